"""The refits of one TensorRT-LLM worker: what has arrived, and whether it may be served.

A refit is ``begin``, ``load`` for each bucket, ``finish``, and ``commit`` once all workers have finished. ``begin`` and
``commit`` change what may be served, so all workers do them at the same step of the engine: a worker that refused a step
while another computed it would leave the other waiting in a collective.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ....integration.colocated.memory import MemoryWatch
from ....integration.colocated.stages import KV_CACHE
from ....integration.errors import RefitError, RefitMismatch
from ....integration.session import ServingState
from ....integration.weights.endpoints import rank_device
from ....integration.weights.manifest import TensorSpec, dtype_name
from ..common.guard import WeightsGuard, call_after, call_before
from . import compat
from .payload import APPROVED, Entry, Imports, decode
from .peers import Peers

logger = logging.getLogger(__name__)


class _Arriving:
    """A refit that has begun.

    Attributes:
        version: that it brings.
        awaited: all of its weights; None if the sender did not say which there are.
        due: names that have to arrive.
        whole: whether these are all weights of the model.
        losses: how often weights had lost their memory when it began.
        arrived: names so far.
        failed: why it can't go on, or empty.
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
        update: TensorRT-LLM's own ``update_weights``, to be called while the engine's loop is held: it loads and
            finalizes, in whatever way this version does.
        approved: what a payload may import.
        timeout_s: how long to wait for the other workers, where the caller settles nothing among them.

    Attributes:
        state: version and dirtiness of the weights.
        guard: of the weights.
        device: of the weights.
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
        self._peers = Peers(timeout_s)
        self._arriving: _Arriving | None = None
        # As it was before the first reload since graphs were last looked at; failed refits move tensors, too.
        self._baked_in: Hashable | None = None
        # What the last refit brought that committed. A reload of the engine's begins by giving up what it holds.
        self._known: set[str] = set()
        # Whether these are all weights of the model.
        self._known_whole = False
        # What refits wrote since that did not commit: the next one has to bring all of it.
        self._owed: set[str] = set()
        self.device = rank_device()
        self.memory = MemoryWatch(self.device)
        self.state = ServingState()
        self.guard = _guarded(worker, self.state)

    def begin(self, version: int, specs: Sequence[TensorSpec] | None) -> None:
        """Forbid steps until ``version`` has committed. A refit that was left unfinished is given up.

        Args:
            version: of the weights to come.
            specs: all of them, as they are sent; None expects those of the last refit, and all that the model's
                checkpoint has where the engine holds no weights that another refit or a checkpoint brought.

        Raises:
            RefitError: the weights are asleep, or nothing tells which they are. Nothing has changed.
        """
        self.guard.require_awake()
        arriving = self._expected(version, specs)
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
            # What no refit brings, the engine would have from nowhere.
            due, whole = self._known | compat.checkpoint_names(self._worker, undefined), True
        return _Arriving(version, awaited, due, whole, self.guard.losses)

    def load(self, handles: dict[str, Any]) -> dict[str, Any]:
        """Load a bucket: ``{device UUID: payload}``, of which this worker takes its own.

        Raises:
            RefitError: there is none for this worker's GPU, or it is refused. Nothing of it was loaded.
            RefitMismatch: it holds a weight that is not awaited, another shape or dtype, or one for the second time.
                Nothing of it was loaded.
        """
        arriving = self._require_arriving()
        with self._failing(arriving):
            self.guard.require_awake()
            entries = decode(self._own(handles), compat.restricted_loads, self._approved)
            self._check_names(arriving, entries)
            in_parts = compat.loads_in_parts(self._worker)
            if not in_parts:
                _check_whole(arriving, entries)
            weights = [self._opened(arriving, entry) for entry in entries]
            nbytes = sum(tensor.nbytes for _, tensor in weights)
            self._owed.update(entry.name for entry in entries)
            self._give(weights, in_parts)
            arriving.arrived.update(entry.name for entry in entries)
        # The sender frees its bucket once this worker has answered: nothing may read it or map it any more.
        weights.clear()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.ipc_collect()
        return {"weights": len(entries), "bytes": nbytes}

    def finish(self) -> None:
        """Have the engine make what it derives from the weights, and drop what it cached with the old ones.

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
            RefitError: they are not all there and finished, or of another version.
        """
        arriving = self._require_arriving()
        if not arriving.finished or arriving.version != version:
            raise RefitError(
                f"version {version} can't be committed: refit {arriving.version} is under way and "
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
        """TensorRT-LLM's contract, for callers who know no more: buckets, then None. Versions count up by themselves.

        With None all workers of the engine settle whether they serve the refit, so all have to be called. Of a refit that
        was begun with its weights announced, None finishes it, and :meth:`commit` is the caller's.

        Raises:
            RefitError: as :meth:`begin`, :meth:`load` and :meth:`finish`; or another worker failed, and none serves it.
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
                version = self._require_arriving().version = self._peers.settle(self._finished)
                self.commit(version)

    def _finished(self) -> int:
        self.finish()
        return self._require_arriving().version

    def _require_complete(self, arriving: _Arriving) -> None:
        due = sorted(self._owed | arriving.due)
        missing = [name for name in due if name not in arriving.arrived]
        if not missing:
            return
        told = (
            f"{len(missing)} of {len(due)} weights that refit {arriving.version} has to bring did not arrive: those that it "
            "began with or the last one brought, and what failed ones wrote since. "
        )
        undefined = self.guard.undefined
        if undefined and arriving.awaited is None:
            told += (
                f"Since {undefined}, all that its checkpoint names are among them; of these the engine would serve undefined "
                f"values. It refuses to generate; refit again with all weights, or {compat.ANNOUNCE}"
            )
        else:
            told += "The engine would serve old values of them. It refuses to generate; refit again with all weights"
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
                    f"it came twice in refit {arriving.version}; one of two values would be served. Each weight is sent "
                    "once",
                    stage="transfer",
                    parameter=name,
                )
            if arriving.awaited is not None and name not in arriving.awaited:
                raise RefitMismatch(
                    f"it came with refit {arriving.version}, which began without it; prepare the refit again after the "
                    "model has changed",
                    stage="transfer",
                    parameter=name,
                )
            seen.add(name)

    def _opened(self, arriving: _Arriving, entry: Entry) -> tuple[str, torch.Tensor]:
        tensor = entry.open(self._worker.device_id)
        spec = arriving.awaited[entry.name] if arriving.awaited is not None else None
        if spec is not None and (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
            raise RefitMismatch(
                f"it arrived as {dtype_name(tensor.dtype)}{list(tensor.shape)}, and refit {arriving.version} began with "
                f"{dtype_name(spec.dtype)}{list(spec.shape)}. Nothing of its bucket was loaded",
                stage="transfer",
                parameter=entry.name,
            )
        return entry.name, tensor

    def _give(self, weights: Sequence[tuple[str, torch.Tensor]], in_parts: bool) -> None:
        """To TensorRT-LLM's own loading, in its form for tensors that no unpickler has to see."""
        # Its call replaces the argument of the device, the seventh.
        opened = [(name, (partial(_given, tensor), (None,) * 7)) for name, tensor in weights]
        handles = {compat.device_uuid(self._worker.device_id): opened}
        if in_parts:
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
                f"weights of the engine have slept since refit {self._arriving.version} began, which does not keep them: what "
                "had arrived is lost. The engine refuses to generate; begin a new refit once they are awake",
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
    """Guard a worker's weights from here on: its ``sleep`` and ``wakeup``, and its model engine's ``forward``, are wrapped."""
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
    call_before(worker.engine.model_engine, "forward", lambda *_, **__: guard.require_servable())
    call_after(worker, "sleep", slept)
    call_after(worker, "wakeup", woke)
    return guard


def _given(tensor: torch.Tensor, *_: object) -> torch.Tensor:
    return tensor


def _check_whole(arriving: _Arriving, entries: Sequence[Entry]) -> None:
    """Its loader would leave the rest as it is, or lose what came before."""
    if arriving.arrived or (arriving.awaited is not None and len(entries) != len(arriving.awaited)):
        raise RefitError(
            f"a bucket brings {len(entries)} weights, and {len(arriving.arrived)} came before; this model's load_weights "
            "takes no allow_partial_loading, so all weights of a refit have to come in one bucket. Nothing of it was "
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
