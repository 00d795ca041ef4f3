"""The modules of an engine's model: which hold a parameter, how they take new weights, and by which path."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from .....integration.layout.rearrangement import Rearrangement
from .trace import LoaderTrace


@dataclass(frozen=True)
class ModuleLayout:
    """How one module of a live model takes new weights. Each engine's own layout adds what its loader does.

    Attributes:
        reason: why bytes must not be written straight into its parameters; empty if they may be.
        placed: bytes may be, but the engine's loader can't write it: its parameters are no longer as they are loaded. What
            comes over the misc path all the same is written where the trace saw it land.
        swapped: its parameters in which the engine swapped the two halves of the rows after loading.
        rearranged: its parameters whose elements the engine put elsewhere after loading, and where.
        otherwise: how it takes new weights that can't all be written as this says; None if it has no other way.
        for_now: whether it may take them otherwise in the next epoch: too little memory was left to find out how.
    """

    reason: str = ""
    placed: bool = False
    swapped: frozenset[str] = frozenset()
    rearranged: Mapping[str, Rearrangement] = field(default_factory=dict)
    otherwise: ModuleLayout | None = None
    for_now: bool = False

    @property
    def direct(self) -> bool:
        """Whether bytes may be written straight into its parameters."""
        return not self.reason

    @property
    def separable(self) -> bool:
        """Whether one of its parameters may be loaded by the engine while bytes are written straight into another."""
        return False


def tensors_in(value: object) -> list[torch.Tensor]:
    """Those that a module's attribute is, or has one after another or by name."""
    if isinstance(value, dict):
        value = list(value.values())
    found = value if isinstance(value, (list, tuple)) else [value]
    return [one for one in found if isinstance(one, torch.Tensor)]


def owners_of(twin: nn.Module) -> dict[str, frozenset[str]]:
    """For each parameter or buffer name the modules that hold it; several where weights are tied."""
    first_name: dict[int, str] = {}
    for name, tensor in (*twin.named_parameters(), *twin.named_buffers()):
        first_name.setdefault(id(tensor), name)
    holders: dict[str, set[str]] = {}
    for module_name, module in twin.named_modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            holders.setdefault(first_name[id(tensor)], set()).add(module_name)
    return {name: frozenset(modules) for name, modules in holders.items()}


def spread_over_modules(
    trace: LoaderTrace,
    owners: Mapping[str, frozenset[str]],
    blocked: Mapping[str, str],
    separable: Collection[str] = (),
) -> dict[str, str]:
    """Misc reasons, such that nothing gets both direct writes and loaded tensors; in manifest order.

    Args:
        trace: of the whole manifest.
        owners: for each parameter or buffer the modules that hold it.
        blocked: modules that must not be written in place, with the reason.
        separable: modules of which a single parameter may not get both; of all others, the whole module.
    """
    modules_of = {
        name: sorted({module for parameter in touched for module in owners[parameter]})
        for name, touched in trace.touched.items()
    }
    reasons = dict(trace.misc_reasons)
    for name, modules in modules_of.items():
        blocking = next((blocked[module] for module in modules if module in blocked), None)
        if blocking is not None:
            reasons.setdefault(name, blocking)
    # What is written by one path: a module, or a parameter.
    wholes_of = {
        name: sorted(
            {
                whole
                for parameter in touched
                for module in owners[parameter]
                for whole in ([("module", module)] if module not in separable else [("parameter", parameter)])
            }
        )
        for name, touched in trace.touched.items()
    }
    names_in: dict[tuple[str, str], list[str]] = {}
    for name, wholes in wholes_of.items():
        for whole in wholes:
            names_in.setdefault(whole, []).append(name)
    done: set[tuple[str, str]] = set()
    pending = deque(reasons)
    while pending:
        cause = pending.popleft()
        for whole in wholes_of[cause]:
            if whole in done:
                continue
            done.add(whole)
            kind, place = whole
            for name in names_in[whole]:
                if name not in reasons:
                    reasons[name] = (
                        f"{'layer' if kind == 'module' else kind} {place}: {cause} takes the misc path ({reasons[cause]}), and one {kind} is "
                        "never written by both"
                    )
                    pending.append(name)
    return {name: reasons[name] for name in trace.touched if name in reasons}


def changed_parameter(live: nn.Module, twin: nn.Module, besides: Collection[str] = ()) -> str:
    """The first parameter that post-load processing visibly replaced, in words; empty if there is none.

    Args:
        live: the module.
        twin: its untouched twin.
        besides: parameters that are not asked about.
    """
    for name, fresh in twin.named_parameters(recurse=False):
        if name in besides:
            continue
        current = live._parameters.get(name)
        if current is None:
            return f"{name} no longer exists after process_weights_after_loading"
        for what, now, loaded in (
            ("shape", tuple(current.shape), tuple(fresh.shape)),
            ("dtype", current.dtype, fresh.dtype),
            ("strides", current.stride(), fresh.stride()),
        ):
            if now != loaded:
                return f"process_weights_after_loading changed the {what} of {name} from {loaded} to {now}"
        if hasattr(fresh, "weight_loader") and not hasattr(current, "weight_loader"):
            return f"process_weights_after_loading replaced {name}, which lost its weight loader"
    return ""


class NumbersStayReal(TorchFunctionMode):
    """Under an outer ``torch.device("meta")``, integer tables and tensors of one number are built on the CPU, unless a device is given.

    Constructors and loaders read such values by ``.item()``: the expert map of an expert-parallel layer, the factors of an activation.
    So they need some. Weights are floating point and stay on meta, and a tensor of one number computes with those.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _device_constructors() and kwargs.get("device") is None and _is_read(func, args, kwargs):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class WeightsStayOnMeta(TorchFunctionMode):
    """What is on the meta device stays there where a constructor moves it to another one, as vLLM's of Kimi-K2.5 does with its encoder."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.Tensor.to or not args[0].is_meta:
            return func(*args, **kwargs)
        tensor, *how = args
        how = [
            one.dtype if isinstance(one, torch.Tensor) else one
            for one in how
            # A number of a device, and not whether to wait or to copy.
            if not isinstance(one, torch.device | str) and type(one) is not int
        ]
        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        return tensor.to(*how, **kwargs) if how or kwargs else tensor


def _is_read(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    dtype = kwargs.get("dtype")
    if func is torch.tensor and isinstance(args[0] if args else kwargs["data"], (int, float)):
        return True
    return dtype is not None and not dtype.is_floating_point
