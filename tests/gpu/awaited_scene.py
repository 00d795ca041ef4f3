"""A trainer and vLLM's ``AsyncLLM`` on one GPU, in two processes, that take turns in an event loop; tests look at what they found.

The engine starts from the second of two checkpoints. The trainer's turns bring the first one, the second, and both again: every
turn changes all weights, and what the engine has to hold and to say after each other one is known from its start.
"""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from rlrefit.integration.colocated.memory import StageRecord
from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control import open_rendezvous
from rlrefit.integration.errors import RefitError
from rlrefit.integration.records.record import RefitRecord

from .awaited_trainer import Sampled, Trainer, write_checkpoint
from .vllm_checkpoints import read_checkpoint
from .vllm_live import EAGER, PROMPTS, engine_environment

# After so many seconds all threads tell where they are: somebody waits in vain.
TELL_AT = 120
# Much more than the weights take.
KV_CACHE = 4 << 30
TOKENS = 24
# More than it gets to: it is cancelled.
ENDLESS = 1900
ENGINE: dict[str, Any] = {
    **EAGER,
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "gpu_memory_utilization": 0.3,
    "kv_cache_memory_bytes": KV_CACHE,
    "enable_flashinfer_autotune": False,
    "enable_sleep_mode": True,
    "disable_log_stats": True,
    "worker_extension_cls": "tests.gpu.vllm_extension.PoisonExtension",
}
CONFIG = RefitConfig(bucket_mb=64, timeout_s=60.0, verify="full")
# Versions: by turns in stages, from a sleep that keeps nothing; by turns that wake all at once, from one that keeps the weights.
IN_STAGES, AT_ONCE = (0, 1), (2, 3)


@dataclass(frozen=True)
class Turn:
    """The engine after a refit.

    Attributes:
        trained: digests of the trainer's weights, as the parameters that vLLM makes of them.
        held: digests of the engine's.
        late: what a request gave that came while the engine slept; None of a turn without one.
        said: what requests gave, one by one.
        together: the same prompts as one rollout.
        records: of both sides.
    """

    trained: dict[str, str]
    held: dict[str, str]
    late: Sampled | None
    said: list[Sampled]
    together: list[Sampled]
    records: list[RefitRecord]


@dataclass
class Found:
    """Of the whole scene.

    Attributes:
        held: digests of the engine as it was started.
        said: by it.
        weight_bytes: of all its parameters.
        turns: by version.
        apart: largest difference of a token's log-probabilities by engine and trainer, of all turns but the last.
        used: of the GPU's bytes, along the first turn.
        refused: what was asked for out of turn → kind and text of the error.
        stages: the account of all moves.
        seconds: by what took them.
    """

    held: dict[str, str] = field(default_factory=dict)
    said: list[Sampled] = field(default_factory=list)
    weight_bytes: int = 0
    turns: list[Turn] = field(default_factory=list)
    apart: list[float] = field(default_factory=list)
    used: dict[str, int] = field(default_factory=dict)
    refused: dict[str, tuple[str, str]] = field(default_factory=dict)
    stages: list[StageRecord] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


class Refits:
    """Between this process and vLLM's, awaited; every parameter is NaN before."""

    def __init__(self, llm: Any, driver: Any, trainer: Trainer) -> None:
        self._llm, self._driver, self._trainer = llm, driver, trainer
        self._server = open_rendezvous("127.0.0.1", 1, 1)
        self._session: Any = None

    async def __call__(self, version: int) -> list[RefitRecord]:
        if self._session is None:
            # Not before: both need their weights to be there.
            await self._meet()
        await self._llm.collective_rpc("poison")
        sent, received = await self._both(lambda: self._session.refit(version), self._driver.refit(version))
        return [sent, *(RefitRecord(**record) for record in received)]

    async def close(self) -> None:
        if self._session is not None:
            await self._both(self._session.close, self._driver.close_refit())
        self._server.close()

    async def _meet(self) -> None:
        from rlrefit.integration.session import RefitSession
        from rlrefit.workers.trainers.fsdp.source import FSDPSource

        meeting, kind = self._server.rendezvous, "colocated_ipc"

        def join() -> RefitSession:
            return RefitSession.open(meeting, 0, lambda: FSDPSource(self._trainer.model), CONFIG, engine=kind)

        self._session, _ = await self._both(join, self._driver.join_refit(meeting.to_json(), 1, CONFIG, kind))

    async def _both(self, ours: Callable[[], Any], theirs: Awaitable[Any]) -> list[Any]:
        """What the trainer's side gives, which blocks, and the engine's; the end of both is awaited in any case."""
        from rlrefit.workers.engines.vllm.async_driver import all_answers

        return await all_answers([asyncio.to_thread(ours), theirs])


def used() -> int:
    """Of the GPU's bytes, by all processes, without what this one's allocator caches."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


async def refused(call: Awaitable[Any]) -> tuple[str, str]:
    """Kind and text of what a call is refused with."""
    try:
        await call
    except RefitError as error:
        return type(error).__name__, str(error)
    return "", "it was not refused"


class Scene:
    def __init__(self, llm: Any, paths: list[str]) -> None:
        from rlrefit.workers.engines.vllm.async_driver import AsyncVllmDriver

        self.found = Found()
        self._llm = llm
        self._driver = AsyncVllmDriver(llm)
        self._trainer = Trainer(paths)
        self._refits = Refits(llm, self._driver, self._trainer)
        self._requests = itertools.count()
        # One for all turns: to each thread that multiplies, cuBLAS gives a workspace of its own.
        self._trainers = ThreadPoolExecutor(1)
        self._trained: dict[str, str] = {}

    async def play(self) -> Found:
        found = self.found
        found.held, found.said = await self._digests(), await self._one_by_one()
        cycle = await self._cycle()
        await self._turn_move_by_move(cycle)
        await self._leave_rollouts(cycle)
        await self._turn(cycle, IN_STAGES[1], late=True)
        # All at once an engine that has kept its weights runs what waits before the refit.
        cycle = await self._cycle(multi_stage_wake_up=False, sleep_level=1)
        for version in AT_ONCE:
            await self._turn(cycle, version, late=False)
        await self._refits.close()
        return found

    async def _cycle(self, **settings: Any) -> Any:
        from rlrefit.workers.engines.common.awaited import AwaitedCycle
        from rlrefit.workers.engines.vllm.colocated import AwaitedVllmSleeper

        engine = AwaitedVllmSleeper([self._driver])
        return await AwaitedCycle.open(
            engine, self._trainer, self._refits, on_stage=self.found.stages.append, **settings
        )

    async def _turn_move_by_move(self, cycle: Any) -> None:
        """The first one: with looks at the GPU's memory, and calls out of turn."""
        memory, told, [version, _] = self.found.used, self.found.refused, IN_STAGES
        told["refit, of an engine awake"] = await refused(cycle.refit(version))
        memory["awake"] = used()
        await cycle.sleep()
        memory["asleep"] = used()
        told["the version, of one asleep"] = await refused(self._driver.serving_version())
        await cycle.load_trainer()
        await self._learn(cycle, version)
        memory["training"] = used()
        told["generate, in training"] = await refused(cycle.generate(self._one_by_one))
        await cycle.offload_trainer()
        memory["trainer offloaded"] = used()
        await cycle.wake_weights()
        memory["weights awake"] = used()
        records = await cycle.refit(version)
        memory["refitted"] = used()
        told["wake_kv_cache, before the trainer has left"] = await refused(cycle.wake_kv_cache())
        await cycle.free_trainer()
        memory["trainer freed"] = used()
        told["generate, without a KV cache"] = await refused(cycle.generate(self._one_by_one))
        await cycle.wake_kv_cache()
        memory["awake again"] = used()
        await self._look(cycle, None, records)

    async def _leave_rollouts(self, cycle: Any) -> None:
        """A rollout that is cancelled keeps the engine from nothing, and a request that is not the cycle's does."""
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(cycle.generate(lambda: self._ask(PROMPTS[0], ENDLESS)), 0.5)
        assert not self._driver.busy
        outside = asyncio.create_task(self._ask(PROMPTS[0], ENDLESS))
        await self._until_busy(outside)
        self.found.refused["to_training, beside a request"] = await refused(cycle.to_training())
        assert not outside.done()
        outside.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outside

    async def _turn(self, cycle: Any, version: int, *, late: bool) -> None:
        await cycle.to_training()
        said = self.found.turns[-1].said
        apart = await self._train(cycle, lambda: self._trainer.apart(said))
        self.found.apart.append(apart)
        await self._learn(cycle, version)
        coming = None
        if late:
            coming = asyncio.create_task(self._ask(PROMPTS[0]))
            await self._until_busy(coming)
        records = await cycle.to_generation(version)
        await self._look(cycle, await coming if coming else None, records)

    async def _learn(self, cycle: Any, version: int) -> None:
        def learn() -> dict[str, str]:
            self._trainer.step(version)
            return self._trainer.digests()

        self._trained = await self._train(cycle, learn)

    async def _train[Result](self, cycle: Any, work: Callable[[], Result]) -> Result:
        loop = asyncio.get_running_loop()
        return await cycle.train(lambda: loop.run_in_executor(self._trainers, work))

    async def _look(self, cycle: Any, late: Sampled | None, records: list[RefitRecord]) -> None:
        async def together() -> list[Sampled]:
            running = [asyncio.create_task(self._ask(prompt)) for prompt in PROMPTS]
            self.found.refused["to_training, beside a rollout"] = await refused(cycle.to_training())
            return await asyncio.gather(*running)

        held = await self._digests()
        said = await cycle.generate(self._one_by_one)
        self.found.turns.append(
            Turn(self._trained, held, late, said, await cycle.generate(together), records)
        )

    async def _digests(self) -> dict[str, str]:
        [found] = await self._llm.collective_rpc("refit_parameter_digests")
        return found

    async def _one_by_one(self) -> list[Sampled]:
        # Which requests a step has together depends on time, and kernels round by what is in a step.
        return [await self._ask(prompt) for prompt in PROMPTS]

    async def _ask(self, prompt: list[int], tokens: int = TOKENS) -> Sampled:
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0
        )
        request = f"request {next(self._requests)}"
        async for found in self._driver.generate({"prompt_token_ids": prompt}, parameters, request):
            last = found
        [completion], [versions] = last.output.outputs, last.versions
        logprobs = [e[t].logprob for t, e in zip(completion.token_ids, completion.logprobs, strict=True)]
        return Sampled(prompt, list(completion.token_ids), logprobs, set(versions))

    async def _until_busy(self, request: asyncio.Task[Sampled]) -> None:
        while not self._driver.busy:
            assert not request.done(), request
            await asyncio.sleep(0.01)


async def scene(folder: Path, results: Any) -> None:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    began = time.monotonic()
    paths = [write_checkpoint(folder, seed) for seed in (0, 1)]
    written = time.monotonic()
    # Before this process takes any of the GPU.
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=paths[1], **ENGINE))
    started = time.monotonic()
    try:
        found = await Scene(llm, paths).play()
        found.weight_bytes = sum(tensor.nbytes for tensor in read_checkpoint(paths[1]).values())
        found.seconds = {
            "checkpoints": written - began,
            "vLLM's start": started - written,
            "turns": time.monotonic() - started,
        }
        results.send(found)
    finally:
        llm.shutdown()


def scene_main(folder: str, results: Any) -> None:
    faulthandler.dump_traceback_later(TELL_AT)
    try:
        with engine_environment({}):
            asyncio.run(scene(Path(folder), results))
    except BaseException:
        results.send(traceback.format_exc())
        raise
