"""What the ranks of a trial hold: bulk and misc weights, sharded another way on each side, and ways to spoil them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from random import Random
from typing import Any

import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.layout import Box, Fragment
from rlrefit.integration.weights.manifest import TensorSpec
from tests.refit.synthetic import Layout, SyntheticDestination, SyntheticSource, value_of

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
# The version that an engine has before its first refit.
LOADED = -1
_GUARD = 77.0


class SmallBuckets(RefitConfig):
    """Buckets of a size at which weights of a test's size travel in many messages."""

    @property
    def bucket_bytes(self) -> int:
        return 12 << 10


def _rows(spec: TensorSpec, parts: int, index: int) -> Box:
    size = spec.shape[0] // parts
    return ((index * size, (index + 1) * size), *((0, n) for n in spec.shape[1:]))


def _columns(spec: TensorSpec, parts: int, index: int) -> Box:
    size = spec.shape[1] // parts
    return ((0, spec.shape[0]), (index * size, (index + 1) * size))


def _whole(spec: TensorSpec) -> Box:
    return tuple((0, n) for n in spec.shape)


def trainer_layout(rank: int, ranks: int) -> Layout:
    embed, up, down, norm, gate = BULK
    return {
        "embed": [_rows(embed, ranks, rank)],
        "up": [_columns(up, ranks, rank)],
        "down": [_rows(down, ranks, rank)],
        "norm": [_whole(norm)],
        "gate": [_rows(gate, ranks, rank)],
    }


def engine_layout(rank: int, ranks: int) -> Layout:
    embed, up, down, norm, gate = BULK
    return {
        "embed": [_rows(embed, ranks, rank)],
        "up": [_rows(up, ranks, rank)],
        "down": [_columns(down, ranks, rank)],
        "norm": [_whole(norm)],  # replicated, so that engines pass it on
        "gate": [_whole(gate)],
    } | {spec.name: [_whole(spec)] for spec in MISC}


Hook = Callable[[str], None]


class Trainer(SyntheticSource):
    """A trainer rank whose every method can be made to fail."""

    def __init__(self, rank: int, ranks: int, hook: Hook):
        super().__init__(SPECS, trainer_layout(rank, ranks), {spec.name: "it is misc" for spec in MISC})
        self._hook = hook
        self.exported_as: dict[str, torch.dtype | tuple[int, ...]] = {}

    @property
    def held(self) -> dict[tuple[str, Box], torch.Tensor]:
        return self._held

    def specs(self) -> list[TensorSpec]:
        self._hook("specs")
        return super().specs()

    def fragments(self) -> tuple[list[Fragment], dict[str, str]]:
        self._hook("fragments")
        return super().fragments()

    def settle(self) -> None:
        self._hook("settle")
        super().settle()

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().export(names):
            self._hook("export")
            other = self.exported_as.get(name, tensor.dtype)
            yield name, tensor.to(other) if isinstance(other, torch.dtype) else tensor.reshape(other)

    def storage_key(self) -> Hashable:
        self._hook("storage_key")
        return super().storage_key()


class Engine(SyntheticDestination):
    """A generation rank whose every method can be made to fail, and that sees writes beside its weights.

    Before its first refit it holds version ``LOADED``.
    """

    def __init__(self, rank: int, ranks: int, hook: Hook):
        super().__init__(SPECS, engine_layout(rank, ranks))
        self._hook = hook
        for (name, box), storage in self._wanted.items():
            storage.copy_(_part(name, box, LOADED))
        self.fence()

    @property
    def held(self) -> dict[tuple[str, Box], torch.Tensor]:
        return self._wanted

    def fence(self) -> None:
        """Set all memory around the weights to a value that must stay."""
        for view in self._wanted.values():
            values = view.clone()
            _ground_of(view).fill_(_GUARD)
            view.copy_(values)

    def wrong(self, version: int) -> list[str]:
        """Weights that are not, bit for bit, those of ``version``, and those beside which something was written."""
        found = [
            f"{name} {box}"
            for (name, box), view in self._wanted.items()
            if not _same_bits(view, _part(name, box, version))
        ]
        return found + [
            f"beside {name} {box}" for (name, box), view in self._wanted.items() if _overrun(view)
        ]

    def fragments(self, specs: Sequence[TensorSpec]) -> tuple[list[Fragment], dict[str, str]]:
        self._hook("fragments")
        wanted, refused = super().fragments(specs)
        misc = {spec.name for spec in MISC}
        return [f for f in wanted if f.name not in misc], refused | dict.fromkeys(misc, "it is misc")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        def passing() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                self._hook("load_weights")
                yield name, tensor

        super().load_weights(passing())

    def finish(self, version: int) -> None:
        self._hook("finish")
        super().finish(version)

    def storage_key(self) -> Hashable:
        self._hook("storage_key")
        return super().storage_key()


def moved(endpoint: Any) -> None:
    """All weights come to lie elsewhere, with the same values, as after an offload."""
    for key, storage in endpoint.held.items():
        endpoint.held[key] = storage.clone(memory_format=torch.preserve_format)


def changed(endpoint: Any, what: str, rng: Random) -> tuple[str, str]:
    """Change one weight as no refit may: (its name, how it was changed). The values stay as near as they can.

    Args:
        endpoint: of the rank.
        what: ``dtype``, ``strides`` or ``shape``.
        rng: chooses the weight and the way.
    """
    misc = {spec.name for spec in MISC}
    if what != "strides" and isinstance(endpoint, Trainer) and rng.random() < 0.2:
        spec = rng.choice(MISC)
        others = [d for d in (BF16, FP16, FP32) if d != spec.dtype]
        other = rng.choice(others) if what == "dtype" else (spec.shape[1], spec.shape[0])
        endpoint.exported_as[spec.name] = other
        return spec.name, f"exported as {other}"
    choices = [key for key in endpoint.held if key[0] not in misc and (what != "strides" or len(key[1]) > 1)]
    key = name, box = rng.choice(choices)
    old = endpoint.held[key]
    same_address = rng.random() < 0.5
    if what == "dtype":
        others = [d for d in (BF16, FP16, FP32) if d != old.dtype]
        new_dtype = rng.choice(others)
        same_address = same_address and new_dtype.itemsize == old.dtype.itemsize
        values = old.to(new_dtype)
        if same_address:
            new = old.view(new_dtype)
            new.copy_(values)
        else:
            new = values
        endpoint.held[key] = new
        return name, f"{old.dtype} to {new_dtype} {_where(same_address)}"
    if what == "strides":
        values = old.clone()
        strides = (1, old.shape[0])
        if same_address:
            new = old.as_strided(old.shape, strides, old.storage_offset())
        else:
            new = torch.empty_strided(old.shape, strides, dtype=old.dtype)
        new.copy_(values)
        endpoint.held[key] = new
        return name, f"strides {old.stride()} to {strides} {_where(same_address)}"
    # A row less, as after a resharding: the box says so, and the view is that of what is left.
    (start, stop), *others_of_box = box
    del endpoint.held[key]
    new = old[: stop - start - 1]
    endpoint.held[name, ((start, stop - 1), *others_of_box)] = new if same_address else new.clone()
    return name, f"a row less {_where(same_address)}"


def _where(same_address: bool) -> str:
    return "at the same address" if same_address else "elsewhere"


_BY_NAME = {spec.name: spec for spec in SPECS}


def _part(name: str, box: Box, version: int) -> torch.Tensor:
    return value_of(_BY_NAME[name], version)[tuple(slice(a, b) for a, b in box)]


def _same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    if found.dtype != expected.dtype:  # an engine that converts what it gets would be right
        return torch.equal(found.to(torch.float64), expected.to(found.dtype).to(torch.float64))
    bits = torch.int32 if expected.dtype == FP32 else torch.int16
    return torch.equal(found.contiguous().view(bits), expected.contiguous().view(bits))


def _overrun(view: torch.Tensor) -> bool:
    rest = _ground_of(view).clone()
    rest.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(_GUARD)
    return not bool((rest == _GUARD).all())


def _ground_of(view: torch.Tensor) -> torch.Tensor:
    """All of the storage that a view lies in."""
    count = view.untyped_storage().nbytes() // view.element_size()
    return view.as_strided((count,), (1,), 0)
