"""The driver's side: refit a running SGLang engine, in this process or behind its HTTP server, and put its memory to sleep.

:class:`SglangRefit` has the order of all steps, except those of a pause, which :mod:`.pausing` has. :class:`AsyncSglangRefit`
runs it for coroutines. The engine is asked each time what sleeps and whether it is paused, because other drivers and other
callers change both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from ....integration.colocated.memory import ProcessMemory
from ....integration.colocated.stages import KV_CACHE, TAGS, WEIGHTS, StageRefused
from ....integration.config import RefitConfig
from ....integration.control import Rendezvous
from ....integration.control.channel import refusals_told
from ....integration.errors import EngineDirty, RefitError, RefitMismatch
from ....integration.quantize.formats import Format, as_made, from_json
from ....integration.weights.manifest import TensorSpec
from ...trainers.qat.config import require_as_trained
from ..common.awaited import Forwarded, in_thread
from ..common.loader_trace.quantized import on_the_wire
from .callers import Caller, EngineCaller, EngineCalls
from .engine_state import PARTS, EngineState
from .pausing import DRAIN_S, PauseMode, Pauses

DISCARDING = 2
# By the trainer's key what the workers hold, and of which weights.
_HELD = {
    "trainer_quantize_fp8": (
        "FP8 blocks",
        "BF16 or FP16 matrices, for SGLang's own Fp8LinearMethod and Fp8MoEMethod",
    ),
    "trainer_quantize_int4": (
        "INT4",
        "matrices in the engine's dtype, for the WNA16 schemes of compressed-tensors, symmetric, in groups of 32, 64 or 128",
    ),
}


class SglangRefit:
    """Drives an SGLang engine that was started with ``custom_weight_loader=[LOADER]``.

    It is a :class:`~rlrefit.integration.colocated.stages.SleepingEngine`, and what a :class:`~.sender.SglangSender` calls.

    Args:
        caller: the way to the engine.
        timeout_s: how long to wait for running requests.

    Attributes:
        calls: of the engine and its workers, for other purposes than refits.
        devices: UUIDs of the GPUs of the workers, in the order of their tensor ranks.
        loads_in_parts: SGLang's loaders take weights in several buckets.
        unusable: the error of a refit that left the engine paused, until one succeeds; None if there is none.

    Raises:
        RefitError: the engine was started with settings that can't be refitted; all of them are named.
    """

    loads_in_parts = True

    def __init__(self, caller: Caller, timeout_s: float = 300.0) -> None:
        self.calls = EngineCalls(caller)
        self._pauses = Pauses(self.calls, timeout_s)
        self._engine = ""
        # Of the refit in buckets that has begun: its version, and whether SGLang's own loader can't write all of it.
        self._version, self._placing = -1, False
        self.unusable: BaseException | None = None
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

    def records(self) -> list[dict[str, Any]]:
        """What each worker tells of the last refit shard to shard: its record, and ``failed_attempt`` if a later one failed
        (:meth:`~..common.destination_mixin.DestinationRefitMixin.refit_record`)."""
        return self.calls.ask("refit_record")

    def weight_version(self) -> str:
        """The version as text, which SGLang reports with each output (``meta_info["weight_version"]``)."""
        return str(self.calls.step("weight_version").value)

    def require_servable(self) -> None:
        """Check before requests are given to the engine; a paused engine would keep them waiting.

        Raises:
            EngineDirty: a refit failed or has not ended, the engine is paused, its weights are not whole, or memory is asleep.
        """
        state = self._require_whole()
        if self._pauses.there(state):
            raise EngineDirty(
                "the engine is paused, or did not confirm that it has resumed, so nothing would be generated. Call resume(), refit "
                "again, which resumes it, or restart the engine",
                stage="generate",
            )

    # Shard to shard

    def join_refit(
        self, rendezvous: dict[str, Any], first_rank: int, config: RefitConfig, engine: str = "nccl_xfer"
    ) -> list[dict[str, Any]]:
        """Have all workers meet the trainer; ``first_rank`` is the refit rank of the first of them.

        Raises:
            RefitError: of the type that the worker raised. Nothing was written.
        """
        with refusals_told(Rendezvous.from_json(rendezvous), first_rank):
            self._require_refittable()
        answers = self.calls.ask("join", rendezvous, first_rank, asdict(config), engine)
        self._engine = engine
        return answers

    def refit(self, version: int, mode: PauseMode = "wait") -> list[dict[str, Any]]:
        """Have all workers receive the weights, and serve ``version`` from then on.

        Args:
            version: the same as on the trainer.
            mode: what becomes of running requests.

        Returns:
            The workers' records.

        Raises:
            RefitError: of the type that the worker raised. If weights were written in part, the engine stays paused until a
                refit succeeds.
        """
        if not self._engine:
            raise RefitError(
                "no trainer has been met; call join_refit with the rendezvous that trainer rank 0 opened",
                stage="handshake",
            )
        with self._refitting(mode, version):
            records = self.calls.ask("refit", version)
        with self._keeping_paused():
            self._serve(version)
        return records

    def close_refit(self) -> None:
        """End the epoch on all workers."""
        self.calls.ask("close")
        self._engine = ""

    # In buckets, on the trainer's GPUs

    def begin(
        self,
        version: int,
        specs: Sequence[TensorSpec],
        mode: PauseMode = "wait",
        config: RefitConfig | None = None,
        trained: Mapping[str, Format] | None = None,
    ) -> dict[str, Format]:
        """Pause the engine, and have its workers check that these weights fill the model and that they can take them.

        Args:
            version: of the weights to come.
            specs: as the trainer holds the weights.
            mode: what becomes of running requests.
            config: tells by which key the trainer makes codes and scales of the weights that the workers hold so, and by which rule; None
                of one that makes none.
            trained: weights that the trainer trains quantized, with their formats; None if it does not tell.

        Returns:
            The weights that the trainer has to quantize, with the formats in which it makes them; none without such a key.

        Raises:
            RefitMismatch: no worker holds any in such a format, two hold one differently, or the trainer trains others so or
                otherwise. Nothing was written.
            RefitError: of the worker's kind; nothing was written.
        """
        with self._refitting(mode):
            formats: dict[str, Format] = {}
            as_asked: tuple[bool, ...] = ()
            config = config or RefitConfig()
            quantizes = config.quantized_in_transit
            if quantizes:
                held = merged(self.calls.ask("formats", _plain(specs)))
                asked = {name: format for name, format in held.items() if format.setting == quantizes}
                formats = as_made(asked, config.int4_scale)
                if not formats:
                    what, of = _HELD[quantizes]
                    raise RefitMismatch(
                        f"{quantizes} is true, but no worker of the engine holds a weight in {what} that a trainer makes of these ({of}). "
                        f"Nothing was written; start SGLang from a checkpoint of {what}, or set {quantizes} to false",
                        stage="handshake",
                    )
                as_asked = (True,)
            if trained is not None:
                require_as_trained(formats, trained, 0)
            begun = self.calls.ask("begin", version, _plain(on_the_wire(specs, formats)), *as_asked)
            self._version, self._placing = version, any(found["placing"] for found in begun)
            return formats

    def load(self, handles: dict[str, str]) -> None:
        """Load a bucket on all workers: ``{device UUID: payload}``, whose memory may be freed afterwards.

        Raises:
            RefitError: SGLang says why. The engine stays paused until a refit succeeds.
        """
        payloads = [handles[device] for device in self.devices]
        with self._keeping_paused():
            if self._placing:
                self.calls.deliver(payloads)
            else:
                self.calls.update(payloads, "flattened_bucket")
            # SGLang answers once its copies are queued, and the sender frees what they read.
            self.calls.ask("synchronize")

    def finish(self) -> None:
        """After the last bucket: derived state. Raises as :meth:`load`."""
        with self._keeping_paused():
            self.calls.ask("finish", self._version)

    def commit(self, version: int) -> None:
        """Serve ``version``. Raises as :meth:`load`."""
        with self._keeping_paused():
            self.calls.ask("commit", version)
            self._serve(version)

    # Memory by stage

    @property
    def sleeps(self) -> bool:
        """Whether SGLang can give its memory back; without its memory saver it silently ignores a release on a GPU."""
        return bool(self.calls.settings["enable_memory_saver"]) or self.calls.settings["device"] == "cpu"

    def sleep(self, level: int = DISCARDING, mode: PauseMode | None = None) -> None:
        """Release KV cache and weights. :class:`~rlrefit.integration.colocated.stages.SleepingEngine`'s.

        Requests that come meanwhile wait until everything is awake. Requests that would crash SGLang's scheduler are rejected
        first.

        Args:
            level: 2 discards the weights, 1 keeps them in host memory.
            mode: what becomes of running requests, as :meth:`pause`'s; without it, the engine refuses to sleep while there are some.

        Raises:
            StageRefused: requests are running, or wait after a ``retract``, and SGLang's scheduler would crash at the release;
                memory is asleep; SGLang was started without ``enable_memory_saver``; or level 1 was asked for and SGLang was
                started without ``enable_weights_cpu_backup``. Nothing has changed.
            RefitTimeout: as :meth:`pause`.
        """
        if not self.sleeps:
            raise StageRefused(
                "SGLang was started without its memory saver, so a sleep would free nothing and the trainer would run out of "
                "memory. Nothing has changed; start it with enable_memory_saver=True",
                stage="sleep",
            )
        if level < DISCARDING and not self.calls.settings["enable_weights_cpu_backup"]:
            raise StageRefused(
                f"sleep level {level} keeps the weights in host memory, which needs SGLang to be started with "
                f"enable_weights_cpu_backup=True. Nothing has changed; start it so, or use level {DISCARDING}",
                stage="sleep",
            )
        if mode == "retract":
            raise StageRefused(
                "SGLang's scheduler crashes if memory is released while retracted requests wait. Nothing has changed; use "
                "mode='abort', which returns the tokens so far, and send the requests again, or mode='wait'",
                stage="sleep",
            )
        state = self.calls.state()
        if state.asleep:
            raise StageRefused(
                f"{', '.join(sorted(state.asleep))} sleeps already. Nothing has changed", stage="sleep"
            )
        if mode is not None:
            self._pauses.quiet(mode, state)
        elif not self._pauses.idle(state):
            raise StageRefused(
                "the engine has unfinished requests, and SGLang's scheduler crashes if memory is released under them. Nothing has "
                "changed; let generate() return first, or sleep with mode='abort'",
                stage="sleep",
            )
        if level >= DISCARDING:
            self.calls.ask("discard", f"a level {level} sleep discarded the weights")
        self.calls.step("release_memory_occupation", tags=[KV_CACHE])
        self.calls.step("release_memory_occupation", tags=[WEIGHTS])

    def wake(self, tags: Sequence[str] = (WEIGHTS, KV_CACHE)) -> None:
        """Take memory again: ``weights`` before a refit, ``kv_cache`` once the trainer has freed its own memory.

        Requests run again once nothing sleeps. Weights that SGLang did not keep are served only after a refit, whoever has
        released them.

        Raises:
            StageRefused: a tag is unknown, or its memory is awake, and SGLang's scheduler would crash. Nothing has changed.
        """
        state = self.calls.state()
        wrong = sorted(set(tags) - state.asleep)
        if wrong or not tags:
            raise StageRefused(
                f"{', '.join(wrong) or 'nothing'} can't wake: each of {', '.join(sorted(TAGS))} wakes once after a sleep. Nothing "
                "has changed",
                stage="wake_up",
            )
        if WEIGHTS in tags and self.sleeps and not self.calls.settings["enable_weights_cpu_backup"]:
            self.calls.ask("discard", "a sleep discarded the weights")
        for tag in sorted(tags, reverse=True):  # the weights first
            self.calls.step("resume_memory_occupation", tags=sorted(PARTS[tag] & state.released))
        # If a sleep has discarded the weights, a refit has to bring them before requests run.
        if not state.asleep - set(tags) and self.unusable is None and self._served():
            self._pauses.resume()

    def asleep(self) -> frozenset[str]:
        """Which of ``weights`` and ``kv_cache`` have no memory at the moment, whoever has released it."""
        return self.calls.state().asleep

    def pause(self, mode: PauseMode = "wait") -> None:
        """Let no request run until :meth:`resume`, the end of the next refit or the end of a sleep; new requests wait.

        Before a sleep, pause with ``abort``, so that rollouts return the tokens that they have, or with ``wait``. A
        :class:`~rlrefit.integration.colocated.cycle.ColocatedCycle` asks the workers before it lets the engine sleep, and SGLang
        answers once running requests have ended: pause before ``to_training``.

        Args:
            mode: what becomes of running requests.

        Raises:
            RefitTimeout: they don't end. Nothing has changed.
            RefitError: the engine can't be paused in this mode. Nothing has changed.
        """
        self._pauses.quiet(mode, self.calls.state())

    def resume(self) -> None:
        """Let requests run again after a :meth:`pause`, or a pause by another caller.

        Raises:
            EngineDirty: a refit failed or has not ended, the weights are not whole, or memory is asleep.
            RefitError: requests hold prefixes that old weights may have computed. The engine stays paused.
        """
        self._drop_prefixes(self._require_whole())
        self._pauses.resume()

    def seed(self, seed: int) -> None:
        """Have all workers draw from here on as those of an engine that was started with ``seed``, below 4294967296."""
        self.calls.ask("seed", seed)

    def empty_cache(self) -> None:
        """Have all workers give back what their allocators cache."""
        self.calls.ask("empty_cache")

    def memory(self, *, restart: bool = False) -> list[ProcessMemory]:
        """Of each worker, with the peaks since the last restart; ``restart`` lets them count anew from here."""
        return [ProcessMemory(**found) for found in self.calls.ask("memory", restart)]

    # Steps

    def _serve(self, version: int) -> None:
        """Drop what the old weights have computed, set the version, and let requests run again."""
        state = self.calls.state()
        self._drop_prefixes(state)
        self.calls.step("update_weight_version", new_version=str(version))
        self.unusable = None
        if not state.released:
            self._pauses.resume()

    def _drop_prefixes(self, state: EngineState) -> None:
        if KV_CACHE in state.released or self._pauses.retracted:
            return
        flushed = self.calls.flush(DRAIN_S)
        if not flushed.success:
            raise RefitError(
                "SGLang keeps prefixes of the old weights, because requests are left "
                f"({flushed.message or 'it gives no reason'}). The engine stays paused; refit again with mode='abort'",
                stage="post_load",
            )

    @contextmanager
    def _keeping_paused(self) -> Iterator[None]:
        """After any error, nothing may be generated until a refit succeeds."""
        try:
            yield
        except BaseException as error:
            self.unusable = error
            raise

    @contextmanager
    def _refitting(self, mode: PauseMode, version: int | None = None) -> Iterator[None]:
        """As :meth:`_keeping_paused`, for an engine that can be refitted and is paused here.

        After an error the engine resumes if its weights are whole and unchanged, unless it was paused before or sleeps.

        Args:
            mode: what becomes of running requests.
            version: that the workers serve at the end of the block; None if they do not serve a new one yet.
        """
        state = self._require_refittable()
        paused = self._pauses.quiet(mode, state)
        before = self.unusable
        try:
            with self._keeping_paused():
                yield
        except RefitError:
            served = self._served()
            # Workers may serve the new version although the driver got an error; their caches then hold prefixes of the old weights.
            if before is None and served and version not in served:
                if not (paused or state.released):
                    self._pauses.resume()
                self.unusable = None
            raise

    def _served(self) -> set[int]:
        """Versions that the workers serve; none if the weights are not whole."""
        try:
            return {answer["version"] for answer in self.calls.ask("serving_version")}
        except RefitError:
            return set()

    def _require_refittable(self) -> EngineState:
        self.calls.require_no_store()
        state = self.calls.state()
        if WEIGHTS in state.asleep:
            raise RefitError(
                "the engine's weights are asleep and can't be written. Nothing was written. Call wake(['weights']), refit, then "
                "wake(['kv_cache'])",
                stage="handshake",
            )
        return state

    def _require_whole(self) -> EngineState:
        """As :meth:`require_servable`, but a paused engine passes."""
        if self.unusable is not None:
            raise EngineDirty(
                "the last refit failed and left the engine paused, so nothing would be generated: "
                f"{type(self.unusable).__name__}: {self.unusable}. Refit again, which resumes it, or restart the engine",
                stage="generate",
            )
        state = self.calls.state()
        if state.asleep:
            raise EngineDirty(
                f"{' and '.join(sorted(state.asleep))} of the engine are asleep; wake them before anything is generated",
                stage="generate",
            )
        self.calls.ask("serving_version")
        return state


class AsyncSglangRefit(Forwarded):
    """:class:`SglangRefit` for coroutines: its methods, awaited; ``version()`` is one here. Make it with :meth:`open`."""

    def __init__(self, refit: SglangRefit) -> None:
        super().__init__(refit, lambda _, call: self.run(call))
        # One call at a time: SGLang's own locks do not keep the steps of a refit together.
        self._turn = asyncio.Lock()

    @staticmethod
    async def open(engine: Any, timeout_s: float = 300.0) -> AsyncSglangRefit:
        """For an ``sglang.Engine`` whose asynchronous methods are awaited in the running loop.

        Args:
            engine: the engine, or a :class:`~.callers.Caller` (of a server, say).
            timeout_s: as :class:`SglangRefit`'s.
        """
        caller = engine if hasattr(engine, "call") else EngineCaller(engine, asyncio.get_running_loop())
        return AsyncSglangRefit(await asyncio.to_thread(SglangRefit, caller, timeout_s))

    async def run[Result](self, call: Callable[..., Result], *arguments: Any) -> Result:
        """Any blocking call that uses :attr:`blocking` (a sender's refit, a cycle's move), in a thread with the caller's device."""
        async with self._turn:
            # A cancelled caller waits until its steps have ended, because others must not begin beside them.
            return await in_thread("a call of SGLang's driver", lambda: call(*arguments))


def merged(answers: Sequence[Mapping[str, Any]]) -> dict[str, Format]:
    """What all workers together hold quantized; each may hold experts that others don't.

    Raises:
        RefitMismatch: two workers hold one weight in different formats.
        RefitError: a worker's answer names an unknown format.
    """
    found: dict[str, Format] = {}
    for rank, answer in enumerate(answers):
        try:
            kinds = [from_json(kind) for kind in answer["formats"]]
        except ValueError as error:
            raise RefitError(
                f"SGLang worker {rank} names a format that is unknown here: {error}. Nothing was written",
                stage="handshake",
                rank=rank,
            ) from error
        for name, which in answer["weights"].items():
            if found.setdefault(name, kinds[which]) != kinds[which]:
                raise RefitMismatch(
                    f"SGLang worker {rank} holds it as {kinds[which]} and another worker as {found[name]}, but the trainer "
                    "quantizes it once for all workers. Nothing was written; start all workers with the same kernels",
                    stage="handshake",
                    rank=rank,
                    parameter=name,
                )
    return found


def _plain(specs: Sequence[TensorSpec]) -> list[Any]:
    return [spec.to_json() for spec in specs]
