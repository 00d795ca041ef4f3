"""Global scales: of weights, from their largest magnitudes over all shards and fused neighbours, and of layers' inputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ...integration.endpoints import WeightSource
from ...integration.errors import RefitError
from ...integration.quantize import nvfp4
from ...integration.quantize.nvfp4_checkpoint import fused_module, input_module


def maximum_over(group: dist.ProcessGroup | None, values: torch.Tensor) -> None:
    """Replace ``values`` by the largest of all ranks; infinity where one of them is no number."""
    values.nan_to_num_(nan=torch.inf, posinf=torch.inf)  # what a maximum makes of a NaN is up to the backend
    if dist.is_initialized():
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group)


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
        self._held: dict[int, list[torch.Tensor]] = {}
        self._storage: object = None
        self._stale = "they have not been computed yet"
        self.generation = 0

    def position(self, weight: str) -> int:
        """Where the scale of a weight is."""
        return self._position[fused_module(weight)]

    def now_stale(self, why: str) -> None:
        """Have the next use fail, unless they are refreshed before."""
        self._stale = why

    def refresh(self) -> None:
        """Compute them anew; a collective of all trainer ranks.

        Raises:
            RefitError: on all ranks, if a weight holds NaN or infinity.
        """
        source = self._source = self._source or self._make_source()
        source.settle()
        if (storage := source.storage_key()) != self._storage:
            self._held, self._storage = self._views(source), storage
        amax = torch.zeros(len(self.names), device=source.device)
        positions = [at for at, views in self._held.items() for _ in views]
        views = [view for views in self._held.values() for view in views]
        if views:
            with torch.no_grad():
                # The largest magnitude of each, by one kernel for many.
                largest = [t.to(amax) for t in torch._foreach_norm(views, torch.inf)]
            index = torch.tensor(positions, device=amax.device)
            amax.scatter_reduce_(
                0, index, torch.stack(largest).nan_to_num(nan=torch.inf, posinf=torch.inf), "amax"
            )
        maximum_over(self._group, amax)
        bad = [name for name, value in zip(self.names, amax.tolist(), strict=True) if value == torch.inf]
        if bad:
            raise RefitError(
                f"{len(bad)} quantized weights hold NaN or infinity, the first in {bad[0]}; their blocks would be NaN, "
                "and so would all that the engine generates. Look for a diverged step, or go back to good weights",
                stage="quantize",
                parameter=bad[0],
            )
        self._amax = amax
        self._stale = ""
        self.generation += 1

    def of(self, positions: int | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Global scales of weights that are computed with in ``dtype``: ``weight_scale_2``, FP32.

        Rounding to ``dtype`` keeps order, so the maximum of the rounded weight is the rounded maximum.

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
        return nvfp4.global_scale(self._amax[positions].to(dtype))

    def _views(self, source: WeightSource) -> dict[int, list[torch.Tensor]]:
        held, refused = source.fragments()
        unplaced = sorted(self._weights & refused.keys())
        if unplaced:
            raise RefitError(
                f"the values of {len(unplaced)} quantized weights can't be told from this rank's parameters: "
                f"{unplaced[0]}: {refused[unplaced[0]]}. Leave their layers out by exclude",
                stage="quantize",
                parameter=unplaced[0],
            )
        views: dict[int, list[torch.Tensor]] = defaultdict(list)
        for fragment in held:
            if fragment.name in self._weights and fragment.view.numel():
                views[self.position(fragment.name)].append(fragment.view)
        return dict(views)


class InputScales:
    """The largest magnitudes of layers' inputs.

    Args:
        weights: names of the quantized weights, the same on all ranks.
        device: of the model's computation.
        group: of all trainer ranks.
        dynamic: whether each call makes its own scale; the largest magnitudes are noted beside.

    Attributes:
        calibrating: whether inputs are looked at and left as they are.
    """

    def __init__(
        self, weights: Collection[str], device: torch.device, group: dist.ProcessGroup | None, dynamic: bool
    ):
        self.names = sorted(set(map(input_module, weights)))
        self._position = {name: i for i, name in enumerate(self.names)}
        self._amax = torch.zeros(len(self.names), device=device)
        self._group = group
        self._dynamic = dynamic
        self.calibrating = False
        self._calibrated = False

    def position(self, weight: str) -> int:
        """Where the scale of the inputs of a weight is."""
        return self._position[input_module(weight)]

    def of(self, position: int, x: torch.Tensor) -> torch.Tensor:
        """The global scale for ``x``, as it is passed to the layer.

        Raises:
            RefitError: it is static and was never calibrated.
        """
        if self._dynamic:
            return nvfp4.global_scale(self.observe(position, x))
        self._require_calibrated()
        return nvfp4.global_scale(self._amax[position])

    def observe(self, position: int, x: torch.Tensor) -> torch.Tensor:
        """Note the largest magnitude of ``x``, and return it."""
        with torch.no_grad():
            seen = x.abs().amax().float() if x.numel() else self._amax.new_zeros(())
            self._amax[position] = torch.maximum(self._amax[position], seen)
            return seen

    @contextmanager
    def calibration(self) -> Iterator[None]:
        """Look at all inputs inside, and share what was seen at the end; a collective of all trainer ranks.

        Raises:
            RefitError: on all ranks, if some layers had no inputs.
        """
        self._amax.zero_()
        self.calibrating = True
        try:
            yield
        finally:
            self.calibrating = False
        maximum_over(self._group, self._amax)
        self._set_calibrated(self._amax.tolist())

    def exported(self, weight: str) -> torch.Tensor:
        """``input_scale`` of a weight: FP32 scalar.

        Raises:
            RefitError: its inputs were never seen.
        """
        self._require_calibrated()
        return nvfp4.global_scale(self._amax[self.position(weight)])

    def share(self) -> None:
        """With dynamic scales: share what was noted; a collective of all trainer ranks."""
        if self._dynamic:
            maximum_over(self._group, self._amax)
            self._set_calibrated(self._amax.tolist())

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
        self._amax.copy_(torch.tensor(values))
        self._calibrated = all(values)

    def _set_calibrated(self, values: Sequence[float]) -> None:
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
        self._calibrated = True

    def _require_calibrated(self) -> None:
        if not self._calibrated:
            raise RefitError(
                "the global scales of the quantized layers' inputs are not known yet. Run some batches of training "
                "data through the model inside calibrating(), on all trainer ranks, or load saved ones",
                stage="quantize",
            )
