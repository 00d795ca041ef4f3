"""What a configuration of LoRA may ask for: all violations at once, each with the remedy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlrefit.integration.colocated.stages import StageRefused
from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import RefitError
from rlrefit.workers.engines.common.destination_mixin import DestinationRefitMixin
from rlrefit.workers.engines.transformers.colocated import TransformersSleeper
from rlrefit.workers.lora import AdapterSettings, lora_violations, split_name

_MERGE, _ADAPTER = RefitConfig(), RefitConfig(lora="adapter")


def test_plain_lora_may_be_merged_for_any_engine_or_sent_to_one_that_serves_it() -> None:
    plain = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
    assert lora_violations(_MERGE, plain, "vllm", {}) == []
    assert lora_violations(_MERGE, {**plain, "modules_to_save": ["lm_head"]}, "transformers", {}) == []
    assert lora_violations(_ADAPTER, plain, "vllm", {"enable_lora": True}) == []
    assert lora_violations(_ADAPTER, plain, "transformers", {"tensor_parallel_size": 1}) == []


def test_all_violations_are_told_at_once() -> None:
    lora = {"r": 8, "rank_pattern": {"q_proj": 64}, "use_dora": True, "modules_to_save": ["x"], "bias": "all"}
    found = lora_violations(_ADAPTER, lora, "vllm", {"load_format": "dummy"})
    assert [text.partition(":")[0] for text in found] == [
        "policy.lora.use_dora",
        "policy.lora.modules_to_save",
        "policy.lora.bias",
        "policy.refit.lora",
        "policy.lora.r",
        "policy.refit.lora",
    ]
    assert "max_lora_rank, 16" in found[4]
    (wrapped,) = lora_violations(_MERGE, {}, "vllm", {"enable_lora": True})
    assert "start vLLM without enable_lora" in wrapped
    (base,) = lora_violations(_ADAPTER, {"init_lora_weights": "pissa_niter_4"}, "transformers", {})
    assert base.startswith("policy.lora.init_lora_weights")
    assert lora_violations(_ADAPTER, {"init_lora_weights": "gaussian"}, "transformers", {}) == []
    assert lora_violations(_MERGE, {"init_lora_weights": "pissa"}, "transformers", {}) == []
    (parts,) = lora_violations(_ADAPTER, {}, "transformers", {"tensor_parallel_size": 2})
    assert "tensor parallelism 1 alone" in parts
    assert RefitConfig.unchecked(lora="both").violations() == [
        "policy.refit.lora: 'both' is not one of merge, adapter"
    ]


def test_settings_and_names_survive_the_wire() -> None:
    settings = AdapterSettings({"a.b": 4, "c": 3}, {"a.b": 12 / 4, "c": 7 / 3})
    assert AdapterSettings.from_tensor(settings.to_tensor()) == settings
    prefix = "base_model.model."
    assert split_name(f"{prefix}model.q_proj.lora_A.weight") == ("model.q_proj", "A")
    assert split_name(f"{prefix}model.embed_tokens.lora_embedding_B") == ("model.embed_tokens", "B")
    assert split_name(f"{prefix}lm_head.weight") is None


def test_no_adapter_is_to_come_alone_to_base_weights_that_a_refit_or_a_sleep_has_changed() -> None:
    worker = DestinationRefitMixin()
    worker.refit_state.mark_dirty(3)
    with pytest.raises(RefitError) as error:
        worker.join_refit({}, 1, {"lora": "adapter"})
    assert (error.value.stage, worker.refit_state.dirty) == ("settings", True)

    # Into what an earlier refit has brought the adapter may be merged already.
    worker = DestinationRefitMixin()
    worker._refit_session = SimpleNamespace(  # type: ignore[assignment]
        refit=lambda version: SimpleNamespace(to_json=dict), close=lambda: None
    )
    worker.refit(0)
    with pytest.raises(RefitError, match="refit 0") as error:
        worker.join_refit({}, 1, {"lora": "adapter"})
    assert (error.value.stage, worker.brings_adapter) == ("settings", False)

    model = torch.nn.Linear(2, 2)
    held = model.weight.detach().clone()
    model.device = torch.device("cpu")
    sleeper = TransformersSleeper(SimpleNamespace(model=model, brings_adapter=True))  # type: ignore[arg-type]
    with pytest.raises(StageRefused):
        sleeper.sleep(2)
    assert model.weight.equal(held)
