"""The driver's side: refit a running SGLang engine, in this process or behind its HTTP server, and put its memory to sleep.

:class:`SglangRefit` is the only place where an order of steps is written; :mod:`.async_driver` runs it for coroutines.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Literal

from ...integration.config import RefitConfig
from ...integration.errors import EngineDirty, RefitError, RefitMismatch, RefitTimeout
from ...integration.manifest import TensorSpec
from ...integration.stage_memory import ProcessMemory
from ...integration.stages import KV_CACHE, TAGS, WEIGHTS, StageRefused
from .callers import Caller
from .engine_calls import EngineCalls

# What becomes of running requests. wait: they end with the old weights first; abort: they end as they are; retract: they go
# back to the queue, and their keys and values are computed anew with the new weights.
PauseMode = Literal["wait", "abort", "retract"]
_METHODS = {
    "nccl_xfer": "nccl_xfer_refit",
    "colocated_ipc": "nccl_xfer_refit",
    "packed_broadcast": "update_weights_from_collective",
}
DISCARDING = 2
_POLL_S = 0.05
# For an overlapped batch whose requests have ended, and for aborted requests.
_IDLE_S, _DRAIN_S = 1.0, 10.0


class SglangRefit:
    """Drives an SGLang engine that was started with ``custom_weight_loader=[LOADER]``.

    It is a :class:`~...integration.stages.SleepingEngine`, and what a :class:`~.sender.SglangSender` calls.

    Args:
        caller: the way to the engine.
        timeout_s: for running requests to end, where they are waited for.

    Attributes:
        calls: of the engine and its workers; not for steps of a refit, whose order is here.
        devices: UUIDs of the GPUs of the workers, in the order of their tensor ranks.
        loads_in_parts: SGLang's loaders take weights in several buckets.

    Raises:
        RefitError: how the engine was started; everything that is wrong with it.
    """

    loads_in_parts = True

    def __init__(self, caller: Caller, timeout_s: float = 300.0) -> None:
        self.calls = EngineCalls(caller)
        self._timeout_s = timeout_s
        self._asleep: frozenset[str] = frozenset()
        # From before the engine is asked to pause until it has said that it goes on.
        self._paused = False
        # Whether requests wait that were retracted: their keys and values are gone, and no prefixes are cached.
        self._retracted = False
        self._engine = ""
        self._sending = -1
        # What a refit left that failed: until one succeeds, nothing is to be generated.
        self._unusable: BaseException | None = None
        # The workers guard their weights from here on, and not from the first refit.
        self.calls.update([])
        self.devices: list[str] = [found["device"] for found in self.calls.ask("describe")]

    @property
    def version(self) -> int:
        """Of the weights that all workers may serve, -1 before the first refit.

        Raises:
            EngineDirty: they are not whole on a worker.
            RefitMismatch: workers hold different versions.
        """
        found = {answer["version"] for answer in self.calls.ask("serving_version")}
        if len(found) > 1:
            raise RefitMismatch(
                f"workers of one engine hold versions {sorted(found)}; refit again before anything is generated",
                stage="generate",
            )
        return int(found.pop())

    def weight_version(self) -> str:
        """What SGLang itself tells with each output (``meta_info["weight_version"]``): the version, as text."""
        return str(self.calls.step("weight_version").value)

    def require_servable(self) -> None:
        """To be called before requests are given to the engine; a paused engine would keep them waiting.

        Raises:
            EngineDirty: a refit failed or has not ended, the engine is paused, its weights are not whole, or memory is asleep.
        """
        if self._unusable is not None:
            raise EngineDirty(
                "the last refit failed and left the engine paused, so that nothing would be generated: "
                f"{type(self._unusable).__name__}: {self._unusable}. Refit again, which resumes it, or start the engine anew",
                stage="generate",
            )
        if self._asleep:
            raise EngineDirty(
                f"{' and '.join(sorted(self._asleep))} of the engine are asleep; wake them before anything is generated",
                stage="generate",
            )
        self.calls.ask("serving_version")
        if self._paused:
            raise EngineDirty(
                "the engine is paused, or has not said that it goes on, so that nothing would be generated. Refit (again), "
                "which resumes it, or start the engine anew",
                stage="generate",
            )

    # Shard to shard

    def init_refit(
        self, rendezvous: dict[str, Any], first_rank: int, config: RefitConfig, engine: str = "nccl_xfer"
    ) -> list[dict[str, Any]]:
        """Have all workers meet the trainer; ``first_rank`` is the refit rank of the first of them.

        Raises:
            RefitError: of the kind that the worker raised. Nothing has been written.
        """
        if engine not in _METHODS:
            raise RefitError(f"engine: {engine!r} is not one of {', '.join(_METHODS)}", stage="settings")
        self._require_refittable()
        answers = self.calls.ask("join", rendezvous, first_rank, asdict(config), engine)
        self._engine = engine
        return answers

    def refit(self, version: int, mode: PauseMode = "wait") -> list[dict[str, Any]]:
        """Have all workers receive the weights, and serve ``version`` from here on.

        Args:
            version: the same as on the trainer.
            mode: what becomes of running requests.

        Returns:
            The workers' records.

        Raises:
            RefitError: of the kind that the worker raised. If weights were written in part the engine stays paused, and the
                next refit that succeeds resumes it.
        """
        if not self._engine:
            raise RefitError(
                "no trainer has been met: call init_refit with the rendezvous that trainer rank 0 opened",
                stage="handshake",
            )
        self._require_refittable()
        self._quiet(mode)
        with self._refitting(version):
            records = self.calls.ask(_METHODS[self._engine], version)
        with self._keeping_paused():
            self._serve(version)
        return records

    def close_refit(self) -> None:
        """End the epoch on all workers."""
        self.calls.ask("close")
        self._engine = ""

    # Through SGLang's own loader, on the trainer's GPUs

    def begin(self, version: int, specs: Sequence[TensorSpec], mode: PauseMode = "wait") -> None:
        """Pause the engine, and have its workers see that they can take these weights, and no less.

        Raises:
            RefitError: of the worker's kind; nothing was written.
        """
        self._require_refittable()
        self._quiet(mode)
        with self._refitting():
            self.calls.ask("begin", version, [spec.to_json() for spec in specs])
        self._sending = version

    def load(self, handles: dict[str, str]) -> None:
        """Load a bucket on all workers: ``{device UUID: payload}``, whose memory may be freed afterwards.

        Raises:
            RefitError: SGLang says why. The engine stays paused until a refit succeeds.
        """
        payloads = [handles[device] for device in self.devices]
        with self._keeping_paused():
            self.calls.update(payloads, "flattened_bucket")
            # SGLang answers once its copies are queued; the sender frees what they read.
            self.calls.ask("settle")

    def finish(self) -> None:
        """After the last bucket: derived state. Raises as :meth:`load`."""
        with self._keeping_paused():
            self.calls.ask("finish", self._sending)

    def commit(self, version: int) -> None:
        """Serve ``version``. Raises as :meth:`load`."""
        with self._keeping_paused():
            self.calls.ask("commit", version)
            self._serve(version)

    # Memory by stage

    @property
    def sleeps(self) -> bool:
        """Whether SGLang can give its memory back; without its memory saver it passes over a release on a GPU in silence."""
        return bool(self.calls.settings["enable_memory_saver"]) or self.calls.settings["device"] == "cpu"

    def sleep(self, level: int = DISCARDING) -> None:
        """Release KV cache and weights. :class:`~...integration.stages.SleepingEngine`'s.

        Requests that come meanwhile wait until all has woken.

        Raises:
            StageRefused: requests are running, whose release SGLang answers by ending its scheduler; memory is asleep; SGLang
                was started without ``enable_memory_saver``; or level 1, for which it has to be started with
                ``enable_weights_cpu_backup``. Nothing has changed.
        """
        if not self.sleeps:
            raise StageRefused(
                "SGLang was started without its memory saver, so that it would free nothing as it sleeps, and the trainer would "
                "run out of memory. Nothing has changed; start it with enable_memory_saver=True",
                stage="sleep",
            )
        if level < DISCARDING and not self.calls.settings["enable_weights_cpu_backup"]:
            raise StageRefused(
                f"sleep level {level} was asked for, and SGLang keeps released weights in host memory only where it was started "
                f"with enable_weights_cpu_backup=True. Nothing has changed; start it so, or take level {DISCARDING}",
                stage="sleep",
            )
        if self._asleep:
            raise StageRefused(
                f"{', '.join(sorted(self._asleep))} sleeps already. Nothing has changed", stage="sleep"
            )
        if not (self.calls.flush(_IDLE_S).success if self._paused else self._pause_idle()):
            raise StageRefused(
                "the engine has unfinished requests, and SGLang's scheduler ends where memory is released under them. Nothing "
                "has changed; let generate() return first",
                stage="sleep",
            )
        if level >= DISCARDING:
            self.calls.ask("discard", f"a level {level} sleep discarded the weights")
        # Here, and not after: a release that fails half-way leaves memory that is not known.
        self._asleep = TAGS
        self.calls.step("release_memory_occupation", tags=[KV_CACHE])
        self.calls.step("release_memory_occupation", tags=[WEIGHTS])

    def wake(self, tags: Sequence[str] = (WEIGHTS, KV_CACHE)) -> None:
        """Take memory again: ``weights`` before a refit, ``kv_cache`` once the trainer freed its own; requests run again once
        nothing sleeps.

        Raises:
            StageRefused: a tag is unknown, or its memory is there already, for which SGLang's scheduler would end. Nothing
                has changed.
        """
        wrong = sorted(set(tags) - self._asleep)
        if wrong or not tags:
            raise StageRefused(
                f"{', '.join(wrong) or 'nothing'} can't wake: each of {', '.join(sorted(TAGS))} does so once after a sleep. "
                "Nothing has changed",
                stage="wake_up",
            )
        for tag in sorted(tags, reverse=True):  # the weights first
            self.calls.step("resume_memory_occupation", tags=[tag])
            self._asleep -= {tag}
        # What a sleep has discarded, a refit brings first.
        if not self._asleep and self._unusable is None and self._served():
            self._resume()

    def asleep(self) -> frozenset[str]:
        """Which of ``weights`` and ``kv_cache`` have no memory at the moment."""
        return self._asleep

    def empty_cache(self) -> None:
        """Have all workers give back what their allocators cache."""
        self.calls.ask("empty_cache")

    def memory(self, *, restart: bool = False) -> list[ProcessMemory]:
        """Of each worker, with the peaks since the last restart; ``restart`` lets them count anew from here."""
        return [ProcessMemory(**found) for found in self.calls.ask("memory", restart)]

    # Steps

    def _quiet(self, mode: PauseMode) -> None:
        """Let no batch run until :meth:`_resume`."""
        self._retracted = self._paused and self._retracted
        if self._paused and mode != "abort":
            return
        if mode == "wait":
            limit = time.monotonic() + self._timeout_s
            while not self._pause_idle():
                if time.monotonic() > limit:
                    raise RefitTimeout(
                        f"the engine's requests did not all end within {self._timeout_s:.0f} s, new ones included. Nothing was "
                        "written; refit with mode='abort', or stop sending requests",
                        stage="handshake",
                    )
                time.sleep(_POLL_S)
        elif mode == "retract" and not self.calls.settings["disable_radix_cache"]:
            raise RefitError(
                "mode='retract' needs an engine without cached prefixes: SGLang flushes none while retracted requests wait, so "
                "that they would go on from keys and values of the old weights. Nothing was written; start SGLang with "
                "disable_radix_cache=True, or use mode='abort' or 'wait'",
                stage="settings",
            )
        elif mode in ("abort", "retract"):
            self._retracted = mode == "retract"
            self._paused = True
            self.calls.step("pause_generation", mode=mode)
        else:
            raise RefitError(
                f"mode: {mode!r} is not one of wait, abort, retract. SGLang's in_place lets running requests go on with keys and "
                "values of the old weights, and their tokens would be no version's",
                stage="settings",
            )

    def _pause_idle(self) -> bool:
        """Pause an engine without requests, caches empty; False, and not paused, where it has some."""
        # Mostly there are none. Where there are, nothing ends while the engine is paused: it goes on, to be paused once idle.
        return self._paused_empty() or (self.calls.flush(_IDLE_S).success and self._paused_empty())

    def _paused_empty(self) -> bool:
        """Pause first, so that no request can come between the look and the pause; False, and not paused, with requests."""
        self._paused = True
        self.calls.step("pause_generation", mode="in_place")
        # Only an engine without requests is flushed.
        if not self.calls.flush().success:
            self._resume()
            return False
        return True

    def _serve(self, version: int) -> None:
        """Drop what was computed with the old weights, tell the version, and let requests run again."""
        if KV_CACHE not in self._asleep and not self._retracted:
            flushed = self.calls.flush(_DRAIN_S)
            if not flushed.success:
                raise RefitError(
                    "SGLang keeps prefixes of the old weights, since requests are left "
                    f"({flushed.message or 'it gives no reason'}). The engine stays paused; refit again with mode='abort'",
                    stage="post_load",
                )
        self.calls.step("update_weight_version", new_version=str(version))
        self._unusable = None
        if not self._asleep:
            self._resume()

    def _resume(self) -> None:
        if self._paused:
            self.calls.step("continue_generation", torch_empty_cache=False)
        self._paused = False

    @contextmanager
    def _keeping_paused(self) -> Iterator[None]:
        """After an error of any kind nothing is to be generated until a refit succeeds."""
        try:
            yield
        except BaseException as error:
            self._unusable = error
            raise

    @contextmanager
    def _refitting(self, version: int | None = None) -> Iterator[None]:
        """As :meth:`_keeping_paused`, but an engine whose weights are whole, and as they were, goes on.

        Args:
            version: that the workers may serve once they have done their part; None if they don't yet.
        """
        before = self._unusable
        try:
            with self._keeping_paused():
                yield
        except RefitError:
            served = self._served()
            # Workers that serve the new version have done so unseen, with prefixes of the old weights in their caches.
            if before is None and served and version not in served:
                if not self._asleep:
                    self._resume()
                self._unusable = None
            raise

    def _served(self) -> set[int]:
        """Versions that all workers may serve; none where the weights are not whole."""
        try:
            return {answer["version"] for answer in self.calls.ask("serving_version")}
        except RefitError:
            return set()

    def _require_refittable(self) -> None:
        if WEIGHTS in self._asleep:
            raise RefitError(
                "the engine's weights are asleep: nothing can be written into them. Nothing has moved. Wake them with "
                "wake(['weights']), refit, then wake(['kv_cache'])",
                stage="handshake",
            )
        self.calls.require_no_store()
