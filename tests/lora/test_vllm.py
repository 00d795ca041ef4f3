"""A LoRA adapter into a live vLLM: it serves what vLLM makes of the same adapter's files, from memory alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import EngineDirty, RefitError
from rlrefit.workers.engines.vllm.lora import lora_request
from rlrefit.workers.trainers.megatron.lora_targets import megatron_targets
from rlrefit.workers.trainers.megatron.mixin import MegatronRefitMixin
from rlrefit.workers.trainers.megatron.model import Lora, MegatronLayout, build_megatron
from tests.ahead import FoundAhead
from tests.meeting import meeting_in, wait_for
from tests.vllm.vllm_checkpoints import dense_config, write_checkpoint
from tests.vllm_follower import CONFIG, ENGINE, follow, joined, likeliest, met

from .ranks import VERSIONS

REFIT = RefitConfig(**CONFIG, lora="adapter")
MERGED = RefitConfig(**CONFIG)
# Two blocks of vLLM's cache for CPUs, so that its prefix is kept for the next request.
PROMPTS = [[5, 17, 33, 9], [3 + i % 50 for i in range(260)]]
Sampled = list[tuple[list[int], list[float]]]


@dataclass(frozen=True)
class Served:
    """What the engine gave: with the base model, then after each refit with the refit's adapter and with its files.

    Before that it was to take merged weights: ``refused`` is the stage of its error.
    """

    refused: str
    base: Sampled
    refitted: list[Sampled]
    from_files: list[Sampled]
    factors_differ: list[list[str]]
    versions: list[list[int]]
    cached: list[int]


def serve(folder: Path) -> Served:
    """An engine in this process, which follows the trainer and asks vLLM itself for the same adapters."""
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    from rlrefit.workers.engines.vllm.driver import VllmDriver
    from rlrefit.workers.engines.vllm.lora import ADAPTER_ID

    llm = LLM(
        model=str(folder / "base"),
        max_model_len=512,
        worker_extension_cls="tests.lora.vllm_probe.AdapterProbe",
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
        **ENGINE,
    )
    driver = VllmDriver(llm)
    parameters = likeliest(logprobs=0)
    versions: list[list[int]] = []
    cached: list[int] = []

    def sample(request: Any) -> Sampled:
        found = driver.generate([{"prompt_token_ids": p} for p in PROMPTS], parameters, lora_request=request)
        versions.append(sorted({version for one in found for own in one.versions for version in own}))
        cached.append(max(one.output.num_cached_tokens or 0 for one in found))
        outputs = [one.output.outputs[0] for one in found]
        return [
            (list(o.token_ids), [e[t].logprob for t, e in zip(o.token_ids, o.logprobs, strict=True)])
            for o in outputs
        ]

    with pytest.raises(RefitError, match="enable_lora") as merging:
        driver.join_refit(meeting_in(folder, 2), 1, MERGED)
    base = sample(None)
    refitted, from_files, factors_differ = [], [], []
    for version in range(2 * VERSIONS):
        if version % VERSIONS == 0:
            driver.close_refit()
            driver.join_refit(meeting_in(folder, version // VERSIONS), 1, REFIT)
        llm.collective_rpc("poison_adapters")
        driver.refit(version)
        refitted.append(sample(None))
        saved = folder / f"version{version}"
        wait_for(saved.with_suffix(".done"))
        from_files.append(sample(LoRARequest(f"files{version}", version + 1, str(saved))))
        factors_differ += llm.collective_rpc("differing_layers", args=(ADAPTER_ID, version + 1))
    driver.close_refit()
    llm.llm_engine.engine_core.shutdown()
    return Served(merging.value.stage, base, refitted, from_files, factors_differ, versions, cached)


def train(folder: Path) -> None:
    """A trainer under peft, and then one under Bridge, in this process; the adapter is another before each refit."""
    torch.manual_seed(1)
    _train_by_peft(folder)
    _train_by_bridge(folder)


def _train_by_peft(folder: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16)
    lora = LoraConfig(
        r=6, lora_alpha=9, target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    )
    model = get_peft_model(base, lora)
    with pytest.raises(RefitError, match="enable_lora"), joined(model, folder, MERGED, 1, epoch=2):
        pass
    with joined(model, folder, REFIT, 1) as trainer:
        for version in range(VERSIONS):
            _draw([p for name, p in model.named_parameters() if "lora_" in name])
            trainer.refit(version)
            model.save_pretrained(folder / f"version{version}")
            (folder / f"version{version}.done").touch()


def _train_by_bridge(folder: Path) -> None:
    from megatron.bridge.peft.lora import LoRA

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    lora = Lora(8, 5, megatron_targets(["all-linear"]))
    built = build_megatron(folder / "base", MegatronLayout(), lora=lora, wrap_with_ddp=False)

    class Trainer(MegatronRefitMixin):
        model, bridge, refit_config = built.model, built.bridge, REFIT

    trainer = Trainer()
    with met(trainer, folder, 1, epoch=1):
        for version in range(VERSIONS, 2 * VERSIONS):
            _draw([p for chunk in built.model for n, p in chunk.named_parameters() if ".adapter." in n])
            trainer.refit(version)
            files = folder / f"version{version}"
            built.bridge.save_hf_adapter(built.model, files, LoRA(dim=lora.rank, alpha=lora.alpha))
            files.with_suffix(".done").touch()


def _draw(factors: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for factor in factors:
            factor.normal_(0.0, 0.3)


def serve_adapters(folder: Path) -> Served:
    config = dense_config()
    config.vocab_size = 128
    write_checkpoint(folder / "base", config, seed=1)
    return follow(serve, train, folder)


AHEAD = (serve_adapters,)


@pytest.fixture(scope="module")
def served(found_ahead: FoundAhead) -> Served:
    return found_ahead.by(serve_adapters)


def test_the_engine_serves_what_vllm_makes_of_the_adapter_s_files(served: Served) -> None:
    assert served.factors_differ == [[]] * 2 * VERSIONS
    assert served.refitted == served.from_files
    assert served.refitted[0] != served.base
    assert all(one != other for one, other in pairwise(served.refitted))


def test_tokens_tell_their_version_and_no_prefix_outlives_it(served: Served) -> None:
    # The base model, then each refit's adapter and the same from its files.
    assert served.versions == [[-1], *([version] for version in range(2 * VERSIONS) for _ in range(2))]
    assert served.cached == [0] * len(served.versions)


def test_no_request_asks_for_an_adapter_that_no_refit_has_brought() -> None:
    with pytest.raises(EngineDirty):
        lora_request(-1)


def test_an_engine_that_wraps_its_layers_refuses_merged_weights_before_any_is_written(served: Served) -> None:
    assert served.refused == "settings"
    # It went on to serve what it had.
    assert served.versions[0] == [-1]
