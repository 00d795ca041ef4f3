"""The policy under FSDP2 over NCCL against one plain process on the CPU, and across a restart."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.fsdp_policy.models import Oracle, write_checkpoint
from tests.fsdp_policy.ranks import Case, make_policy, resume_all, train
from tests.spawn import free_port

from .needs import needs
from .spawned import spawned

pytestmark = needs("transformers")

# Name of the case: (layout, further fields of the policy's configuration).
ALONE: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "plain": ({}, {}),
    "gathered": ({}, {"reshard_after_forward": False}),
    "in host memory": ({}, {"cpu_offload": True}),
    "recomputing": ({}, {"recompute": True}),
}
ON_PAIRS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "HSDP": ({"replicate": 2}, {}),
    "TP": ({"tensor_parallel": 2}, {}),
}
PAIRED = torch.cuda.device_count() >= 2
CASES = {**ALONE, **(ON_PAIRS if PAIRED else {})}


@dataclass(frozen=True)
class World:
    oracle: Oracle
    ranks: list[dict[str, Any]]


def on_rank(rank: int, size: int, port: int, checkpoint: str, root: str, results: Any) -> None:
    """Report what the rank saw, or the traceback."""
    import torch.distributed as dist

    try:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), **place)
        torch.cuda.set_device(rank)
        # Gloo gathers what is in host memory when all is compared.
        dist.init_process_group("cpu:gloo,cuda:nccl")
        exact = {name: Case(checkpoint, layout, options=more) for name, (layout, more) in CASES.items()}
        rounded = {
            name: Case(checkpoint, layout, torch.bfloat16, options=more)
            for name, (layout, more) in CASES.items()
        }
        trained = {name: train(make_policy(case), case) for name, case in exact.items()}
        report = {"trained": trained, "resumed": resume_all(rounded, root)}
        results.put((rank, report))
        dist.destroy_process_group()
    except Exception:
        results.put((rank, traceback.format_exc()))
        raise


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("fsdp_policy")
    checkpoint = write_checkpoint("qwen3", root / "qwen3")
    size, port = 2 if PAIRED else 1, free_port()
    ranks = [(rank, size, port, checkpoint, str(root)) for rank in range(size)]
    found = {}
    with spawned(on_rank, ranks, ends_within_s=60) as results:
        oracle = Oracle(checkpoint)
        for _ in ranks:
            rank, report = results.get(timeout=240)
            assert not isinstance(report, str), report
            found[rank] = report
    return World(oracle, [found[rank] for rank in range(size)])


@pytest.mark.parametrize("case", CASES)
def test_steps_on_gpus_are_those_of_one_process_with_the_whole_model(world: World, case: str) -> None:
    for rank in world.ranks:
        report = rank["trained"][case]
        torch.testing.assert_close(report.logprobs, world.oracle.first_logprobs, atol=1e-4, rtol=0)
        for ours, wanted in zip(report.metrics, world.oracle.metrics, strict=True):
            assert ours == pytest.approx(wanted, rel=1e-3, abs=1e-4)
        for name, wanted in world.oracle.weights.items():
            torch.testing.assert_close(report.weights[name], wanted, atol=1e-4, rtol=0, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_training_on_gpus_goes_on_bit_for_bit_after_a_restart(world: World, case: str) -> None:
    for rank in world.ranks:
        report = rank["resumed"][case]
        assert report["again"] == report["through"]
        assert report["before"] != report["through"][1]
