"""What a refit needs of FP8 blocks beside the parameters that codes and scales are written into.

Where SGLang computes with scales in another form than checkpoints have them, a refit's scales land in tensors of the
checkpoint's form, and what is computed with is made of them, in its place, once all have landed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from sglang.srt.layers.moe.moe_runner.hpc_ops import pad_hpc_ops_block_scale
from sglang.srt.layers.quantization.fp8_utils import requant_weight_ue8m0
from torch import nn

from ....integration.quantize.layouts import packed_ue8m0, rows_of_blocks
from .fp8 import BlockFp8, block_fp8


def block_modules(model: nn.Module) -> dict[str, BlockFp8]:
    """The modules of ``model`` that hold weights in FP8 blocks, by name."""
    found = {name: block_fp8(module) for name, module in model.named_modules()}
    return {name: blocks for name, blocks in found.items() if blocks is not None}


def staged_scales(
    blocks: Mapping[str, BlockFp8],
    live: Mapping[str, torch.Tensor],
    fresh: Mapping[str, torch.Tensor],
    held: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Where a refit's scales land for parameters that are packed, by the parameter's name.

    Args:
        blocks: of the live model.
        live: its parameters.
        fresh: those of its twin, which are as they are loaded.
        held: tensors of an earlier call, taken again as long as they fit, since views of them may be in use.
    """
    found = {}
    for module, facts in blocks.items():
        for scales in sorted(facts.packed):
            name = f"{module}.{scales}"
            shape, device, before = fresh[name].shape, live[name].device, held.get(name)
            if before is not None and (before.shape, before.device) == (shape, device):
                found[name] = before
            else:
                found[name] = torch.full(shape, torch.nan, dtype=facts.format.scale_dtype, device=device)
    return found


def follow_scales(
    name: str, module: nn.Module, facts: BlockFp8, staged: Mapping[str, torch.Tensor], promised: bool
) -> None:
    """Bring what a module computes with up to date with the codes and scales that have landed, without moving it.

    Args:
        name: of the module.
        module: of the live model.
        facts: about it.
        staged: as :func:`staged_scales` made them.
        promised: all its scales are powers of two, so that they are to be packed and nothing else.
    """
    for codes, scales in facts.scales.items():
        if scales in facts.packed:
            landed = staged[f"{name}.{scales}"]
            if promised:
                _pack(getattr(module, codes), getattr(module, scales), landed)
            else:
                _quantize_again(getattr(module, codes), getattr(module, scales), landed, facts)
    for copy, scales in facts.copies.items():
        held, parameter = getattr(module, copy), getattr(module, scales).detach()
        # Where nothing had to be padded, the copy is the parameter.
        if held.untyped_storage()._cdata != parameter.untyped_storage()._cdata:
            held.copy_(pad_hpc_ops_block_scale(parameter))


def _pack(codes: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> None:
    packed.detach().copy_(packed_ue8m0(rows_of_blocks(scales, codes.shape[-2])))


def _quantize_again(codes: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, facts: BlockFp8) -> None:
    """As SGLang does after loading, one matrix at a time: it computes in FP32, and experts would take many times their size."""
    block = list(facts.format.block)
    matrices = (
        tensor.detach().flatten(0, -3) if tensor.dim() > 2 else tensor.detach()[None]
        for tensor in (codes, packed, scales)
    )
    for weight, target, scale in zip(*matrices, strict=True):
        made, made_scales = requant_weight_ue8m0(weight, scale, block)
        weight.copy_(made)
        target.copy_(made_scales)
