"""Global scales: of weights, from their largest magnitudes over all shards and fused neighbours, and of layers' inputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from ....integration.errors import RefitError
from ....integration.packing.tables import FLOAT_DTYPES, MagnitudeTable
from ....integration.quantize import blocks, nvfp4
from ....integration.quantize.nvfp4_checkpoint import fused_module, input_module
from ....integration.weights.endpoints import Look, WeightSource, rank_device


def _maximum_over(
    group: dist.ProcessGroup | None, size: int, work: Callable[[], torch.Tensor], what: str
) -> torch.Tensor:
    """The largest of all ranks of what ``work`` gives, ``[size]``; infinity where one of them is no number.

    One collective, which a rank whose ``work`` raised takes part in too, so that none waits for it.

    Raises:
        RefitError: on all ranks, if ``work`` raised on any; names the rank. Without other ranks, what it raised.
    """
    failure: Exception | None = None
    try:
        values = work()
    except Exception as error:  # whatever it is, the others must hear of it before it is raised
        failure = error
        values = torch.zeros(size, dtype=torch.float32, device=rank_device())
    # What a maximum makes of a NaN is up to the backend.
    values = torch.cat([values, values.new_tensor([failure is not None])]).nan_to_num(
        nan=torch.inf, posinf=torch.inf
    )
    if dist.is_initialized():
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    if not values[-1]:
        return values[:-1]
    if failure is not None and not dist.is_initialized():
        raise failure
    told: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(
        told, "" if failure is None else f"{type(failure).__name__}: {failure}", group=group
    )
    rank, text = next((rank, text) for rank, text in enumerate(told) if text)
    raise RefitError(
        f"{what} failed on trainer rank {rank} of {len(told)}: {text}. Nothing was computed, written or sent on any rank; "
        "the traceback is on that rank",
        stage="quantize",
    ) from failure


def prepare_on_all(group: dist.ProcessGroup | None, source: WeightSource) -> None:
    """Prepare a source on all trainer ranks; a collective.

    Raises:
        RefitError: on all ranks, if it fails on any. Without other ranks, what it raised.
    """

    def work() -> torch.Tensor:
        source.prepare()
        return torch.zeros(0, device=rank_device())

    _maximum_over(group, 0, work, "preparing the export")


class Found(NamedTuple):
    """Largest magnitudes of weights that are exported in one dtype, as their encoding notes them.

    Attributes:
        dtype: of the export.
        positions: int64 ``[weights]``, of their scales.
        bits: int32, largest magnitudes in FP32 of these weights and others; 0 before anything is encoded.
        places: int64 ``[weights]``, of these among them.
    """

    dtype: torch.dtype
    positions: torch.Tensor
    bits: torch.Tensor
    places: torch.Tensor


class AsSent(NamedTuple):
    """Weights whose encoding looks at all that this rank holds of them.

    Attributes:
        weights: their names.
        found: what it finds.
    """

    weights: frozenset[str]
    found: Sequence[Found]


_WRITTEN = "a weight was written after the last refresh()"
_COMPUTING = "computing the global scales of the quantized weights"


class WeightScales:
    """The largest magnitudes of the matrices that the engine will have, exact, and computed once a step.

    Args:
        source: makes the rank's source; asked once, when the scales are first needed.
        weights: names of the quantized weights, the same on all ranks.
        group: of all trainer ranks.

    Attributes:
        generation: how often they have been refreshed.
    """

    def __init__(
        self, source: Callable[[], WeightSource], weights: Collection[str], group: dist.ProcessGroup | None
    ):
        self._make_source = source
        self._source: WeightSource | None = None
        self._group = group
        self._weights = frozenset(weights)
        self.names = sorted(set(map(fused_module, weights)))
        self._position = {name: i for i, name in enumerate(self.names)}
        self._amax: torch.Tensor | None = None
        self._held = _Held({}, rank_device(), 0)
        # Of all that is held, and of what is not looked at as it is sent.
        self._all, self._rest = _Magnitudes(), _Magnitudes()
        self._storage: object = None
        # By name, of what this rank holds, as it was at the last refresh; None before the first.
        self._seen: torch.Tensor | None = None
        # Of what counts the versions of what is held.
        self._versions: dict[int, int] = {}
        self._stale = "they have not been computed yet"
        self.generation = 0

    def position(self, weight: str) -> int:
        """Where the scale of a weight is."""
        return self._position[fused_module(weight)]

    def now_stale(self, why: str) -> None:
        """Have the next use fail, unless they are refreshed before."""
        self._stale = why

    def forget(self) -> None:
        """Keep no views of parameters, which would hold memory that they move out of; the next refresh makes them."""
        self._held, self._storage, self._versions = _Held({}, rank_device(), 0), None, {}
        self._all, self._rest = _Magnitudes(), _Magnitudes()

    def refresh(self) -> None:
        """Compute them anew; one collective of all trainer ranks.

        Raises:
            RefitError: on all ranks, if a weight holds NaN or infinity, or this rank or another one can't tell.
        """
        self.now_stale("the last refresh() failed")
        self._take(
            _maximum_over(self._group, len(self.names), lambda: self._local(self._prepared()), _COMPUTING)
        )

    def refresh_for_export(
        self,
        inputs: InputScales | None,
        source: WeightSource | None = None,
        ahead: AsSent | None = None,
    ) -> Look | None:
        """As :meth:`refresh`, in one collective with more that an export needs.

        What fails beside the weights (a rank's source, inputs that were never seen) leaves the scales as they were.

        Args:
            inputs: scales to make those of all ranks.
            source: that is exported from, whose preparation may fail on one rank alone; the same parameters are looked at through it,
                and not once more through the own one.
            ahead: to take this rank's weights for what they were at the last refresh, if nothing tells otherwise: which of them are
                looked at as they are sent.

        Returns:
            If they were, what looks whether they are; it is no collective.

        Raises:
            RefitError: on all ranks, as :meth:`refresh`, and where inputs have no scales.
        """
        count = len(self.names)
        known = ahead is not None and not self._stale and not self._written(self._held.counters)
        seen = self._seen if known else None

        def work() -> torch.Tensor:
            ready = self._prepared(source)
            found = self._local(ready) if seen is None else seen
            return found if inputs is None else torch.cat([found, inputs.noted()])

        size = count if inputs is None else count + 2 * len(inputs.names)
        before = self._held, self._storage, self._seen, self._versions
        try:
            shared = _maximum_over(self._group, size, work, _COMPUTING)
        except BaseException:
            # Else writes since the last refresh would count as seen by it.
            self._held, self._storage, self._seen, self._versions = before
            raise
        self._take(shared[:count])
        if inputs is not None:
            inputs.take(shared[count:])
        return None if seen is None else partial(self._look_again, seen, source or self._source, ahead)

    def _take(self, amax: torch.Tensor) -> None:
        """Let the weights' largest magnitudes over all ranks be the scales from now on."""
        if bool(amax.isinf().any()):
            bad = [name for name, value in zip(self.names, amax.tolist(), strict=True) if value == torch.inf]
            self.now_stale(f"the last refresh found NaN or infinity in {bad[0]}")
            raise RefitError(
                f"{len(bad)} quantized weights hold NaN or infinity, the first in {bad[0]}; their blocks would be NaN, "
                "and so would all that the engine generates. Look for a diverged step, or go back to good weights",
                stage="quantize",
                parameter=bad[0],
            )
        self._amax = amax
        self._stale = ""
        self.generation += 1

    def check_contents(self) -> None:
        """Have the next use fail if the largest magnitudes of what this rank holds are no longer those of the refresh, by scale.

        The version of a shard does not rise where its DTensor is written, and that of neither where a checkpoint is loaded by
        ``torch.distributed.checkpoint.load``.
        """
        if not self._stale and self._held.counters and not torch.equal(self._largest(), self._seen):
            self.now_stale(_WRITTEN)

    def check_versions(self, positions: tuple[int, ...]) -> None:
        """Have the next use fail if a parameter behind these scales was written in place since the refresh."""
        if not self._stale and self._written(self._held.behind(positions)):
            self.now_stale(_WRITTEN)

    def of(self, positions: int | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Global scales of weights that are computed with in ``dtype``: ``weight_scale_2``, FP32.

        Rounding to ``dtype`` keeps order, so the maximum of the rounded weight is the rounded maximum.

        Raises:
            RefitError: the weights may have changed since the last refresh.
        """
        return nvfp4.global_scale(self.require_fresh()[positions].to(dtype))

    def require_fresh(self) -> torch.Tensor:
        """The weights' largest magnitudes.

        Raises:
            RefitError: the weights may have changed since the last refresh.
        """
        if self._amax is None or self._stale:
            raise RefitError(
                f"the global scales of the quantized weights are not up to date: {self._stale}. Blocks would be cut "
                "off, or differ from what is exported. Call refresh() on all trainer ranks after each optimizer step "
                "and after loading weights, before the next forward pass",
                stage="quantize",
            )
        return self._amax

    def _prepared(self, source: WeightSource | None = None) -> WeightSource:
        """Another source of the same parameters, or the own one, that has been prepared."""
        if source is None:
            source = self._source = self._source or self._make_source()
        source.prepare()
        return source

    def _local(self, source: WeightSource) -> torch.Tensor:
        """The largest magnitudes of what this rank holds, through a source that has been prepared."""
        self._versions = self._look_at(source)
        self._seen = self._largest()
        return self._seen

    def _look_again(self, seen: torch.Tensor, source: WeightSource, as_sent: AsSent) -> Callable[[], bool]:
        """Look at what this rank holds, but for what is looked at as it is sent; returns what compares all once it has been sent."""
        versions = self._look_at(source)
        views, places, skipped = self._held.besides(as_sent.weights)
        now = self._by_name(self._rest.of(views), places)
        return partial(self._still, seen, now, versions, skipped, as_sent.found)

    def _still(
        self,
        seen: torch.Tensor,
        now: torch.Tensor,
        versions: dict[int, int],
        skipped: torch.Tensor,
        as_sent: Sequence[Found],
    ) -> bool:
        """Whether the largest magnitudes of what this rank holds are what they were; the next use fails, or finds them out anew, if not.

        ``now``: by name, 0 where ``skipped`` says that it was looked at as it was sent; ``versions`` before that.
        """
        for found in as_sent:
            # Some encodings round before they look, and some do not.
            largest = _finite_or_infinity(
                found.bits[found.places].view(torch.float32).to(found.dtype).float()
            )
            largest = torch.where(skipped[found.positions], largest, 0.0)
            now = now.scatter_reduce(0, found.positions, largest, "amax")
            rounded = seen.to(found.dtype).float()[found.positions]
            seen = torch.where(skipped, seen.scatter(0, found.positions, rounded), seen)
        if not torch.equal(now, seen):
            self.now_stale(_WRITTEN)
            return False
        self._versions = versions
        return True

    def _look_at(self, source: WeightSource) -> dict[int, int]:
        """Hold the views of ``source``; returns the versions of what counts them."""
        if (storage := source.storage_key()) != self._storage:
            self._held, self._storage = _Held(self._views(source), source.device, len(self.names)), storage
        return {one: counter._version for one, counter in self._held.counters.items()}

    def _written(self, counters: Collection[int]) -> bool:
        """Whether something was written in place since the refresh, of what counts that."""
        held = self._held.counters
        return any(held[one]._version != self._versions.get(one) for one in counters)

    def _largest(self) -> torch.Tensor:
        """By name, of all views; infinity where it is no number."""
        views, places, _ = self._held.besides(frozenset())
        return self._by_name(self._all.of(views), places)

    def _by_name(self, largest: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        amax = torch.zeros(len(self.names), dtype=torch.float32, device=places.device)
        return amax.scatter_reduce_(0, places, _finite_or_infinity(largest).to(places.device), "amax")

    def _views(self, source: WeightSource) -> dict[int, list[tuple[str, torch.Tensor]]]:
        held, refused = source.fragments()
        unplaced = sorted(self._weights & refused.keys())
        if unplaced:
            raise RefitError(
                f"the values of {len(unplaced)} quantized weights can't be told from this rank's parameters: "
                f"{unplaced[0]}: {refused[unplaced[0]]}. Leave their layers out by exclude",
                stage="quantize",
                parameter=unplaced[0],
            )
        views: dict[int, list[tuple[str, torch.Tensor]]] = defaultdict(list)
        for fragment in held:
            if fragment.name in self._weights and fragment.view.numel():
                views[self.position(fragment.name)].append((fragment.name, fragment.view))
        return dict(views)


class _Magnitudes:
    """Finds the largest magnitudes of views, by one kernel for many where this process's GPU can read all."""

    def __init__(self) -> None:
        # Where they lay when the table was made.
        self._table: tuple[list[int], MagnitudeTable | None] = [], None

    def of(self, views: Sequence[torch.Tensor]) -> torch.Tensor:
        """FP32 ``[views]``.

        Raises:
            RefitError: a view's memory is gone.
        """
        if not views:
            return torch.zeros(0, dtype=torch.float32, device=rank_device())
        # A trainer that leaves its GPU has its storages' memory elsewhere when it comes back.
        addresses = [view.data_ptr() for view in views]
        if not all(addresses):
            raise RefitError(
                "memory of quantized weights was freed since the last refresh(), so that their global scales can't be told. Call release() "
                "before the model leaves its GPU, and refresh() when it is back",
                stage="quantize",
            )
        if self._table[0] != addresses:
            self._table = addresses, _table_of(views)
        if (table := self._table[1]) is not None:
            return table.compute()
        with torch.no_grad():
            each = torch._foreach_norm(views, torch.inf)
        return torch.stack([one.to(rank_device(), torch.float32) for one in each])


class _Held:
    """What a rank holds of the quantized weights.

    Args:
        views: of parameters, with the names of their weights, by the position of their scale.
        device: on which largest magnitudes are gathered.
        scales: how many there are.

    Attributes:
        counters: what counts the versions of the views, by its identity.
    """

    def __init__(
        self, views: Mapping[int, Sequence[tuple[str, torch.Tensor]]], device: torch.device, scales: int
    ) -> None:
        self._by_position = views
        self._device = device
        self._scales = scales
        # Experts are parts of few parameters.
        every = (view for found in views.values() for _, view in found)
        self.counters = {id(base): base for base in map(_base, every)}
        self._of: dict[tuple[int, ...], frozenset[int]] = {}
        self._besides: dict[frozenset[str], tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]] = {}

    def behind(self, positions: tuple[int, ...]) -> Collection[int]:
        """Of :attr:`counters`, those of the views of these scales."""
        if positions not in self._of:
            found = (view for at in positions for _, view in self._by_position.get(at, ()))
            self._of[positions] = frozenset(id(_base(view)) for view in found)
        return self._of[positions]

    def besides(self, weights: frozenset[str]) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """The views of all scales but those under which this rank holds nothing else than some weights.

        Returns:
            The views; int64 ``[views]``, the positions of their scales; bool ``[scales]``, which scales were left out.
        """
        if weights not in self._besides:
            skipped = torch.zeros(self._scales, dtype=torch.bool)
            for at, found in self._by_position.items():
                skipped[at] = all(name in weights for name, _ in found)
            left = [
                (at, view) for at, found in self._by_position.items() for _, view in found if not skipped[at]
            ]
            places = torch.tensor([at for at, _ in left], dtype=torch.int64, device=self._device)
            self._besides[weights] = [view for _, view in left], places, skipped.to(self._device)
        return self._besides[weights]


def _table_of(views: Sequence[torch.Tensor]) -> MagnitudeTable | None:
    """Of views that this process's GPU can read; None on a CPU, or where a view lies elsewhere."""
    device = rank_device()
    if device.type == "cuda" and all(v.device == device and v.dtype in FLOAT_DTYPES for v in views):
        return MagnitudeTable.build(views, device)
    return None


def _finite_or_infinity(values: torch.Tensor) -> torch.Tensor:
    return values.nan_to_num(nan=torch.inf, posinf=torch.inf)


class InputScales:
    """The largest magnitudes of layers' inputs.

    Args:
        weights: names of the quantized weights, the same on all ranks.
        device: of the model's computation.
        group: of all trainer ranks.
        dynamic: whether each call makes its own scale; the largest magnitudes are noted beside.
    """

    def __init__(
        self, weights: Collection[str], device: torch.device, group: dist.ProcessGroup | None, dynamic: bool
    ):
        self.names = sorted(set(map(input_module, weights)))
        self._position = {name: i for i, name in enumerate(self.names)}
        self._amax = torch.zeros(len(self.names), dtype=torch.float32, device=device)
        self._seen: torch.Tensor | None = None
        self._group = group
        self._dynamic = dynamic
        self._calibrated = False

    @property
    def calibrating(self) -> bool:
        """Whether inputs are looked at and left as they are."""
        return self._seen is not None

    def position(self, weight: str) -> int:
        """Where the scale of the inputs of a weight is."""
        return self._position[input_module(weight)]

    def of(self, position: int, x: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
        """The global scale for ``x``, as it is passed to the layer.

        Args:
            position: of the scale.
            x: ``[..., k]``; ``[rows, k]`` with ``ends``.
            ends: as :func:`.functions.linear`'s, if dynamic scales are each expert's own.

        Returns:
            FP32, a scalar; ``[rows]`` of dynamic scales with ``ends``.

        Raises:
            RefitError: it is static and was never calibrated.
        """
        if self._dynamic:
            seen = self.observe(position, x)
            if ends is None:
                return nvfp4.global_scale(seen)
            experts = torch.searchsorted(ends, torch.arange(len(x), device=ends.device), right=True)
            of_rows = torch.linalg.vector_norm(x.detach(), torch.inf, dim=-1).float()
            of_experts = of_rows.new_zeros(len(ends)).scatter_reduce(0, experts, of_rows, "amax")
            return nvfp4.global_scale(of_experts)[experts]
        self._require_calibrated()
        return nvfp4.global_scale(self._amax[position])

    def observe(self, position: int, x: torch.Tensor) -> torch.Tensor:
        """Note the largest magnitude of ``x``, and return it."""
        with torch.no_grad():
            noted = self._amax if self._seen is None else self._seen
            seen = blocks.largest_magnitude(x).to(noted.device)
            noted[position] = torch.maximum(noted[position], seen)
            return seen

    @contextmanager
    def calibration(self) -> Iterator[None]:
        """Look at all inputs inside, and share what was seen at the end; a collective of all trainer ranks.

        The scales of before stay if it fails.

        Raises:
            RefitError: on all ranks, if some layers had no inputs.
        """
        seen = self._seen = torch.zeros_like(self._amax)
        try:
            yield
        finally:
            self._seen = None
        self._replace(_maximum_over(self._group, len(self.names), lambda: seen, "calibration"))

    def exported(self, weight: str) -> torch.Tensor:
        """``input_scale`` of a weight: FP32 scalar.

        Raises:
            RefitError: its inputs were never seen.
        """
        return self.exported_at(self.position(weight))

    def exported_at(self, positions: int | torch.Tensor) -> torch.Tensor:
        """As :meth:`exported`, of layers by their places."""
        self._require_calibrated()
        return nvfp4.global_scale(self._amax[positions])

    def noted(self) -> torch.Tensor:
        """What this rank brings to :meth:`take`, whose largest of all ranks that gets.

        Raises:
            RefitError: they are static and were never calibrated.
        """
        if not self._dynamic:
            self._require_calibrated()
        return torch.cat([self._amax, -self._amax])

    def take(self, shared: torch.Tensor) -> None:
        """Make what was noted that of all ranks, if scales are dynamic; static ones are so from calibration on.

        Raises:
            RefitError: on all ranks, if layers saw no inputs, or static scales differ between ranks.
        """
        largest, smallest = shared[: len(self.names)], -shared[len(self.names) :]
        if self._dynamic:
            self._replace(largest)
        elif not torch.equal(largest, smallest):
            at = int(torch.argmax((largest != smallest).int()))
            raise RefitError(
                f"trainer ranks have different scales for the inputs of {self.names[at]}, from {smallest[at]} to "
                f"{largest[at]} as largest magnitude: they would train and send different things. Calibrate on all ranks, "
                "or load the same saved scales on all",
                stage="quantize",
            )

    def state_dict(self) -> dict[str, float]:
        """The largest magnitudes by layer, as plain values."""
        return dict(zip(self.names, self._amax.tolist(), strict=True))

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Inverse of :meth:`state_dict`.

        Raises:
            ValueError: other layers.
        """
        if state.keys() != set(self.names):
            differ = sorted(state.keys() ^ set(self.names))
            raise ValueError(
                f"the saved scales of inputs are those of other layers; {len(differ)} differ, the first {differ[0]}. "
                "Train with the exclude that they were saved with, or calibrate again"
            )
        values = [state[name] for name in self.names]
        self._amax.copy_(torch.tensor(values, dtype=torch.float32))
        self._calibrated = all(0 < value < torch.inf for value in values)

    def _replace(self, amax: torch.Tensor) -> None:
        values = amax.tolist()
        unseen = [name for name, value in zip(self.names, values, strict=True) if not value]
        wild = [name for name, value in zip(self.names, values, strict=True) if value == torch.inf]
        if unseen or wild:
            what = (
                f"saw no inputs of {unseen[0]}" if unseen else f"saw NaN or infinity as inputs of {wild[0]}"
            )
            raise RefitError(
                f"calibration {what} (and {len(unseen) + len(wild) - 1} more layers); no scale can be made for them. "
                "Calibrate with more, or other, tokens; leave layers out that never run",
                stage="quantize",
            )
        self._amax, self._calibrated = amax, True

    def _require_calibrated(self) -> None:
        if not self._calibrated:
            raise RefitError(
                "the global scales of the quantized layers' inputs are not known yet. Run some batches of training "
                "data through the model inside calibrating(), on all trainer ranks, or load saved ones",
                stage="quantize",
            )


def _base(tensor: torch.Tensor) -> torch.Tensor:
    """What counts the versions of a view."""
    return tensor if tensor._base is None else tensor._base
