"""Updates of full tensors, by the calls of NeMo-RL's ``CheckpointEngineWeightSynchronizer`` in its order: two policy workers
and two of vLLM, each an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rlrefit.integration.errors import RefitError, RefitMismatch
from rlrefit.workers.frameworks.nemo_rl.full_tensors import FullTensorEngine
from tests.odd_weights import SPECS, as_exported, weight, wrong

MIB = 1 << 20


def exported(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, as_exported(weight(name, version))) for name in SPECS)


async def load(engine: FullTensorEngine) -> dict[str, torch.Tensor]:
    """What a worker of vLLM gets for its loader."""
    loaded: dict[str, torch.Tensor] = {}
    async for batch in engine.receive_weight_batches():
        assert sum(tensor.nbytes for _, tensor in batch) <= MIB or len(batch) == 1
        for name, tensor in batch:
            assert name not in loaded
            loaded[name] = tensor.clone()
    return loaded


class Workers:
    """Two policy workers and two of vLLM, as NeMo-RL's synchronizer drives them."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.engines = [FullTensorEngine(bucket_size=MIB, **options) for _ in range(4)]

    def ready(self) -> None:
        metadata = [engine.prepare() | {"rank": rank % 2} for rank, engine in enumerate(self.engines)]
        topology = {"train_world_size": 2, "rollout_world_size": 2, "metadata": metadata}
        self.all(
            lambda rank: (
                self.engines[rank].init_policy_process_group(worker_rank=rank, **topology)
                if rank < 2
                else self.engines[rank].init_rollout_process_group(rollout_rank=rank - 2, **topology)
            )
        )

    def sync(self, version: int) -> None:
        """An update, and what the loaders of vLLM's workers were given is right."""

        def one(rank: int) -> dict[str, torch.Tensor]:
            engine = self.engines[rank]
            if rank >= 2:
                return asyncio.run(load(engine))
            asyncio.run(engine.send_weights(exported(version)))
            return {}

        for loaded in self.all(one)[2:]:
            assert list(loaded) == list(SPECS)
            assert wrong(loaded, version) == []

    def all(self, call: Callable[[int], Any]) -> list[Any]:
        """``call(rank)`` on all ranks at once."""
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(call, range(4)))

    def finalize(self) -> None:
        for engine in self.engines:
            engine.finalize()


def test_two_changed_updates_arrive_bit_for_bit_over_one_group(tmp_path: Path) -> None:
    workers = Workers(timeout_s=60.0, verify="full", records_dir=str(tmp_path), release_after_refit=False)
    workers.ready()
    for version in (1, 2):
        workers.sync(version)
    workers.finalize()
    records = [json.loads(line) for line in (tmp_path / "refits-generation-1.jsonl").read_text().splitlines()]
    assert [(record["version"], record["epoch"], record["rank"]) for record in records] == [
        (1, 1, 3),
        (2, 1, 3),
    ]
    assert all(record["bytes_verified"] == record["bytes_misc"] > 4 * MIB for record in records)


def test_records_that_cannot_be_written_are_refused_at_the_start_and_fail_no_update_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "records"
    folder.touch()
    with pytest.raises(RefitError, match="records_dir"):
        Workers(records_dir=str(folder))
    folder.unlink()
    workers = Workers(timeout_s=60.0, records_dir=str(folder))
    workers.ready()
    shutil.rmtree(folder)
    folder.touch()
    for version in (1, 2):
        workers.sync(version)
        assert f"version {version}" in caplog.text
    assert [engine.version for engine in workers.engines] == [2] * 4
    workers.finalize()


@pytest.mark.parametrize("behind", [None, 0, 3])
def test_release_after_refit_meets_anew_and_takes_along_who_did_not_hear_of_the_last_commit(
    behind: int | None,
) -> None:
    workers = Workers(timeout_s=20.0, release_after_refit=True)
    workers.ready()
    workers.sync(1)
    workers.finalize()
    if behind is not None:
        workers.engines[behind].version = 0
    workers.ready()
    workers.sync(2)
    assert [engine.version for engine in workers.engines] == [2] * 4
    workers.finalize()


def test_all_wrong_options_are_told_at_once() -> None:
    options: dict[str, Any] = {
        "timeout_s": 0,
        "verify": "some",
        "port": 1,
        "release_after_refit": "no",
        "records_dir": 3,
        "update_weights_bucket_memory_ration": 1,
    }
    with pytest.raises(RefitError) as error:
        FullTensorEngine(0, **options)
    for key in options:
        assert f"policy.generation.refit_cfg[…].{key}: " in str(error.value)
    assert "update_weights_bucket_memory_ratio leaves no room" in str(error.value)


def test_workers_of_another_protocol_are_refused_by_their_ranks() -> None:
    engine = FullTensorEngine(MIB)
    metadata = [engine.prepare(), {"protocol": 0}]
    with pytest.raises(RefitMismatch, match=r"\[1\]"):
        engine.init_policy_process_group(
            worker_rank=0, train_world_size=1, rollout_world_size=1, metadata=metadata
        )
    engine.finalize()
