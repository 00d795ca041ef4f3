"""What a trainer and an engine must offer to take part in a refit."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch

from ..layout import Fragment
from .holdings import Holdings, SpecTable, check_shapes
from .manifest import TensorSpec

if TYPE_CHECKING:
    from ..quantize.formats import Format


class WeightSource(Protocol):
    """A trainer rank."""

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""

    def specs(self) -> list[TensorSpec]:
        """All weights in the order of the export; equal on all trainer ranks."""

    def fragments(self) -> tuple[list[Fragment], dict[str, str]]:
        """What this rank holds, and the weights that must not go shard to shard with the reason.

        Asked by several, and again where :meth:`storage_key` has changed. Memory that the source itself fills has to be the same for all
        of them, or :meth:`storage_key` has to tell of it.
        """

    def prepare(self) -> None:
        """Called before each refit, and at the end of each step that is recorded: finish what still has to write the parameters
        (a delayed gather, say), and refuse what can't be sent. A collective of all trainer ranks, unless :class:`PreparesAlone`
        says otherwise. Nobody writes to an engine before all trainer ranks have returned from it."""

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors of ``names``, in the order of :meth:`specs`; a collective of all trainer ranks."""

    def storage_key(self) -> Hashable:
        """A value that changes when a parameter's storage moves, or is seen in another shape, by other strides or in another
        dtype; views made before are then stale. :func:`storage_key` of the tensors, or quicker :class:`StorageLook`."""


class WeightDestination(Protocol):
    """A generation rank."""

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""

    def fragments(self, specs: Sequence[TensorSpec]) -> tuple[list[Fragment], dict[str, str]]:
        """What this rank wants of ``specs``, and the weights it can take only through its loader, with reasons.

        Raises:
            RefitError: a parameter of the engine that no weight of ``specs`` fills.
        """

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load full tensors through the engine's own loader; called once per refit if anything is misc."""

    def finish(self, version: int) -> None:
        """Post-load work once per refit: derived state, caches that depend on weights."""

    def abandon(self) -> None:
        """After a refit that failed: leave the loader ready for the next one. Written bytes stay written."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of the parameters that this rank keeps after a refit (its shard of the model)."""

    def storage_key(self) -> Hashable:
        """As for a source."""


@runtime_checkable
class StoresQuantized(Protocol):
    """What a generation rank offers beside :class:`WeightDestination` if it may store weights quantized."""

    def quantized(self, specs: Sequence[TensorSpec]) -> dict[str, Format]:
        """Names of ``specs`` that this rank stores in a format which a trainer can make, each with the format."""


@runtime_checkable
class GivesMemoryBack(Protocol):
    """What a rank of either side offers beside :class:`WeightSource` or :class:`WeightDestination` if its weights may leave
    their memory between refits, or to say that they don't."""

    @property
    def gives_memory_back(self) -> bool | None:
        """Whether the driver is to get the weights' memory back between refits: no peer may keep it mapped then. None if that is
        not known here."""


def gives_memory_back(endpoint: object) -> bool | None:
    """As the endpoint says; None if it does not say: then engines keep their memory, and trainers do unless they share their GPU
    with an engine that reads it."""
    return endpoint.gives_memory_back if isinstance(endpoint, GivesMemoryBack) else None


@runtime_checkable
class PreparesAlone(Protocol):
    """What a trainer rank offers beside :class:`WeightSource` to say that its :meth:`WeightSource.prepare` waits for no other rank.

    It is then prepared before the ranks meet over a version, so that one meeting is enough.
    """

    @property
    def prepares_alone(self) -> bool:
        """Whether it does at present."""


def prepares_alone(endpoint: object) -> bool:
    """As the endpoint says; one that does not say may wait for others."""
    return isinstance(endpoint, PreparesAlone) and endpoint.prepares_alone


@runtime_checkable
class PreparesAhead(Protocol):
    """What a trainer rank offers beside :class:`WeightSource` if it can prepare by what it found out after the last step, and look at its
    weights once more as they are sent."""

    def prepare_ahead(self, encoded: frozenset[str]) -> Look | None:
        """In place of :meth:`WeightSource.prepare`, and a collective where that is one.

        Args:
            encoded: names of fragments with an encoding of which this rank encodes all that it holds in the refit that follows. What
                encodes them looks at them, too (:class:`..quantize.jobs.GlobalScale`). The same object while it tells the same.

        Returns:
            What looks at the weights as this rank sends. If they are not those that were known, the next call finds out anew, and all
            is sent again. None if it found out now.
        """


# To be called once, as a rank sends; it waits for no other rank, nor for the device. Returns what to call once all has been sent, if it
# has: whether the weights that were sent are those that were known.
Look = Callable[[], Callable[[], bool]]


def prepare_ahead(source: WeightSource, encoded: frozenset[str]) -> Look | None:
    """Prepare a source, ahead if it can: :meth:`PreparesAhead.prepare_ahead`."""
    if isinstance(source, PreparesAhead):
        return source.prepare_ahead(encoded)
    source.prepare()
    return None


@runtime_checkable
class WorksOnPortions(Protocol):
    """What a generation rank offers beside :class:`WeightDestination` if it can do some of its post-load work on weights that have
    landed whole, while others are on their way."""

    @property
    def works_on_portions(self) -> bool:
        """Whether there is such work; asked after :meth:`WeightDestination.fragments`."""

    def expect(self, portions: Mapping[str, int]) -> None:
        """Called whenever weights are bound: by the name of a weight the portion of a refit with which the last of it lands. Names
        that are not there land at the end of the refit, or are loaded. The same object while it tells the same."""

    def landed(self, portion: int) -> None:
        """A portion has landed whole. Not called in each refit, nor with each portion: :meth:`WeightDestination.finish` does the rest. What
        has been done counts for nothing after :meth:`WeightDestination.abandon`."""


def working_on_portions(endpoint: object) -> WorksOnPortions | None:
    """The endpoint, if it has such work."""
    return endpoint if isinstance(endpoint, WorksOnPortions) and endpoint.works_on_portions else None


@runtime_checkable
class TellsWhatItRewrites(Protocol):
    """What a generation rank offers beside :class:`WeightDestination` if it may store codes and scales, and knows what becomes
    of them.

    Sparse refits build on what the one before has written. So they carry no weight whose bytes the engine itself changes
    meanwhile: by :meth:`WeightDestination.finish`, by what it loads beside, or as it serves.
    """

    def rewritten(self, specs: Sequence[TensorSpec]) -> dict[str, str]:
        """Names of ``specs`` whose bytes may not stay as they were written until the next refit, with reasons.

        Args:
            specs: all weights, codes and scales that travel in bulk; asked after :meth:`WeightDestination.fragments`.
        """


def rewritten(endpoint: object, specs: Sequence[TensorSpec]) -> dict[str, str]:
    """Weights of ``specs`` that may not stay as they were written, with reasons, as the endpoint says.

    One that says nothing leaves numbers as they are, and may rewrite codes and their scales, as some engines do for their kernels.
    """
    if isinstance(endpoint, TellsWhatItRewrites):
        return endpoint.rewritten(specs)
    reason = "the engine does not say that codes and scales stay as they were written"
    return {
        spec.name: reason for spec in specs if spec.dtype.itemsize == 1 or not spec.dtype.is_floating_point
    }


class Writes(NamedTuple):
    """How often weights were written in place.

    Attributes:
        names: of the weights.
        counts: torch's own, ``_version`` of each; -1 of one of inference mode, which has none.
        places: the address of each.
    """

    names: tuple[str, ...]
    counts: tuple[int, ...]
    places: tuple[int, ...]


@runtime_checkable
class CountsWrites(Protocol):
    """What a trainer rank offers beside :class:`WeightSource` to tell that something wrote its weights between two recorded steps."""

    def writes(self) -> Writes:
        """As it is now, of the same weights each time; :func:`writes_of` the tensors."""


def writes_by(source: object) -> Writes:
    """Writes of a source that counts them; of nothing otherwise. For a source over another one."""
    return source.writes() if isinstance(source, CountsWrites) else Writes((), (), ())


def writes_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> Writes:
    """Writes of tensors by name.

    Views of a tensor have its count, but a tensor that was made of its ``data`` has one of its own.
    """
    with torch._C.DisableTorchFunctionSubclass():
        # Three tuples of what the garbage collector does not follow: see ``storage_key``.
        found = [*tensors]
        return Writes(
            tuple([name for name, _ in found]),
            tuple([-1 if t.is_inference() else t._version for _, t in found]),
            tuple([t.data_ptr() for _, t in found]),
        )


@runtime_checkable
class HoldsQuantized(Protocol):
    """What a trainer rank offers beside :class:`WeightSource` if it may keep weights quantized itself."""

    def quantized_fragments(
        self, formats: Mapping[str, Format]
    ) -> tuple[list[Fragment], dict[str, str], frozenset[str]]:
        """Weights that this rank keeps quantized, of those that the engine stores so.

        Args:
            formats: Hugging Face name of a weight → the engine's format.

        Returns:
            Fragments of codes, under the weight's name, and of their scales; weights that can't be sent as they are
            kept, with the reason; the names of both.
        """


@runtime_checkable
class TellsFormats(Protocol):
    """What a trainer rank offers beside :class:`WeightSource` if its model may be trained quantized, or if it sends codes itself."""

    @property
    def trained_formats(self) -> Mapping[str, Format]:
        """Weights, of all ranks, that training computes with as a format has them, each with the format."""

    @property
    def sent_formats(self) -> Mapping[str, Format]:
        """Weights that this source sends in a format, each with the format."""


def trained_formats(source: object) -> Mapping[str, Format]:
    """As the source says; of nothing where it does not say. For a source over another one."""
    return source.trained_formats if isinstance(source, TellsFormats) else {}


def sent_formats(source: object) -> Mapping[str, Format]:
    """As :func:`trained_formats`."""
    return source.sent_formats if isinstance(source, TellsFormats) else {}


def rank_device() -> torch.device:
    """This process's GPU, or the CPU where there is none: where a trainer rank's parameters live."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def storage_key(tensors: Iterable[torch.Tensor]) -> Hashable:
    """Where ``tensors``' data lie and how they are read there: what ``storage_key()`` answers.

    The address alone does not tell: the same bytes may be seen in another shape, by other strides or in another dtype.

    Each tensor has to be read, since ``p.data = …`` changes one parameter alone. Parameters of a subclass (vLLM's) would run
    its ``__torch_function__`` for each of them, which takes 15 times as long and can't change the answers.

    Nothing but numbers, 64 bits of a hash among them: tuples that are kept, three for each of a model's weights, would call
    Python's garbage collector up, which looks at all objects of the process for 0.2 s and more.
    """
    with torch._C.DisableTorchFunctionSubclass():
        # All of a tensor at once: its memory is in no cache, since a training step came before, and that takes longest.
        return tuple([n for t in tensors for n in (t.data_ptr(), hash((t.size(), t.stride(), t.dtype)))])


class StorageLook:
    """Gives an endpoint's :func:`storage_key` again and again, and quicker where nothing has changed since the last look.

    It is asked in every refit before the ranks meet, so it costs all of them. Two loops in C compare the tensors with what
    they were: guards of torch's compiler their dtypes, shapes and strides, and a list their addresses. Only if these do not
    agree, the key is made anew. No tensor is kept. That takes a third of the key's time for tensors that are in a cache, and two
    thirds for those that are not: most of it is the memory's then. The guards are private to torch: with a torch that has none, or others,
    the key is made anew each time.
    """

    def __init__(self) -> None:
        self._may_guard = _guards_tell()
        # The numbers within a tuple, which finds at once that it is equal to itself. They would be compared one by one.
        self._key: Hashable = None
        # Guards and addresses, for as many tensors as :func:`_some` gives at a time; none, where only the key itself can tell.
        self._kept: list[tuple[Any, list[int]]] = []
        self._count = 0

    def key(self, tensors: Iterable[torch.Tensor]) -> Hashable:
        """The key of ``tensors``, the same ones as of the last call or others."""
        with torch._C.DisableTorchFunctionSubclass():
            held = list(tensors)
            if self._unchanged(held):
                return self._key
            before, self._key, self._kept = self._key, (storage_key(held),), []
            # Not while they lie elsewhere at each look, as those of a trainer do that offloads them.
            if self._may_guard and (before is None or before == self._key):
                self._guard(held)
            return self._key

    def _unchanged(self, held: list[torch.Tensor]) -> bool:
        """Whether all surely are what they were."""
        if not self._kept or len(held) != self._count:
            return False
        return all(
            guards.check(*some) and [*map(torch.Tensor.data_ptr, some)] == addresses
            for (guards, addresses), some in zip(self._kept, _some(held), strict=True)
        )

    def _guard(self, held: list[torch.Tensor]) -> None:
        # The guards take a tensor that stands twice for another one.
        if len({*map(id, held)}) < len(held):
            return
        self._kept = _guarded(held)
        self._count = len(held)


def _guarded(held: list[torch.Tensor]) -> list[tuple[Any, list[int]]]:
    """Guards and addresses, for as many tensors as :func:`_some` gives at a time."""
    # One list for all that are alike: thousands would call the garbage collector up.
    alike: dict[tuple[int, ...], list[int]] = {}

    def numbers(found: tuple[int, ...]) -> list[int]:
        return alike.setdefault(found, [*found])

    make: Any = torch._C._dynamo.guards.TensorGuards
    kept = []
    for some in _some(held):
        sizes, strides = [numbers(tuple(t.size())) for t in some], [numbers(t.stride()) for t in some]
        guards = make(*some, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        kept.append((guards, [*map(torch.Tensor.data_ptr, some)]))
    return kept


def _guards_tell() -> bool:
    """Whether this torch has the guards, and they tell what a look asks of them."""
    seen = torch.empty(2, 3, dtype=torch.float32, device="cpu")
    others = seen.view(torch.int32), seen.view(3, 2), seen[:1], seen.as_strided((2, 3), (1, 2))
    try:
        [(guards, _)] = _guarded([seen])
        return bool(guards.check(seen)) and not any(map(guards.check, others))
    except (AttributeError, TypeError):
        return False


def _some(held: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    # So few that they stay in the cache from one loop to the next, and the table in which guards note what they have seen.
    return (held[start : start + 512] for start in range(0, len(held), 512))


def holdings_of(
    rank: int, fragments: Sequence[Fragment], refused: dict[str, str], table: SpecTable, who: str
) -> Holdings:
    """The plain data that describes a rank's fragments to its peers.

    Raises:
        RefitMismatch: a fragment of a weight that the trainer does not export, or of another shape.
    """
    check_shapes(fragments, table, rank, who)
    return Holdings.from_fragments(rank, fragments, refused, table.positions)
