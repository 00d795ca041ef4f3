"""Refits by :class:`ShardSynchronizer` on Ray, in the order in which NeMo-RL's GRPO calls it: two FSDP2 policy workers, and
two engines of one rank each, vLLM's own and one of transformers."""

from __future__ import annotations

import json
import pickle
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rlrefit.integration.errors import PeerLost, RefitError, RefitTimeout
from rlrefit.workers.frameworks.nemo_rl.calls import within
from rlrefit.workers.frameworks.nemo_rl.install import around
from rlrefit.workers.frameworks.nemo_rl.settings import WORKER_CLS, NemoRlRefit
from rlrefit.workers.frameworks.nemo_rl.synchronizer import TIMER, ShardSynchronizer
from tests.nemo_rl_adapter.recorded import WeightSynchronizer
from tests.nemo_rl_adapter.run_workers import (
    GenerationWorker,
    Policy,
    PolicyWorker,
    VllmGeneration,
    called,
    timer,
)
from tests.ray_cluster import warm_cluster
from tests.refit.models import make_model
from tests.spawn import free_port

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120.0
LOADED = (
    "tests.nemo_rl_adapter.run_workers",
    "transformers.models.qwen3.modeling_qwen3",
    "rlrefit.workers.engines.transformers.engine",
    "rlrefit.workers.frameworks.nemo_rl.settings",
)


@dataclass(frozen=True)
class Run:
    """What NeMo-RL's setup leaves behind."""

    policy: Policy
    generation: VllmGeneration
    engines: list[Any]
    noted: list[str]
    records_dir: Path

    def synchronizer(self) -> ShardSynchronizer:
        return ShardSynchronizer(self.policy, self.generation, NemoRlRefit.of(self.generation.cfg))

    @contextmanager
    def shared_gpus(self) -> Iterator[ShardSynchronizer]:
        """A synchronizer of a run in which both sides take turns, from no turn yet."""
        self.noted.clear()
        colocated = self.generation.cfg["colocated"]
        self.generation.cfg["colocated"] = {"enabled": True}
        synchronizer = self.synchronizer()
        try:
            yield synchronizer
        finally:
            synchronizer.shutdown()
            self.generation.cfg["colocated"] = colocated
            self.noted.clear()

    @contextmanager
    def own_gpus(self) -> Iterator[ShardSynchronizer]:
        """A synchronizer of a run in which each side has its own."""
        synchronizer = self.synchronizer()
        try:
            yield synchronizer
        finally:
            synchronizer.shutdown()

    def train(self, version: int, share: float = 1.0) -> None:
        called(self.policy.worker_group.workers, "train", version, share)

    def wrong(self, engine: int) -> list[str]:
        exported = called(self.policy.worker_group.workers, "exported")[0]
        return self.ask(engine, "probe_wrong", exported)

    def lines(self) -> list[str]:
        return (self.records_dir / "refits.jsonl").read_text().splitlines()

    def poison(self) -> None:
        for engine in range(len(self.engines)):
            self.ask(engine, "probe_poison")

    def ask(self, engine: int, method: str, *args: Any) -> Any:
        [[found]] = called([self.engines[engine]], "checkpoint_engine_rpc", method, args)
        return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    checkpoint = make_model("qwen3", tmp_path_factory.mktemp("model"), seed=1)
    records_dir = tmp_path_factory.mktemp("records")
    env = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    settings = {"timeout_s": TIMEOUT_S, "bucket_mb": 1, "verify": "full", "records_dir": str(records_dir)}
    cfg = {
        "backend": "vllm",
        "colocated": {"enabled": False},
        "vllm_cfg": {"async_engine": False},
        "refit_transport": "rlrefit",
        "refit_cfg": {"rlrefit": settings},
    }
    noted: list[str] = []
    with warm_cluster(LOADED, env, num_cpus=4):
        policies, generations = ray.remote(num_cpus=1)(PolicyWorker), ray.remote(num_cpus=1)(GenerationWorker)
        port = free_port()
        engines = [generations.remote(checkpoint, kind) for kind in ("vllm", "transformers")]
        workers = [policies.remote(checkpoint, rank, port) for rank in range(2)]
        called(
            engines, "checkpoint_engine_rpc", "rlrefit_close"
        )  # NeMo-RL's setup returns with all of them started
        called(workers, "checkpoint_engine_rpc", "")
        yield Run(Policy(workers, noted), VllmGeneration(engines, cfg, noted), engines, noted, records_dir)


def test_two_changed_refits_reach_live_parameters_bit_for_bit_in_nemo_rls_order(
    run: Run, as_recorded: None
) -> None:
    def setup(config: Any) -> tuple[Any, ...]:
        assert config.policy["generation"]["refit_transport"] is None
        assert config.policy["generation"]["vllm_kwargs"] == {"worker_cls": WORKER_CLS}
        return run.policy, run.generation, "all else"

    config = SimpleNamespace(policy={"generation": run.generation.cfg})
    assert around(setup)(config) == (run.policy, run.generation, "all else")
    synchronizer = run.generation.weight_synchronizer
    assert isinstance(synchronizer, WeightSynchronizer)
    assert synchronizer.is_stale
    tokens = []
    for version in (1, 2):
        run.train(version)
        run.poison()
        metrics = synchronizer.sync_weights(timer=timer(run.noted), kv_scales=None)
        assert not synchronizer.is_stale
        tokens.append(called(run.engines[:1], "generate"))
        assert [run.wrong(engine) for engine in (0, 1)] == [[], []]
        assert [run.ask(engine, "rlrefit_serving_version")["version"] for engine in (0, 1)] == [version] * 2
    assert tokens[0] != tokens[1]
    assert run.noted == [TIMER, TIMER]  # their GPUs are their own: NeMo-RL takes no turns
    assert metrics["version"] == 2
    assert metrics["misc_mbytes"] == 0
    records = [json.loads(line) for line in run.lines()]
    assert [(record["version"], record["epoch"], record["rank"]) for record in records] == [
        (version, 1, rank) for version in (1, 2) for rank in range(4)
    ]
    assert all(r["bytes_verified"] == r["bytes_bulk"] > 0 for r in records if r["role"] == "generation")
    # The asynchronous trainer sends its generation to another process, whose copy must not end this epoch.
    copy = pickle.loads(pickle.dumps(synchronizer))
    copy.shutdown()
    with pytest.raises(RefitError, match="refit from NeMo-RL's driver"):
        copy.sync_weights()
    assert synchronizer.sync_weights()["version"] == 3


@pytest.mark.parametrize("colocated", [False, True], ids=["GPUs of their own", "shared GPUs"])
def test_three_refits_of_what_changed_alone_leave_the_same_bytes_and_tell_how_little_travelled(
    run: Run, colocated: bool
) -> None:
    settings = run.generation.cfg["refit_cfg"]["rlrefit"]
    settings["delta"] = "always"
    try:
        with run.shared_gpus() if colocated else run.own_gpus() as synchronizer:
            synchronizer.init_communicator()
            told = []
            for version in (41, 42, 43, 44):
                run.train(version, 0.02)
                if version == 41:
                    run.poison()
                told.append(synchronizer.sync_weights())
                assert [run.wrong(engine) for engine in (0, 1)] == [[], []]
    finally:
        del settings["delta"]
    dense, *sparse = told
    assert "changed_share" not in dense
    for metrics in sparse:
        assert 0.01 < metrics["changed_share"] < 0.03
        assert metrics["wire_mbytes"] < 0.1 * metrics["bulk_mbytes"]


def test_records_that_cannot_be_written_are_refused_at_the_start_and_fail_no_refit_later(
    run: Run, as_recorded: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "records"
    folder.touch()
    before = run.generation.weight_synchronizer
    settings = replace(NemoRlRefit.of(run.generation.cfg), records_dir=str(folder))
    synchronizer = ShardSynchronizer(run.policy, run.generation, settings)
    with pytest.raises(RefitError, match="records_dir"):
        synchronizer.init_communicator()
    assert run.generation.weight_synchronizer is before
    folder.unlink()
    synchronizer.init_communicator()
    shutil.rmtree(folder, ignore_errors=True)
    folder.touch()
    run.train(31)
    run.poison()
    assert synchronizer.sync_weights()["version"] == 1
    assert [run.wrong(engine) for engine in (0, 1)] == [[], []]
    assert not synchronizer.is_stale
    assert "version 1 was not written" in caplog.text
    synchronizer.shutdown()


def test_on_shared_gpus_both_sides_take_turns_and_meet_in_the_first_refit(run: Run) -> None:
    with run.shared_gpus() as synchronizer:
        synchronizer.init_communicator()
        assert run.noted == []  # vLLM sleeps at that moment
        for version in (11, 12):
            run.train(version)
            run.poison()
            synchronizer.sync_weights(timer=timer(run.noted))
            assert [run.wrong(engine) for engine in (0, 1)] == [[], []]
        turn = ["offload_before_refit", "weights", TIMER, "offload_after_refit", "kv_cache"]
        assert run.noted == turn * 2
        assert json.loads(run.lines()[-1])["engine"] == "colocated_ipc"


def test_a_stuck_policy_worker_on_shared_gpus_is_an_error_in_time_and_no_turn_waits_for_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = tmp_path / "go on"
    with run.shared_gpus() as synchronizer:
        synchronizer.init_communicator()
        synchronizer.sync_weights()
        run.noted.clear()
        called(run.policy.worker_group.workers[1:], "stick_in_refit", go_on)
        monkeypatch.setattr(synchronizer._workers, "_limit_s", 1.5)
        try:
            with pytest.raises(RefitTimeout, match="policy worker 1") as error:
                synchronizer.sync_weights()
        finally:
            go_on.touch()
        assert run.noted == ["offload_before_refit", "weights"]
        not_offloaded, not_woken = error.value.__notes__
        assert "offloaded" in not_offloaded
        assert "kv_cache" in not_woken
        assert "not all workers left" not in caplog.text  # it was not waited for once more
        assert synchronizer.is_stale
        monkeypatch.undo()
        run.train(13)
        synchronizer.sync_weights()
        assert [run.wrong(engine) for engine in (0, 1)] == [[], []]


def test_an_engine_of_two_workers_is_called_at_its_first_and_takes_two_ranks(run: Run) -> None:
    vllm, engine = run.engines
    called([engine], "resize", 2)
    # NeMo-RL's group has an actor for each GPU, and those after an engine's first are called by nobody.
    generation = VllmGeneration([engine, vllm], run.generation.cfg, run.noted, ranks=2)
    synchronizer = replace(run, generation=generation).synchronizer()
    try:
        synchronizer.init_communicator()
        for version in (21, 22):
            run.train(version)
            called([engine], "checkpoint_engine_rpc", "probe_poison")
            synchronizer.sync_weights()
            exported = called(run.policy.worker_group.workers, "exported")[0]
            assert called([engine], "checkpoint_engine_rpc", "probe_wrong", (exported,)) == [[[], []]]
        records = [json.loads(line) for line in run.lines()[-4:]]
        roles = ["trainer", "trainer", "generation", "generation"]
        assert [(record["rank"], record["role"]) for record in records] == list(enumerate(roles))
    finally:
        synchronizer.shutdown()
        called([engine], "resize", 1)


def test_a_call_of_nemo_rl_that_does_not_return_is_left_behind() -> None:
    def fails() -> None:
        raise TimeoutError("its own")

    over = threading.Event()
    with pytest.raises(RefitTimeout, match=r"^NeMo-RL's offload did not return within 0 s"):
        within(0.1, over.wait, "NeMo-RL's offload", "handshake")
    over.set()
    with pytest.raises(TimeoutError, match="its own"):
        within(60.0, fails, "", "")
    assert within(60.0, lambda: 3, "", "") == 3


def test_an_engine_killed_in_a_refit_ends_it_with_its_own_error_and_the_others_go_on(run: Run) -> None:
    with run.shared_gpus() as synchronizer:
        synchronizer.init_communicator()
        called(run.engines[1:], "die_in_refit")
        start = time.monotonic()
        with pytest.raises(PeerLost) as error:
            synchronizer.sync_weights()
        assert time.monotonic() - start < TIMEOUT_S
        # Whoever is heard first; two policy workers and the other engine are before it.
        assert error.value.blamed == 3
        assert synchronizer.is_stale
        # The policy gets back what it had; vLLM's failure to wake without the one that died is not what the trainer is told.
        assert run.noted == ["offload_before_refit", "weights", "offload_after_refit"]
        assert "kv_cache was not woken" in error.value.__notes__[0]

    left = VllmGeneration(run.engines[:1], run.generation.cfg, run.noted)
    run.train(3)
    rebuilt = replace(run, generation=left).synchronizer()
    rebuilt.init_communicator()
    rebuilt.sync_weights()
    assert run.wrong(0) == []
