"""Both sides' real storage with random weights, and the endpoints that a refit session drives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from ...integration.layout import Axes, Fragment, box_of
from ...integration.quantize.formats import Format
from ...integration.weights.endpoints import StorageLook
from ...integration.weights.manifest import TensorSpec
from ..plan.catalog import Param
from . import encoded_values, values
from .sleeping import SleepingMemory


@dataclass(frozen=True)
class Storage:
    """One rank's parameters.

    Attributes:
        tensors: one for each parameter, allocated by itself as a trainer or an engine does it.
        fragments: every box of a weight that they hold.
        by_name: the same by weight.
        padding: elements of each tensor that belong to no weight (padded vocabularies), in their order.
        memory: of the tensors, where it can be given back; else None.
    """

    tensors: list[torch.Tensor]
    fragments: list[Fragment]
    by_name: dict[str, list[Fragment]]
    padding: list[int]
    memory: SleepingMemory | None = None

    @staticmethod
    def allocate(
        params: Sequence[Param],
        whole: Sequence[TensorSpec],
        device: torch.device,
        left_out: Collection[str] = (),
        *,
        sleeps: bool = False,
        axes: Mapping[str, Axes] = MappingProxyType({}),
    ) -> Storage:
        """Poisoned storage.

        Args:
            params: the rank's parameters.
            whole: weights that it keeps in full beside them, since no rule says where they stand in a parameter.
            device: of all storage.
            left_out: weights whose place in ``params`` is not used.
            sleeps: whether the memory can be given back and taken anew.
            axes: by which all ranks see some weights. Such a weight is one of the seen shape, here.
        """
        wanted = [(tuple(one.shape), one.dtype) for one in (*params, *whole)]
        memory = (
            SleepingMemory([torch.Size(shape).numel() * dtype.itemsize for shape, dtype in wanted], device)
            if sleeps
            else None
        )

        def make(index: int) -> torch.Tensor:
            shape, dtype = wanted[index]
            if memory is not None:
                return memory.tensor(index, shape, dtype)
            return torch.empty(shape, dtype=dtype, device=device)

        tensors: list[torch.Tensor] = []
        fragments: list[Fragment] = []
        by_name: dict[str, list[Fragment]] = defaultdict(list)
        padding: list[int] = []
        for param in params:
            tensor = make(len(tensors))
            covered = 0
            for part in param.parts:
                if part.name in left_out:
                    continue
                own = tensor[part.index].T if part.turned else tensor[part.index]
                held = Fragment(part.name, tuple(part.full_shape), part.box, own, axes=part.axes)
                covered += held.view.numel()
                found = [held]
                if part.name in axes:
                    seen = axes[part.name]
                    found = [Fragment(f.name, seen.shape, f.box, f.view) for f in held.seen_by(seen)]
                fragments += found
                by_name[part.name] += found
            tensors.append(tensor)
            padding.append(tensor.numel() - covered)
        for spec in whole:
            tensor = make(len(tensors))
            fragment = Fragment(spec.name, tuple(spec.shape), box_of(spec.shape), tensor)
            tensors.append(tensor)
            fragments.append(fragment)
            by_name[spec.name].append(fragment)
            padding.append(0)
        values.poison(tensors)
        return Storage(tensors, fragments, dict(by_name), padding, memory)

    @property
    def nbytes(self) -> int:
        """Bytes of all fragments, without padding."""
        return sum(fragment.nbytes for fragment in self.fragments)


class BenchSource:
    """A trainer rank: values of a version that advances before each refit."""

    def __init__(
        self,
        specs: list[TensorSpec],
        storage: Storage,
        refused: dict[str, str],
        device: torch.device,
        *,
        leaves: bool = False,
    ):
        """Fill the storage with version 0.

        Args:
            specs: all weights in the order of the export.
            storage: this rank's; trainer rank 0 holds the refused weights in full.
            refused: weights that must not go shard to shard, with reasons.
            device: of the storage.
            leaves: whether its memory goes back to the driver between refits, by :meth:`leave`.
        """
        self.device = device
        self.version = 0
        self.changes: list[values.Change] = []
        self.storage = storage
        self._leaves = leaves
        self._look = StorageLook()
        self._specs = specs
        self._refused = refused
        self._by_name = {spec.name: spec for spec in specs}
        values.write(storage.fragments, 0)

    def advance(self) -> None:
        """Change every weight."""
        held = _dense_version(self.version, self.changes)
        values.advance(self.storage.tensors, held, held + 1)
        self.version += 1

    @property
    def gives_memory_back(self) -> bool:
        return self._leaves

    def leave(self) -> None:
        """Give the memory of all weights back, and come back with the same values, if it is to leave at all."""
        if not self._leaves:
            return
        torch.cuda.synchronize(self.device)
        storages = [tensor.untyped_storage() for tensor in self.storage.tensors]
        sizes = [storage.nbytes() for storage in storages]
        for storage in storages:
            storage.resize_(0)
        torch.cuda.empty_cache()
        for storage, size in zip(storages, sizes, strict=True):
            storage.resize_(size)
        values.write(self.storage.fragments, self.version)

    def change(self, share: float) -> None:
        """Change a share of all elements."""
        self.changes = step(self.changes, share)
        values.change(self.storage.fragments, self.changes[-1])
        self.version += 1

    def specs(self) -> list[TensorSpec]:
        return self._specs

    def fragments(self) -> tuple[list[Fragment], dict[str, str]]:
        return [f for f in self.storage.fragments if f.name not in self._refused], self._refused

    def prepare(self) -> None:
        """Nothing writes these parameters between two refits but :meth:`advance`."""

    @property
    def prepares_alone(self) -> bool:
        """As trainers without adapters do."""
        return True

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            held = self.storage.by_name.get(name)
            if held:
                yield name, held[0].view
            else:
                # Only trainer rank 0's tensors travel; the others draw along, as they do in a real export.
                spec = self._by_name[name]
                yield name, torch.empty(spec.shape, dtype=spec.dtype, device="meta")

    def storage_key(self) -> Hashable:
        return self._look.key(self.storage.tensors)


class BenchDestination:
    """An engine rank. Its loader copies what its parameters keep of a full tensor."""

    def __init__(
        self,
        specs: list[TensorSpec],
        storage: Storage,
        refused: dict[str, str],
        device: torch.device,
        formats: Mapping[str, Format],
    ):
        """Args as for :class:`BenchSource`; the storage stays poisoned.

        ``formats``: the weights that engines store as codes and scales, which are then what the storage holds.
        """
        self.device = device
        self.version = 0
        self.changes: list[values.Change] = []
        self.storage = storage
        self._look = StorageLook()
        self._refused = refused
        self._by_name = {spec.name: spec for spec in specs}
        self._formats = {name: f for name, f in formats.items() if name in storage.by_name}
        scales = {name + format.scale_name_end for name, format in self._formats.items()}
        self._plain = [f for f in storage.fragments if f.name not in self._formats and f.name not in scales]

    def advance(self) -> None:
        """Count the version that the trainers move to."""
        self.version += 1

    def change(self, share: float) -> None:
        """As the trainers change a share of all elements."""
        self.changes = step(self.changes, share)
        self.version += 1

    def quantized(self, specs: Sequence[TensorSpec]) -> dict[str, Format]:
        return {spec.name: self._formats[spec.name] for spec in specs if spec.name in self._formats}

    def rewritten(self, specs: Sequence[TensorSpec]) -> dict[str, str]:
        """None: a refit's bytes stay as they land."""
        return {}

    def fragments(self, specs: Sequence[TensorSpec]) -> tuple[list[Fragment], dict[str, str]]:
        known = {spec.name for spec in specs}
        refused = {name: reason for name, reason in self._refused.items() if name in known}
        return [f for f in self.storage.fragments if f.name not in refused], refused

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            for fragment in self.storage.by_name.get(name, ()):
                fragment.view.copy_(tensor[tuple(slice(start, stop) for start, stop in fragment.box)])

    def quantize_and_load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load full tensors that nobody has quantized, as engines do that quantize on arrival."""
        for name, tensor in weights:
            format = self._formats.get(name)
            if format is None:
                self.load_weights([(name, tensor)])
            else:
                names = name, name + format.scale_name_end
                self.load_weights(zip(names, format.encode(tensor), strict=True))

    def finish(self, version: int) -> None:
        """These parameters have no derived state."""

    def abandon(self) -> None:
        """The loader above keeps nothing between refits."""

    @property
    def kept_bytes(self) -> int:
        return self.storage.nbytes

    def storage_key(self) -> Hashable:
        return self._look.key(self.storage.tensors)

    @property
    def gives_memory_back(self) -> bool:
        return self.storage.memory is not None

    def sleep(self) -> None:
        """Give the memory of all weights back, and wake to new memory at the same addresses, if it can be."""
        if self.storage.memory is not None:
            torch.cuda.synchronize(self.device)
            self.storage.memory.sleep()
            self.storage.memory.wake()
            self.poison()

    def poison(self) -> None:
        """Fill all storage with NaN."""
        values.poison(self.storage.tensors)

    def faults(self) -> list[str]:
        """What is not as the trainers' version says, one sentence each; storage was poisoned before the refit."""
        now = _dense_version(self.version, self.changes), self.changes
        found = [
            f"{f.name} {f.box} does not hold the values of version {self.version}"
            for f in (
                *values.wrong(self._plain, *now),
                *encoded_values.wrong(self.storage.by_name, self._by_name, self._formats, *now),
            )
        ]
        for index, (tensor, padding) in enumerate(
            zip(self.storage.tensors, self.storage.padding, strict=True)
        ):
            left = values.poisoned(tensor)
            if left != padding and not found:
                found.append(
                    f"parameter {index} of shape {list(tensor.shape)} has {left} untouched elements, and {padding} "
                    "are padding"
                )
        return found


def _dense_version(version: int, changes: Sequence[values.Change]) -> int:
    """The version that ``changes`` were made to, which stay while it advances."""
    return version - sum(taken.steps for taken in changes)


def step(changes: Sequence[values.Change], share: float) -> list[values.Change]:
    """With one more step of a share."""
    *before, last = changes or [values.Change(share)]
    if last.share != share:
        before, last = [*before, last], values.Change(share)
    return [*before, replace(last, steps=last.steps + 1)]
