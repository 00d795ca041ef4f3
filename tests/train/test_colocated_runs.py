"""Runs of a recipe whose trainer and engine take turns on the same devices; of FSDP's in ``test_fsdp_runs``."""

from __future__ import annotations

import io
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from rich.console import Console

from rlrefit.integration.errors import PeerLost
from rlrefit.recipes.config.load import load_config
from rlrefit.recipes.config.schema import RayConfig
from rlrefit.recipes.policy.group import TrainerActor
from rlrefit.recipes.rewards.scorer import RewardError
from rlrefit.recipes.run.cluster import ActorGroup, RunError, gather, ray_cluster
from rlrefit.recipes.run.colocated import ColocatedRefits
from rlrefit.recipes.run.files import read_json_lines
from rlrefit.recipes.train import train
from tests.ahead import FoundAhead, keeping_time
from tests.ray_cluster import patient_ray

from .command import SHORT, metrics, numbers
from .shared_cluster import on_shared_cluster

STEPS = 2
TURNS = ("generation.colocated.enabled=true", "generation.colocated.multi_stage_wake_up=false")
# All at once; the first refit needs the trainer built, and a step generates twice where it validates.
BEGIN = ["sleep", "load_trainer"]
STEP = [
    *("offload_trainer", "wake_all", "refit", "free_trainer", "generate", "generate"),
    *BEGIN,
    "train",
    "train",
]


def run(name: str, root: Path, ray_address: str, *overrides: str, refits: Any = None) -> Path:
    """The folder of a DAPO run, with Megatron in BF16."""
    common = (
        f"name={name}",
        f"run_root={root}",
        f"ray.address={ray_address}",
        f"algorithm.steps={STEPS}",
        "algorithm.max_sampling_rounds=2",
        "validation.every=1",
        "checkpoint.every=0",
    )
    config = load_config("dapo_tiny", [*common, *SHORT, *overrides])
    return train(config, Console(file=io.StringIO()), refits)


class WatchedRefits(ColocatedRefits):
    """Before the first step, work fails, and is asked for at the wrong stage; the run goes on as if nothing had been.

    After the last one a rank fails while another waits for it in a collective, which ends the run.
    """

    failed_at = 0.0

    def __init__(self, config: Any, trainers: Any, engines: Any, records: Path) -> None:
        super().__init__(config, trainers, engines, records)
        step = trainers.train_step

        def kept(batch: Any) -> dict[str, float]:
            self._batch = batch
            return step(batch)

        trainers.train_step = kept

    def run(self, version: int) -> Any:
        return super().run(version) if version < STEPS else self.train(self._stick)

    def _stick(self) -> None:
        first, second = self._trainers.actors.actors
        stuck = second.train_step.remote(self._batch)
        calls = [("trainer rank 0", first.load.remote("/nowhere")), ("trainer rank 1", stuck)]
        try:
            gather(calls, 60)
        finally:
            WatchedRefits.failed_at = time.monotonic()

    def begin(self, first_step: int, on_met: Any) -> None:
        super().begin(first_step, on_met)
        with pytest.raises(RewardError, match="no number"):
            self.train(_fail)
        with pytest.raises(
            RunError, match=r"train failed: RunError: trainer rank . failed: CheckpointError: .*Stage: train"
        ) as failed:
            self.train(lambda: self._trainers.load(Path("/nowhere")))
        told = re.search(r"worker-\*-(\d+)\.err", str(failed.value))
        assert told is not None
        assert b"ray::" in Path(f"/proc/{told[1]}/cmdline").read_bytes()
        with pytest.raises(
            RunError, match=r"generate was asked for at stage 'training'.*The way to generate: offload"
        ):
            self.generate(lambda: None)


def _fail() -> None:
    raise RewardError("no number")


def _lose_ranks() -> list[str]:
    """What is raised where a rank that has lost its peers is heard before the one that they have lost, and a third one waits."""

    class Rank:
        def wait(self) -> None:
            time.sleep(600)

        def fail(self, error: Exception, after_s: float) -> None:
            time.sleep(after_s)
            raise error

        def die(self, after_s: float) -> None:
            time.sleep(after_s)
            os._exit(7)

    found = []
    for end, *how in (("die", 0.5), ("fail", ValueError("no room"), 0.5)):
        ranks = [ray.remote(num_cpus=0)(Rank).remote() for _ in range(3)]
        ray.get([rank.__ray_ready__.remote() for rank in ranks])
        calls = [
            ("rank 0", ranks[0].fail.remote(PeerLost("rank 1 is lost"), 0.0)),
            ("rank 1", getattr(ranks[1], end).remote(*how)),
            ("rank 2", ranks[2].wait.remote()),
        ]
        with pytest.raises(RunError) as raised:
            gather(calls, 60)
        found.append(str(raised.value))
        for rank in ranks:
            ray.kill(rank)
    return found


def _ask_for_too_many(folder: Path, ray_address: str) -> tuple[float, list[str]]:
    """Seconds until that is refused; and what is raised of ranks that are lost."""
    config = RayConfig(address=ray_address, timeout_s=1)
    with patient_ray(), ray_cluster(config, 2):
        lost = _lose_ranks()
        joined = time.monotonic()
        with pytest.raises(
            RunError, match=r"64 trainer ranks .* on one host.*hosts of this cluster have \d+ CPU\."
        ):
            ActorGroup("trainer", TrainerActor, 64, 0, config, guest_cpus=1.0)
        return time.monotonic() - joined, lost


@dataclass(frozen=True)
class Both:
    """Folders of a run beside its engine and of one in turns, and how the latter ended after its last step."""

    beside: Path
    turns: Path
    error: str
    seconds_to_error: float


def _train_both_ways(folder: Path, ray_address: str) -> Both:
    sparse = ("policy.refit.delta=always", "policy.refit.delta_base=optimizer", "policy.refit.transport=p2p")
    beside = run("beside", folder, ray_address, "model.dtype=bfloat16", *sparse)
    with pytest.raises(RunError) as ended:
        run("turns", folder, ray_address, *TURNS, f"algorithm.steps={STEPS + 1}", refits=WatchedRefits)
    return Both(beside, folder / "turns", str(ended.value), time.monotonic() - WatchedRefits.failed_at)


@keeping_time  # Ray gives up starting after half a minute
def ask_for_too_many(folder: Path) -> tuple[float, list[str]]:
    return on_shared_cluster(_ask_for_too_many, folder)


@keeping_time
def train_both_ways(folder: Path) -> Both:
    return on_shared_cluster(_train_both_ways, folder)


AHEAD = (ask_for_too_many, train_both_ways)


def test_ranks_that_no_host_can_hold_end_the_start_at_once(found_ahead: FoundAhead) -> None:
    seconds, _ = found_ahead.by(ask_for_too_many)
    assert seconds < 30


def test_the_rank_that_others_have_lost_is_named_though_one_of_them_is_heard_first(
    found_ahead: FoundAhead,
) -> None:
    _, (died, failed) = found_ahead.by(ask_for_too_many)
    assert died.startswith("rank 1 died")
    assert failed.startswith("rank 1 failed: ValueError: no room")


def test_in_turns_megatron_learns_bit_for_bit_what_it_learns_beside_its_engine_with_sparse_refits(
    found_ahead: FoundAhead,
) -> None:
    both = found_ahead.by(train_both_ways)
    assert both.seconds_to_error < 50  # and not after all that the second rank may wait
    assert "train failed: RunError: trainer rank 0 failed: CheckpointError" in both.error
    assert "resume=true goes on from the last checkpoint" in both.error
    rows, beside = metrics(both.turns), metrics(both.beside)
    assert numbers(rows) == numbers(beside)
    shares = [row.get("refit/changed_share") for row in beside]
    assert shares[0] is None
    assert all(0 < share < 1 for share in shares[1:])
    assert max(row["generation_kl"] for row in rows) <= 1e-3
    assert [row["weights/version"] for row in rows] == list(range(STEPS))
    assert all(row[f"stage/seconds/{move}"] > 0 for row in rows for move in STEP)
    assert all(row[f"stage/peak_bytes/{move}"] > 0 for row in rows for move in STEP)

    stages = read_json_lines(both.turns / "stages.jsonl")
    failed = [row["failed"].partition(":")[0] for row in stages if row["failed"]]
    assert failed == ["RewardError", "RunError", "RunError"]
    assert [row["move"] for row in stages if not row["failed"]] == BEGIN + STEP * STEPS
    names = {"trainer rank 0", "trainer rank 1", "engine rank 0", "engine rank 1"}
    assert {process["process"] for process in stages[-2]["processes"]} == names
    # One waits for the other, and was not waited for.
    assert {process["process"] for process in stages[-1]["processes"]} == names - {"trainer rank 1"}
    refits = read_json_lines(both.turns / "refits.jsonl")
    assert len(refits) == 4 * STEPS
    assert {(row["engine"], row["transport"]) for row in refits} == {("colocated_ipc", "buckets")}
    assert all(row["stage_peaks"].keys() >= {"wake_all", "refit", "free_trainer"} for row in refits)
