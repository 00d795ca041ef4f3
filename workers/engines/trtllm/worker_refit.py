"""The refits of one TensorRT-LLM worker: what has arrived, and whether it may be served.

A refit is ``begin``, ``load`` for each bucket, ``finish``, and ``commit`` once all workers have finished. ``begin`` and
``commit`` change what may be served, so all workers do them at the same step of the engine. If a worker refused a step that
another computed, the other would wait in a collective.

TensorRT-LLM loads bucket by bucket, and runs any request that comes between two buckets on weights of two versions.
``sleep`` unmaps memory, and keeps weights only if its configuration says so. So the worker's weights are guarded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ....integration.colocated.memory import MemoryWatch
from ....integration.colocated.stages import KV_CACHE
from ....integration.errors import PeerLost, RefitError, RefitMismatch
from ....integration.session import ServingState
from ....integration.weights.endpoints import rank_device
from ....integration.weights.manifest import TensorSpec, dtype_name
from ..common.guard import WeightsGuard, call_after, call_before
from . import compat
from .payload import APPROVED, Entry, Imports, decode

logger = logging.getLogger(__name__)


class _Arriving:
    """A refit that has begun.

    Attributes:
        version: that it brings.
        awaited: all of its weights; None if the sender did not announce them.
        due: names that have to arrive.
        whole: whether ``due`` are all weights of the model.
        losses: how often weights had lost their memory when it began.
        arrived: names so far.
        failed: why it can't continue, or empty.
        finished: whether the engine has made all that it derives from the weights.
    """

    def __init__(
        self,
        version: int,
        awaited: Mapping[str, TensorSpec] | None,
        due: Collection[str],
        whole: bool,
        losses: int,
    ) -> None:
        self.version = version
        self.awaited = awaited
        self.due = frozenset(due)
        self.whole = whole
        self.losses = losses
        self.arrived: set[str] = set()
        self.failed = ""
        self.finished = False


class WorkerRefit:
    """One worker's refits.

    Args:
        worker: TensorRT-LLM's worker, with ``engine``, ``device_id`` and ``llm_args``.
        update: TensorRT-LLM's own ``update_weights``, called while the engine's loop waits: it loads and finalizes as this
            version does.
        approved: what a payload may import.
        timeout_s: how long ``update_weights(None)`` waits for the other workers.

    Attributes:
        state: version and dirtiness of the weights.
        guard: of the weights.
        device: of the weights.
        in_parts: whether the model takes its weights in several buckets.
        memory: of this process and the device.
    """

    def __init__(
        self,
        worker: Any,
        update: Callable[[dict[str, Any] | None], object],
        approved: Imports = APPROVED,
        timeout_s: float = 300.0,
    ) -> None:
        self._worker = worker
        self._update = update
        self._approved = approved
        self._timeout_s = timeout_s
        # Of all workers of the engine, on host memory.
        self._group: dist.ProcessGroup | None = None
        self._arriving: _Arriving | None = None
        # From before the first reload since graphs were last checked; failed refits move tensors, too.
        self._baked_in: Hashable | None = None
        # Names that the last committed refit brought. An engine's reload begins by dropping the weights that it holds.
        self._known: set[str] = set()
        # Whether these are all weights of the model.
        self._known_whole = False
        # Names that refits have written since without committing: the next one has to bring all of them.
        self._owed: set[str] = set()
        self.device = rank_device()
        self.memory = MemoryWatch(self.device)
        self.in_parts = compat.loads_in_parts(worker)
        self.state = ServingState()
        self.guard = _guarded(worker, self.state)

    def begin(self, version: int, specs: Sequence[TensorSpec] | None) -> None:
        """Refuse steps until ``version`` has committed. An unfinished refit is given up.

        Args:
            version: of the weights to come.
            specs: all of them, as they are sent. None expects those of the last refit, or all of the model's checkpoint if
                neither a refit nor a checkpoint has brought the engine's weights.

        Raises:
            RefitError: the weights are asleep, their names are not known, or the model can't be loaded again. Nothing has
                changed.
        """
        self.guard.require_awake()
        arriving = self._expected(version, specs)
        compat.require_reloadable(self._worker)
        if self._arriving is not None:
            logger.warning("refit %d begins; refit %d had not committed", version, self._arriving.version)
            compat.abort_cycle(self._worker)
        self.state.mark_dirty(version)
        if self._baked_in is None:
            self._baked_in = compat.baked_in(self._worker)
        self._arriving = arriving

    def _expected(self, version: int, specs: Sequence[TensorSpec] | None) -> _Arriving:
        awaited = None if specs is None else {spec.name: spec for spec in specs}
        due: Collection[str] = self._known if awaited is None else awaited
        whole = awaited is not None or self._known_whole
        undefined = self.guard.undefined
        if undefined and not whole:
            # Weights that no refit brings would stay undefined.
            due, whole = self._known | compat.checkpoint_names(self._worker, undefined), True
        return _Arriving(version, awaited, due, whole, self.guard.losses)

    def load(self, handles: dict[str, Any]) -> dict[str, Any]:
        """Load a bucket: ``{device UUID: payload}``, of which this worker takes its own.

        Raises:
            RefitError: there is no payload for this worker's GPU, or it is refused. Nothing of it was loaded.
            RefitMismatch: it holds a weight that was not announced, has another shape or dtype, or came before. Nothing of it
                was loaded.
        """
        arriving = self._require_arriving()
        with self._failing(arriving):
            self.guard.require_awake()
            entries = decode(self._own(handles), self._approved)
            self._check_names(arriving, entries)
            if not self.in_parts:
                _check_whole(arriving, entries)
            weights = [self._opened(arriving, entry) for entry in entries]
            nbytes = sum(tensor.nbytes for _, tensor in weights)
            self._owed.update(entry.name for entry in entries)
            self._give(weights)
            arriving.arrived.update(entry.name for entry in entries)
        # The sender frees its bucket once this worker has answered: nothing may read or map it any more.
        weights.clear()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.ipc_collect()
        return {"weights": len(entries), "bytes": nbytes}

    def finish(self) -> None:
        """Have the engine recompute what it derives from the weights, and drop what it cached with the old ones.

        Raises:
            RefitMismatch: weights are missing. The engine keeps refusing steps.
        """
        arriving = self._require_arriving()
        with self._failing(arriving):
            self._require_complete(arriving)
            self._update(None)
            if compat.baked_in(self._worker) != self._baked_in:
                compat.release_graphs(self._worker)
            self._baked_in = None
            arriving.finished = True

    def commit(self, version: int) -> None:
        """Serve the weights.

        Raises:
            RefitError: the refit is not finished, or is of another version.
        """
        arriving = self._require_arriving()
        if not arriving.finished or arriving.version != version:
            raise RefitError(
                f"version {version} can't be committed: the present refit is {arriving.version}, "
                f"{'finished' if arriving.finished else 'not finished'}. Refit again",
                stage="commit",
            )
        self._arriving = None
        self._known = arriving.arrived
        self._known_whole = arriving.whole
        self._owed.clear()
        self.state.commit(version)
        self.guard.refitted()

    def update_weights(self, handles: dict[str, Any] | None) -> None:
        """TensorRT-LLM's contract, for callers who know only that: buckets, then None. Versions count up by themselves.

        With None, all workers of the engine agree whether they serve the refit, so all have to be called. If the refit's weights
        were announced, None only finishes it, and the caller calls :meth:`commit`.

        Raises:
            RefitError: as :meth:`begin`, :meth:`load` and :meth:`finish`; or another worker failed, and no worker serves it.
            PeerLost: another worker did not come.
        """
        arriving = self._arriving
        if handles is not None:
            if arriving is None or arriving.failed:
                self.begin(self.state.version + 1, None)
            self.load(handles)
        elif arriving is not None and arriving.awaited is not None:
            self.finish()
        else:
            with self._failing(arriving):
                version = self._require_arriving().version = self._finished_by_all()
                self.commit(version)

    def _finished_by_all(self) -> int:
        """Finish on all workers of the engine; the version, once all of them have finished.

        A caller who knows only TensorRT-LLM's contract ends a refit with one call to all workers, ``update_weights(None)``. If one
        worker served after it while another refused, it would compute a step whose collectives the other never joins.

        Each worker counts versions by itself, and one that failed before it learned of the last version is behind the others.
        The largest count is the version, by which such a worker catches up.

        Raises:
            RefitError: this worker's own error; or another worker failed.
            PeerLost: a worker did not come.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self._finished()
        met: Exception | None = None
        version, failure = -1, ""
        try:
            version = self._finished()
        # Any exception: the loader raises what it likes, and the other workers have to learn of it.
        except Exception as error:
            met, failure = error, f"{type(error).__name__}: {error}"
        everyone = self._gathered((version, failure), met)
        if met is not None:
            raise met
        failed = [f"worker {rank}: {text}" for rank, (_, text) in enumerate(everyone) if text]
        if failed:
            raise RefitError(
                f"refit {version} is finished on this worker, but no worker serves it, because others failed: "
                f"{'; '.join(failed)}. The engine refuses to generate; refit again with all weights",
                stage="commit",
            )
        return max(found for found, _ in everyone)

    def _finished(self) -> int:
        self.finish()
        return self._require_arriving().version

    def _gathered(self, own: tuple[int, str], met: Exception | None) -> list[tuple[int, str]]:
        everyone: list[tuple[int, str]] = [own] * dist.get_world_size()
        try:
            if self._group is None:
                # TensorRT-LLM's Ray workers make their engine's process group before the worker (RayWorkerWrapper). A group
                # of its own keeps this apart from the executor's collectives, and has its own time limit.
                limit = timedelta(seconds=self._timeout_s)
                self._group = dist.new_group(backend="gloo", timeout=limit)
            dist.all_gather_object(everyone, own, group=self._group)
        except RuntimeError as error:
            here = f"finished refit {own[0]}" if met is None else f"failed ({own[1]})"
            raise PeerLost(
                f"this worker {here}, and not all workers of its engine reported their result within {self._timeout_s:.0f} s: "
                f"{error}. Those that did refuse to generate; call update_weights(None) on all workers, and restart the engine",
                stage="commit",
            ) from met or error
        return everyone

    def _require_complete(self, arriving: _Arriving) -> None:
        due = sorted(self._owed | arriving.due)
        missing = [name for name in due if name not in arriving.arrived]
        if not missing:
            return
        told = (
            f"{len(missing)} of {len(due)} weights that refit {arriving.version} has to bring did not arrive: those that it "
            "announced or the last refit brought, and those that failed refits have written since. "
        )
        undefined = self.guard.undefined
        if undefined and arriving.awaited is None:
            told += (
                f"Because {undefined}, all weights of its checkpoint are among them, and the engine would serve undefined values. "
                f"It refuses to generate; refit again with all weights, or {compat.ANNOUNCE}"
            )
        else:
            told += "The engine would serve their old values. It refuses to generate; refit again with all weights"
        raise RefitMismatch(told, stage="misc", parameter=missing[0])

    def _own(self, handles: dict[str, Any]) -> object:
        own = compat.device_uuid(self._worker.device_id)
        if own not in handles:
            raise RefitError(
                f"a bucket has payloads for {', '.join(sorted(handles)) or 'no GPU'}, and none for this worker's {own}. "
                "Nothing of it was loaded; a trainer rank has to run on each of the engine's GPUs",
                stage="transfer",
            )
        return handles[own]

    def _check_names(self, arriving: _Arriving, entries: Sequence[Entry]) -> None:
        seen: set[str] = set()
        for name, *_ in entries:
            if name in seen or name in arriving.arrived:
                raise RefitMismatch(
                    f"it came twice in refit {arriving.version}, and either value might be served. Send each weight once",
                    stage="transfer",
                    parameter=name,
                )
            if arriving.awaited is not None and name not in arriving.awaited:
                raise RefitMismatch(
                    f"it came with refit {arriving.version}, which did not announce it; prepare the refit again after the model "
                    "has changed",
                    stage="transfer",
                    parameter=name,
                )
            seen.add(name)

    def _opened(self, arriving: _Arriving, entry: Entry) -> tuple[str, torch.Tensor]:
        tensor = entry.open(self._worker.device_id)
        spec = arriving.awaited[entry.name] if arriving.awaited is not None else None
        if spec is not None and (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
            raise RefitMismatch(
                f"it arrived as {dtype_name(tensor.dtype)}{list(tensor.shape)}, but refit {arriving.version} announced "
                f"{dtype_name(spec.dtype)}{list(spec.shape)}. Nothing of its bucket was loaded",
                stage="transfer",
                parameter=entry.name,
            )
        return entry.name, tensor

    def _give(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Pass weights to TensorRT-LLM's own loading, in its form for tensors that need no unpickling."""
        # Its call replaces the argument of the device, the seventh.
        opened = [(name, (partial(_given, tensor), (None,) * 7)) for name, tensor in weights]
        handles = {compat.device_uuid(self._worker.device_id): opened}
        if compat.knows_parts(self._worker):
            self._update(handles)
        else:
            with _all_at_once(self._worker.engine.model_engine.model_loader):
                self._update(handles)

    def _require_arriving(self) -> _Arriving:
        if self._arriving is None:
            raise RefitError("no refit has begun on this worker; begin one", stage="handshake")
        if self._arriving.failed:
            raise RefitError(
                f"refit {self._arriving.version} has failed on this worker: {self._arriving.failed}. Begin a new one",
                stage="handshake",
            )
        if self._arriving.losses != self.guard.losses:
            raise RefitError(
                f"weights of the engine have slept since refit {self._arriving.version} began, and a sleep does not keep them: "
                "what had arrived is lost. The engine refuses to generate; begin a new refit once they are awake",
                stage="handshake",
            )
        return self._arriving

    @contextmanager
    def _failing(self, arriving: _Arriving | None) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if arriving is not None:
                arriving.failed = f"{type(error).__name__}: {error}"
            raise


def _guarded(worker: Any, state: ServingState) -> WeightsGuard:
    """Guard a worker's weights from here on: its ``sleep`` and ``wakeup``, and its model engine's steps, are wrapped."""
    load_format = getattr(worker.llm_args, "load_format", "")
    guard = WeightsGuard(state, dummy="dummy" in str(getattr(load_format, "name", load_format)).lower())

    def slept(sleep_tags: Iterable[str]) -> None:
        guard.slept(sleep_tags)
        if guard.asleep - {KV_CACHE}:
            # Unless TensorRT-LLM's configuration says so when it starts, a sleep does not keep weights.
            guard.discarded("weights of the engine have slept, which does not keep them")

    def woke(wakeup_tags: Iterable[str]) -> None:
        guard.woke(wakeup_tags)

    # TensorRT-LLM answers all running requests with the error's text; some versions' executors end with it.
    for step in compat.steps(worker):
        call_before(worker.engine.model_engine, step, lambda *_, **__: guard.require_servable())
    call_after(worker, "sleep", slept)
    call_after(worker, "wakeup", woke)
    return guard


def _given(tensor: torch.Tensor, *_: object) -> torch.Tensor:
    return tensor


def _check_whole(arriving: _Arriving, entries: Sequence[Entry]) -> None:
    """Check that a bucket has all weights: this loader would leave the others as they are, or lose what came before."""
    if arriving.arrived or (arriving.awaited is not None and len(entries) != len(arriving.awaited)):
        raise RefitError(
            f"a bucket brings {len(entries)} weights after {len(arriving.arrived)} others, but this model, or a method of its "
            "quantized layers, has no allow_partial_loading: all weights of a refit have to come in one bucket. Nothing of it was "
            "loaded",
            stage="transfer",
        )


@contextmanager
def _all_at_once(model_loader: Any) -> Iterator[None]:
    """For models that take all weights in one call: TensorRT-LLM's extension asks its loader for parts."""
    reload = model_loader.reload

    def whole(model: Any, weights: dict[str, torch.Tensor], allow_partial_loading: bool = False) -> Any:
        return reload(model, weights, allow_partial_loading=False)

    model_loader.reload = whole
    try:
        yield
    finally:
        del model_loader.reload
