"""Parameters that Transformer Engine keeps in FP8 blocks: what is sent stands for what Bridge exports."""

from __future__ import annotations

import os
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.spawn import free_port

from .needs import needs
from .spawned import spawned

pytestmark = needs("megatron", "transformer_engine", "transformers", capability=(9, 0))


def run(scene: Callable[[str], Any], folder: str, port: int, results: Any) -> None:
    try:
        import torch.distributed as dist

        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        torch.cuda.set_device(0)
        dist.init_process_group("nccl")
        results.put(scene(folder))
        dist.destroy_process_group()
    except Exception:
        results.put(traceback.format_exc())
        raise


def compared(folder: str) -> dict[str, Any]:
    """Of a bare model: what is sent, of its first weights and of changed ones."""
    from rlrefit.workers.trainers.megatron.model import (
        MegatronLayout,
        ensure_megatron,
        set_layout,
        set_precision,
    )
    from rlrefit.workers.trainers.megatron.source import MegatronSource

    bridge = ensure_megatron().from_hf_pretrained(folder)
    provider = bridge.to_megatron_provider(load_weights=False)
    set_layout(provider, MegatronLayout())
    set_precision(provider, torch.bfloat16)
    provider.gradient_accumulation_fusion = False
    provider.fp8, provider.fp8_recipe, provider.fp8_param = "e4m3", "blockwise", True
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    bridge.load_hf_weights(model)
    source = MegatronSource(bridge, model)
    found: dict[str, Any] = {"native": len(native_of(model)), "first": sent(source)}
    for weight in native_of(model):
        weight.quantize_(torch.randn(weight.shape, dtype=torch.bfloat16, device="cuda"))
    return found | {"changed": sent(source)}


def trained(folder: str) -> dict[str, Any]:
    """Of a policy beside one in BF16: masters, losses, restarts, and what is sent."""
    from rlrefit.recipes.algorithms.losses import PolicyLossConfig
    from rlrefit.recipes.policy.base import AdamConfig, PolicyBatch
    from rlrefit.recipes.policy.megatron import MegatronPolicy, MegatronPolicyConfig
    from rlrefit.workers.trainers.megatron.source import MegatronSource

    def make(fp8_param: bool) -> Any:
        return MegatronPolicy(
            MegatronPolicyConfig(
                folder,
                loss=PolicyLossConfig(aggregation="token"),
                optimizer=AdamConfig(lr=1e-3, warmup_steps=1),
                micro_batch=4,
                fp8_param=fp8_param,
            )
        )

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 16, (8, 29), generator=generator)
    mask = torch.zeros(8, 29)
    mask[:, 8:] = 1
    advantages = torch.randn(8, generator=generator)
    found: dict[str, Any] = {}
    for name, fp8_param in (("BF16", False), ("FP8", True)):
        policy = make(fp8_param)
        masters = {
            name: parameter.main_param.detach().cpu()
            for chunk in policy.model
            for name, parameter in chunk.named_parameters()
        }
        old = policy.compute_logprobs(PolicyBatch(ids, mask * 0))
        batch = PolicyBatch(ids, mask, advantages=advantages, old_logprobs=old)
        steps = [policy.train_step(batch) for _ in range(3)]
        found[name] = {"masters": masters, "logprobs": old[:, 8:], "losses": [step["loss"] for step in steps]}
        if fp8_param:
            found["native"] = len(native_of(policy.model))
            found["sent"] = sent(MegatronSource(policy.bridge, policy.model))
            saved = Path(folder).parent / "saved"
            policy.save(saved)
            through = [policy.train_step(batch) for _ in range(2)], codes_of(policy.model)
            leave_layout()
            again = make(fp8_param)
            again.load(saved)
            resumed = [again.train_step(batch) for _ in range(2)], codes_of(again.model)
            found["resumed"] = through[0] == resumed[0] and all(
                torch.equal(one, other) for one, other in zip(through[1], resumed[1], strict=True)
            )
        leave_layout()
    return found


def leave_layout() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def native_of(model: list[Any]) -> list[Any]:
    from rlrefit.workers.trainers.megatron.native_fp8 import is_native

    return [weight for chunk in model for weight in chunk.parameters() if is_native(weight)]


def codes_of(model: list[Any]) -> list[torch.Tensor]:
    from rlrefit.workers.trainers.megatron.native_fp8 import native_state

    return [part.cpu().clone() for weight in native_of(model) for part in native_state(weight).values()]


def sent(source: Any) -> dict[str, Any]:
    """What a source sends to an engine of FP8 blocks, held against Bridge's export."""
    from rlrefit.integration.quantize import fp8_blockwise
    from rlrefit.integration.quantize.formats import Fp8Blockwise
    from rlrefit.integration.weights.quantizing import QuantizingSource

    linear = {s.name for s in source.specs() if len(s.shape) == 2 and "_proj" in s.name}
    fragments, refused = QuantizingSource(source, dict.fromkeys(linear, Fp8Blockwise())).fragments()
    codes = {f.name: torch.zeros(f.full_shape, device="cuda").to(torch.float8_e4m3fn) for f in fragments}
    scales = {
        f.name: torch.zeros(f.full_shape, device="cuda") for f in fragments if f.name.endswith("_scale_inv")
    }
    for fragment in fragments:
        whole = scales.get(fragment.name, codes[fragment.name])
        part = tuple(slice(start, stop) for start, stop in fragment.box)
        if fragment.encoding is None and (fragment.name in linear or fragment.name in scales):
            whole[part].view(torch.uint8).copy_(fragment.view.contiguous().view(torch.uint8))
    return {
        "linear": len(linear),
        "refused": refused,
        "as they are": Counter(f.encoding is None for f in fragments if f.name in linear)[True],
        "wrong": [
            name
            for name, weight in source.export(sorted(linear))
            if name not in refused
            and not torch.equal(
                fp8_blockwise.dequantize(codes[name], scales[f"{name}_scale_inv"], dtype=weight.dtype),
                weight,
            )
        ],
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("native") / "model"
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def found_by(scene: Callable[[str], Any], folder: str) -> dict[str, Any]:
    with spawned(run, [(scene, folder, free_port())], ends_within_s=60) as results:
        found: dict[str, Any] | str = results.get(timeout=240)
    assert not isinstance(found, str), found
    return found


def _require_sent(found: dict[str, Any]) -> None:
    assert found["linear"] == 14
    assert found["refused"] == {}
    assert found["as they are"] > 0
    assert found["wrong"] == []


def test_codes_and_scales_that_are_sent_as_they_are_stand_for_bridges_export(model: str) -> None:
    found = found_by(compared, model)
    assert found["native"] == 8
    _require_sent(found["first"])
    _require_sent(found["changed"])


def test_a_policy_with_parameters_in_fp8_trains_goes_on_and_sends_them_as_they_are(model: str) -> None:
    found = found_by(trained, model)
    assert found["native"] == 8
    # The optimizer begins with what the checkpoint has, not with what its codes stand for.
    masters, wanted = found["FP8"]["masters"], found["BF16"]["masters"]
    assert masters.keys() == wanted.keys()
    assert [name for name, master in masters.items() if not torch.equal(master, wanted[name])] == []
    torch.testing.assert_close(found["FP8"]["logprobs"], found["BF16"]["logprobs"], atol=0.1, rtol=0)
    assert found["FP8"]["losses"] == pytest.approx(found["BF16"]["losses"], abs=0.05)
    assert len(set(found["FP8"]["losses"])) == 3
    assert found["resumed"]
    _require_sent(found["sent"])
