"""Steps that are recorded on a trainer rank, and whether its masks tell all that has changed since the last refit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ..errors import RefitError
from ..layout import Fragment, Misfit
from ..packing import NotComputable
from ..weights.endpoints import CountsWrites, WeightSource, Writes
from .mask import StepRecorder
from .path import DeltaPath

logger = logging.getLogger(__name__)

# What a step goes on without a record for. A refit raises it again, unless it was memory for the moment.
_NO_RECORD = (RefitError, Misfit, NotComputable, torch.OutOfMemoryError)


_OPEN = "a refit and a recorded step were under way at the same time"


class Recording:
    """Of one rank in one epoch.

    Args:
        source: this rank's weights.
        path: its masks.
        as_planned: the source's fragments as the plan's boxes see the weights.
        compares_sums: whether weight sums prove what the masks tell; else a refit without a recorded step is dense.
    """

    def __init__(
        self,
        source: WeightSource,
        path: DeltaPath,
        as_planned: Callable[[Sequence[Fragment]], list[Fragment]],
        *,
        compares_sums: bool,
    ):
        self._source, self._path, self._compares_sums = source, path, compares_sums
        self._as_planned = as_planned
        self._recorders: list[tuple[StepRecorder, int]] | None = None
        self._bound_to: Hashable = None
        self._on_host = False
        # Steps that have ended since the last refit, and those that have not.
        self._steps = self._open = 0
        # Whether a step, in another thread, has gone on or begun since the refit that is under way began.
        self._overtaken = False
        # Whether a weight was moved outside of the steps since the last refit.
        self._moved = False
        # Whether the last refit was sparse, and so one after the last dense one has read all weights.
        self._proven = False
        # Why the masks miss something; empty if nothing is known to be missed.
        self._lost = ""
        self._told: set[str] = set()
        self._writes: Writes | None = None

    @contextmanager
    def step(self, *, records: bool) -> Iterator[None]:
        """A context in which the weights are written, and at whose end they are complete; one that is not recorded is only noted."""
        self._overtaken = True
        self._open += 1
        try:
            copies = self._keep() if records else []
            yield
            if records:
                self._mark(copies)
        except BaseException:
            self._lose("a recorded step ended with an error")
            raise
        finally:
            self._open -= 1
        self._steps += 1

    def refit_begins(self) -> None:
        """A refit begins, which :meth:`restart` ends."""
        self._overtaken = self._open > 0

    def unsure(self) -> str:
        """Before a refit that may be sparse: why it has to be dense; empty if the masks tell all, as far as is known."""
        if self._open:
            self._lose(_OPEN)
        if not self._lost and (other := self._written_by_others()):
            self._lose(other)
        if not self._lost and not self._steps and not self._compares_sums:
            self._lose(
                "no step was recorded since the last refit, and with policy.refit.verify=off nothing else tells what changed"
            )
        return self._lost

    def doubtful(self) -> bool:
        """In a sparse refit: whether weights may have been written unseen, so that all of them have to be read for their sum.

        They may where no step was recorded, as by a trainer that records none, and where a weight was moved, and its count of
        writes with it. The first refit after a dense one tells of a trainer that always writes outside of its recorded steps.
        """
        return not self._steps or self._moved or not self._proven

    def restart(self, *, sparse: bool) -> None:
        """All ranks hold what this one has sent, in a sparse refit or a dense one, and nothing is marked."""
        self._steps, self._moved, self._proven, self._lost = 0, False, sparse, ""
        # What a step wrote meanwhile may not have been sent, and what one writes that goes on is in no mask.
        if self._overtaken:
            self._lose(_OPEN)
        self._writes = self._writes_now()

    # Parameters that are trained would make the copies a part of their graph; the same in _mark().
    @torch.no_grad()
    def _keep(self) -> list[torch.Tensor]:
        """A copy of each stream as it is; none if that would be of no use."""
        if not self._lost and (other := self._written_by_others()):
            self._lose(other)
        if self._lost:
            return []
        try:
            recorders = self._follow()
            copies = [self._memory(nbytes) for _, nbytes in recorders]
            with self._path.on_device():
                for (recorder, _), copy in zip(recorders, copies, strict=True):
                    recorder.keep(copy)
            self._await_reads()
        except _NO_RECORD as error:
            self._lose(f"a step could not be recorded: {error}")
            return []
        return copies

    @torch.no_grad()
    def _mark(self, copies: list[torch.Tensor]) -> None:
        if self._lost:
            return
        try:
            recorders = self._follow()
            with self._path.on_device():
                for (recorder, _), copy in zip(recorders, copies, strict=True):
                    recorder.mark(copy)
            self._await_reads()
        except _NO_RECORD as error:
            self._lose(f"a step could not be recorded: {error}")
        self._writes = self._writes_now()

    def _follow(self) -> list[tuple[StepRecorder, int]]:
        """Recorders of the weights where they lie, made anew if that is another place than before."""
        now = self._source.storage_key()
        if self._recorders is None or now != self._bound_to:
            self._recorders = None
            # Later steps need not be in inference mode, where nothing else could write what is made in it.
            with torch.inference_mode(False):
                fragments = self._as_planned(self._source.fragments()[0])
                device = self._source.device
                self._on_host = any(fragment.view.device.type != device.type for fragment in fragments)
                self._recorders, self._bound_to = self._path.make_recorders(fragments), now
        return self._recorders

    def _await_reads(self) -> None:
        """An optimizer on the CPU writes weights in page-locked memory at once, and does not wait for a GPU that has yet to read
        them."""
        if self._on_host:
            torch.cuda.current_stream(self._source.device).synchronize()

    def _memory(self, nbytes: int) -> torch.Tensor:
        device = self._source.device
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # of any allocator
            raise RefitError(
                f"there are no {nbytes / 1e6:.0f} MB on {device} for a copy of what is sent, which delta_base=optimizer takes for the "
                "time of a step. Make room, or set policy.refit.delta_base to host",
                stage="record",
            ) from error

    def _lose(self, why: str) -> None:
        self._lost = why
        if why not in self._told:
            self._told.add(why)
            logger.warning("%s. The next refit is dense. This is told once", why)

    def _writes_now(self) -> Writes | None:
        source: object = self._source
        return source.writes() if isinstance(source, CountsWrites) else None

    def _written_by_others(self) -> str:
        """A weight that was written outside of recorded steps, in words; empty if none is known. Notes one that was moved."""
        now, then = self._writes_now(), self._writes
        if now is None or then is None or now == then:
            return ""
        # What lies elsewhere was moved, and its copy has a count of its own.
        written, moved = [], []
        for name, count, place, count_then, place_then in zip(*now, *then[1:], strict=True):
            if place != place_then:
                moved.append(name)
            elif count != count_then:
                written.append(name)
        if written:
            return (
                f"{written[0]} was written outside recording_changes() since the last refit{_more(written)}: by a checkpoint that was "
                "loaded, say"
            )
        self._moved |= bool(moved)
        if moved and not self._compares_sums:
            return (
                f"{moved[0]} was moved outside recording_changes() since the last refit{_more(moved)}, and with "
                "policy.refit.verify=off nothing tells whether it was written there"
            )
        return ""


def _more(names: list[str]) -> str:
    return f", and {len(names) - 1} weights more" if names[1:] else ""
