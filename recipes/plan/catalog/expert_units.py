"""Routed experts: a parameter for each local expert in Megatron, one for all of a rank's in vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .storage import Param, Part, Weight
from .units import STACKED, TURNED, Division, Mesh, Place, Shard, cut_box, everything, stack


@dataclass(frozen=True)
class GatedExperts:
    """Experts with a gate, an up and a down matrix of their own in the checkpoint.

    Attributes:
        prefix: of the Hugging Face names ``{prefix}{expert}.{gate,up,down}_proj.weight``.
        megatron: prefix of the names ``{megatron}linear_fc1.weight{expert}``, with global expert numbers.
        vllm: prefix of ``w13_weight`` and ``w2_weight``.
        count: experts.
        inner: rows of gate and up.
        outer: columns of gate and up.
    """

    prefix: str
    megatron: str
    vllm: str
    count: int
    inner: int
    outer: int

    def weights(self) -> Iterator[Weight]:
        for expert in range(self.count):
            yield from self._of(expert)

    def train(self, place: Place) -> Iterator[Param]:
        for expert in range(*place.ep.cut(self.count)):
            gate, up, down = self._of(expert)
            yield stack(f"{self.megatron}linear_fc1.weight{expert}", (gate, up), place.etp, place.dtype)
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
            gate, up, down = self._of(expert)
            for weight, row in ((gate, 0), (up, height)):
                index = (local, slice(row, row + height), slice(0, self.outer))
                w13.append(Part(weight.name, weight.shape, ((start, stop), (0, self.outer)), index))
            index = (local, slice(0, self.outer), slice(0, height))
            w2.append(Part(down.name, down.shape, ((0, self.outer), (start, stop)), index))
        count = last - first
        yield Param(f"{self.vllm}w13_weight", (count, 2 * height, self.outer), place.dtype, tuple(w13))
        yield Param(f"{self.vllm}w2_weight", (count, self.outer, height), place.dtype, tuple(w2))

    def train_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        yield Division(f"the experts of {self.prefix}*", self.count, "ep")
        yield Division(f"dimension 0 of {self.prefix}*.gate_proj.weight", self.inner, "etp")

    def gen_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        yield Division(f"dimension 0 of {self.prefix}*.gate_proj.weight", self.inner, "etp")

    def _of(self, expert: int) -> tuple[Weight, Weight, Weight]:
        name = f"{self.prefix}{expert}."
        return (
            Weight(f"{name}gate_proj.weight", (self.inner, self.outer)),
            Weight(f"{name}up_proj.weight", (self.inner, self.outer)),
            Weight(f"{name}down_proj.weight", (self.outer, self.inner)),
        )


@dataclass(frozen=True)
class StackedExperts:
    """GPT-OSS: all experts in one checkpoint tensor, gate and up rows interleaved, matrices transposed, biases.

    No rule can place gate and up. The trainer's rule places the down projections, but vLLM's loader copies all of
    them through a tensor of its own, so here they take the misc path like the others.

    Attributes:
        prefix: of the Hugging Face names ``{prefix}{gate_up,down}_proj{,_bias}``.
        megatron: prefix of ``linear_fc{1,2}.{weight,bias}{expert}``, with global expert numbers.
        vllm: prefix of ``w13_weight``, ``w13_bias``, ``w2_weight`` and ``w2_bias``.
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

    def weights(self) -> Iterator[Weight]:
        yield Weight(f"{self.prefix}gate_up_proj", (self.count, self.outer, 2 * self.inner))
        yield Weight(f"{self.prefix}gate_up_proj_bias", (self.count, 2 * self.inner))
        yield Weight(f"{self.prefix}down_proj", (self.count, self.inner, self.outer))
        yield Weight(f"{self.prefix}down_proj_bias", (self.count, self.outer))

    def train(self, place: Place) -> Iterator[Param]:
        gate_up, gate_up_bias, down, down_bias = (weight.name for weight in self.weights())
        inner = self.inner // place.etp.size
        for expert in range(*place.ep.cut(self.count)):
            for name, shape, weight, reason in (
                (f"linear_fc1.weight{expert}", (2 * inner, self.outer), gate_up, STACKED),
                (f"linear_fc1.bias{expert}", (2 * inner,), gate_up_bias, STACKED),
                (f"linear_fc2.weight{expert}", (self.outer, inner), down, TURNED),
                (f"linear_fc2.bias{expert}", (self.outer,), down_bias, TURNED),
            ):
                yield Param(self.megatron + name, shape, place.dtype, (), (weight,), reason)

    def gen(self, place: Place) -> Iterator[Param]:
        gate_up, gate_up_bias, down, down_bias = (weight.name for weight in self.weights())
        first, last = _experts_of(place.ep, self.count)
        count, inner = last - first, -(-self.inner // place.etp.size)
        reason = "stacked experts: the loader copies them transposed, through a tensor of its own"
        for name, shape, weight in (
            ("w13_weight", (count, 2 * inner, self.outer), gate_up),
            ("w13_bias", (count, 2 * inner), gate_up_bias),
            ("w2_weight", (count, self.outer, inner), down),
            ("w2_bias", (count, self.outer), down_bias),
        ):
            yield Param(self.vllm + name, shape, place.dtype, (), (weight,), reason)

    def train_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        yield Division(f"the experts of {self.prefix}*", self.count, "ep")
        yield Division(f"the last dimension of {self.prefix}gate_up_proj, halved,", self.inner, "etp")

    def gen_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        return iter(())


def _experts_of(ep: Shard, count: int) -> tuple[int, int]:
    """A vLLM rank's range of experts: as even as possible, the first ranks one more (``determine_expert_map``)."""
    base, more = divmod(count, ep.size)
    start = ep.rank * base + min(ep.rank, more)
    return start, start + base + (ep.rank < more)
