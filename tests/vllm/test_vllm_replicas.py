"""An ``AsyncLLM`` with two data-parallel replicas behind one driver: both are refitted, and each answers for itself."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm_checkpoints import dense_config, write_checkpoint

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import EngineDirty
from tests.ahead import FoundAhead
from tests.meeting import meeting_in
from tests.vllm_follower import CONFIG, ENGINE, follow, joined, six_tokens
from tests.vllm_processes import vllm_processes

REPLICAS = 2
# Of each refit: the trainer's weights are those of this checkpoint. The engine starts with the first.
SENT = (1, 0)
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
    """

    digests: list[list[dict[str, str]]]
    answers: list[list[Answer]]
    ranks: list[list[int]]
    refused: str


def serve(folder: Path) -> Served:
    return asyncio.run(_serve(folder))


async def _serve(folder: Path) -> Served:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from rlrefit.workers.vllm.driver import AsyncVllmDriver

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

    async def ask(index: int) -> Answer:
        prompt: Any = {"prompt_token_ids": PROMPTS[index]}
        async for found in driver.generate(prompt, six_tokens(), f"{len(answers)}.{index}"):
            last = found
        return list(last.output.outputs[0].token_ids), list(last.versions[0])

    async def look() -> None:
        digests.append(await driver._rpc("refit_parameter_digests"))
        answers.append(await asyncio.gather(*map(ask, range(len(PROMPTS)))))

    await look()
    meeting = await asyncio.to_thread(meeting_in, folder)
    await driver.init_refit(meeting, 1, RefitConfig(**CONFIG))
    for version in range(len(SENT)):
        await driver._cores.ask_workers("probe_poison")
        ranks.append([record["rank"] for record in await driver.refit(version)])
        assert await driver.serving_version() == version
        await look()
    await driver._cores.ask_workers("probe_dirty_replica", 1)
    with pytest.raises(EngineDirty) as refused:
        await driver.serving_version()
    await driver.close_refit()
    llm.shutdown()
    return Served(digests, answers, ranks, str(refused.value))


def train(folder: Path) -> None:
    models = [AutoModelForCausalLM.from_pretrained(folder / str(i), dtype=torch.bfloat16) for i in SENT]
    with joined(models[0], folder, RefitConfig(**CONFIG), REPLICAS) as trainer:
        for version, sent in enumerate(models):
            with torch.no_grad():
                for own, other in zip(trainer.model.parameters(), sent.parameters(), strict=True):
                    own.copy_(other)
            trainer.nccl_xfer_refit(version)


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
    assert served.ranks == [[1, 2], [1, 2]]
    start, first, second = served.digests
    assert start[0] == start[1] == second[0] == second[1]
    assert first[0] == first[1]
    assert all(first[0][name] != start[0][name] for name in start[0])


def test_requests_on_all_replicas_come_from_the_version_they_tell(served: Served) -> None:
    for version, answers in enumerate(served.answers, start=-1):
        assert {turn for _, versions in answers for turn in versions} == {version}
        # The same prompts in other replicas.
        assert answers[0][0] == answers[1][0]
        assert answers[2][0] == answers[3][0]
    start, first, second = ([tokens for tokens, _ in answers] for answers in served.answers)
    assert start == second != first


def test_weights_that_one_replica_alone_holds_in_part_are_told(served: Served) -> None:
    assert "vLLM worker 1" in served.refused
    assert "refit 99 began" in served.refused
