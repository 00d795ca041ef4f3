"""What the ranks of these tests do: train in INT4 in several layouts, beside a model without quantization of the engine's weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .ranks import slices, token_ids

GROUP = 32


@dataclass(frozen=True)
class Case:
    """A trainer in a layout of Megatron's, or under FSDP over all ranks.

    Attributes:
        checkpoint: that it starts from.
        dequantized: the same with the weights that an engine makes of its matrices.
        megatron: the layout.
        quantized: under FSDP, whether before or after the model is sharded.
        latent: whether it has latent attention, which Megatron-core's own attention for CPUs does not compute.
    """

    checkpoint: Path
    dequantized: Path
    megatron: dict[str, int] | None = None
    quantized: str = "before"
    latent: bool = False


def run(rank: int, cases: Sequence[Case]) -> list[dict[str, Any]]:
    return [_megatron(case) if case.megatron else _fsdp(case) for case in cases]


def config() -> Any:
    from rlrefit.integration.quantize.formats import Int4
    from rlrefit.workers.trainers.qat.config import QATConfig

    return QATConfig(activations=False, format=Int4(GROUP))


def sgd_step(model: Any) -> None:
    ids = token_ids()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _sent(source: Any, qat: Any) -> Any:
    """What this rank would send by ``trainer_quantize_int4``."""
    from rlrefit.integration.weights.quantizing import QuantizingSource

    return slices(QuantizingSource(source, dict.fromkeys(qat.weights, qat.config.format)))


def _fsdp(case: Case) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    from rlrefit.workers.trainers.fsdp.source import FSDPSource
    from rlrefit.workers.trainers.qat.fsdp import quantize_module

    model = AutoModelForCausalLM.from_pretrained(case.checkpoint, dtype=torch.float32)
    made = quantize_module(model, config()) if case.quantized == "before" else None
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    qat = quantize_module(model, config()) if made is None else made
    source = FSDPSource(model, torch.bfloat16)
    report: dict[str, Any] = {"weights": qat.weights, "first": _sent(source, qat), "logits": []}
    report["told"] = source.trained_formats == qat.formats
    for _ in range(2):
        with torch.no_grad():
            report["logits"].append(model(token_ids()).logits)
        model.reshard()  # or the optimizer would be given parameters of the root that are gathered
        # Both ranks take the same rows, so that the average of their gradients is each one's.
        sgd_step(model)
    trained = dict(source.export([spec.name for spec in source.specs()]))
    return report | {
        "trained": {name: t.clone() for name, t in trained.items()},
        "second": _sent(source, qat),
    }


def _megatron(case: Case) -> dict[str, Any]:
    from megatron.core import parallel_state

    from rlrefit.recipes.plan.offline_bridge import accept_any_attention
    from rlrefit.workers.trainers.megatron.model import MegatronLayout, build_megatron
    from rlrefit.workers.trainers.megatron.source import MegatronSource
    from rlrefit.workers.trainers.qat.layers import EXPERTS, weigh_outputs
    from rlrefit.workers.trainers.qat.megatron import quantize_chunks

    assert case.megatron is not None
    if case.latent:
        accept_any_attention()
    layout = MegatronLayout(**case.megatron)
    quantized, plain = (
        build_megatron(folder, layout, dtype=torch.bfloat16, distributed_optimizer=False)
        for folder in (str(case.checkpoint), str(case.dequantized))
    )
    for built in (quantized, plain):
        built.provider.gradient_accumulation_fusion = False
        for module in built.model[0].modules() if case.latent else ():
            if type(module).__name__ == "MLASelfAttention":
                module.core_attention.forward = _attend
    qat = quantize_chunks(quantized.bridge, quantized.model, config())
    for module in plain.model[0].modules():
        if type(module).__name__ in EXPERTS:
            weigh_outputs(module)  # as those of the other one do
    source = MegatronSource(quantized.bridge, quantized.model)
    report: dict[str, Any] = {"weights": qat.weights, "first": _sent(source, qat)}
    report["told"] = source.trained_formats == qat.formats
    logits, gradients = zip(*map(_passes, (quantized.model[0], plain.model[0])), strict=True)
    report["logits equal"] = torch.equal(*logits)
    report["other gradients"] = [
        name for name, ours in gradients[0].items() if not torch.equal(ours, gradients[1][name])
    ]
    report["without gradient"] = [name for name, gradient in gradients[0].items() if not gradient.any()]
    with torch.no_grad():
        for parameter in quantized.model[0].parameters():
            if not getattr(parameter, "tensor_model_parallel", False) and getattr(
                parameter, "allreduce", True
            ):
                dist.all_reduce(parameter.main_grad)  # as Megatron does, of what all ranks hold whole
            parameter.data.sub_(0.5 * parameter.main_grad)  # of which nothing is told
    report["changed"] = not torch.equal(_passes(quantized.model[0])[0], logits[0])
    exported = source.export([spec.name for spec in source.specs()])
    report |= {"trained": {name: t.clone() for name, t in exported}, "second": _sent(source, qat)}
    parallel_state.destroy_model_parallel()
    return report


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Causal attention of ``[S, B, heads, width]``, where values have another width."""
    batches_first = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    found = torch.nn.functional.scaled_dot_product_attention(*batches_first, is_causal=True)
    return found.permute(2, 0, 1, 3).flatten(2)


def _passes(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and gradients."""
    ids = token_ids()
    positions = torch.arange(ids.shape[1]).expand_as(ids).contiguous()
    with torch.no_grad():
        logits = model(ids, positions, None)
    model.zero_grad_buffer()
    model(ids, positions, None, labels=ids.roll(-1, 1)).mean().backward()
    return logits.clone(), {name: p.main_grad.clone() for name, p in model.named_parameters()}
