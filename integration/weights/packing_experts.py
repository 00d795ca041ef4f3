"""A trainer rank that sends GPT-OSS's experts in MXFP4, as OpenAI's checkpoints have them.

A checkpoint in BF16 has the experts of a layer in one tensor ``x`` ``[experts, k, n]``, that in MXFP4 has ``x_blocks`` (``uint8``
``[experts, n, k / 32, 16]``) and ``x_scales`` (``uint8`` ``[experts, n, k / 32]``): rows are quantized along ``k``. Biases stay.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import torch

from ..errors import RefitMismatch
from ..layout import Axes, Box, Fragment
from ..packing import Cast
from ..quantize import mxfp4
from ..quantize.formats import Format
from ..quantize.mxfp4_table import Packer, PackJob, make_packer
from .endpoints import WeightSource, gives_memory_back, prepares_alone, sent_formats, trained_formats
from .manifest import TensorSpec, dtype_name

_ENDS = (".experts.gate_up_proj", ".experts.down_proj")
_HALF = mxfp4.BLOCK // 2


class PackedExperts(NamedTuple):
    """What travels in a weight's place."""

    blocks: TensorSpec
    scales: TensorSpec


def packed_experts(spec: TensorSpec) -> PackedExperts | None:
    """What stands for a weight in a checkpoint in MXFP4; None if the weight itself does.

    Args:
        spec: of a checkpoint in BF16.

    Raises:
        ValueError: experts that have no such form; says why.
    """
    if not spec.name.endswith(_ENDS):
        return None
    if len(spec.shape) != 3 or spec.shape[1] % mxfp4.BLOCK or spec.dtype != torch.bfloat16:
        raise ValueError(
            f"{spec.name} is {dtype_name(spec.dtype)}{list(spec.shape)}; MXFP4 is made of experts [experts, k, n] in BF16 whose k is "
            f"a multiple of {mxfp4.BLOCK}"
        )
    experts, k, n = spec.shape
    count = k // mxfp4.BLOCK
    return PackedExperts(
        TensorSpec(f"{spec.name}_blocks", (experts, n, count, _HALF), torch.uint8),
        TensorSpec(f"{spec.name}_scales", (experts, n, count), torch.uint8),
    )


def scales_of_packed(specs: Iterable[TensorSpec]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Of a manifest the scales of experts in MXFP4: by name the codes that stand for the weight, and the block in its dimensions.

    Whoever packed them: a trainer may export a checkpoint in MXFP4 itself.
    """
    names = {spec.name: len(spec.shape) for spec in specs}
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, dims in names.items():
        weight, end, rest = name.rpartition("_scales")
        if end and not rest and dims == 3 and weight.endswith(_ENDS) and f"{weight}_blocks" in names:
            found[name] = f"{weight}_blocks", (1, 1, mxfp4.BLOCK)
    return found


class ExpertPackingSource:
    """Implements :class:`.endpoints.WeightSource`: experts travel in MXFP4, whatever layout the rank holds them in.

    The packed tensors of what this rank holds are kept in memory, 17/32 byte a weight, and made anew before each refit. A shard that
    cuts no block gives the bytes of a slice of the whole packed weight. Other experts, and those that ``source`` refuses, take the misc
    path, packed.

    Args:
        source: of unquantized weights.

    Raises:
        RefitMismatch: it has no experts that can be packed; says why.
    """

    def __init__(self, source: WeightSource):
        self._source = source
        self._specs: list[TensorSpec] = []
        self._packed: dict[str, PackedExperts] = {}
        self._origin: dict[str, str] = {}
        for spec in source.specs():
            try:
                packed = packed_experts(spec)
            except ValueError as error:
                raise RefitMismatch(
                    f"the trainer can't pack it, as policy.refit.trainer_quantize_mxfp4 asks: {error}. Nothing was written; set it to "
                    "false, and start the engine from a checkpoint in BF16",
                    stage="handshake",
                    parameter=spec.name,
                ) from error
            self._specs += [spec] if packed is None else packed
            self._origin.update(dict.fromkeys((s.name for s in packed or (spec,)), spec.name))
            if packed is not None:
                self._packed[spec.name] = packed
        if not self._packed:
            raise RefitMismatch(
                "policy.refit.trainer_quantize_mxfp4 is true, but the trainer has no experts as GPT-OSS has them (names that end in "
                f"{' or '.join(_ENDS)}); nothing was written. Set it to false",
                stage="handshake",
            )
        self._jobs: list[PackJob] = []
        self._packer: Packer | None = None
        self._packed_from: tuple[int, ...] = ()
        self._memory: dict[tuple[str, Box], torch.Tensor] = {}

    @property
    def device(self) -> torch.device:
        return self._source.device

    @property
    def gives_memory_back(self) -> bool | None:
        return gives_memory_back(self._source)

    @property
    def prepares_alone(self) -> bool:
        return prepares_alone(self._source)

    @property
    def trained_formats(self) -> Mapping[str, Format]:
        return trained_formats(self._source)

    @property
    def sent_formats(self) -> Mapping[str, Format]:
        return sent_formats(self._source)

    def specs(self) -> list[TensorSpec]:
        return self._specs

    def fragments(self) -> tuple[list[Fragment], dict[str, str]]:
        held, told = self._source.fragments()
        refused = dict(told)  # which may be the source's own
        sent: list[Fragment] = []
        parts: list[tuple[Fragment, torch.Tensor]] = []
        for fragment in held:
            if fragment.name not in self._packed:
                sent.append(fragment)
                continue
            seen = _rows_last(fragment)
            if isinstance(seen, str):
                refused.setdefault(fragment.name, seen)
            else:
                parts.append((fragment, seen))
        self._jobs, self._packer = [], None
        for fragment, seen in parts:
            if fragment.name not in refused:
                sent += self._pack(fragment, seen)
        return sent, {name: refused[origin] for name, origin in self._origin.items() if origin in refused}

    def prepare(self) -> None:
        self._source.prepare()
        places = self._places()
        if self._packer is None or self._packed_from != places:
            # An offloaded trainer's weights may have come back elsewhere since fragments were asked for.
            self._packer = make_packer(self._jobs, torch.bfloat16, self.device)
            self._packed_from = places
        self._packer.launch()

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        wanted = set(names)
        origins = dict.fromkeys(self._origin[name] for name in names)
        for origin, weight in self._source.export(list(origins)):
            packed = self._packed.get(origin)
            if packed is None:
                yield origin, weight
                continue
            # One expert at a time: what quantizing takes meanwhile is several times what it is given.
            codes, scales = map(
                torch.stack, zip(*(mxfp4.quantize(expert.t()) for expert in weight.unbind()), strict=True)
            )
            for spec, tensor in ((packed.blocks, codes), (packed.scales, scales)):
                if spec.name in wanted:
                    yield spec.name, tensor.view(spec.shape)

    def storage_key(self) -> Hashable:
        # Of what is packed, too: fragments may have been asked for where the weights are no longer.
        return self._source.storage_key(), self._places()

    def _places(self) -> tuple[int, ...]:
        return tuple([job.source.data_ptr() for job in self._jobs])

    def _pack(self, fragment: Fragment, seen: torch.Tensor) -> Iterator[Fragment]:
        """What stands for a part whose columns, along ``k``, are the last dimension of ``seen``."""
        packed = self._packed[fragment.name]
        axes = fragment.axes or Axes.of(fragment.full_shape)
        at, box = _place_of_k(axes), fragment.box
        rows, (start, stop) = (*box[:at], *box[at + 1 :]), box[at]
        count = start // mxfp4.BLOCK, stop // mxfp4.BLOCK
        *extents, columns = seen.shape
        codes = self._kept(packed.blocks.name, box, (*extents, columns // 2))
        scales = self._kept(packed.scales.name, box, (*extents, columns // mxfp4.BLOCK))
        self._jobs += [PackJob(*one) for one in zip(*map(_matrices, (seen, codes, scales)), strict=True)]
        experts, _, outer = axes.splits
        # The factors of k are gone from among those of the other dimensions.
        order = tuple(i - (i > len(experts)) for i in axes.order if i != len(experts))
        halves = codes.view(*extents, count[1] - count[0], _HALF)
        for spec, made, columns_of in (
            (packed.blocks, halves, (count, (0, _HALF))),
            (packed.scales, scales, (count,)),
        ):
            splits = experts, outer, *((n,) for n in spec.shape[2:])
            found = Axes(splits, (*order, *range(len(order), len(order) + len(columns_of))))
            yield Fragment(
                spec.name, spec.shape, (*rows, *columns_of), made, axes=None if found.plain else found
            )

    def _kept(self, name: str, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
        """The same memory each time: who asked for fragments before reads what :meth:`prepare` writes, as who asks now."""
        if (name, box) not in self._memory:
            self._memory[name, box] = torch.empty(shape, dtype=torch.uint8, device=self.device)
        return self._memory[name, box]


def _matrices(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A tensor as matrices of its last dimension and of the one before it that has several elements: views, in order."""
    *extents, _ = tensor.shape
    several = tensor[tuple(0 if n == 1 else slice(None) for n in extents)]
    if several.dim() == 1:
        return [several[None]]
    return [several[index] for index in product(*map(range, several.shape[:-2]))]


def _place_of_k(axes: Axes) -> int:
    """Where a fragment's view has the tensor's second dimension, which is not split."""
    experts, _, _ = axes.splits
    return axes.order.index(len(experts))


def _rows_last(fragment: Fragment) -> torch.Tensor | str:
    """The part with the blocks' elements as its last dimension, or why it can't be packed alone."""
    if fragment.encoding is not None and not isinstance(fragment.encoding, Cast):
        return "a rank computes it while packing, and what is computed is not quantized in the same pass"
    axes = fragment.axes or Axes.of(fragment.full_shape)
    if len(axes.splits[1]) > 1:
        return "a rank holds the elements of its blocks apart"
    at = _place_of_k(axes)
    start, stop = fragment.box[at]
    if start % mxfp4.BLOCK or stop % mxfp4.BLOCK:
        return (
            f"a rank holds elements {start}:{stop} of its rows, which cuts blocks of {mxfp4.BLOCK} elements, so the whole weight is "
            "packed"
        )
    return fragment.view.movedim(at, -1)
