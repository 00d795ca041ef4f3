"""Which layers are quantized, and how their inputs are."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ...integration.quantize import nvfp4
from ...integration.quantize.nvfp4_checkpoint import fused_module, module_of

# As ModelOpt leaves them out by default. Engines hold them unquantized whatever a checkpoint says.
DEFAULT_EXCLUDED = (
    "lm_head",
    "*.lm_head",
    "*embed*",
    "*router*",
    "*.gate",
    "*shared_expert_gate",
    "*conv1d*",
)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class QATConfig:
    """Quantization-aware training in NVFP4.

    Attributes:
        exclude: glob patterns over names of modules in the Hugging Face checkpoint (``model.layers.0.mlp.down_proj``);
            matching linear layers stay as they are. Add your own to :data:`DEFAULT_EXCLUDED`.
        first_layers: transformer layers to leave out at the model's begin.
        last_layers: and at its end.
        activations: W4A4; otherwise weights alone (W4A16).
        force_dynamic_quantization: the global scale of a layer's inputs is that of their own maximum at each call,
            as TensorRT-LLM has it under its option of this name; otherwise what calibration found. vLLM has no such
            mode: it always takes the checkpoint's ``input_scale``, so train without it for vLLM.
    """

    exclude: tuple[str, ...] = DEFAULT_EXCLUDED
    first_layers: int = 0
    last_layers: int = 0
    activations: bool = True
    force_dynamic_quantization: bool = False


@dataclass(frozen=True)
class Linear:
    """A weight of a linear layer.

    Attributes:
        name: in the Hugging Face checkpoint.
        columns: of it that this rank holds.
        refused: why it can't be quantized, or an empty string.
    """

    name: str
    columns: int
    refused: str = ""


def select(config: QATConfig, linears: Collection[Linear], names: Collection[str]) -> frozenset[str]:
    """The weights to quantize.

    Args:
        config: what is asked for.
        linears: of the whole model, on whatever rank they are; several ranks may tell of one.
        names: of all weights.

    Raises:
        ValueError: it can't be done; tells all that is wrong.
    """
    modules = {name: module_of(name) for name in names if name.endswith(".weight")}
    depth = 1 + max((_layer(name) for name in names), default=-1)
    chosen = frozenset(
        linear.name for linear in linears if not _is_left_out(config, module_of(linear.name), depth)
    )
    problems = [
        *_of_numbers(config, depth),
        *_unmatched(config.exclude, modules.values()),
        *_of_weights(linear for linear in linears if linear.name in chosen),
        *_of_fused(chosen, names),
    ]
    if not chosen:
        problems.append("no linear layer is left to quantize; leave out less")
    if problems:
        raise ValueError("NVFP4 training is not possible so:\n  " + "\n  ".join(dict.fromkeys(problems)))
    return chosen


def _is_left_out(config: QATConfig, module: str, depth: int) -> bool:
    layer = _layer(f"{module}.")
    at_an_end = layer >= 0 and not config.first_layers <= layer < depth - config.last_layers
    return at_an_end or any(fnmatchcase(module, pattern) for pattern in config.exclude)


def _layer(name: str) -> int:
    found = _LAYER.search(name)
    return int(found.group(1)) if found else -1


def _of_numbers(config: QATConfig, depth: int) -> Iterator[str]:
    for name in ("first_layers", "last_layers"):
        count = getattr(config, name)
        if not 0 <= count <= depth:
            yield f"{name} is {count}; the model has {depth} layers, so give 0 to {depth}"
    if config.force_dynamic_quantization and not config.activations:
        yield (
            "force_dynamic_quantization is about activations, and activations is false, which leaves them as they "
            "are; set one of them otherwise"
        )


def _unmatched(patterns: Iterable[str], modules: Collection[str]) -> Iterator[str]:
    for pattern in patterns:
        if pattern not in DEFAULT_EXCLUDED and not any(fnmatchcase(m, pattern) for m in modules):
            yield (
                f"exclude has {pattern!r}, which matches no module; the layer that it means would be quantized. "
                "Patterns match whole names as the Hugging Face checkpoint has them, e.g. *.layers.0.*"
            )


def _of_weights(chosen: Iterable[Linear]) -> Iterator[str]:
    for linear in chosen:
        if linear.refused:
            yield f"{linear.name}: {linear.refused}. Leave its layer out by exclude"
        elif linear.columns % nvfp4.BLOCK:
            yield (
                f"{linear.name}: a rank holds {linear.columns} columns, which cuts blocks of {nvfp4.BLOCK}. Leave "
                "its layer out by exclude, or choose another tensor parallelism"
            )
        if fnmatchcase(module_of(linear.name), "*lm_head"):
            yield f"{linear.name}: engines hold the head unquantized; leave it out by exclude ('lm_head')"


def _of_fused(chosen: Collection[str], names: Collection[str]) -> Iterator[str]:
    parts: Mapping[str, list[str]] = {fused_module(name): [] for name in chosen}
    for name in names:
        if name.endswith(".weight") and (fused := fused_module(name)) in parts:
            parts[fused].append(name)
    for fused, members in parts.items():
        kept = [name for name in members if name not in chosen]
        if kept:
            yield (
                f"{', '.join(kept)} would be left out, and {', '.join(sorted(set(members) - set(kept)))} quantized; "
                f"engines hold them in one matrix, {fused}. Leave out all or none of them by exclude"
            )
