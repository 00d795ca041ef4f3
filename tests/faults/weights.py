"""What the ranks of a trial hold: bulk and misc weights, sharded another way on each side, and ways to spoil them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from random import Random
from typing import Any
from unittest import mock

import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.delta import packer, path
from rlrefit.integration.layout import Box, Fragment, box_of
from rlrefit.integration.weights.manifest import TensorSpec
from tests.refit.synthetic import Layout, SyntheticDestination, SyntheticSource, held_by, value_of, whole

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Divisible by all numbers of ranks that there are; several messages for each pair of ranks.
BULK = [
    TensorSpec("embed", (96, 120), BF16),
    TensorSpec("up", (48, 240), BF16),
    TensorSpec("down", (120, 96), BF16),
    TensorSpec("norm", (72,), FP32),
    TensorSpec("gate", (36, 40), FP16),
]
# More than one bucket of the packed broadcast; multiples of its alignment, so that no byte is padding.
MISC = [
    TensorSpec("router", (64, 60), BF16),
    TensorSpec("bias", (32, 64), FP32),
    TensorSpec("scale", (60, 64), FP16),
]
SPECS = [*BULK[:3], *MISC[:1], *BULK[3:], *MISC[1:]]
_BY_NAME = {spec.name: spec for spec in SPECS}
_REFUSED = {spec.name: "it is misc" for spec in MISC}
# The version that an engine has before its first refit.
LOADED = -1
_GUARD = 77.0

Hook = Callable[[str], None]
# Of a weight at a version.
Value = Callable[[TensorSpec, int], torch.Tensor]


class SmallBuckets(RefitConfig):
    """Buckets of a size at which weights of a test's size travel in many messages."""

    @property
    def bucket_bytes(self) -> int:
        return 12 << 10


@contextmanager
def small_sections() -> Iterator[None]:
    """Sections of a size at which deltas of a test's size have several; room for the largest block, and not for all of any two."""
    with (
        mock.patch.object(path, "LEAST_ROOM", 8 << 10),
        mock.patch.object(path, "_ROOM_SHARE", 3),
        mock.patch.object(packer, "LEAST_ROOM", 12 << 10),
    ):
        yield


# Of each weight's elements those that change from a version to the next, so that there are blocks of every form.
_CHANGED = {"embed": 0.004, "up": 0.15, "down": 1.0, "gate": 0.02, "norm": 0.3}


@cache
def drifting(spec: TensorSpec, version: int) -> torch.Tensor:
    """As :func:`value_of`, but that only a share of the elements differs from the version before."""
    if version < 1:
        return value_of(spec, version)
    changes = torch.rand(spec.shape, generator=torch.Generator().manual_seed(1000 * len(spec.name) + version))
    share = _CHANGED.get(spec.name, 0.5)
    return torch.where(changes < share, value_of(spec, version), drifting(spec, version - 1))


def _cut(dim: int, parts: int, index: int, *names: str) -> Layout:
    """One of the parts into which weights are cut along a dimension."""
    found: Layout = {}
    for name in names:
        box = list(box_of(_BY_NAME[name].shape))
        size = box[dim][1] // parts
        box[dim] = (index * size, (index + 1) * size)
        found[name] = [tuple(box)]
    return found


def _hooked(method: str) -> Any:
    """The endpoint's method, which may fail before it does anything."""

    def call(self: Any, *args: Any) -> Any:
        self._hook(method)
        return getattr(super(type(self), self), method)(*args)

    return call


class Trainer(SyntheticSource):
    """A trainer rank whose every method can be made to fail."""

    specs = _hooked("specs")
    fragments = _hooked("fragments")
    prepare = _hooked("prepare")
    storage_key = _hooked("storage_key")

    def __init__(self, rank: int, ranks: int, hook: Hook, value: Value = value_of):
        cut = _cut(0, ranks, rank, "embed", "down", "gate") | _cut(1, ranks, rank, "up")
        super().__init__(SPECS, cut | whole([_BY_NAME["norm"]]), _REFUSED)
        self._hook, self._value = hook, value
        self.exported_as: dict[str, torch.dtype | tuple[int, ...]] = {}

    def set_version(self, version: int) -> None:
        self.version = version
        for (name, box), storage in self._held.items():
            # An endpoint may hold less of a box than it has: see :func:`changed`.
            storage.copy_(_part(self._value, name, box, version))

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            tensor = self._value(_BY_NAME[name], self.version)
            self._hook("export")
            other = self.exported_as.get(name, tensor.dtype)
            yield name, tensor.to(other) if isinstance(other, torch.dtype) else tensor.reshape(other)


class Engine(SyntheticDestination):
    """A generation rank whose every method can be made to fail, and that sees writes beside its weights.

    Before its first refit it holds version ``LOADED``.
    """

    finish = _hooked("finish")
    storage_key = _hooked("storage_key")

    def __init__(self, rank: int, ranks: int, hook: Hook, value: Value = value_of):
        # The norm is replicated, so that engines pass it on.
        cut = _cut(0, ranks, rank, "embed", "up") | _cut(1, ranks, rank, "down")
        super().__init__(SPECS, whole(SPECS) | cut)
        self._hook, self._value = hook, value
        for (name, box), storage in self._wanted.items():
            storage.copy_(_part(value, name, box, LOADED))
        self.fence()

    def poison_misc(self) -> None:
        """What travels whole in each refit."""
        for (name, _), storage in self._wanted.items():
            if name in _REFUSED:
                storage.fill_(float("nan"))

    def spoil(self, version: int, rng: Random, *, seen: bool) -> str:
        """Change a bit of one element that ``version`` changes, if it is to be ``seen``, or of one that no block is about."""
        choices = []
        for (name, box), view in self._wanted.items():
            new, old = (_bits(_part(self._value, name, box, v)) for v in (version, version - 1))
            changed = new != old
            # Where nearly all change, blocks hold all.
            if name not in _REFUSED and (changed.any() if seen else changed.float().mean() < 0.9):
                choices.append((name, view, (changed == seen).nonzero()))
        name, view, places = rng.choice(choices)
        place = tuple(places[rng.randrange(len(places))].tolist())
        bit = rng.randrange(8 * view.element_size())
        element = _bits(view[place].reshape(1))
        view[place] = (element ^ torch.tensor(1).to(element.dtype) << bit).view(view.dtype)[0]
        return f"bit {bit} of {name} {place}"

    def fence(self) -> None:
        """Set all memory around the weights to a value that must stay."""
        for view in self._wanted.values():
            values = view.clone()
            _ground_of(view).fill_(_GUARD)
            view.copy_(values)

    def wrong(self, version: int) -> list[str]:
        """Weights that are not, bit for bit, those of ``version``, and those beside which something was written."""
        found = []
        for (name, box), view in self._wanted.items():
            if not _same_bits(view, _part(self._value, name, box, version)):
                found.append(f"{name} {box}")
            rest = _ground_of(view).clone()
            rest.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(_GUARD)
            if (rest != _GUARD).any():
                found.append(f"beside {name} {box}")
        return found

    def fragments(self, specs: Sequence[TensorSpec]) -> tuple[list[Fragment], dict[str, str]]:
        self._hook("fragments")
        wanted, refused = super().fragments(specs)
        return [f for f in wanted if f.name not in _REFUSED], refused | _REFUSED

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        def passing() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                self._hook("load_weights")
                yield name, tensor

        super().load_weights(passing())


def changed(endpoint: Any, what: str, rng: Random) -> tuple[str, str]:
    """Change one weight's ``dtype``, ``strides`` or ``shape`` as no refit may: (its name, how it was changed).

    The values stay as near as they can.
    """
    held = held_by(endpoint)
    if what != "strides" and isinstance(endpoint, Trainer) and rng.random() < 0.2:
        spec = rng.choice(MISC)
        dtypes = [d for d in (BF16, FP16, FP32) if d != spec.dtype]
        endpoint.exported_as[spec.name] = rng.choice(dtypes) if what == "dtype" else spec.shape[::-1]
        return spec.name, f"exported as {endpoint.exported_as[spec.name]}"
    choices = [key for key in held if key[0] not in _REFUSED and (what != "strides" or len(key[1]) > 1)]
    key = name, box = rng.choice(choices)
    old = held[key]
    same_address = rng.random() < 0.5
    if what == "dtype":
        dtype = rng.choice([d for d in (BF16, FP16, FP32) if d != old.dtype])
        same_address = same_address and dtype.itemsize == old.dtype.itemsize
        new = values = old.to(dtype)
        if same_address:
            new = old.view(dtype)
            new.copy_(values)
        how = f"{old.dtype} to {dtype}"
    elif what == "strides":
        values, strides = old.clone(), (1, old.shape[0])
        new = torch.empty_strided(old.shape, strides, dtype=old.dtype)
        if same_address:
            new = old.as_strided(old.shape, strides, old.storage_offset())
        new.copy_(values)
        how = f"strides {old.stride()} to {strides}"
    else:
        # A row less, as after a resharding: the box says so, and the view is that of what is left.
        (start, stop), *others = box
        del held[key]
        key = name, ((start, stop - 1), *others)
        new = old[: stop - start - 1] if same_address else old[: stop - start - 1].clone()
        how = "a row less"
    held[key] = new
    return name, f"{how} {'at the same address' if same_address else 'elsewhere'}"


def _part(value: Value, name: str, box: Box, version: int) -> torch.Tensor:
    return value(_BY_NAME[name], version)[tuple(slice(a, b) for a, b in box)]


def _same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    if found.dtype != expected.dtype:  # an engine that converts what it gets would be right
        return torch.equal(found.to(torch.float64), expected.to(found.dtype).to(torch.float64))
    return torch.equal(_bits(found), _bits(expected))


def _bits(held: torch.Tensor) -> torch.Tensor:
    return held.contiguous().view(torch.int32 if held.dtype == FP32 else torch.int16)


def _ground_of(view: torch.Tensor) -> torch.Tensor:
    """All of the storage that a view lies in."""
    count = view.untyped_storage().nbytes() // view.element_size()
    return view.as_strided((count,), (1,), 0)
