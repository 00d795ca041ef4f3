"""TensorRT-LLM's restricted unpickler in its two generations, re-created from its published behaviour.

Stands for ``tensorrt_llm/serialization.py`` (``tensorrt_llm/llmapi/serialization.py`` in later versions), which can't be
installed without CUDA. Each rule below is one of the contract's:

1. Text is refused with ``TypeError``: only bytes are read.
2. An import outside the rules ends in ``ValueError: Import MODULE | NAME is not allowed``.
3. Allow-list generation: ``approved_imports`` maps modules to the names that may be imported from them;
   ``approved_module_patterns`` are regular expressions, matched at the begin of a module's name, all of whose names may be.
   Nothing else may.
4. Deny-list generation: ``disallowed_imports`` is looked at first and always refuses. Then rule 3 holds if any approved
   import was given; if none was, everything that is not refused may be imported.
5. The latest generation looks at ``disallowed_imports`` first, too, and then always follows rule 3.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, approved: Any, patterns: Any, disallowed: Any, allow_list: bool) -> None:
        if isinstance(data, str):
            raise TypeError("Can't load pickle from unicode string")  # rule 1
        super().__init__(io.BytesIO(data))
        self._approved, self._patterns, self._disallowed = approved or {}, patterns or [], disallowed or {}
        self._allow_list = allow_list

    def find_class(self, module: str, name: str) -> Any:
        refused = name in self._disallowed.get(module, [])
        if self._allow_list or self._approved:
            patterned = any(re.match(pattern, module) for pattern in self._patterns)
            refused = refused or not (name in self._approved.get(module, []) or patterned)  # rules 3 and 4
        if refused:
            raise ValueError(f"Import {module} | {name} is not allowed")  # rule 2
        return super().find_class(module, name)


def allow_list_loads(
    s: bytes,
    /,
    *,
    approved_imports: Any = None,
    approved_module_patterns: Any = None,
) -> Any:
    return _Unpickler(s, approved_imports, approved_module_patterns, None, True).load()


def latest_loads(
    s: bytes,
    /,
    *,
    approved_imports: Any = None,
    approved_module_patterns: Any = None,
    disallowed_imports: Any = None,
) -> Any:
    return _Unpickler(
        s, approved_imports, approved_module_patterns, disallowed_imports, True
    ).load()  # rule 5


def deny_list_loads(
    s: bytes,
    /,
    *,
    approved_imports: Any = None,
    approved_module_patterns: Any = None,
    disallowed_imports: Any = None,
) -> Any:
    return _Unpickler(s, approved_imports, approved_module_patterns, disallowed_imports, False).load()


_BUILTINS = ["list", "tuple", "str", "int", "float", "bool", "bytes", "dict", "NoneType", "type"]
_DISALLOWED = {"torch.storage": ["_load_from_bytes"], "torch.hub": ["_load_local"], "torch": ["save"]}

# What the worker extensions in use hand to ``loads``, by generation:
# - verl's extension for vision-language models, which knows no float8 dtype;
_ALLOW_LIST = {
    "approved_imports": {
        "builtins": _BUILTINS,
        "torch": [
            *(
                "Tensor",
                "FloatTensor",
                "DoubleTensor",
                "HalfTensor",
                "BFloat16Tensor",
                "IntTensor",
                "LongTensor",
            ),
            *("ShortTensor", "CharTensor", "ByteTensor", "BoolTensor", "Size", "dtype", "device"),
            *("float32", "float16", "bfloat16", "int32", "int64", "int16", "int8", "uint8", "bool"),
        ],
        "torch.multiprocessing.reductions": ["rebuild_cuda_tensor", "rebuild_tensor"],
        "torch._utils": ["_rebuild_tensor_v2"],
        "torch.storage": ["_load_from_bytes", "_TypedStorage", "UntypedStorage", "TypedStorage"],
    }
}
# - TensorRT-LLM's own when the deny-list was new: nothing is approved, so all but three imports may be made;
_DENY_LIST = {"disallowed_imports": _DISALLOWED}
# - and since: all of torch but those three, and builtins.
_BOTH = {
    "approved_imports": {"builtins": _BUILTINS},
    "approved_module_patterns": [r"^torch.*"],
    "disallowed_imports": _DISALLOWED,
}

# generation → (loads, what its worker extension hands to it)
GENERATIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "allow-list": (allow_list_loads, _ALLOW_LIST),
    "deny-list": (deny_list_loads, _DENY_LIST),
    "both": (latest_loads, _BOTH),
}
