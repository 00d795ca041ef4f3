"""LoRA trained by Megatron on Transformer Engine: refits, merged and alone, are Bridge's own export, and restarts go on bit for bit."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.spawn import free_port

from .needs import needs
from .spawned import spawned

pytestmark = needs("megatron", "transformer_engine", "transformers", gpus=2)

RANKS = 2
CASES: dict[str, dict[str, int]] = {
    "qwen3": {"tensor_parallel": 2},
    "qwen3-moe": {"tensor_parallel": 2, "expert_parallel": 2},
}


def rank_main(rank: int, root: str, port: int, results: Any) -> None:
    """Report, for each kind of model, what :func:`train_and_send` found."""
    try:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), **place)
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl")
        results.put({kind: train_and_send(kind, root) for kind in CASES})
        dist.destroy_process_group()
    except Exception:
        results.put(traceback.format_exc())
        raise


def train_and_send(kind: str, root: str) -> dict[str, Any]:
    """What differs from Bridge's exports after each of two steps, and how training went on with a restart and without."""
    from megatron.core import parallel_state

    from rlrefit.recipes.algorithms.losses import PolicyLossConfig
    from rlrefit.recipes.policy.base import AdamConfig, PolicyBatch
    from rlrefit.recipes.policy.megatron import MegatronPolicy, MegatronPolicyConfig
    from rlrefit.recipes.tiny.checkpoints import make_checkpoint
    from rlrefit.workers.lora import PREFIX
    from rlrefit.workers.trainers.megatron.adapter_source import AdapterSource
    from rlrefit.workers.trainers.megatron.lora_targets import megatron_targets
    from rlrefit.workers.trainers.megatron.model import Lora, MegatronLayout
    from rlrefit.workers.trainers.megatron.source import MegatronSource

    folder = Path(root) / kind
    if dist.get_rank() == 0:
        make_checkpoint(kind, folder)
    dist.barrier()

    def make() -> Any:
        return MegatronPolicy(
            MegatronPolicyConfig(
                str(folder),
                MegatronLayout(**CASES[kind]),
                loss=PolicyLossConfig(aggregation="token", kl_coef=0.01),
                optimizer=AdamConfig(lr=1e-2),
                micro_batch=4,
                lora=Lora(8, 32, megatron_targets(["all-linear"])),
            )
        )

    def steps(policy: Any, batch: Any) -> list[dict[str, float]]:
        return [policy.train_step(batch) for _ in range(2)]

    policy = make()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 16, (8, 32), generator=generator)
    mask = torch.zeros(8, 32)
    mask[:, 8:] = 1
    plain = PolicyBatch(ids, mask * 0)
    old, reference = policy.compute_logprobs(plain), policy.compute_reference_logprobs(plain)
    advantages = torch.randn(8, generator=generator)
    batch = PolicyBatch(ids, mask, advantages=advantages, old_logprobs=old, ref_logprobs=reference)
    found: dict[str, Any] = {"reference": old.equal(reference), "wrong": [], "misc": []}
    sources = MegatronSource(policy.bridge, policy.model), AdapterSource(policy.bridge, policy.model)
    held = [source.fragments() for source in sources]
    found["misc"] = sorted({name for _, refused in held for name in refused})
    for version in range(2):
        steps(policy, batch)
        exports = policy.bridge.export_hf_weights(policy.model, cpu=False, show_progress=False)
        wanted = {name: weight.detach().clone() for name, weight in exports}
        exports = policy.bridge.export_adapter_weights(policy.model, cpu=False, show_progress=False)
        wanted |= {f"{PREFIX}{name}": weight.detach().clone() for name, weight in exports}
        for source, (fragments, _) in zip(sources, held, strict=True):
            source.prepare()
            found["wrong"] += [
                f"v{version} {f.name}" for f in fragments if not f.part_of(wanted[f.name]).equal(f.view)
            ]
    found["moved"] = (policy.compute_logprobs(plain) - old).abs().max().item()
    found["reference"] &= policy.compute_reference_logprobs(plain).equal(reference)
    saved = Path(root) / f"{kind} saved"
    policy.save(saved)
    dist.barrier()
    found["through"] = steps(policy, batch)
    parallel_state.destroy_model_parallel()
    again = make()
    again.load(saved)
    found["resumed"] = steps(again, batch)
    parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root, port = str(tmp_path_factory.mktemp("lora")), free_port()
    ranks = [(r, root, port) for r in range(RANKS)]
    with spawned(rank_main, ranks, ends_within_s=60) as results:
        told = [results.get(timeout=540) for _ in ranks]
    failed = [text for text in told if isinstance(text, str)]
    assert not failed, failed[0]
    return told


@pytest.mark.parametrize("kind", CASES)
def test_what_is_sent_is_what_bridge_exports_and_the_reference_is_the_model_without_adapters(
    kind: str, found: list[dict[str, Any]]
) -> None:
    for rank in found:
        assert rank[kind]["wrong"] == []
        assert all("gate.weight" in name or "config" in name for name in rank[kind]["misc"])
        assert rank[kind]["reference"]
        assert rank[kind]["moved"] > 1e-3


@pytest.mark.parametrize("kind", CASES)
def test_training_goes_on_bit_for_bit_after_a_restart(kind: str, found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank[kind]["resumed"] == rank[kind]["through"]
