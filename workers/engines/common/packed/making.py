"""What an engine makes of packed layers after loading, made anew by a refit for all layers together, where the engine has it.

Which layers these are, and how it is known that the same is made, :mod:`.layers` says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from math import prod
from typing import Any

import torch

from .....integration.layout import Box, box_of, flat_bytes, local_slice, subtract_all
from .....integration.layout.codes import Tiling
from .....integration.layout.rearrangement import Rearrangement
from .....integration.packing.reordering import Unordered, make_largest_bytes, make_reordering

_IN_ORDER = "the engine puts it in its kernel's order once it has landed, so what a sparse refit builds on is not there any more"

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
Tensors = Mapping[str, torch.Tensor]


class Formula(Enum):
    """How a global scale of a kernel is made, of the largest weight's and input's scale of some that were loaded."""

    WEIGHT = auto()
    MARLIN = auto()
    INPUT = auto()
    INVERSE_INPUT = auto()
    PRODUCT = auto()


@dataclass(frozen=True)
class Derived:
    """A live parameter of global scales.

    Attributes:
        parameter: its name.
        formula: of each element.
        weights: for each element the weights' scales of which it has the largest: the loaded parameter, and places in it.
        inputs: the same of inputs' scales.
        scales: the block scales whose factor is taken off.
    """

    parameter: str
    formula: Formula
    weights: tuple[str, tuple[tuple[int, ...], ...]] = ("", ())
    inputs: tuple[str, tuple[tuple[int, ...], ...]] = ("", ())
    scales: str = ""

    @property
    def elements(self) -> int:
        return max(len(self.weights[1]), len(self.inputs[1]))


@dataclass(frozen=True)
class Order:
    """In which a packed parameter lies.

    Attributes:
        bits: of an element.
        tiling: of each of its matrices, one behind the other.
        changed: whether the kernel has other bytes of it, by the largest one: Marlin of NVFP4's block scales.
    """

    bits: int
    tiling: Tiling
    changed: bool


@dataclass(frozen=True)
class Padded:
    """A parameter behind whose elements a kernel has zeros: the engine pads it after it is loaded, before it is put in order.

    Attributes:
        dims: for each dimension of the parameter the sizes of its parts, the slowest one first, each as it is loaded and with the zeros.
            Rows of gate and up are two parts that are padded apart: ``((2, 2), (96, 128))``.
    """

    dims: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter with the zeros."""
        return tuple(prod(whole for _, whole in parts) for parts in self.dims)

    @property
    def places(self) -> Rearrangement:
        """Where what is loaded lies in it."""
        stride, steps = prod(self.shape), []
        for parts in self.dims:
            found: tuple[int, ...] = (0,)
            for size, whole in parts:
                stride //= whole
                found = tuple(step + i * stride for step in found for i in range(size))
            steps.append(found)
        return Rearrangement(tuple(map(len, steps)), 0, tuple(steps))

    def loaded(self, memory: torch.Tensor) -> torch.Tensor:
        """Those elements of the contiguous ``memory`` that are loaded, with parts of dimensions as dimensions."""
        return _box_of(memory, self._wholes, self._loaded)

    def zeros(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """All others."""
        rest = subtract_all(box_of(self._wholes), [self._loaded])
        return [_box_of(memory, self._wholes, box) for box in rest]

    @property
    def _wholes(self) -> tuple[int, ...]:
        return tuple(whole for parts in self.dims for _, whole in parts)

    @property
    def _loaded(self) -> Box:
        return tuple((0, size) for parts in self.dims for size, _ in parts)


@dataclass(frozen=True)
class MarlinsMaps:
    """What Marlin makes of block scales.

    Attributes:
        maps: uint8 ``[powers, 256]``: of each byte, for each power of two by which scales are multiplied.
        powers: int32 ``[256]``: the power for each byte that is the largest of a layer; 0 for no positive one.
        factors: FP32 ``[powers]``: 2 to the power.
        global_scales: what Marlin makes of global scales, FP32, in a layer of a dtype, before such a factor is taken off.
    """

    maps: torch.Tensor
    powers: torch.Tensor
    factors: torch.Tensor
    global_scales: Callable[[torch.Tensor, torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class PackedForm:
    """How layers of one kind are made of what is loaded.

    Attributes:
        loaded: shape and dtype of all parameters as they are loaded.
        staged: those of them that land beside the model.
        orders: those that are put in order in the live memory.
        derived: what is made of :attr:`staged`.
        dtype: in which the layer computes.
        held: shape, strides and dtype of the parameters that the engine makes.
        padded: those that the kernel pads.
        maps: what Marlin makes of block scales, where some of :attr:`orders` are changed.
    """

    loaded: Shapes
    staged: tuple[str, ...]
    orders: Mapping[str, Order]
    derived: tuple[Derived, ...]
    dtype: torch.dtype
    held: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    padded: Mapping[str, Padded] = field(default_factory=dict)
    maps: MarlinsMaps | None = field(default=None, compare=False)

    def laid(self, name: str) -> tuple[int, ...]:
        """The shape in which a parameter lies in the live memory before it is put in order."""
        return self.padded[name].shape if name in self.padded else self.loaded[name][0]

    def holding(self, held: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]) -> PackedForm:
        """The same, of layers that hold such parameters."""
        return replace(self, held=held)


class PutInOrder:
    """The part of a :class:`.layers.PackedFormat` whose parameters are all loaded in place, and then at most put in order."""

    def form(self, live: Any, loaded: Shapes, kernel: str, orders: Mapping[str, Order]) -> PackedForm:
        return PackedForm(loaded, (), orders, (), live.params_dtype)

    def padding(
        self, live: Any, loaded: Shapes, kernel: str
    ) -> tuple[Mapping[str, Padded], Mapping[str, int]]:
        return {}, {}

    def given(self, loaded: Shapes, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
        yield any_bytes(loaded, device)


class Making:
    """What refits make of packed layers once all has landed, or those of a portion; prepared for parameters that stay where they are.

    Args:
        modules: by name, the live parameters of each, and its form.
        device: of them.
        padding: by module and parameter the boxes that nothing lands in, as it is loaded: they hold zeros, as what a kernel pads does.
    """

    def __init__(
        self,
        modules: Mapping[str, tuple[Tensors, PackedForm]],
        device: torch.device,
        padding: Mapping[tuple[str, str], Sequence[Box]] | None = None,
    ) -> None:
        self._device = device
        self._modules = dict(modules)
        self._staged: dict[tuple[str, str], slice] = {}
        count = 0
        for module, (_, form) in modules.items():
            for name in form.staged:
                begin, count = count, count + prod(form.loaded[name][0])
                self._staged[module, name] = slice(begin, count)
        self._flat = torch.zeros(count, dtype=torch.float32, device=device)
        changed = [
            (module, name)
            for module, (_, form) in modules.items()
            for name, order in form.orders.items()
            if order.changed
        ]
        dtypes = {modules[module][1].dtype for module, _ in changed}
        if len(dtypes) > 1:
            raise ValueError(f"layers compute in {dtypes}")
        self._maps = next((form.maps for _, form in modules.values() if form.maps), None) or _no_maps(device)
        # Of each parameter of block scales, which row of the maps makes Marlin's bytes of it in the refit under way.
        self._slots = {place: slot for slot, place in enumerate(changed)}
        # The kernels want some memory, even where they read none of it.
        self._choices = torch.zeros(max(1, len(changed)), dtype=torch.int32, device=device)
        self._scales = self._derived()
        # By module: zeros before it is put in order, or at the end of a refit if it isn't.
        self._blank: dict[str, list[torch.Tensor]] = defaultdict(list)
        for (module, name), boxes in (padding or {}).items():
            memory = self.as_loaded(module, name)
            self._blank[module] += [_box_of(memory, memory.shape, box) for box in boxes]
        for module, (_, form) in modules.items():
            for name, padded in form.padded.items():
                self._blank[module] += padded.zeros(self.as_loaded(module, name))
        # What is put in order with each portion, and None of what is at the end, once that is prepared; those of the refit under way
        # that have been.
        self._orders: dict[int | None, _Orders] | None = None
        self._done: set[int | None] = set()

    @property
    def orders(self) -> bool:
        """Whether something is put in order."""
        return any(form.orders for _, form in self._modules.values())

    def expect(self, portions: Mapping[str, int]) -> None:
        """Prepare to put modules in order that have landed whole with a portion, and the others at the end of a refit."""
        modules: dict[int | None, list[str]] = defaultdict(list)
        for module, (_, form) in self._modules.items():
            if form.orders:
                modules[portions.get(module)].append(module)
        self._orders = {portion: self._ordered(found) for portion, found in modules.items()}

    def put_in_order(self, portion: int | None) -> None:
        """Put modules in order that have landed whole with a portion; on a GPU, enqueue that on the current stream."""
        assert self._orders is not None, "it is told what to expect before"
        if portion in self._orders:
            self._orders[portion].put(self._maps, self._choices)
            self._done.add(portion)

    def abandon(self) -> None:
        """What was put in order of the refit under way counts for nothing."""
        self._done.clear()

    def landing(self, module: str, parameter: str) -> torch.Tensor | None:
        """Where a parameter of a module lands, as it is loaded; None if in the live parameter as that is."""
        if module not in self._modules:
            return None
        _, form = self._modules[module]
        if (module, parameter) in self._staged:
            return self._flat[self._staged[module, parameter]].view(form.loaded[parameter][0])
        seen_otherwise = (
            parameter in form.orders or parameter in form.padded or self._has_other_view(module, parameter)
        )
        return self.as_loaded(module, parameter) if seen_otherwise else None

    def _has_other_view(self, module: str, parameter: str) -> bool:
        """Whether the bytes of a parameter stay in their order, and the kernel has them as others than they are loaded."""
        held, form = self._modules[module]
        if parameter not in held or parameter not in form.loaded:
            return False
        memory, (shape, kind) = held[parameter], form.loaded[parameter]
        like = tuple(memory.shape) == shape and memory.dtype == kind
        return not like and memory.is_contiguous() and memory.nbytes == prod(shape) * kind.itemsize

    def as_loaded(self, module: str, parameter: str) -> torch.Tensor:
        """The memory of a live parameter of a module in the shape and dtype in which it is loaded, with the zeros that a kernel pads."""
        held, form = self._modules[module]
        return flat_bytes(held[parameter]).view(form.loaded[parameter][1]).view(form.laid(parameter))

    def rewrites(self, module: str, parameter: str) -> str:
        """Why what has landed of a parameter does not stay as it is; empty if it does."""
        return _IN_ORDER if module in self._modules and parameter in self._modules[module][1].orders else ""

    @torch.no_grad()
    def make(self) -> None:
        """Once per refit, after all has landed; on a GPU, enqueued on the current stream."""
        if self._orders is None:
            self.expect({})
        _fill_with_zeros(
            [
                one
                for module, (_, form) in self._modules.items()
                if not form.orders
                for one in self._blank[module]
            ]
        )
        for portion in self._orders.keys() - self._done:
            self.put_in_order(portion)
        self._done.clear()
        for make in self._scales:
            make()
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)

    def _ordered(self, modules: Sequence[str]) -> _Orders:
        """Prepare what puts all matrices of some modules in order."""
        jobs: list[Unordered] = []
        scales: list[tuple[torch.Tensor, int]] = []
        for module in modules:
            held, form = self._modules[module]
            for name, order in form.orders.items():
                memory = flat_bytes(held[name])
                slot = self._slots.get((module, name))
                if slot is not None:
                    scales.append((memory, slot))
                *_, rows, count = (1, *form.laid(name))
                width = count * form.loaded[name][1].itemsize
                jobs += [
                    Unordered(matrix, rows, width * 8 // order.bits, order.bits, order.tiling, slot)
                    for matrix in memory.split(rows * width)
                ]
        blank = [one for module in modules for one in self._blank[module]]
        return _Orders(jobs, scales, blank, self._device)

    def _derived(self) -> list[Callable[[], None]]:
        """Prepare what computes all global scales: a function for each formula, which writes its part of one row."""
        by_formula: dict[tuple[Formula, torch.dtype], list[tuple[str, Derived]]] = defaultdict(list)
        for module, (_, form) in self._modules.items():
            for one in form.derived:
                by_formula[one.formula, form.dtype].append((module, one))
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        makers: list[Callable[[], None]] = []
        for (formula, dtype), found in by_formula.items():
            row = torch.empty(sum(one.elements for _, one in found), dtype=torch.float32, device=self._device)
            sizes = [one.elements for _, one in found]
            for (module, one), part in zip(found, row.split(sizes), strict=True):
                target = self._modules[module][0][one.parameter]
                if target.numel() != one.elements:
                    raise ValueError(f"{one.parameter} has {target.numel()} elements")
                self._targets.append(target)
                self._sources.append(part.view(target.shape))
            weights = self._groups((module, one.weights) for module, one in found)
            inputs = self._groups((module, one.inputs) for module, one in found)
            slots = torch.tensor(
                [
                    self._slots[module, one.scales]
                    for module, one in found
                    if one.scales
                    for _ in range(one.elements)
                ],
                dtype=torch.int64,
                device=self._device,
            )
            makers.append(partial(self._write, formula, dtype, row, weights, inputs, slots))
        return makers

    def _groups(self, found: Iterator[tuple[str, tuple[str, tuple[tuple[int, ...], ...]]]]) -> torch.Tensor:
        """Places in what has landed beside the model, ``[elements, most]``; the last one of a group again where it has fewer."""
        rows = [
            [self._staged[module, name].start + place for place in places]
            for module, (name, groups) in found
            for places in groups
        ]
        most = max(map(len, rows), default=0)
        return torch.tensor(
            [row + row[-1:] * (most - len(row)) for row in rows], dtype=torch.int64, device=self._device
        )

    def _write(
        self,
        formula: Formula,
        dtype: torch.dtype,
        row: torch.Tensor,
        weights: torch.Tensor,
        inputs: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """The operations of the engine's ``process_weights_after_loading`` in their order, on all layers' scales."""
        if formula is Formula.WEIGHT:
            made = self._largest(weights)
        elif formula is Formula.MARLIN:
            whole = self._maps.global_scales(self._largest(weights), dtype)
            made = whole / self._maps.factors[self._choices[slots]]
        elif formula is Formula.INPUT:
            made = self._largest(inputs)
        elif formula is Formula.INVERSE_INPUT:
            made = 1.0 / self._largest(inputs)
        else:
            made = self._largest(inputs) * self._largest(weights)
        row.copy_(made)

    def _largest(self, groups: torch.Tensor) -> torch.Tensor:
        return self._flat[groups].amax(dim=1)


def _no_maps(device: torch.device) -> MarlinsMaps:
    """Where no bytes are changed."""
    ints = torch.zeros(1, dtype=torch.int32, device=device)
    return MarlinsMaps(
        torch.zeros(1, 256, dtype=torch.uint8, device=device),
        ints,
        ints.float(),
        lambda scales, dtype: scales,
    )


class _Orders:
    """Puts some matrices in their kernel's order, and changes those bytes that Marlin changes.

    Args:
        jobs: of the matrices.
        scales: block scales among them, and their slots.
        blank: what holds zeros before that.
        device: of them.
    """

    def __init__(
        self,
        jobs: Sequence[Unordered],
        scales: Sequence[tuple[torch.Tensor, int]],
        blank: Sequence[torch.Tensor],
        device: torch.device,
    ) -> None:
        self._blank = blank
        self._reordering = make_reordering(jobs, device)
        memory = [(one, number) for number, (one, _) in enumerate(scales)]
        self._finder = make_largest_bytes(memory, device) if scales else None
        self._slots = torch.tensor([slot for _, slot in scales], dtype=torch.int64, device=device)
        self._found = torch.zeros(len(scales), dtype=torch.int32, device=device)

    def put(self, maps: MarlinsMaps, choices: torch.Tensor) -> None:
        # First, since they lie among the block scales whose largest one is looked for.
        _fill_with_zeros(self._blank)
        if self._finder is not None:
            self._finder.find(self._found)
            choices.index_copy_(0, self._slots, maps.powers[self._found])
        self._reordering.launch(maps.maps, choices)


def _box_of(memory: torch.Tensor, shape: Sequence[int], box: Box) -> torch.Tensor:
    """A box of contiguous memory, as a tensor of that shape."""
    return memory.view(*shape)[local_slice(box_of(shape), box)]


def _fill_with_zeros(tensors: Sequence[torch.Tensor]) -> None:
    # torch takes no empty list.
    if tensors:
        torch._foreach_zero_(list(tensors))


def any_bytes(loaded: Shapes, device: torch.device) -> dict[str, torch.Tensor]:
    """Parameters as they are loaded, of random bytes of all kinds."""
    generator = torch.Generator(device).manual_seed(0)
    return {
        name: torch.randint(
            0,
            256,
            (*shape[:-1], shape[-1] * kind.itemsize),
            dtype=torch.uint8,
            device=device,
            generator=generator,
        ).view(kind)
        for name, (shape, kind) in loaded.items()
    }
