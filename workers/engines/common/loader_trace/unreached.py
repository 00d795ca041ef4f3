"""Which parameters a traced manifest does not fill. They would keep the weights of an earlier version."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from torch import nn

from .....integration.errors import PlanError
from .trace import LoaderTrace

_NAMED: Final = 4  # parameters that an error names beside the first


def _stale_parameters(trace: LoaderTrace, parameters: Iterable[str]) -> dict[str, int]:
    """Those of ``parameters`` of which a part gets no values, with the number of its elements, by name.

    A tensor that the loader was not seen to put anywhere may reach what looks unwritten. It excuses its own module and those
    that share a parent with it (``mlp.up_proj`` may go into ``mlp.gate_up_proj``), up to as many elements as it has: what
    several of them excuse together must not be more than they bring, or a weight beside them is missing.
    """
    lost_at: dict[tuple[str, ...], set[str]] = {}
    for name in trace.lost:
        for place in _places(name):
            lost_at.setdefault(place, set()).add(name)
    beside: dict[frozenset[str], dict[str, int]] = {}
    for parameter in sorted(parameters):
        elements = trace.unwritten.get(parameter, 0)
        if elements:
            near = frozenset().union(*(lost_at.get(place, ()) for place in _places(parameter)))
            beside.setdefault(near, {})[parameter] = elements
    stale = {
        parameter: elements
        for near, found in beside.items()
        if sum(found.values()) > sum(trace.lost[name] for name in near)
        for parameter, elements in found.items()
    }
    return dict(sorted(stale.items()))


def filled_buffers(model: nn.Module, besides: tuple[type[nn.Module], ...] = ()) -> set[str]:
    """Names of the floating-point buffers that an engine fills with random numbers as it does parameters (``load_format=dummy``).

    Args:
        model: the live one.
        besides: modules whose buffers the engine sets anew.
    """
    saved = model.state_dict().keys()
    return {
        f"{module_name}.{name}" if module_name else name
        for module_name, module in model.named_modules()
        if not isinstance(module, besides)
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_floating_point()
    } & set(saved)


def require_reached(
    trace: LoaderTrace, parameters: Iterable[str], filled: Collection[str] | None = None
) -> None:
    """Refuse a manifest that leaves a part of a parameter with the weights of an earlier version.

    Args:
        trace: of the whole manifest.
        parameters: names of all that the manifest has to fill.
        filled: those of them that are buffers, of an engine that was started with random numbers in all; None of another one.

    Raises:
        PlanError: names the first parameter.
    """
    stale = _stale_parameters(trace, parameters)
    if not stale:
        return
    dummy = filled is not None
    held = "random numbers, since the engine was started with load_format=dummy" if dummy else "old weights"
    buffer = min(stale.keys() & set(filled or ()), default="")
    # Constants that a module registers as persistent buffers: a checkpoint may have them, a trainer need not.
    also = (
        f". If {buffer} is a buffer that training doesn't change (XIELU's beta and eps, the factor of Gemma 2's embeddings), which the "
        "trainer doesn't export, start the engine with load_format=auto, which keeps what the checkpoint or the module gave it"
        if buffer
        else ""
    )
    raise PlanError(
        f"{_in_words(trace, stale)}; they would keep {held} or become undefined, and the engine would serve a mixture. "
        f"{_REMEDY}{also}.",
        stage="trace",
        parameter=next(iter(stale)),
    )


def _in_words(trace: LoaderTrace, stale: Mapping[str, int]) -> str:
    """What does not come, what comes for the first parameter, and what could not be followed."""
    first, *others = stale
    come = sorted(name for name, touched in trace.touched.items() if first in touched)
    only = f" (of what it holds only {_listed(come)} comes)" if come else ""
    lost = (
        f"; the loader could not be followed for {_listed(sorted(trace.lost))}, which can't make up for that"
        if trace.lost
        else ""
    )
    rest = f", nor a part of {len(others)} other parameters ({_listed(others)})" if others else ""
    return f"no tensor of the manifest reaches {stale[first]} elements of {first}{only}{rest}{lost}"


_REMEDY: Final = (
    "Give the trainer's whole manifest, in checkpoint names that the engine's loader knows; a Megatron trainer's log names "
    "the parameters for which Megatron-Bridge has no mapping, which never come"
)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _places(name: str) -> Iterator[tuple[str, ...]]:
    """The module of a tensor or parameter, from the number of its block on, and that module's parent, experts as one.

    Engines change the names before that number. Outside of blocks a module's own name alone stands for it.
    """
    *modules, _ = name.split(".")
    number = next((i for i, part in enumerate(modules) if part.isdigit()), None)
    if number is None:
        yield tuple(modules[-1:])
        return
    block, *inside = modules[number:]
    module = (block, *(part for part in inside if not part.isdigit()))
    yield module
    if len(module) > 1:
        yield module[:-1]
