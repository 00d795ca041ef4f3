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

from rlrefit.integration.errors import RefitError, RefitMismatch, RefitTimeout
from rlrefit.workers.frameworks.nemo_rl.full_tensors import FullTensorEngine

MIB = 1 << 20
# Over several buckets of 1 MiB: one larger than two of them, odd sizes, scalars and types that torch can't add up.
SPECS = {
    "model.embed_tokens.weight": ((1200, 1024), torch.bfloat16),
    "model.layers.0.input_layernorm.weight": ((513,), torch.float32),
    "model.layers.0.self_attn.q_proj.weight": ((256, 1024), torch.bfloat16),
    "model.layers.0.mlp.experts.0.w.weight": ((300, 1000), torch.float8_e4m3fn),
    "model.layers.0.self_attn.k_scale": ((), torch.float32),
    "lm_head.weight": ((400, 1024), torch.float32),
}


def weight(name: str, version: int) -> torch.Tensor:
    shape, dtype = SPECS[name]
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 1009 + version)
    return (torch.randn(shape, generator=generator) * 8).to(dtype)


def exported(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name in SPECS:
        whole = weight(name, version)
        # Not contiguous, as exports of fused weights are.
        yield name, whole.t().contiguous().t() if whole.dim() == 2 else whole


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

    def sync(self, version: int) -> list[dict[str, torch.Tensor]]:
        """What the loaders of vLLM's workers were given."""

        def one(rank: int) -> dict[str, torch.Tensor]:
            engine = self.engines[rank]
            if rank < 2:
                asyncio.run(engine.send_weights(exported(version)))
                return {}
            return asyncio.run(self.load(engine))

        return self.all(one)[2:]

    async def load(self, engine: FullTensorEngine) -> dict[str, torch.Tensor]:
        loaded: dict[str, torch.Tensor] = {}
        async for batch in engine.receive_weight_batches():
            assert sum(tensor.nbytes for _, tensor in batch) <= MIB or len(batch) == 1
            for name, tensor in batch:
                assert name not in loaded
                loaded[name] = tensor.clone()
        return loaded

    def all(self, call: Callable[[int], Any]) -> list[Any]:
        """``call(rank)`` on all ranks at once; the first error."""
        with ThreadPoolExecutor(4) as pool:
            pending = [pool.submit(call, rank) for rank in range(4)]
        return [future.result() for future in pending]

    def finalize(self) -> None:
        for engine in self.engines:
            engine.finalize()


def assert_bit_exact(loaded: dict[str, torch.Tensor], version: int) -> None:
    assert list(loaded) == list(SPECS)
    for name, tensor in loaded.items():
        whole = weight(name, version)
        assert (tensor.shape, tensor.dtype) == (whole.shape, whole.dtype)
        assert tensor.view(-1).view(torch.uint8).equal(whole.contiguous().view(-1).view(torch.uint8)), name


def test_two_changed_updates_arrive_bit_for_bit_over_one_group(tmp_path: Path) -> None:
    workers = Workers(timeout_s=60.0, verify="full", records_dir=str(tmp_path), release_after_refit=False)
    workers.ready()
    for version in (1, 2):
        for loaded in workers.sync(version):
            assert_bit_exact(loaded, version)
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
    with pytest.raises(RefitError, match=r"refit_cfg\[…\]\.records_dir: no record can be written to "):
        Workers(records_dir=str(folder))
    folder.unlink()
    workers = Workers(timeout_s=60.0, records_dir=str(folder))
    workers.ready()
    shutil.rmtree(folder)
    folder.touch()
    for version in (1, 2):
        for loaded in workers.sync(version):
            assert_bit_exact(loaded, version)
        assert f"the record of version {version} was not written to" in caplog.text
    assert [engine.version for engine in workers.engines] == [2] * 4
    workers.finalize()


def test_release_after_refit_meets_anew_for_each_update() -> None:
    workers = Workers(timeout_s=60.0, release_after_refit=True)
    for version in (1, 2):
        workers.ready()
        for loaded in workers.sync(version):
            assert_bit_exact(loaded, version)
        workers.finalize()
    assert [engine.version for engine in workers.engines] == [2] * 4


@pytest.mark.parametrize("behind", [0, 3])
def test_a_worker_that_did_not_hear_of_the_last_commit_goes_on_with_the_others_in_the_next_group(
    behind: int,
) -> None:
    workers = Workers(timeout_s=20.0, release_after_refit=True)
    workers.ready()
    workers.sync(1)
    workers.finalize()
    workers.engines[behind].version = 0
    workers.ready()
    for loaded in workers.sync(2):
        assert_bit_exact(loaded, 2)
    assert [engine.version for engine in workers.engines] == [2] * 4
    workers.finalize()


def test_a_worker_that_does_not_come_ends_the_update_in_time_on_all_others() -> None:
    workers = Workers(timeout_s=1.0)
    workers.ready()

    def one(rank: int) -> Exception | None:
        engine = workers.engines[rank]
        try:
            if rank < 2:
                asyncio.run(engine.send_weights(exported(1)))
            elif rank == 2:
                asyncio.run(workers.load(engine))
        except RefitError as error:
            return error
        return None

    errors = workers.all(one)
    assert errors.pop() is None
    assert any(isinstance(error, RefitTimeout) and "generation rank 1" in str(error) for error in errors)
    assert all(isinstance(error, RefitError) for error in errors)
    with pytest.raises(RefitError, match="has ended"):
        asyncio.run(workers.engines[0].send_weights(exported(2)))
    workers.finalize()


def test_a_loader_that_fails_ends_the_update_on_all_others() -> None:
    workers = Workers(timeout_s=60.0)
    workers.ready()

    async def failing(engine: FullTensorEngine) -> None:
        async for _ in engine.receive_weight_batches():
            raise KeyError("vLLM's loader knows no such weight")

    def one(rank: int) -> Exception | None:
        engine = workers.engines[rank]
        try:
            asyncio.run(
                engine.send_weights(exported(1))
                if rank < 2
                else (failing(engine) if rank == 2 else workers.load(engine))
            )
        except (RefitError, KeyError) as error:
            return error
        return None

    errors = workers.all(one)
    assert isinstance(errors.pop(2), KeyError)
    assert all(isinstance(error, RefitError) for error in errors)
    workers.finalize()


def test_all_wrong_options_are_told_at_once() -> None:
    with pytest.raises(RefitError) as error:
        FullTensorEngine(
            0,
            timeout_s=0,
            verify="some",
            port=1,
            release_after_refit="no",
            records_dir=3,
            update_weights_bucket_memory_ration=1,
        )
    for part in (
        ".timeout_s: 0 is not above 0",
        ".verify: 'some' is not one of off, sampled, full",
        "].port: there is no such key; the keys of policy.generation.refit_cfg[…] are timeout_s, verify, records_dir, "
        "release_after_refit, update_weights_bucket_memory_ratio",
        ".release_after_refit: 'no' is not true or false",
        ".records_dir: 3 is not a string or null",
        "did you mean policy.generation.refit_cfg[…].update_weights_bucket_memory_ratio?",
        "update_weights_bucket_memory_ratio leaves no room for a weight; give a larger one",
    ):
        assert part in str(error.value)


def test_workers_of_another_protocol_are_refused_by_their_ranks() -> None:
    engine = FullTensorEngine(MIB)
    metadata = [engine.prepare(), {"protocol": 0}]
    with pytest.raises(RefitMismatch, match=r"another rlrefit than this one's: \[1\]"):
        engine.init_policy_process_group(
            worker_rank=0, train_world_size=1, rollout_world_size=1, metadata=metadata
        )
    engine.finalize()
