"""What the trainer needs of TRL and of accelerate, and how it is refused where that is missing."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.utils import DistributedType

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import RefitError
from rlrefit.workers.frameworks.trl.contract import TESTED, UnsupportedTrl, require_supported, violations
from rlrefit.workers.frameworks.trl.transfer import ShardOptions, ShardTransfer

needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None,
    reason="needs TRL, which verl can't have beside it: make test-trl",
)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Any:
    """TRL's module, or a double of it that has less."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.async_grpo import async_grpo_trainer

    return async_grpo_trainer


@needs_trl
def test_the_installed_release_has_all(published: Any):
    assert violations(published) == []


@needs_trl
@pytest.mark.parametrize(
    ("kind", "method", "told"),
    [
        ("AsyncGRPOTrainer", "_sync_weight_merged", "there is no AsyncGRPOTrainer._sync_weight_merged"),
        ("VLLMClient", "wait_for_server_ready", "there is no VLLMClient.wait_for_server_ready"),
    ],
)
def test_a_release_that_lacks_a_method_is_refused_with_its_name(
    published: Any, kind: str, method: str, told: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delattr(getattr(published, kind), method)
    with pytest.raises(UnsupportedTrl, match=told) as refused:
        require_supported(published)
    assert TESTED in str(refused.value)


@needs_trl
def test_a_release_that_syncs_in_another_way_is_refused_with_all_that_differs(
    published: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(published.AsyncGRPOTrainer, "_sync_weight", lambda self: None)
    monkeypatch.setattr(published.AsyncGRPOTrainer, "_sync_weight_merged", lambda self, begun, mode: None)
    monkeypatch.setattr(published.WeightTransferProtocol, "flush", lambda self: None, raising=False)
    assert violations(published) == [
        "AsyncGRPOTrainer._sync_weight_merged takes (self, begun, mode), not (self, t0)",
        "AsyncGRPOTrainer._sync_weight knows no _lora_sync, _sync_weight_merged",
        "WeightTransferProtocol asks for flush",
    ]


def test_a_module_that_has_nothing_is_refused_with_a_sentence_for_each_thing():
    assert len(violations(SimpleNamespace())) == 6


def _transfer(
    kind: DistributedType, options: ShardOptions | None = None, is_fsdp2: bool = True
) -> ShardTransfer:
    accelerator = SimpleNamespace(distributed_type=kind, is_fsdp2=is_fsdp2)
    return ShardTransfer(SimpleNamespace(accelerator=accelerator), options or ShardOptions())


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (DistributedType.DEEPSPEED, "DEEPSPEED"),
        (DistributedType.MEGATRON_LM, "MEGATRON_LM"),
        (DistributedType.FSDP, "FSDP1"),
    ],
)
def test_ranks_whose_modules_do_not_have_their_weights_are_refused_by_name(kind: DistributedType, name: str):
    with pytest.raises(RefitError, match=name) as refused:
        _transfer(kind, is_fsdp2=False).require_served()
    assert refused.value.stage == "settings"


def test_all_that_is_wrong_with_the_options_is_told_at_once():
    refit = RefitConfig.unchecked(
        bucket_mb=0, lora="adapter", kv_scales=True, delta="auto", delta_base="optimizer"
    )
    with pytest.raises(RefitError) as refused:
        _transfer(DistributedType.DEEPSPEED, ShardOptions(refit)).require_served()
    for wrong in ("bucket_mb", "refit.lora", "refit.kv_scales", "refit.delta_base", "DEEPSPEED"):
        assert wrong in str(refused.value)
