"""What the adapter checks of NeMo-RL before anything runs: against the interfaces as they were read, and against NeMo-RL
itself where it can be found."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from rlrefit.integration.errors import RefitError
from rlrefit.workers.frameworks.nemo_rl import contract as nemo_rl_contract
from rlrefit.workers.frameworks.nemo_rl.contract import (
    CHECKPOINT_ENGINE,
    SHARD_TO_SHARD,
    SYNCHRONIZER,
    UnsupportedNemoRl,
    differences,
    require_supported,
    violations,
)
from rlrefit.workers.frameworks.nemo_rl.engine_calls import EngineCalls
from rlrefit.workers.frameworks.nemo_rl.full_tensors import FullTensorEngine
from rlrefit.workers.frameworks.nemo_rl.install import around
from rlrefit.workers.frameworks.nemo_rl.settings import WORKER_CLS, NemoRlRefit
from rlrefit.workers.frameworks.nemo_rl.synchronizer import ShardSynchronizer
from tests.nemo_rl_adapter import recorded

ALL = (CHECKPOINT_ENGINE, *SHARD_TO_SHARD)
TRANSPORT = "rlrefit.workers.frameworks.nemo_rl.checkpoint_engine:NcclXferCheckpointEngine"


def configured(**changes: Any) -> dict[str, Any]:
    generation = {
        "backend": "vllm",
        "colocated": {"enabled": False},
        "vllm_kwargs": {"worker_cls": WORKER_CLS},
        "refit_transport": None,
        "refit_cfg": {"rlrefit": {"timeout_s": 60.0, "records_dir": "runs"}},
    }
    return generation | changes


def test_the_contract_is_what_was_read_and_what_an_installed_nemo_rl_has() -> None:
    for published in ALL:
        assert differences(published, getattr(recorded, published.name)) == []
    if find_spec("nemo_rl") is not None:
        assert violations(ALL) == []
        backend = importlib.import_module("nemo_rl.models.generation.vllm.vllm_backend")
        extension = backend.VllmInternalWorkerExtensionWithCheckpointEngine
        names = {name for name in dir(extension) if not name.startswith("__")}
        assert names == set(recorded.EXTENSION)


def test_our_sides_answer_what_the_contract_asks() -> None:
    for published, ours in ((CHECKPOINT_ENGINE, FullTensorEngine), (SYNCHRONIZER, ShardSynchronizer)):
        asked = set(published.methods) | set(getattr(recorded, published.name).__abstractmethods__)
        assert asked <= set(dir(ours))
        for method, wanted in published.methods.items():
            assert nemo_rl_contract.shown(getattr(ours, method)) == wanted


def test_vllm_finds_no_name_of_nemo_rls_extension_on_our_worker() -> None:
    assert set(dir(EngineCalls)) & set(recorded.EXTENSION) == set()


def test_the_transport_is_made_as_nemo_rl_makes_it(as_recorded: None) -> None:
    module, name = TRANSPORT.split(":")
    kind = getattr(importlib.import_module(module), name)
    # What create_checkpoint_engine passes.
    made = kind(bucket_size=1 << 20, release_after_refit=False, timeout_s=5)
    assert isinstance(made, recorded.CheckpointEngine)
    assert made.get_target_weight_layout() is None


def test_a_nemo_rl_that_calls_in_another_way_is_refused_with_all_differences(
    as_recorded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Later(recorded.WeightSynchronizer):
        def sync_weights(self, *, timer=None, kv_scales=None, refit_timeout_s=None): ...

        def reconcile_communicator(self, absent_shards): ...

    Later.__abstractmethods__ |= {"reconcile_communicator"}
    monkeypatch.setattr(sys.modules[SYNCHRONIZER.module], "WeightSynchronizer", Later)
    monkeypatch.delattr(sys.modules["nemo_rl.distributed.worker_groups"], "RayWorkerGroup")
    with pytest.raises(UnsupportedNemoRl) as error:
        require_supported(SHARD_TO_SHARD)
    for part in (
        "sync_weights takes (self, *, timer, kv_scales, refit_timeout_s), not (self, *, timer, kv_scales)",
        "WeightSynchronizer asks for reconcile_communicator",
        "nemo_rl.distributed.worker_groups has no RayWorkerGroup",
        nemo_rl_contract.READ_AT[:9],
    ):
        assert part in str(error.value)
    for published in ALL:
        monkeypatch.setitem(sys.modules, published.module, None)
    with pytest.raises(UnsupportedNemoRl, match=r"weight_sync\.interfaces"):
        require_supported(SHARD_TO_SHARD)


DRAFTING = {"worker_cls": WORKER_CLS, "speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
MANY_FAULTS = {
    "backend": "sglang",
    "vllm_kwargs": None,
    "refit_transport": "nccl_reshard",
    "refit_cfg": {
        "rlrefit": {
            "transport": "fast",
            "buckets": 3,
            "records_dir": 3,
            "delta": "auto",
            "delta_base": "optimizer",
        }
    },
}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            MANY_FAULTS,
            [
                *("backend", "worker_cls", "refit_transport", "'fast' is not one of"),
                *("rlrefit.buckets: ", "rlrefit.bucket_mb?", "rlrefit.records_dir: 3"),
                "rlrefit.delta_base: optimizer",
            ],
        ),
        ({"refit_cfg": {"rlrefit": "auto"}}, ["refit_cfg.rlrefit: 'auto'"]),
        ({"vllm_kwargs": DRAFTING, "_mtp_weights_from_refit": True}, ["speculative_config"]),
    ],
    ids=["many", "no section", "a drafter that is trained along"],
)
def test_all_that_is_wrong_with_a_configuration_is_told_at_once(
    changes: dict[str, Any], told: list[str]
) -> None:
    with pytest.raises(RefitError) as error:
        NemoRlRefit.of(configured(**changes))
    for part in told:
        assert part in str(error.value)


def test_what_is_wrong_is_told_before_nemo_rl_sets_anything_up() -> None:
    def setup(config: Any) -> tuple[Any, ...]:
        raise AssertionError("called")

    for generation in (configured(**MANY_FAULTS), configured(refit_transport="rlrefit", backend="sglang")):
        with pytest.raises(RefitError, match=r"policy\.generation\.backend"):
            around(setup)(SimpleNamespace(policy={"generation": generation}))


def test_the_settings_are_read_from_nemo_rls_own_section() -> None:
    found = NemoRlRefit.of(configured())
    assert (found.config.timeout_s, found.records_dir, found.engine) == (60.0, "runs", "nccl_xfer")
    assert NemoRlRefit.of(configured(colocated={"enabled": True})).engine == "colocated_ipc"
    assert NemoRlRefit.of(configured(refit_cfg=None)).records_dir is None
    # A drafter from the checkpoint, as NeMo-RL loads it where the policy doesn't train it; and trained, but not served.
    NemoRlRefit.of(configured(vllm_kwargs=DRAFTING, _mtp_weights_from_refit=False))
    NemoRlRefit.of(configured(_mtp_weights_from_refit=True))


class _Side(SimpleNamespace):
    """What is refitted, as far as a meeting asks for it."""

    def join_refit(self, *_: Any) -> dict[str, Any]:
        self.awake = self.stays_awake
        return {}


@pytest.mark.parametrize(("colocated", "awake"), [(False, True), (True, False)])
def test_an_engine_keeps_its_memory_between_refits_where_nemo_rl_never_puts_it_to_sleep(
    colocated: bool, awake: bool
) -> None:
    side = _Side()

    class Rank(EngineCalls):
        def _rlrefit_side(self) -> Any:
            return side

        def _rlrefit_rank(self) -> int:
            return 0

    engine = NemoRlRefit.of(configured(colocated={"enabled": colocated})).engine
    Rank().rlrefit_join({}, 1, {}, engine)
    assert side.awake is awake
