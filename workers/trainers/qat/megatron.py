"""NVFP4 and INT4 training of Megatron models under Bridge: TP, EP, ETP, PP, with Transformer Engine or the CPU's stand-ins."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from ....integration.quantize.nvfp4_checkpoint import fused_module
from ..megatron.adapters import is_adapted
from ..megatron.enumeration import conversion_tasks
from ..megatron.rules import Refused, fragments_of_task
from ..megatron.source import MegatronSource
from ..trained import note_trained
from .config import Linear, QATConfig, decoder_layers
from .layers import EXPERTS, NORMED, PARALLEL, Quantizer, quantize_normed, quantize_parallel, weigh_outputs
from .model import QAT

# What of the model's configuration reads or keeps weights in a way that other weights in their place don't reach.
_CONTRADICTIONS = {
    "gradient_accumulation_fusion": "its kernel adds gradients to the parameter, past the quantized weight",
    "fp8": "the product would quantize once more",
    "fp4": "the product would quantize once more",
    "delay_wgrad_compute": "gradients of weights would be computed of weights that are no longer there",
    "tp_comm_overlap": "norm and product are computed apart",
    "cpu_offloading": "weights are moved while they are computed with",
    "use_transformer_engine_op_fuser": "it computes past the layers that are quantized",
    "enable_cuda_graph": "a graph would go on with the quantized weights of an old step",
    "external_cuda_graph": "a graph would go on with the quantized weights of an old step",
    "cuda_graph_impl": "a graph would go on with the quantized weights of an old step",
}


def quantize_chunks(
    bridge: Any, model: list[Any], config: QATConfig, group: dist.ProcessGroup | None = None
) -> QAT:
    """Make the linear layers of this rank's model chunks compute in NVFP4 or INT4; a collective of all trainer ranks.

    Args:
        bridge: ``AutoBridge`` of the Hugging Face checkpoint.
        model: model chunks of this rank.
        config: what to quantize.
        group: of all trainer ranks; None for the default group.

    The quantized values lie beside the weights, in their dtype: in NVFP4 between steps, in INT4 from a forward pass to its backward pass.

    Raises:
        ValueError: it can't be done as asked; tells all that is wrong, the same on all ranks.
    """
    tasks = conversion_tasks(bridge, model)
    groups = [m for chunk in model for m in chunk.modules() if type(m).__name__ in EXPERTS]
    grouped = {inner: group for group in groups for inner in group.modules()}
    linears: list[Linear] = []
    held: dict[Any, dict[str, tuple[str, ...]]] = defaultdict(dict)
    for task in tasks:
        name = task.global_param_name.rpartition(".")[2]
        if task.param_weight is None or not _is_linear(task.megatron_module) or not name.startswith("weight"):
            continue
        names, reason = _placed(task, config)
        if ".mlp.experts." in task.global_param_name and task.megatron_module not in grouped:
            reason = "Megatron computes its experts by a class that is not known here"
        columns = task.param_weight.shape[-1]
        linears += [Linear(n, columns, reason or _contradiction(task.megatron_module)) for n in names]
        held[task.megatron_module][_local_name(task)] = names
    qat = QAT(
        config,
        linears,
        [name for task in tasks for name in _named(task)],
        lambda: MegatronSource(bridge, model),
        decoder_layers(bridge.hf_pretrained.config),
        group,
    )
    quantized: set[Any] = set()
    for module, parameters in held.items():
        quantizers = {
            name: qat.quantizer(*names)
            for name, names in parameters.items()
            if qat.weights.intersection(names)
        }
        if quantizers:
            _install(module, quantizers)
            quantized.add(grouped.get(module))
    for group_of_experts in groups:
        if group_of_experts in quantized:
            weigh_outputs(group_of_experts)
    for chunk in model:
        note_trained(chunk, qat.formats)
        qat.watch(chunk)
    return qat


def _install(module: Any, quantizers: dict[str, Quantizer]) -> None:
    if type(module).__name__ == NORMED:
        quantize_normed(module, quantizers["weight"])
    else:
        quantize_parallel(module, quantizers)


def _is_linear(module: Any) -> bool:
    return type(module).__name__ in PARALLEL or type(module).__name__ == NORMED


def _placed(task: Any, config: QATConfig) -> tuple[tuple[str, ...], str]:
    """The weights that a parameter holds parts of, and why it can't be quantized, or an empty string."""
    if is_adapted(task):
        return _named(task), "an adapter adds to it"
    try:
        fragments = fragments_of_task(task, {})
    except Refused as reason:
        return _named(task), str(reason)
    names = tuple(dict.fromkeys(fragment.name for fragment in fragments))
    fused = {fused_module(name) for name in names if name.endswith(".weight")}
    if config.format.has_global_scale and len(fused) > 1:
        return names, "Megatron has it in one parameter with weights that engines give other scales"
    if any(f.view.dim() != 2 or f.view.stride() != task.param_weight.stride() for f in fragments):
        return names, "Megatron has its rows in another form"
    return names, ""


def _named(task: Any) -> tuple[str, ...]:
    named = task.mapping.hf_param
    return tuple(name for name in _flat([named] if isinstance(named, str) else named.values()))


def _flat(names: Iterable[str]) -> Iterable[str]:
    return (name for name in names if isinstance(name, str))


def _local_name(task: Any) -> str:
    """The parameter's name in its module: experts are counted from the first that the rank holds."""
    for name, parameter in task.megatron_module.named_parameters(recurse=False):
        if parameter is task.param_weight:
            return str(name)
    raise ValueError(
        f"{task.global_param_name} is no parameter of its module any more; quantize the model as Bridge has built it"
    )


def _contradiction(module: Any) -> str:
    found = [
        f"{key} is on: {why}"
        for key, why in _CONTRADICTIONS.items()
        if getattr(module.config, key, None) not in (None, False, "none")
    ]
    return "; ".join(found)
