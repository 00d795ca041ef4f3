"""Does a manifest reach all of an engine's weights? What it leaves would keep an older version, or random numbers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ...integration.errors import PlanError
from ..loader_trace.blocks import may_be_reached
from ..loader_trace.trace import LoaderTrace
from .layouts import ATTENTION_MODULES, ModuleLayout, has_padding


def check_complete(
    trace: LoaderTrace,
    owners: Mapping[str, frozenset[str]],
    layouts: Mapping[str, ModuleLayout],
    model: nn.Module,
    parameters: set[str],
    *,
    strict: set[str] | frozenset[str] = frozenset(),
    dummy: bool = False,
) -> None:
    """Raise where the manifest leaves a part of a parameter with the weights of an earlier version.

    A tensor whose destination could not be followed may reach what looks unwritten. It excuses the modules of its own
    block, by the first number in the names (``model.layers.3.…``), and one without a number excuses all.

    Args:
        trace: of the whole manifest.
        owners: for each parameter or buffer the modules that hold it.
        layouts: of those modules.
        model: the live model.
        parameters: names of its parameters.
        strict: those that have to be filled even where their modules are reloaded: FP8 codes without their scales, say.
        dummy: the engine was started with ``load_format=dummy``, so that what no tensor reaches holds random numbers:
            floating-point buffers of the ``state_dict`` count too (vLLM fills them as it does parameters), and a
            tensor without a number excuses nothing.

    Raises:
        PlanError: names the first parameter.
    """
    misc = {parameter for name in trace.misc_reasons for parameter in trace.touched[name]}
    candidates = parameters | (_filled_buffers(model) & owners.keys() if dummy else set())
    stale = [
        (parameter, trace.unwritten[parameter])
        # What the loader made while it ran (scales of a quantization on the fly) follows from what it loaded.
        for parameter in sorted((candidates - misc) & trace.unwritten.keys())
        if trace.unwritten[parameter]
        and all(
            (layouts[m].direct or parameter in strict) and not has_padding(model.get_submodule(m))
            for m in owners[parameter]
        )
        and not may_be_reached(parameter, trace.unknown, strict=dummy)
    ]
    if not stale:
        return
    parameter, elements = stale[0]
    held = "random numbers, since the engine was started with load_format=dummy" if dummy else "old weights"
    followed = (
        f" ({len(trace.unknown)} tensors could not be followed through the loader, {min(trace.unknown)} among them; if one "
        "of them reaches it, start the engine with load_format=auto)"
        if dummy and trace.unknown
        else ""
    )
    raise PlanError(
        f"no tensor of the manifest reaches {elements} elements of {parameter}, nor a part of "
        f"{len(stale) - 1} other parameters; they would keep {held} and the engine would serve a "
        f"mixture{followed}. Give the trainer's whole manifest, in checkpoint names that the engine's loader knows.",
        stage="trace",
        parameter=parameter,
    )


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
