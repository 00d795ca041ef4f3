"""Trace an engine's weight loader once: which parameter elements each checkpoint tensor lands in.

Fused QKV, gate and up in one matrix, stacked experts, replicated KV heads, tensor, expert and pipeline
parallelism all come out of the engine's own code, run on recording tensors, instead of tables of names.
What a replayed copy of bytes cannot express is attributed to its tensor with a reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch

from .....integration.errors import PlanError, RefitMismatch
from .....integration.layout import Axes, Box, Fragment, overlap, volume
from .....integration.layout.rearrangement import Digit, Rearrangement
from .recording import Recorder, StridedRegion, UntraceableOperation, Write

logger = logging.getLogger(__name__)

Manifest = Sequence[tuple[str, tuple[int, ...], torch.dtype]]
LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


@dataclass(frozen=True)
class Landing:
    """One box of a checkpoint tensor and the parameter elements that hold it.

    Attributes:
        name: Hugging Face checkpoint name.
        full_shape: shape of the whole checkpoint tensor.
        box: the part that lands here.
        parameter: name of the engine's parameter.
        offset: first element of the place, counted in elements from the parameter's first element.
        stride: strides of the place, in elements, one for each dimension of the box.
        axes: by which the box sees the checkpoint tensor, if not as it is.
        dtype: of the checkpoint tensor, where the parameter has a wider one; None if both have the same.
    """

    name: str
    full_shape: tuple[int, ...]
    box: Box
    parameter: str
    offset: int
    stride: tuple[int, ...]
    axes: Axes | None = None
    dtype: torch.dtype | None = None

    @property
    def bounds(self) -> Box:
        """The smallest box of the checkpoint tensor itself that has all of these elements."""
        return self.box if self.axes is None else self.axes.bounds(self.box)

    def rearranged(self, parameter: torch.Tensor, by: Rearrangement) -> Landing | None:
        """The same elements where the engine put them after loading; None where those are no box by any axes.

        Args:
            parameter: as it is loaded.
            by: of it.
        """
        extents = tuple(stop - start for start, stop in self.box)
        place = view_box(parameter.shape, parameter.stride(), self.offset, extents, self.stride)
        found = None if place is None else by.boxed(place.box)
        if place is None or found is None:
            return None
        offset, digits_along = found
        splits: list[tuple[int, ...]] = []
        box: list[tuple[int, int]] = []
        stride: list[int] = []
        for dim, ((start, stop), n) in enumerate(zip(self.box, self.full_shape, strict=True)):
            along = place.axes.index(dim) if dim in place.axes else None
            slowest, *others = (() if along is None else digits_along[along]) or (Digit(stop - start, 1),)
            inner = prod(digit.size for digit in others)
            if n % inner or start % inner:
                return None
            splits.append((n // inner, *(digit.size for digit in others)))
            box += [(start // inner, stop // inner), *((0, digit.size) for digit in others)]
            stride += [slowest.stride, *(digit.stride for digit in others)]
        axes = Axes(tuple(splits), tuple(range(len(stride))))
        return replace(
            self, box=tuple(box), offset=offset, stride=tuple(stride), axes=None if axes.plain else axes
        )

    def box_in(self, parameter: torch.Tensor) -> Box:
        """The box of ``parameter``, as it is loaded, that holds these elements."""
        extents, stride = _along(
            *_joined(tuple(stop - start for start, stop in self.box), self.stride), parameter
        )
        found = view_box(parameter.shape, parameter.stride(), self.offset, extents, stride)
        assert found is not None, "the trace lets no tensor be replayed whose place is no box"
        return found.box

    def in_the_other_half(self, parameter: torch.Tensor) -> Landing:
        """The same place in the other half of the rows of ``parameter``, its last dimension but one.

        Raises:
            PlanError: the landing has a part in each half.
        """
        rows, step = parameter.shape[-2], parameter.stride(-2)
        height = next(
            (b - a for (a, b), s in zip(self.box, self.stride, strict=True) if s == step and b - a > 1), 1
        )
        row = self.offset // step % rows
        if row // (rows // 2) != (row + height - 1) // (rows // 2):
            raise PlanError(
                f"its part {self.box} lies in both halves of {self.parameter}, which the engine swaps after loading. "
                "Start the engine with moe_backend='triton', which leaves experts as they are loaded",
                stage="trace",
                parameter=self.name,
            )
        shift = rows // 2 * step
        return replace(self, offset=self.offset + (shift if row < rows // 2 else -shift))

    def fragment(self, parameter: torch.Tensor) -> Fragment:
        """The landing as a fragment of ``parameter``, which must have the traced one's shape and strides."""
        return Fragment(self.name, self.full_shape, self.box, self.place(parameter), axes=self.axes)

    def place(self, parameter: torch.Tensor) -> torch.Tensor:
        """The elements of ``parameter``, which must have the traced one's shape and strides, that hold the landing."""
        shape = tuple(stop - start for start, stop in self.box)
        return parameter.detach().as_strided(shape, self.stride, parameter.storage_offset() + self.offset)

    def write(self, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
        """Copy this landing's part of the whole checkpoint ``tensor`` into its place in ``parameter``."""
        fragment = self.fragment(parameter)
        fragment.view.copy_(fragment.part_of(tensor))


@dataclass(frozen=True)
class Zeros:
    """A part of a parameter that holds zeros on this rank, where others hold a part of a checkpoint tensor.

    Attributes:
        parameter: name of the engine's parameter.
        region: in elements from the parameter's first element.
    """

    parameter: str
    region: StridedRegion

    def fill(self, parameter: torch.Tensor) -> None:
        """Fill them in ``parameter``, which must have the traced one's shape and strides."""
        offset, shape, stride = self.region.offset, self.region.shape, self.region.stride
        parameter.detach().as_strided(shape, stride, parameter.storage_offset() + offset).zero_()


@dataclass(frozen=True)
class Part:
    """The part of a parameter that tensors bring, which is not all of it.

    Attributes:
        shape: of the parameter.
        stride: of the parameter, in elements.
        regions: in elements from its first element, along its dimensions.
        dims: of the tensor that has most of those that reach it; 0 where none does.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    regions: tuple[StridedRegion, ...]
    dims: int


@dataclass(frozen=True)
class LoaderTrace:
    """What a loader does with every tensor of a manifest.

    Attributes:
        landings: for each checkpoint tensor its places; empty where this rank does not load it (another
            pipeline stage, a remote expert, a tied head) and where it is in ``misc_reasons``.
        misc_reasons: tensors that cannot be replayed, with the reason.
        touched: for each tensor the parameters that it was seen to reach, misc tensors included.
        unknown: misc tensors that may reach parameters other than the ones in ``touched``.
        lost: those of them that were seen to reach none, with the number of their elements.
        unwritten: for each parameter the number of its elements that nothing was seen to be written to, whether it can
            be replayed or not.
        zeros: for checkpoint tensors of which the loader makes zeros on this rank, where those go.
        joined: tensors that the loader joins with others before it copies them, so that it needs all of these in one call.
        wider: of tensors in ``misc_reasons`` because their parameters have a wider dtype, and for nothing else, where they land.
        again: the same of tensors of whose parameters the loader made something: they land as they are in the whole of one
            parameter, so that the loader makes the same if it is given that parameter for the tensor.
        parts: of parameters that have an unwritten part, the other one.
    """

    landings: dict[str, tuple[Landing, ...]]
    misc_reasons: dict[str, str]
    touched: dict[str, frozenset[str]]
    unknown: frozenset[str]
    lost: dict[str, int]
    unwritten: dict[str, int]
    joined: frozenset[str] = frozenset()
    zeros: dict[str, tuple[Zeros, ...]] = field(default_factory=dict)
    wider: dict[str, tuple[Landing, ...]] = field(default_factory=dict)
    again: dict[str, tuple[Landing, ...]] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)

    def leaving_buffers(self, parameters: Collection[str]) -> LoaderTrace:
        """The same where what the loader puts elsewhere than into ``parameters`` takes the misc path: nobody follows buffers."""
        known = frozenset(parameters)
        others = {name: at - known for name, at in self.touched.items()}
        found = {name: min(at) for name, at in others.items() if at}
        return replace(
            self,
            landings={name: () if name in found else places for name, places in self.landings.items()},
            misc_reasons={name: f"{at} is a buffer" for name, at in found.items()} | self.misc_reasons,
            wider={name: places for name, places in self.wider.items() if name not in found},
            again={name: places for name, places in self.again.items() if name not in found},
        )

    def once(self, unlike: Collection[str]) -> LoaderTrace:
        """The same where what the loader writes to two places takes the misc path, unless the second is a plain copy.

        Args:
            unlike: parameters whose elements do not stay as they land, so that a copy of them is none.
        """
        twice = []
        for name, places in self.landings.items():
            firsts, copies = copies_among(places)
            if _share_elements(firsts) or any(at.parameter in unlike for pair in copies for at in pair):
                twice.append(name)
        return replace(
            self,
            landings={**self.landings, **dict.fromkeys(twice, ())},
            misc_reasons=dict.fromkeys(twice, "the engine's loader writes it to two places")
            | self.misc_reasons,
        )

    def placing(self, landings: Mapping[str, tuple[Landing, ...]]) -> LoaderTrace:
        """The same where ``landings``, of :attr:`wider` or :attr:`again`, are written in place after all."""
        reasons = {name: why for name, why in self.misc_reasons.items() if name not in landings}
        return replace(self, landings={**self.landings, **landings}, misc_reasons=reasons)

    def without(self, parameters: Collection[str]) -> LoaderTrace:
        """The same, as if the loader had left some parameters alone: what goes nowhere else is not loaded."""
        touched = {name: found.difference(parameters) for name, found in self.touched.items()}
        left = {name for name, found in self.touched.items() if found and not touched[name]} - self.unknown

        def elsewhere[At: (Landing, Zeros)](
            places: Mapping[str, tuple[At, ...]],
        ) -> dict[str, tuple[At, ...]]:
            return {
                name: tuple(at for at in found if at.parameter not in parameters)
                for name, found in places.items()
            }

        return replace(
            self,
            landings=elsewhere(self.landings),
            misc_reasons={name: reason for name, reason in self.misc_reasons.items() if name not in left},
            touched=touched,
            unwritten={name: count for name, count in self.unwritten.items() if name not in parameters},
            joined=self.joined - left,
            zeros=elsewhere(self.zeros),
            wider={name: at for name, at in elsewhere(self.wider).items() if at},
            again={name: at for name, at in elsewhere(self.again).items() if at},
            parts={name: part for name, part in self.parts.items() if name not in parameters},
        )


def copies_among(
    places: Sequence[Landing],
) -> tuple[tuple[Landing, ...], tuple[tuple[Landing, Landing], ...]]:
    """The places of a tensor's boxes, each box once, and those where the same box lands again, beside its first place."""
    firsts: dict[tuple[Box, Axes | None], Landing] = {}
    copies = []
    for at in places:
        first = firsts.setdefault((at.box, at.axes), at)
        if first is not at:
            copies.append((first, at))
    return tuple(firsts.values()), tuple(copies)


def _share_elements(places: Sequence[Landing]) -> bool:
    """Whether two of the places hold an element both, where they see the tensor alike."""
    return any(
        overlap([at.box for at in places if at.axes == axes]) is not None
        for axes in {at.axes for at in places}
    )


def trace_loader(
    load_weights: LoadWeights, params: Mapping[str, torch.Tensor], hf_manifest: Manifest
) -> LoaderTrace:
    """Run ``load_weights`` on recording tensors and return where every tensor lands.

    Args:
        load_weights: the engine's loader; takes an iterable of (checkpoint name, tensor).
        params: the parameters that it writes, by name. Meta tensors do; nothing is read or written
            except that the loader's own constant fills are carried out.
        hf_manifest: checkpoint name, full shape and dtype of every tensor.

    The loader sees one tensor after the other. If it fails, the trace starts again with one call for
    each tensor, so that the failure is attributed to the tensor that caused it.

    Raises:
        RefitMismatch: the loader rejects a tensor that it has not computed with, by its name or shape,
            so it would reject the real one too.
    """
    recorder = Recorder(params)
    try:
        with torch.no_grad(), recorder:
            load_weights((name, recorder.tensor(name, shape, dtype)) for name, shape, dtype in hf_manifest)
    except Exception as error:
        logger.debug("tracing tensor by tensor, because the loader stopped on the whole manifest: %s", error)
        recorder = _trace_one_by_one(load_weights, params, hf_manifest)
    return _conclude(recorder, params, hf_manifest)


def _trace_one_by_one(
    load_weights: LoadWeights, params: Mapping[str, torch.Tensor], manifest: Manifest
) -> Recorder:
    recorder = Recorder(params)
    for name, shape, dtype in manifest:
        try:
            with torch.no_grad(), recorder:
                load_weights(iter([(name, recorder.tensor(name, shape, dtype))]))
        except (UntraceableOperation, RuntimeError, TypeError) as error:
            # torch refuses what needs values or storage with these types; the destination is not known then.
            recorder.refuse(name, f"the loader reads its values: {error}")
            recorder.unknown.add(name)
        except Exception as error:
            if name not in recorder.reasons:
                raise RefitMismatch(
                    f"the engine's loader rejects a tensor of shape {tuple(shape)}, dtype {dtype}: "
                    f"{type(error).__name__}: {error}. Nothing was written. The trainer's manifest and the "
                    "engine's model differ: compare the checkpoint that the engine was started from.",
                    stage="trace",
                    parameter=name,
                ) from error
            recorder.unknown.add(name)
    return recorder


def _conclude(recorder: Recorder, params: Mapping[str, torch.Tensor], manifest: Manifest) -> LoaderTrace:
    shapes = {name: tuple(shape) for name, shape, _ in manifest}
    for write in recorder.writes:
        if write.tensor is None and _target_box(write, params[write.parameter]) is None:
            recorder.rewritten.setdefault(write.parameter, "a constant in a part that is no box")
    for name, parameters in recorder.touched.items():
        for parameter in sorted(parameters & recorder.rewritten.keys()):
            recorder.refuse(name, f"the loader also changes {parameter} by {recorder.rewritten[parameter]}")
    # What is made of parameters may be in others.
    used = {} if any(ps & recorder.rewritten.keys() for ps in recorder.touched.values()) else recorder.used
    landings: dict[str, list[Landing]] = {name: [] for name in shapes}
    zeros: dict[str, list[Zeros]] = {}
    boxes: dict[str, list[tuple[Box, str | None]]] = {}
    for write in recorder.writes:
        box = _target_box(write, params[write.parameter])
        if write.tensor is None:
            if box is not None:
                boxes.setdefault(write.parameter, []).append((box, None))
            if write.zeros_of is not None:
                zeros.setdefault(write.zeros_of, []).append(Zeros(write.parameter, write.target))
            continue
        landing = _landing(write, shapes[write.tensor])
        if landing is None or box is None:
            recorder.refuse(
                write.tensor, f"the part that lands in {write.parameter} is no box with whole dimensions"
            )
            continue
        landings[write.tensor].append(landing)
        boxes.setdefault(write.parameter, []).append((box, write.tensor))
    for parameter, entries in boxes.items():
        _refuse_clashes(recorder, parameter, entries)
    reasons: dict[str, str] = {}
    wider: dict[str, tuple[Landing, ...]] = {}
    again: dict[str, tuple[Landing, ...]] = {}
    for name in shapes:
        made = sorted(recorder.touched.get(name, set()) & recorder.used.keys())
        if name in recorder.reasons:
            reasons[name] = recorder.reasons[name]
        elif made:
            reasons[name] = f"the loader also makes something of {made[0]} by {recorder.used[made[0]]}"
            alone = recorder.touched[name] == {made[0]} and name not in recorder.joined
            if alone and made[0] in used and _is_whole(landings[name], params[made[0]]):
                again[name] = tuple(landings[name])
        elif name in recorder.wider:
            reasons[name] = recorder.wider[name]
            wider[name] = tuple(landings[name])
    unwritten = {
        name: p.numel() - _count_reached(p, recorder.reached.get(name, ())) for name, p in params.items()
    }
    return LoaderTrace(
        landings={n: () if n in reasons else tuple(found) for n, found in landings.items()},
        misc_reasons=reasons,
        touched={name: frozenset(recorder.touched.get(name, ())) for name in shapes},
        unknown=frozenset(recorder.unknown),
        lost={name: prod(shapes[name]) for name in recorder.unknown if not recorder.touched.get(name)},
        unwritten=unwritten,
        zeros={n: tuple(found) for n, found in zeros.items() if n not in reasons or n in wider},
        joined=frozenset(recorder.joined),
        wider=wider,
        again=again,
        parts=_parts(recorder, {name: params[name] for name, count in unwritten.items() if count}, shapes),
    )


def _parts(
    recorder: Recorder, params: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Part]:
    dims: dict[str, int] = {}
    for name, touched in recorder.touched.items():
        for parameter in touched:
            dims[parameter] = max(dims.get(parameter, 0), len(shapes[name]))
    return {
        name: Part(
            tuple(p.shape),
            tuple(p.stride()),
            tuple(
                StridedRegion(region.offset, *_along(region.shape, region.stride, p))
                for region in recorder.reached.get(name, ())
                if prod(region.shape)
            ),
            dims.get(name, 0),
        )
        for name, p in params.items()
    }


def _is_whole(landings: Sequence[Landing], parameter: torch.Tensor) -> bool:
    """Whether a checkpoint tensor, as it is, is all of a parameter."""
    if len(landings) != 1 or landings[0].dtype is not None:
        return False
    [at] = landings
    return (
        at.full_shape == tuple(parameter.shape)
        and at.box == tuple((0, n) for n in parameter.shape)
        and at.offset == 0
        and all(
            step == own
            for step, own, n in zip(at.stride, parameter.stride(), parameter.shape, strict=True)
            if n > 1
        )
    )


def _target_box(write: Write, parameter: torch.Tensor) -> Box | None:
    return _box_of(write.target, parameter)


def _box_of(region: StridedRegion, parameter: torch.Tensor) -> Box | None:
    found = view_box(parameter.shape, parameter.stride(), region.offset, region.shape, region.stride)
    return None if found is None else found.box


def _landing(write: Write, full_shape: tuple[int, ...]) -> Landing | None:
    """The write in the checkpoint tensor's dimension order, or None if its source is no box."""
    source, target = write.source, write.target
    assert source is not None
    assert write.tensor is not None
    # Dimensions that the loader has joined (blocks of a row, say) are the checkpoint tensor's own again.
    cuts = _cuts(source.shape, source.stride, full_shape, _contiguous_stride(full_shape))
    shape, steps = _cut(source.shape, source.stride, cuts)
    found = view_box(full_shape, _contiguous_stride(full_shape), source.offset, shape, steps)
    if found is None:
        return None
    _, places = _cut(target.shape, target.stride, cuts)
    # A dimension of extent 1 is never stepped over, so any stride describes it.
    stride = tuple(1 if axis is None else places[axis] for axis in found.axes)
    return Landing(
        write.tensor, full_shape, found.box, write.parameter, target.offset, stride, dtype=write.dtype
    )


_Cuts = list[tuple[int, ...]]


def _cuts(shape: Sequence[int], stride: Sequence[int], base: Sequence[int], steps: Sequence[int]) -> _Cuts:
    """For each dimension of a view the extents of those of its base, ``base`` with strides ``steps``, that it joins."""
    inner = {step: n for n, step in zip(base, steps, strict=True) if n > 1}
    found: _Cuts = []
    for n, step in zip(shape, stride, strict=True):
        extents: list[int] = []
        while (size := inner.get(step, n)) < n and n % size == 0:
            extents.insert(0, size)
            n, step = n // size, step * size
        found.append((n, *extents))
    return found


def _cut(shape: Sequence[int], stride: Sequence[int], cuts: _Cuts) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A view's extents and strides, with its dimensions cut."""
    assert all(n == prod(extents) for n, extents in zip(shape, cuts, strict=True))
    steps = [
        step * prod(extents[i + 1 :])
        for step, extents in zip(stride, cuts, strict=True)
        for i in range(len(extents))
    ]
    return tuple(n for extents in cuts for n in extents), tuple(steps)


def _along(
    shape: tuple[int, ...], stride: tuple[int, ...], base: torch.Tensor
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A view's extents and strides, with what joins dimensions of ``base`` cut."""
    return _cut(shape, stride, _cuts(shape, stride, base.shape, base.stride()))


def _joined(shape: Sequence[int], stride: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A view's extents and strides, with dimensions joined that lie one behind the other, whatever their order."""
    found: list[tuple[int, int]] = []
    for step, n in sorted((step, n) for n, step in zip(shape, stride, strict=True) if n > 1):
        if found and found[-1][0] * found[-1][1] == step:
            found[-1] = found[-1][0], found[-1][1] * n
        else:
            found.append((step, n))
    return tuple(n for _, n in found), tuple(step for step, _ in found)


def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [], 1
    for n in reversed(shape):
        stride.append(step)
        step *= max(n, 1)
    return tuple(reversed(stride))


def _refuse_clashes(recorder: Recorder, parameter: str, entries: list[tuple[Box, str | None]]) -> None:
    """Refuse tensors whose bytes in ``parameter`` another write also takes."""
    copies = [(box, name) for box, name in entries if name is not None]
    clash = overlap([box for box, _ in copies])
    if clash is not None:
        first, second = (copies[i][1] for i in clash)
        for name in {name for _, name in copies}:
            recorder.refuse(
                name, f"{first} and {second} both write one part of {parameter}; the last one wins, not both"
            )
    for position, (box, name) in enumerate(entries):
        if name is None:
            for earlier, overwritten in entries[:position]:
                if overwritten is not None and overlap([earlier, box]) is not None:
                    recorder.refuse(
                        overwritten, f"the loader overwrites a part of {parameter} with a constant"
                    )


def _count_reached(parameter: torch.Tensor, regions: Collection[StridedRegion]) -> int:
    """Elements in ``regions``, each counted once; of regions that are no boxes the same one may be counted twice."""
    found = [(region, _box_of(region, parameter)) for region in regions]
    boxes = [box for _, box in found if box is not None]
    if overlap(boxes) is not None:
        apart: list[Box] = []
        for box in sorted(boxes, key=volume, reverse=True):
            apart += _outside(box, apart)
        boxes = apart
    scattered = sum(prod(region.shape) for region, box in found if box is None)
    return min(parameter.numel(), sum(map(volume, boxes)) + scattered)


def _outside(box: Box, taken: Sequence[Box]) -> list[Box]:
    """The parts of ``box`` that no box of ``taken`` covers, as disjoint boxes."""
    rest = [box]
    for other in taken:
        rest = [piece for part in rest for piece in _without(part, other)]
    return rest


def _without(box: Box, other: Box) -> list[Box]:
    """``box`` minus ``other``, cut along one dimension after the other."""
    pieces = []
    if overlap([box, other]) is None:
        return [box]
    inner = list(box)
    for d, ((start, stop), (o_start, o_stop)) in enumerate(zip(box, other, strict=True)):
        if start < o_start:
            pieces.append((*inner[:d], (start, o_start), *box[d + 1 :]))
        if o_stop < stop:
            pieces.append((*inner[:d], (o_stop, stop), *box[d + 1 :]))
        inner[d] = (max(start, o_start), min(stop, o_stop))
    return pieces


@dataclass(frozen=True)
class _ViewBox:
    """A view of a base tensor that holds exactly one box of it.

    Attributes:
        box: the part of the base tensor, in the base's coordinates.
        axes: for each dimension of the base, the dimension of the view that runs along it, or None
            where the box has extent 1 there and the view has no dimension of its own for it.
    """

    box: Box
    axes: tuple[int | None, ...]


def view_box(
    base_shape: Sequence[int],
    base_stride: Sequence[int],
    offset: int,
    shape: Sequence[int],
    stride: Sequence[int],
) -> _ViewBox | None:
    """The box of a base tensor that a view (``offset`` elements in, ``shape``, ``stride``) holds.

    None if the view is no rectangular part of the base with its dimensions in some order: a step
    other than 1, merged or split dimensions, a broadcast, or a base whose own elements overlap.
    Exact because the base's strides are nested (each covers all smaller ones), so an offset and a
    stride can be read in one way only.
    """
    axes_by_stride = sorted((d for d, n in enumerate(base_shape) if n > 1), key=lambda d: -base_stride[d])
    reach = 1
    for d in reversed(axes_by_stride):
        if base_stride[d] < reach:
            return None
        reach = base_stride[d] * base_shape[d]
    start = [0] * len(base_shape)
    for d in axes_by_stride:
        start[d], offset = divmod(offset, base_stride[d])
        if start[d] >= base_shape[d]:
            return None
    if offset:
        return None
    axes: list[int | None] = [None] * len(base_shape)
    extent = [1] * len(base_shape)
    for v, n in enumerate(shape):
        if n == 1:
            continue
        d = next((d for d in axes_by_stride if base_stride[d] == stride[v]), None)
        if n < 1 or d is None or axes[d] is not None or start[d] + n > base_shape[d]:
            return None
        axes[d], extent[d] = v, n
    box = tuple((s, s + n) for s, n in zip(start, extent, strict=True))
    return _ViewBox(box, tuple(axes))
