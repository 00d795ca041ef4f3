"""What vLLM's models make of their weights beside the parameters, where no refit would renew it: such models are refused.

vLLM calls a function of a module after loading (``process_weights_after_loading``), and some models keep a copy of a weight as they
first compute: in FP32, transposed, or joined with others (0.21: HunyuanOCR's places, Qwen3-Next's gates with AITER; 0.32: GLM-5-Next's
indexer and convolutions). CUDA graphs hold the addresses of both.
"""

from __future__ import annotations

from collections.abc import Iterable
from inspect import signature
from typing import Any, Final

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from ....integration.errors import RefitError
from ..common.loader_trace.modules import tensors_in
from .layouts import ATTENTION_MODULES

_HOOK: Final = "process_weights_after_loading"
_LAYER: Final = "layer"
# Of attention with sinks of its own (openPangu): it writes them into its cache once.
_POPULATED: Final = "sink_populated"
# Keys and values, which are no weights.
_CACHE: Final = "kv_cache"
# Elements in a row by which a copy is known, how many of them differ at least, and the largest weight that is searched for them.
_RUN: Final = 16
_DIFFERENT: Final = 4
_LARGEST: Final = 1 << 28


def require_read_hooks(model: nn.Module) -> None:
    """Refuse modules that make something of weights after loading, unless it was read what.

    Raises:
        RefitError: names the first one.
    """
    for name, module in model.named_modules():
        if hasattr(module, _POPULATED):
            raise RefitError(
                f"{type(module).__name__} {name} writes its sinks into the KV cache once, so that requests would go on with those of "
                "the first weights. No refit of such a model is taken",
                stage="trace",
            )
        hook = getattr(module, _HOOK, None)
        # Those of quantization methods and kernels are modules too, and take the layer that they are for: layouts knows them.
        if (
            callable(hook)
            and not isinstance(module, ATTENTION_MODULES)
            and _LAYER not in signature(hook).parameters
        ):
            raise RefitError(
                f"it was not read what {_HOOK} of {type(module).__name__} ({name or 'the whole model'}) makes of weights, and a refit "
                "would leave it old. No refit of such a model is taken",
                stage="trace",
            )


# A module, its name, what it holds, how many attributes, and which of them are empty: there a copy may come.
_Looked = tuple[nn.Module, str, dict[str, Any], int, list[str]]


class Copies:
    """The copies of its weights that a live model holds beside them.

    Args:
        model: the live one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._looked = [
            _look(module, name)
            for name, module in model.named_modules()
            # Attention renews what it makes, and quantized layers are reloaded with what they make.
            if not isinstance(module, ATTENTION_MODULES)
            and not isinstance(getattr(module, "quant_method", None), QuantizeMethodBase)
            and next(module.parameters(), None) is not None
        ]

    def compare(self, twin: nn.Module) -> None:
        """Look at what the model holds and its untouched ``twin`` does not.

        Raises:
            RefitError: it is a copy of weights.
        """
        fresh = dict(twin.named_modules())
        for module, name, held, *_ in self._looked:
            if name in fresh:
                made = {attribute for attribute, value in vars(fresh[name]).items() if value is not None}
                _require_no_copy(name, module, held.keys() - made)

    def require_none(self) -> None:
        """Look where nothing was as this was made.

        Raises:
            RefitError: a copy of weights is there now.
        """
        for at, (module, name, held, count, empty) in enumerate(self._looked):
            if len(held) != count or any(held.get(attribute) is not None for attribute in empty):
                _require_no_copy(name, module, (*empty, *list(held)[count:]))
                self._looked[at] = _look(module, name)


def _look(module: nn.Module, name: str) -> _Looked:
    held = vars(module)
    return module, name, held, len(held), [attribute for attribute, value in held.items() if value is None]


def _require_no_copy(name: str, module: nn.Module, attributes: Iterable[str]) -> None:
    weights: list[torch.Tensor] | None = None
    for attribute in attributes:
        for tensor in tensors_in(getattr(module, attribute, None)):
            if attribute.startswith(_CACHE) or not tensor.is_floating_point():
                continue
            if weights is None:
                weights = [p.detach() for p in module.parameters() if 0 < p.numel() <= _LARGEST]
            if _is_copy(tensor.detach(), weights):
                raise RefitError(
                    f"{type(module).__name__} {name} computes with a copy of weights that it made itself ({attribute}), and that a refit "
                    "would leave old. No refit of such a model is taken",
                    stage="trace",
                )


def _is_copy(tensor: torch.Tensor, weights: Iterable[torch.Tensor]) -> bool:
    """Whether some elements in a row of a tensor are in a row of weights, too, and are no view of these."""
    found = list(weights)
    if not tensor.numel() or tensor.untyped_storage()._cdata in {w.untyped_storage()._cdata for w in found}:
        return False
    first = [0] * tensor.dim()
    for dim in range(tensor.dim()):
        run = tensor[tuple(slice(_RUN) if d == dim else at for d, at in enumerate(first))]
        if run.element_size() == 1 and run.numel() < _RUN:
            continue  # a few codes are in a row of many a weight by chance
        known = _comparable(run)
        if known.unique().numel() >= _DIFFERENT and any(
            _has_run(_comparable(weight.to(run.dtype)), known) for weight in found
        ):
            return True
    return False


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """FP8, and scales in E8M0, as FP32: torch finds no different elements among them."""
    return tensor.float() if tensor.element_size() == 1 else tensor


def _has_run(weight: torch.Tensor, run: torch.Tensor) -> bool:
    """Whether the elements of ``run`` follow each other along a dimension of ``weight``."""
    begins = (weight == run[0]).nonzero()
    for dim, size in enumerate(weight.shape):
        at = begins[begins[:, dim] <= size - run.numel()]
        for step, element in enumerate(run[1:], 1):
            if not len(at):
                break
            along = list(at.unbind(dim=1))
            along[dim] = along[dim] + step
            at = at[weight[tuple(along)] == element]
        if len(at):
            return True
    return False
