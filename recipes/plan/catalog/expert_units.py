"""Routed experts: a parameter for each local expert in Megatron, one for all of a rank's in vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....integration.layout import Axes, Box
from .storage import Index, Param, Part, Weight
from .units import Division, Mesh, Place, Shard, cut_box, everything, stack


@dataclass(frozen=True)
class _Routed:
    """What both forms of routed experts have.

    Attributes:
        prefix: of the Hugging Face names.
        megatron: prefix of the names of Megatron's parameters, which end in global expert numbers.
        vllm: prefix of the names of vLLM's parameters.
        count: experts.
        inner: width between the matrices.
        outer: width of the model.
    """

    prefix: str
    megatron: str
    vllm: str
    count: int
    inner: int
    outer: int


@dataclass(frozen=True)
class Experts(_Routed):
    """Experts with matrices of their own in the checkpoint: a gate, an up and a down matrix, or the last two alone.

    Their names are ``{prefix}{expert}.{wide or narrow}.weight``, ``{megatron}linear_fc{1,2}.weight{expert}``, and ``w13_weight`` and
    ``w2_weight`` behind vLLM's prefix.

    Attributes:
        wide: names of gate and up, or of up alone.
        narrow: name of down.
    """

    wide: tuple[str, ...] = ("gate_proj", "up_proj")
    narrow: str = "down_proj"

    def weights(self) -> Iterator[Weight]:
        for expert in range(self.count):
            yield from self._of(expert)

    def train(self, place: Place) -> Iterator[Param]:
        for expert in range(*place.ep.cut(self.count)):
            *wide, down = self._of(expert)
            yield stack(f"{self.megatron}linear_fc1.weight{expert}", wide, place.etp, place.dtype)
            box = cut_box(down.shape, 1, place.etp)
            shape = (self.outer, box[1][1] - box[1][0])
            part = Part(down.name, down.shape, box, everything(shape))
            yield Param(f"{self.megatron}linear_fc2.weight{expert}", shape, place.dtype, (part,))

    def gen(self, place: Place) -> Iterator[Param]:
        first, last = _experts_of(place.ep, self.count)
        start, stop = place.etp.cut(self.inner)
        height = stop - start
        w13: list[Part] = []
        w2: list[Part] = []
        for local, expert in enumerate(range(first, last)):
            *wide, down = self._of(expert)
            for block, weight in enumerate(wide):
                index = (local, slice(block * height, (block + 1) * height), slice(0, self.outer))
                w13.append(Part(weight.name, weight.shape, ((start, stop), (0, self.outer)), index))
            index = (local, slice(0, self.outer), slice(0, height))
            w2.append(Part(down.name, down.shape, ((0, self.outer), (start, stop)), index))
        count = last - first
        rows = len(self.wide) * height
        yield Param(f"{self.vllm}w13_weight", (count, rows, self.outer), place.dtype, tuple(w13))
        yield Param(f"{self.vllm}w2_weight", (count, self.outer, height), place.dtype, tuple(w2))

    def train_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        yield Division(f"the experts of {self.prefix}*", self.count, "ep")
        yield Division(f"dimension 0 of {self.prefix}*.{self.wide[0]}.weight", self.inner, "etp")

    def gen_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        yield Division(f"dimension 0 of {self.prefix}*.{self.wide[0]}.weight", self.inner, "etp")

    def _of(self, expert: int) -> tuple[Weight, ...]:
        name = f"{self.prefix}{expert}."
        return (
            *(Weight(f"{name}{wide}.weight", (self.inner, self.outer)) for wide in self.wide),
            Weight(f"{name}{self.narrow}.weight", (self.outer, self.inner)),
        )


@dataclass(frozen=True)
class StackedExperts(_Routed):
    """GPT-OSS: all experts in one checkpoint tensor, gate and up columns alternating, matrices transposed, biases.

    Megatron has gate before up, in matrices that lie the other way round; vLLM turns the matrices round and leaves the columns
    alternating. Names are ``{prefix}{gate_up,down}_proj{,_bias}``, ``{megatron}linear_fc{1,2}.{weight,bias}{expert}``, and
    ``w13_weight``, ``w13_bias``, ``w2_weight`` and ``w2_bias`` behind vLLM's prefix.
    """

    def weights(self) -> Iterator[Weight]:
        yield Weight(f"{self.prefix}gate_up_proj", (self.count, self.outer, 2 * self.inner))
        yield Weight(f"{self.prefix}gate_up_proj_bias", (self.count, 2 * self.inner))
        yield Weight(f"{self.prefix}down_proj", (self.count, self.inner, self.outer))
        yield Weight(f"{self.prefix}down_proj_bias", (self.count, self.outer))

    def train(self, place: Place) -> Iterator[Param]:
        gate_up, gate_up_bias, down, down_bias = self.weights()
        start, stop = place.etp.cut(self.inner)
        inner = stop - start
        halves = [slice(which * inner, (which + 1) * inner) for which in (0, 1)]
        alternating, turned = self._alternating(), self._turned()
        every, outer = slice(None), (0, self.outer)
        for expert in range(*place.ep.cut(self.count)):
            own = (expert, expert + 1)
            matrices = tuple(
                Part(
                    gate_up.name,
                    gate_up.shape,
                    (own, (start, stop), (which, which + 1), outer),
                    (None, half, None, every),
                    alternating,
                )
                for which, half in enumerate(halves)
            )
            biases = tuple(
                Part(
                    gate_up_bias.name,
                    gate_up_bias.shape,
                    (own, (start, stop), (which, which + 1)),
                    (None, half, None),
                    Axes(((self.count,), (self.inner, 2)), (0, 1, 2)),
                )
                for which, half in enumerate(halves)
            )
            fc1, fc2 = f"{self.megatron}linear_fc1.", f"{self.megatron}linear_fc2."
            yield Param(f"{fc1}weight{expert}", (2 * inner, self.outer), place.dtype, matrices)
            yield Param(f"{fc1}bias{expert}", (2 * inner,), place.dtype, biases)
            part = Part(down.name, down.shape, (own, outer, (start, stop)), (None, every, every), turned)
            yield Param(f"{fc2}weight{expert}", (self.outer, inner), place.dtype, (part,))
            part = Part(down_bias.name, down_bias.shape, (own, outer), (None, every))
            yield Param(f"{fc2}bias{expert}", (self.outer,), place.dtype, (part,))

    def gen(self, place: Place) -> Iterator[Param]:
        gate_up, gate_up_bias, down, down_bias = self.weights()
        own = _experts_of(place.ep, self.count)
        start, stop = place.etp.cut(self.inner)
        columns, outer = (2 * start, 2 * stop), (0, self.outer)
        turned = Axes(((self.count,), (self.outer,), (2 * self.inner,)), (0, 2, 1))
        for name, weight, box, axes in (
            ("w13_weight", gate_up, (own, columns, outer), turned),
            ("w13_bias", gate_up_bias, (own, columns), None),
            ("w2_weight", down, (own, outer, (start, stop)), self._turned()),
            ("w2_bias", down_bias, (own, outer), None),
        ):
            shape = tuple(b - a for a, b in box)
            part = Part(weight.name, weight.shape, box, everything(shape), axes)
            # All ranks' results are added up, so that one of them has the bias.
            parts = () if name == "w2_bias" and place.etp.rank else (part,)
            yield Param(self.vllm + name, shape, place.dtype, parts)

    def train_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        yield Division(f"the experts of {self.prefix}*", self.count, "ep")
        yield from self.gen_divisions(sizes)

    def gen_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        yield Division(f"the last dimension of {self.prefix}gate_up_proj, halved,", self.inner, "etp")

    def _alternating(self) -> Axes:
        return Axes(((self.count,), (self.outer,), (self.inner, 2)), (0, 2, 3, 1))

    def _turned(self) -> Axes:
        return Axes(((self.count,), (self.inner,), (self.outer,)), (0, 2, 1))


# A weight, and a box of it as it is seen.
_Matrix = tuple[Weight, Box]


@dataclass(frozen=True)
class JoinedExperts(_Routed):
    """All experts in one checkpoint tensor, gates before ups: ``[count, 2 * inner, outer]`` and ``[count, outer, inner]``.

    Megatron has a parameter for each expert, vLLM one for all of a rank's, as of :class:`Experts`. Their names in the checkpoint are
    ``{prefix}{gate_up,down}_proj``.

    Attributes:
        turned: the checkpoint has each matrix the other way round.
    """

    turned: bool = False

    def weights(self) -> Iterator[Weight]:
        for name, rows, columns in (
            ("gate_up_proj", 2 * self.inner, self.outer),
            ("down_proj", self.outer, self.inner),
        ):
            shape = (columns, rows) if self.turned else (rows, columns)
            yield Weight(f"{self.prefix}{name}", (self.count, *shape))

    def train(self, place: Place) -> Iterator[Param]:
        start, stop = place.etp.cut(self.inner)
        height, every = stop - start, slice(None)
        for expert in range(*place.ep.cut(self.count)):
            gate, up, down = self._parts(expert, start, stop)
            halves = (slice(0, height), slice(height, 2 * height))
            wide = tuple(
                self._part(box, (None, half, every)) for box, half in zip((gate, up), halves, strict=True)
            )
            yield Param(
                f"{self.megatron}linear_fc1.weight{expert}", (2 * height, self.outer), place.dtype, wide
            )
            narrow = self._part(down, (None, every, every))
            yield Param(
                f"{self.megatron}linear_fc2.weight{expert}", (self.outer, height), place.dtype, (narrow,)
            )

    def gen(self, place: Place) -> Iterator[Param]:
        first, last = _experts_of(place.ep, self.count)
        start, stop = place.etp.cut(self.inner)
        height, columns = stop - start, slice(0, self.outer)
        w13: list[Part] = []
        w2: list[Part] = []
        for local, expert in enumerate(range(first, last)):
            own = slice(local, local + 1)
            gate, up, down = self._parts(expert, start, stop)
            w13.append(self._part(gate, (own, slice(0, height), columns)))
            w13.append(self._part(up, (own, slice(height, 2 * height), columns)))
            w2.append(self._part(down, (own, columns, slice(0, height))))
        count = last - first
        yield Param(f"{self.vllm}w13_weight", (count, 2 * height, self.outer), place.dtype, tuple(w13))
        yield Param(f"{self.vllm}w2_weight", (count, self.outer, height), place.dtype, tuple(w2))

    def train_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        yield Division(f"the experts of {self.prefix}*", self.count, "ep")
        yield from self.gen_divisions(sizes)

    def gen_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        yield Division(f"the rows of gates of {self.prefix}gate_up_proj", self.inner, "etp")

    def _parts(self, expert: int, start: int, stop: int) -> tuple[_Matrix, _Matrix, _Matrix]:
        """Rows ``start`` to ``stop`` of an expert's gate and up, and as many columns of its down."""
        gate_up, down = self.weights()
        own, outer = (expert, expert + 1), (0, self.outer)
        return (
            (gate_up, (own, (start, stop), outer)),
            (gate_up, (own, (self.inner + start, self.inner + stop), outer)),
            (down, (own, outer, (start, stop))),
        )

    def _part(self, matrix: _Matrix, index: Index) -> Part:
        weight, box = matrix
        axes = Axes(tuple((n,) for n in weight.shape), (0, 2, 1)) if self.turned else None
        return Part(weight.name, weight.shape, box, index, axes)


def _experts_of(ep: Shard, count: int) -> tuple[int, int]:
    """A vLLM rank's range of experts: as even as possible, the first ranks one more (``determine_expert_map``)."""
    base, more = divmod(count, ep.size)
    start = ep.rank * base + min(ep.rank, more)
    return start, start + base + (ep.rank < more)
