"""Does a manifest reach all of an engine's weights? What it leaves would keep an older version, or random numbers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ....integration.errors import PlanError
from ..common.loader_trace.trace import LoaderTrace
from ..common.loader_trace.unreached import REMEDY, in_words, stale_parameters
from .layouts import ATTENTION_MODULES, has_padding


def check_complete(
    trace: LoaderTrace,
    owners: Mapping[str, frozenset[str]],
    model: nn.Module,
    parameters: set[str],
    *,
    unused: frozenset[str] = frozenset(),
    dummy: bool = False,
) -> None:
    """Raise where the manifest leaves a part of a parameter with the weights of an earlier version.

    Modules that are reloaded are no exception: what doesn't come is undefined memory in them.

    Args:
        trace: of the whole manifest.
        owners: for each parameter or buffer the modules that hold it.
        model: the live model.
        parameters: names of its parameters as they are loaded.
        unused: those that nothing computes with.
        dummy: the engine was started with ``load_format=dummy``, so that what no tensor reaches holds random numbers:
            floating-point buffers of the ``state_dict`` count too (vLLM fills them as it does parameters).

    Raises:
        PlanError: names the first parameter.
    """
    filled = _filled_buffers(model) & owners.keys() if dummy else set()
    candidates = parameters | filled
    stale = stale_parameters(
        trace,
        (
            parameter
            for parameter in candidates - unused
            if not any(_may_lack(model.get_submodule(module)) for module in owners[parameter])
        ),
    )
    if not stale:
        return
    held = "random numbers, since the engine was started with load_format=dummy" if dummy else "old weights"
    buffers = [name for name in stale if name in filled]
    # Constants that a module registers as persistent buffers: a checkpoint may have them, a trainer need not.
    fixed = (
        f". If {buffers[0]} is a buffer that training doesn't change (XIELU's beta and eps), which the trainer doesn't "
        "export, start the engine with load_format=auto, which keeps what the checkpoint or the module gave it"
        if buffers
        else ""
    )
    raise PlanError(
        f"{in_words(trace, stale)}; they would keep {held} or become undefined, and the engine would serve a mixture. "
        f"{REMEDY}{fixed}.",
        stage="trace",
        parameter=next(iter(stale)),
    )


def _may_lack(live: nn.Module) -> bool:
    """Whether vLLM itself leaves elements of a module unloaded: padding, and scales of attention that it sets to 1."""
    return has_padding(live) or isinstance(live, ATTENTION_MODULES)


def _filled_buffers(model: nn.Module) -> set[str]:
    """Floating-point buffers that vLLM's dummy loader fills, but for the scales that attention layers set anew."""
    saved = model.state_dict().keys()
    return {
        f"{module_name}.{name}" if module_name else name
        for module_name, module in model.named_modules()
        if not isinstance(module, ATTENTION_MODULES)
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_floating_point()
    } & set(saved)
