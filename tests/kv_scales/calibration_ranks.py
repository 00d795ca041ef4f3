"""What two trainer ranks do in the tests of calibration: several models one after another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

LAYERS, ROWS, TOKENS, MARGIN = 4, 4, 16, 1.25
# Of a Megatron trainer, and the attention of an FSDP one.
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tensor_parallel": 2},
    "PP2 VPP2": {"pipeline_parallel": 2, "virtual_pipeline": 2},
}
ATTENTIONS = ("eager", "sdpa")


def write_checkpoint(folder: Path) -> Path:
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # So that layers, heads and parts differ in their largest values, before and after norm and RoPE.
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(folder)
    return folder


def token_ids(step: int) -> Any:
    return torch.randint(0, 64, (ROWS, TOKENS), generator=torch.Generator().manual_seed(step))


def calibrated(rank: int, path: str) -> dict[str, list[dict[str, float]]]:
    """The scales of each trainer by two calibrations, with other weights and other batches."""
    found = {name: _by_megatron(path, layout) for name, layout in LAYOUTS.items()}
    return found | {name: _by_fsdp(rank, path, name) for name in ATTENTIONS}


def _twice(worker: Any, chunks: Sequence[Any]) -> list[dict[str, float]]:
    """What a worker calibrates, before and after its weights change."""
    found = []
    for step in (1, 2):
        found.append(
            worker.calibrate_kv_scales(lambda step=step: worker.forward(token_ids(step)), margin=MARGIN)
        )
        for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
            parameter.data.mul_(1.5)
    return found


def _by_megatron(path: str, layout: dict[str, Any]) -> list[dict[str, float]]:
    from megatron.core import parallel_state

    from rlrefit.integration.config import RefitConfig
    from rlrefit.recipes.policy.batch import BatchSplit, PolicyBatch
    from rlrefit.recipes.policy.forward import run_schedule
    from rlrefit.workers.trainers.megatron.mixin import MegatronRefitMixin
    from rlrefit.workers.trainers.megatron.model import MegatronLayout, build_megatron

    class Worker(MegatronRefitMixin):
        refit_config = RefitConfig(kv_scales=True)

        def __init__(self) -> None:
            built = build_megatron(path, MegatronLayout(**layout), dtype=torch.float32)
            self.model, self.bridge = built.model, built.bridge

        def forward(self, ids: torch.Tensor) -> None:
            whole = PolicyBatch(ids, torch.zeros(ids.shape))
            split = BatchSplit.of(
                whole,
                data_parallel=parallel_state.get_data_parallel_world_size(),
                micro_batch=1,
                token_multiple=1,
                micro_batch_multiple=2,
            )
            local = split.local(whole, parallel_state.get_data_parallel_rank())
            run_schedule(
                self.model, local, split, lambda logits, _: (logits.new_zeros(()), None), forward_only=True
            )

    worker = Worker()
    found = _twice(worker, worker.model)
    hooks = [m._forward_pre_hooks for chunk in worker.model for m in chunk.modules()]
    assert not any(any("watched" in str(h) for h in each.values()) for each in hooks)
    parallel_state.destroy_model_parallel()
    return found


def _by_fsdp(rank: int, path: str, attention: str) -> list[dict[str, float]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from rlrefit.integration.config import RefitConfig
    from rlrefit.workers.trainers.fsdp.mixin import FSDPRefitMixin

    class Worker(FSDPRefitMixin):
        refit_config = RefitConfig(kv_scales=True)

        def __init__(self) -> None:
            self.model = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation=attention
            )
            mesh = init_device_mesh("cpu", (2,))
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

        def forward(self, ids: torch.Tensor) -> None:
            # With gradients, as in a training step, and in parts, as micro-batches are.
            for row in ids[rank::2]:
                self.model(row[None], use_cache=False).logits.sum().backward()

    functions = dict(ALL_ATTENTION_FUNCTIONS)
    worker = Worker()
    found = _twice(worker, [worker.model])
    assert dict(ALL_ATTENTION_FUNCTIONS) == functions
    return found
