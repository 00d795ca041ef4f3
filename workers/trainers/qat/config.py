"""Which layers are quantized, and how their inputs are."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from ....integration.errors import RefitMismatch
from ....integration.quantize.formats import Format, Int4, Nvfp4
from ....integration.quantize.nvfp4_checkpoint import fused_module, module_of

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
_LAYER = re.compile(r"^(?:(.*?)\.)?layers\.(\d+)\.")
NVFP4 = Nvfp4()
# Beside the decoder's layers; towers for images and sound have embeddings of other names.
_EMBEDDING = re.compile(r"^(?:(.*)\.)?(?:embed_tokens|embeddings|word_embeddings|tok_embeddings)\.weight$")


@dataclass(frozen=True)
class QATConfig:
    """Quantization-aware training in NVFP4 or INT4.

    Attributes:
        exclude: glob patterns over names of modules in the Hugging Face checkpoint (``model.layers.0.mlp.down_proj``);
            matching linear layers stay as they are. Add your own to :data:`DEFAULT_EXCLUDED`.
        first_layers: layers to leave out at the decoder's begin; of each stack of layers, in a model without token
            embeddings. Layers of towers for images, and those that predict further tokens, are left out by ``exclude``.
        last_layers: and at its end.
        activations: W4A4; otherwise weights alone (W4A16). INT4 has no other, so that it takes false.
        force_dynamic_quantization: the global scale of a layer's inputs is that of their own maximum at each call,
            as TensorRT-LLM has it under its option of this name; otherwise what calibration found. vLLM has no such
            mode: it always takes the checkpoint's ``input_scale``, so train without it for vLLM; an export warns of that,
            and :class:`.mixin.QATRefitMixin` refuses.
        format: of the weights. ``Int4(group)`` for an engine that holds them so: its ``dtype`` is the one that they are exported in.
    """

    exclude: tuple[str, ...] = DEFAULT_EXCLUDED
    first_layers: int = 0
    last_layers: int = 0
    activations: bool = True
    force_dynamic_quantization: bool = False
    # Not in the repr, which identifies runs in NVFP4 in their checkpoints.
    format: Nvfp4 | Int4 = field(default=NVFP4, repr=False)

    @property
    def format_name(self) -> str:
        """For texts."""
        return self.format.kind.upper()


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


def decoder_layers(config: Any) -> int | None:
    """How many layers the decoder has by the configuration of a transformers model, those of multi-token prediction not
    counted."""
    of_text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    found: int | None = getattr(of_text, "num_hidden_layers", None)
    return found


def select(
    config: QATConfig,
    linears: Collection[Linear],
    names: Collection[str],
    counted: int | None = None,
) -> frozenset[str]:
    """The weights to quantize.

    Args:
        config: what is asked for.
        linears: of the whole model, on whatever rank they are; several ranks may tell of one.
        names: of all weights.
        counted: layers of the decoder; None counts those that have weights.

    Raises:
        ValueError: it can't be done; tells all that is wrong.
    """
    modules = {name: module_of(name) for name in names if name.endswith(".weight")}
    depths = _depths(names, counted)
    matching = {linear.name for linear in linears if not _is_excluded(config, module_of(linear.name))}
    ends = {name: end for name in matching if (end := _end(config, name, depths))}
    chosen = frozenset(matching - ends.keys())
    problems = [
        *_of_numbers(config, depths, set(ends.values())),
        *_unmatched(config.exclude, modules.values()),
        *_of_weights(config, [linear for linear in linears if linear.name in chosen]),
        *_of_fused(chosen, names),
    ]
    if not chosen:
        problems.append("no linear layer is left to quantize; leave out less")
    if problems:
        told = "\n  ".join(dict.fromkeys(problems))
        raise ValueError(f"{config.format_name} training is not possible so:\n  {told}")
    return chosen


def _is_excluded(config: QATConfig, module: str) -> bool:
    return any(fnmatchcase(module, pattern) for pattern in config.exclude)


def require_as_trained(held: Mapping[str, Format], trained: Mapping[str, Format], rank: int) -> None:
    """Check that what a refit makes of weights is what training computes with.

    Args:
        held: formats of the weights that reach engines quantized.
        trained: of those that are trained so.
        rank: of this trainer rank.

    Raises:
        RefitMismatch: engines hold other weights quantized than those that are trained so, or otherwise (other groups, scales by another
            rule); names the first such weight.
    """
    wrong = [name for name in sorted(held.keys() | trained.keys()) if held.get(name) != trained.get(name)]
    if not wrong:
        return
    name = wrong[0]
    raise RefitMismatch(
        f"it reaches the engine {_told(held.get(name))}, and it is trained {_told(trained.get(name))}, and so it is with "
        f"{len(wrong) - 1} more weights: the engine would generate by other weights than training "
        "computes with. Nothing was written. Start the engine with the same layers in the same groups, or train these so "
        "(exclude, first_layers, last_layers and format of QATConfig); make scales by one rule (int4_scale of RefitConfig or SglangSender, and "
        "scale_rule of the format); send what is trained in NVFP4 from a PackedSource",
        stage="handshake",
        rank=rank,
        parameter=name,
    )


def _told(format: Format | None) -> str:
    if isinstance(format, Int4):
        return f"as {format} with scales by {format.scale_rule}"
    return "unquantized" if format is None else f"as {format}"


def _depths(names: Collection[str], counted: int | None) -> dict[str, int]:
    """Layers of each stack that has a begin and an end to be left out, by what stands before ``layers`` in names."""
    depths: dict[str, int] = {}
    for name in names:
        if found := _LAYER.match(name):
            stack = found[1] or ""
            depths[stack] = max(depths.get(stack, 0), int(found[2]) + 1)
    embedded = {found[1] or "" for name in names if (found := _EMBEDDING.match(name))}
    decoders = {stack: depth for stack, depth in depths.items() if stack in embedded}
    # Behind the decoder's own may follow layers of multi-token prediction, under the same name.
    return {
        stack: depth if counted is None else min(depth, counted) for stack, depth in decoders.items()
    } or depths


def _end(config: QATConfig, name: str, depths: Mapping[str, int]) -> str:
    """The key by which a weight's layer is left out, or an empty string."""
    found = _LAYER.match(name)
    if not found or (stack := found[1] or "") not in depths:
        return ""
    layer, depth = int(found[2]), depths[stack]
    if layer < config.first_layers:
        return "first_layers"
    return "last_layers" if depth - config.last_layers <= layer < depth else ""


def _of_numbers(config: QATConfig, depths: Mapping[str, int], used: Collection[str]) -> Iterator[str]:
    depth = min(depths.values(), default=0)
    for name in ("first_layers", "last_layers"):
        count = getattr(config, name)
        if not 0 <= count <= depth:
            yield f"{name} is {count}; the model has {depth} layers, so give 0 to {depth}"
        elif count and name not in used:
            yield (
                f"{name} is {count}, but there is no linear layer in {'these' if count > 1 else 'this'} of "
                f"{', '.join(f'{stack}.layers' for stack in depths)} that would be quantized otherwise, so it leaves "
                "nothing out; give 0, or leave out what is meant by exclude"
            )
    if config.activations and config.format != NVFP4:
        yield f"activations is true, and {config.format_name} has quantized weights alone; give activations=False"
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


def _of_weights(config: QATConfig, chosen: Iterable[Linear]) -> Iterator[str]:
    _, block = config.format.block
    for linear in chosen:
        if linear.refused:
            yield f"{linear.name}: {linear.refused}. Leave its layer out by exclude"
        elif linear.columns % block:
            yield (
                f"{linear.name}: a rank holds {linear.columns} columns, which cuts blocks of {block}. Leave "
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
