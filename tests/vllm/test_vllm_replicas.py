"""An ``AsyncLLM`` with two data-parallel replicas behind one driver: both are refitted and sleep, and each answers for itself."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm_checkpoints import dense_config, write_checkpoint

from rlrefit.integration.colocated.memory import StageRecord
from rlrefit.integration.colocated.stages import TAGS, StageRefused
from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import EngineDirty
from rlrefit.integration.records.record import RefitRecord
from tests.ahead import FoundAhead
from tests.meeting import meeting_in
from tests.stages.pool import TrainersElsewhere
from tests.vllm_follower import CONFIG, ENGINE, follow, joined, likeliest
from tests.vllm_processes import vllm_processes

REPLICAS = 2
# Of each refit: the trainer's weights are those of this checkpoint. The engine starts with the first, and takes turns with
# the trainer for the last two.
SENT = (1, 0, 1, 0)
TURNS = 2
PROMPTS = [[5, 17, 33, 90], [5, 17, 33, 90], [101, 7, 8], [101, 7, 8]]
Answer = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Served:
    """What the engine gave, at its start and after each refit.

    Attributes:
        digests: of each replica's parameters.
        answers: tokens and their versions, of each prompt.
        ranks: that reported, of each refit.
        refused: by the driver, of an engine whose second replica alone holds weights that are not whole.
        early: what requests gave that came while the engine slept, of each turn.
    """

    digests: list[list[dict[str, str]]]
    answers: list[list[Answer]]
    ranks: list[list[int]]
    refused: str
    early: list[list[Answer]]
    stages: list[StageRecord]


def serve(folder: Path) -> Served:
    return asyncio.run(_serve(folder))


async def _serve(folder: Path) -> Served:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from rlrefit.workers.engines.common.awaited import AwaitedCycle
    from rlrefit.workers.engines.vllm.async_driver import AsyncVllmDriver
    from rlrefit.workers.engines.vllm.colocated import AwaitedVllmSleeper

    arguments = AsyncEngineArgs(
        model=str(folder / "0"),
        max_model_len=256,
        data_parallel_size=REPLICAS,
        worker_extension_cls="vllm_probe.ProbeExtension",
        **ENGINE,
    )
    # As engines' processes: it would load vLLM for ten seconds otherwise.
    with mock.patch("vllm.v1.engine.coordinator.get_mp_context", vllm_processes):
        llm = AsyncLLM.from_engine_args(arguments)
    driver = AsyncVllmDriver(llm)
    digests: list[list[dict[str, str]]] = []
    answers: list[list[Answer]] = []
    ranks: list[list[int]] = []
    requests = itertools.count()

    async def ask(index: int, tokens: int = 6) -> Answer:
        prompt: Any = {"prompt_token_ids": PROMPTS[index]}
        async for found in driver.generate(prompt, likeliest(tokens), f"request {next(requests)}"):
            last = found
        return list(last.output.outputs[0].token_ids), list(last.versions[0])

    async def look() -> None:
        digests.append(await driver._rpc("refit_parameter_digests"))
        answers.append(await asyncio.gather(*map(ask, range(len(PROMPTS)))))

    await look()
    meeting = await asyncio.to_thread(meeting_in, folder)
    await driver.join_refit(meeting, 1, RefitConfig(**CONFIG))

    async def refit(version: int) -> list[RefitRecord]:
        await driver._cores.ask_workers("probe_poison")
        records = [RefitRecord(**record) for record in await driver.refit(version)]
        ranks.append([record.rank for record in records])
        return records

    for version in range(len(SENT) - TURNS):
        await refit(version)
        assert await driver.serving_version() == version
        await look()
    early: list[list[Answer]] = []
    stages: list[StageRecord] = []
    cycle = await AwaitedCycle.open(
        AwaitedVllmSleeper([driver]), TrainersElsewhere(), refit, on_stage=stages.append
    )
    for version in range(len(SENT) - TURNS, len(SENT)):
        running = asyncio.create_task(ask(0, 200))
        while not driver.busy:
            await asyncio.sleep(0)
        with pytest.raises(StageRefused, match="engine 0 has unfinished requests"):
            await cycle.to_training()
        await running
        await cycle.to_training()
        assert [answer["asleep"] for answer in await driver._rpc("refit_asleep")] == [sorted(TAGS)] * REPLICAS
        coming = [asyncio.create_task(ask(index)) for index in range(len(PROMPTS))]
        await asyncio.sleep(0.3)
        with pytest.raises(EngineDirty, match="sleep"):
            await driver.serving_version()
        await cycle.to_generation(version)
        assert await driver.serving_version() == version
        early.append(await asyncio.gather(*coming))
        await cycle.generate(look)
    await driver._cores.ask_workers("probe_dirty_replica", 1)
    with pytest.raises(EngineDirty) as refused:
        await driver.serving_version()
    await driver.close_refit()
    llm.shutdown()
    return Served(digests, answers, ranks, str(refused.value), early, stages)


def train(folder: Path) -> None:
    models = [AutoModelForCausalLM.from_pretrained(folder / str(i), dtype=torch.bfloat16) for i in (0, 1, 0)]
    with joined(models[-1], folder, RefitConfig(**CONFIG), REPLICAS) as trainer:
        for version, index in enumerate(SENT):
            with torch.no_grad():
                for own, other in zip(trainer.model.parameters(), models[index].parameters(), strict=True):
                    own.copy_(other)
            trainer.refit(version)


def serve_replicas(folder: Path) -> Served:
    config = dense_config()
    config.vocab_size = 128  # without padding, which would keep the poison that it is given
    for index in range(2):
        write_checkpoint(folder / str(index), config, seed=index + 1)
    return follow(serve, train, folder)


AHEAD = (serve_replicas,)


@pytest.fixture(scope="module")
def served(found_ahead: FoundAhead) -> Served:
    return found_ahead.by(serve_replicas)


def test_every_replica_holds_what_the_trainer_sent(served: Served) -> None:
    assert served.ranks == [[1, 2]] * len(SENT)
    start, *refitted = served.digests
    assert all(of_replicas[0] == of_replicas[1] for of_replicas in served.digests)
    assert [of_replicas == start for of_replicas in refitted] == [index == 0 for index in SENT]
    assert refitted[:2] == refitted[2:]
    assert all(refitted[0][0][name] != start[0][name] for name in start[0])


def test_requests_on_all_replicas_come_from_the_version_they_tell(served: Served) -> None:
    for version, answers in enumerate(served.answers, start=-1):
        assert {turn for _, versions in answers for turn in versions} == {version}
        # The same prompts in other replicas.
        assert answers[0][0] == answers[1][0]
        assert answers[2][0] == answers[3][0]
    start, first, *others = ([tokens for tokens, _ in answers] for answers in served.answers)
    assert start != first
    assert others == [start, first, start]
    # Those that came while all replicas slept run on the weights of the turn.
    assert served.early == served.answers[-TURNS:]


def test_turns_with_a_trainer_lead_all_replicas_through_every_stage(served: Served) -> None:
    to_training = ("sleep", "load_trainer")
    to_generation = ("offload_trainer", "wake_weights", "refit", "free_trainer", "wake_kv_cache", "generate")
    moves = [record.move for record in served.stages if not record.failed]
    assert moves == [*to_training, *to_generation] * TURNS
    for record in served.stages:
        assert [p.process for p in record.processes] == [f"engine rank {rank}" for rank in range(REPLICAS)]
    assert [record.move for record in served.stages if record.failed] == ["sleep"] * TURNS


def test_weights_that_one_replica_alone_holds_in_part_are_told(served: Served) -> None:
    assert "vLLM worker 1" in served.refused
