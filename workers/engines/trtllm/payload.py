"""What TensorRT-LLM's worker extension takes as ``ipc_handles``, and how it is read back.

``{device UUID: payload}``, a payload being base64 text of a pickled list, or that list, with one entry for each tensor::

    (name, (rebuild, args))                   rebuild(*args) gives the tensor; args[6] is the device, set by the receiver
    (name, (rebuild, args), "float8_e4m3fn")  the tensor is the bytes of this dtype; None: it is what it is
    (name, (rebuild, args, "float8_e4m3fn"))  the same

The first form is TensorRT-LLM's own (``WorkerExtension.update_weights`` of ``tensorrt_llm/llmapi/rlhf_utils.py``: ``func, args =
tensor_handle``), whose senders put float8 tensors in it as they are (``RefHFModelWithIPCHandles`` of its tests). The second one is
that of verl's rollout (``trtllm_rollout.py`` at 84270ebc: ``(name, handle, orig_dtype_str)``), and what is made here: allow-lists in
use know no float8 dtype, and bytes without their dtype would be taken for numbers (the engine's loaders convert what they get to their
parameter's type). An extension that does not know this form fails to unpack it, before it loads anything. All three are read,
with the dtype given by name or as itself.
"""

from __future__ import annotations

import base64
import binascii
import inspect
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.multiprocessing import reductions

from ....integration.errors import RefitError
from ....integration.quantize.float8 import FLOAT8, as_bytes, from_bytes, is_float8
from .compat import look_up

Handle = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]
Reduce = Callable[[torch.Tensor], Handle]
Imports = Mapping[str, tuple[str, ...]]

_SERIALIZATION = ("tensorrt_llm.llmapi.serialization", "tensorrt_llm.serialization")
# What TensorRT-LLM's own extension refuses, and what would undo the approvals.
_DISALLOWED = {"torch.storage": ["_load_from_bytes"], "torch.hub": ["_load_local"], "torch": ["save", "load"]}
# Of rebuild_cuda_tensor's arguments the dtype, and the one that the receiver replaces by its own number of the device.
_DTYPE, _DEVICE = 5, 6
# Dtypes that travel as they are; every allow-list in use has these.
_PLAIN = ("float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
# All that may be imported: what rlrefit's own payloads need, which is part of the strictest allow-list in use (that of verl's
# extension for vision models), and the dtypes of the float8 tensors that others send as they are.
APPROVED: Imports = {
    "torch.multiprocessing.reductions": ("rebuild_cuda_tensor",),
    "torch.storage": ("TypedStorage", "UntypedStorage"),
    "torch": ("Tensor", "Size", *_PLAIN, *FLOAT8),
}


class Entry(NamedTuple):
    """One tensor of a payload; ``float8`` is the dtype's name where its bytes travel, or empty."""

    name: str
    handle: Handle
    float8: str

    def open(self, device_id: int) -> torch.Tensor:
        """The sender's memory as a tensor of this process, in its own dtype."""
        rebuild, args = self.handle
        tensor = rebuild(*args[:_DEVICE], device_id, *args[_DEVICE + 1 :])
        return from_bytes(tensor, self.float8) if self.float8 else tensor


def cuda_handle(tensor: torch.Tensor) -> Handle:
    """The handle by which another process on the same GPU reaches the tensor's memory.

    Raises:
        ValueError: the tensor is in host memory, whose pickle holds the bytes themselves and imports
            ``torch.storage._load_from_bytes``, which TensorRT-LLM refuses.
    """
    if tensor.device.type != "cuda":
        raise ValueError(
            f"it is on {tensor.device}, and only GPU memory has a CUDA IPC handle; copy it to the GPU first"
        )
    rebuild, args = reductions.reduce_tensor(tensor)
    return rebuild, args


def encode(weights: Iterable[tuple[str, torch.Tensor]], reduce: Reduce = cuda_handle) -> str:
    """A payload of these weights, whose memory must stay until the engine has answered.

    Each tensor needs storage of its own: a handle that is given for storage stays with it until it is freed.

    Raises:
        RefitError: a weight whose dtype or memory can't travel so.
    """
    entries: list[tuple[Any, ...]] = []
    for name, weight in weights:
        tensor = weight.detach().as_subclass(torch.Tensor)  # a Parameter's class is on no allow-list
        kind = str(tensor.dtype).removeprefix("torch.")
        try:
            if is_float8(tensor.dtype):
                raw, float8 = as_bytes(tensor)
                entries.append((name, reduce(raw), float8))
            elif kind in _PLAIN:
                entries.append((name, reduce(tensor)))
            else:
                raise ValueError(
                    f"TensorRT-LLM's allow-lists have no {kind}; they have {', '.join(_PLAIN)}, and float8"
                )
        except ValueError as error:
            raise RefitError(
                f"a weight can't be handed to TensorRT-LLM: {error}", stage="export", parameter=name
            ) from error
    return base64.b64encode(pickle.dumps(entries, protocol=pickle.HIGHEST_PROTOCOL)).decode("ascii")


def decode(payload: object, approved: Imports = APPROVED) -> list[Entry]:
    """The entries of a payload, none of them opened yet.

    Args:
        payload: text as :func:`encode` made it, or the list itself, as callers inside one cluster may pass it.
        approved: what a payload may import.

    Raises:
        RefitError: it is refused or malformed. Nothing was loaded.
    """
    if isinstance(payload, str):
        try:
            data = base64.b64decode(payload, validate=True)
        except binascii.Error as error:
            raise _malformed(f"it is not base64: {error}") from error
        payload = restricted_loads(data, approved)
    if not isinstance(payload, list):
        raise _malformed(f"it holds a {type(payload).__name__}, not a list")
    rebuilds = {(module, name) for module, names in approved.items() for name in names}
    return [_entry(found, rebuilds) for found in payload]


def restricted_loads(data: bytes, approved: Imports) -> Any:
    """Unpickle with the engine's own restricted unpickler.

    It has had two generations: one that imports only what is approved (``approved_imports``), and one that can refuse imports as
    well (``disallowed_imports``), to which TensorRT-LLM's own extension at times gives nothing but a list of refusals. What
    rlrefit reads is approved explicitly, by the argument that both have.

    Args:
        data: the pickle.
        approved: what it may import.

    Raises:
        RefitError: the payload imports something else, or is no pickle; or this TensorRT-LLM's unpickler takes no
            approvals.
    """
    loads = look_up("loads", _SERIALIZATION)
    known = inspect.signature(loads).parameters
    if "approved_imports" not in known:
        raise RefitError(
            "the unpickler of this TensorRT-LLM (serialization.loads) takes no approved_imports, so a payload could import "
            "anything that the unpickler does not refuse. Nothing was read; use a version that has approved_imports",
            stage="transfer",
        )
    # Lists and a dict of its own: a version that widens what it is given must not widen ours.
    limits: dict[str, Any] = {"approved_imports": {module: list(names) for module, names in approved.items()}}
    if "disallowed_imports" in known:
        limits["disallowed_imports"] = {module: list(names) for module, names in _DISALLOWED.items()}
    try:
        return loads(data, **limits)
    # Of any kind: a hostile or damaged pickle makes the unpickler raise whatever it likes.
    except Exception as error:
        raise RefitError(
            f"TensorRT-LLM's restricted unpickler refused a payload of weights: {type(error).__name__}: {error}. Nothing "
            "of it was loaded. A payload of rlrefit imports only what is approved, so this one is damaged or not from rlrefit",
            stage="transfer",
        ) from error


def _entry(found: object, rebuilds: set[tuple[str, str]]) -> Entry:
    if not isinstance(found, tuple) or len(found) not in (2, 3) or not isinstance(found[0], str):
        raise _malformed("an entry is not (name, (rebuild, args)) with or without a dtype")
    name, handle, *beside = found
    if not (isinstance(handle, tuple) and len(handle) in (2, 3) and isinstance(handle[1], tuple)):
        raise _malformed("the handle is not (rebuild, args) with or without a dtype", name)
    rebuild, args, *inside = handle
    if len(args) <= _DEVICE:
        raise _malformed(
            f"its handle has {len(args)} arguments and none for the device, so it is of host memory; parameters must be "
            "copied to the GPU before their handles are made",
            name,
        )
    # A list that was passed as such has seen no unpickler.
    source = getattr(rebuild, "__module__", ""), getattr(rebuild, "__name__", "")
    if source not in rebuilds or isinstance(rebuild, type):
        called = ".".join(filter(None, source)) or repr(rebuild)
        raise _malformed(f"{called} is not a function that rebuilds tensors", name)
    told = {_dtype_name(dtype) for dtype in (*inside, *beside) if dtype is not None}
    if len(told) > 1:
        raise _malformed(f"its dtype is given as {' and '.join(sorted(told))}", name)
    held = _dtype_name(args[_DTYPE])
    told -= {held}
    if told and (held != "uint8" or not told <= FLOAT8.keys()):
        raise _malformed(
            f"its handle is of {held} and its dtype is given as {told.pop()}, which is not a float8 dtype in bytes",
            name,
        )
    return Entry(name, (rebuild, args), told.pop() if told else "")


def _dtype_name(dtype: object) -> str:
    """``torch.uint8``, ``"torch.uint8"`` and ``"uint8"`` are one; anything else is its text."""
    return str(dtype).removeprefix("torch.")


def _malformed(what: str, name: str = "") -> RefitError:
    return RefitError(
        f"a payload of weights is malformed: {what}. Nothing of it was loaded; check that trainer and engine run the same "
        "version of rlrefit",
        stage="transfer",
        parameter=name,
    )
