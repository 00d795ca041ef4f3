"""Modules of an SGLang model that hold weights in FP8 blocks or MXFP8: in which format, and what SGLang makes of them after loading.

All of it is read in SGLang 0.5.17 and 0.5.23, so modules of any other release are refused. It is asked of the live module: its
method, the kernel or runner that the method chose, what its parameters have become, and what it holds beside them.
``layers/quantization/fp8.py`` leaves blocks as they were loaded, with these exceptions:

- DeepGEMM on Blackwell, where it can run the layer (``should_deepgemm_weight_requant_ue8m0``). Codes are quantized once more with
  powers of two as scales (``requant_weight_ue8m0``), which changes no value where the scales are such powers already: a block whose
  largest code is 224 gets codes twice as large and half the scale, all others keep their bytes. The scales are then packed:
  one for each row, as E8M0, four to an ``int32``, column after column (``transform_scale_ue8m0``).
- HPC-Ops' experts compute with copies of the scales whose rows are padded to a multiple of 4.
- MegaMoE computes with copies that SGLang makes once: processed again, they stay those of the old weights.
- Blocks of 32 columns (0.5.23) may be computed with as MXFP8, by swizzled copies of the scales, or by a copy of the weights in
  BF16; and DeepGEMM on Blackwell takes blocks of 32 by 32 if the scales that were loaded are powers of two. CUDA graphs
  keep which it was.
- AITER shuffles weights, Marlin and AMX pack: nothing here follows them.

CUTLASS and FlashInfer's TRT-LLM compute with blocks as they were loaded (TRT-LLM shuffles other formats).

Linear layers in MXFP8, loaded from codes (E4M3) and scales (E8M0 as ``uint8``, one for 32 elements of a row), keep both as they were
loaded. Triton computes with them. FlashInfer's CUTLASS and DeepGEMM compute with copies of the scales, which SGLang's own
function makes again in their places (``_process_mxfp8_linear_weight_scale``). FlashInfer's TRT-LLM shuffles the codes, and so takes
SGLang's loader and processing. Where 0.5.23 has both copies (DeepGEMM beside FlashInfer), one is made anew elsewhere or not at
all. Experts are swizzled, packed or shuffled, each kernel's in an order of its own. Both are refused.
Weights that SGLang itself quantizes as it loads them have no scales that a loader takes.

Where SGLang computes with scales in another form than checkpoints have them, a refit's scales land in tensors of the
checkpoint's form (:func:`staged_scales`). What is computed with is made of them, in its place, once all have landed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sglang
import torch
from sglang.srt.layers.moe import MoeRunnerBackend
from sglang.srt.layers.moe.moe_runner.hpc_ops import pad_hpc_ops_block_scale
from sglang.srt.layers.moe.utils import get_moe_a2a_backend, get_moe_runner_backend
from sglang.srt.layers.quantization import fp8_utils
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
from sglang.srt.layers.quantization.fp8_utils import requant_weight_ue8m0
from torch import nn

from ....integration.quantize.e8m0 import packed_ue8m0, rows_of_blocks
from ....integration.quantize.formats import Format, Fp8Blockwise, Mxfp8
from .compat import FP8_READ, release

_PLAIN_KERNELS = (
    fp8_utils.triton_w8a8_block_fp8_linear,
    fp8_utils.cutlass_w8a8_block_fp8_linear_with_fallback,
    fp8_utils.deepgemm_w8a8_block_fp8_linear_with_fallback,
    fp8_utils.flashinfer_gemm_w8a8_block_fp8_linear_with_fallback,
    fp8_utils.flashinfer_deepgemm_w8a8_block_fp8_linear_with_fallback,
)
_PLAIN_RUNNERS = (
    MoeRunnerBackend.TRITON,
    MoeRunnerBackend.DEEP_GEMM,
    MoeRunnerBackend.CUTLASS,
    MoeRunnerBackend.FLASHINFER_TRTLLM,
    MoeRunnerBackend.FLASHINFER_TRTLLM_ROUTED,
)
_MEGA_MOE = "MegaMoE computes with copies of experts that are made once, after loading"
# Of linear layers, in 0.5.23.
_LINEAR_COPIES = (
    "weight_scale_inv_swizzled",
    "weight_scale_inv_shuffled",
    "weight_scale_inv_deepgemm",
    "_block_fp8_bf16_weight",
)
# What computes with MXFP8 in linear layers, by its name in SGLang, and the copies of scales that it computes with in their stead.
_MXFP8_COPIES = {
    "triton_mxfp8_blockscaled_linear": [],  # 0.5.17 alone
    "flashinfer_mxfp8_blockscaled_linear": ["weight_scale_inv_swizzled"],
    "_deepgemm_w8a8_mxfp8_linear_with_fallback": ["weight_scale_inv_deepgemm"],  # 0.5.17
    "deepgemm_w8a8_mxfp8_linear_with_fallback": ["weight_scale_inv_deepgemm"],
}
# Where FlashInfer's TRT-LLM has shuffled the codes too.
_SHUFFLED = ["weight_scale_inv_shuffled"]
_MXFP8 = Mxfp8(scale_name_end="_scale_inv")
_MXFP8_EXPERTS = (
    "each kernel has experts in MXFP8 in an order of its own, which is not known here (modules_to_not_convert of the "
    "quantization_config leaves them out)"
)
# The only block of which DeepGEMM packs scales, and the scales in one of its integers.
_PACKED_BLOCK = 128
_PACKED_SCALES = 4


@dataclass(frozen=True)
class BlockFp8:
    """How one module holds its weights.

    Attributes:
        format: what a trainer has to make of them.
        scales: for each parameter of codes the one of its scales.
        packed: parameters of scales that DeepGEMM has packed.
        copies: attributes with padded copies of scales that the kernel computes with, and whose scales they are.
        remade: SGLang's own function makes the copies of scales again with which a kernel computes.
        effect: why codes and scales are not used as they were loaded, and nothing here follows; empty if they are or it does.
        final: with an effect that SGLang does not bring about again for weights that are loaded later.
    """

    format: Format
    scales: Mapping[str, str]
    packed: frozenset[str] = frozenset()
    copies: Mapping[str, str] = field(default_factory=dict)
    remade: bool = False
    effect: str = ""
    final: bool = False


def block_fp8(module: nn.Module) -> BlockFp8 | None:
    """The facts about a module of a live model; None where it holds neither FP8 blocks with FP32 scales nor MXFP8.

    Only SGLang's own methods for FP8 checkpoints: others name or make their scales in ways of their own.
    """
    method: Any = getattr(module, "quant_method", None)
    if type(method) is Fp8LinearMethod:
        scales = {"weight": "weight_scale_inv"}
        if _in_mxfp8(module, method, scales):
            return _if_read(_linear_mxfp8(module, method, scales))
        if _in_blocks(module, method, scales) and not method.use_marlin:
            facts, kept = _facts(module, method, scales), _kept(module)
            return _if_read(replace(facts, effect=kept or _linear_effect(method), final=bool(kept)))
    elif type(method) is Fp8MoEMethod:
        scales = {"w13_weight": "w13_weight_scale_inv", "w2_weight": "w2_weight_scale_inv"}
        if _in_mxfp8(module, method, scales):
            return _if_read(BlockFp8(_MXFP8, scales, effect=_MXFP8_EXPERTS, final=True))
        if _in_blocks(module, method, scales):
            runner, once = _runner(method), get_moe_a2a_backend().is_megamoe()
            return _if_read(
                replace(
                    _facts(module, method, scales),
                    copies={f"hpc_ops_{codes}_scale": scale for codes, scale in scales.items()}
                    if runner is MoeRunnerBackend.HPC_OPS
                    else {},
                    effect=_MEGA_MOE if once else _experts_effect(runner),
                    final=once,
                )
            )
    return None


def _if_read(facts: BlockFp8) -> BlockFp8:
    """The facts as they are in the release in which they were read; of another, that nothing is known."""
    if release(sglang.__version__) in FP8_READ:
        return facts
    why = (
        f"what SGLang {sglang.__version__} makes of FP8 blocks after loading was not read, as it was for "
        f"{' and '.join(FP8_READ)}: it may compute with copies that a refit would leave old"
    )
    return replace(facts, effect=why, final=True)


def block_modules(model: nn.Module) -> dict[str, BlockFp8]:
    """The modules of ``model`` that hold weights in FP8 blocks or MXFP8, by name."""
    return {name: facts for name, module in model.named_modules() if (facts := block_fp8(module))}


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
    if facts.remade:
        method: Any = module.quant_method
        method._process_mxfp8_linear_weight_scale(module)


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


def _in_blocks(module: nn.Module, method: Any, scales: Mapping[str, str]) -> bool:
    return (
        method.block_quant
        and not method.use_mxfp8
        and all(getattr(module, codes).dtype is torch.float8_e4m3fn for codes in scales)
    )


def _in_mxfp8(module: nn.Module, method: Any, scales: Mapping[str, str]) -> bool:
    """Whether codes and scales come from a checkpoint, and not from SGLang's own quantizer, or go on as FP8 blocks."""
    return (
        method.use_mxfp8
        and method.quant_config.is_checkpoint_fp8_serialized
        and all(getattr(module, codes).dtype is torch.float8_e4m3fn for codes in scales)
    )


def _linear_mxfp8(module: nn.Module, method: Any, scales: Mapping[str, str]) -> BlockFp8:
    facts = BlockFp8(_MXFP8, scales)
    kernel, copies = _plain(method.w8a8_mxfp8_linear), _copies(module)
    if copies == _SHUFFLED:
        return replace(
            facts, effect="FlashInfer's TRT-LLM computes with codes that are shuffled after loading"
        )
    if kernel is getattr(fp8_utils, kernel.__name__, None) and _MXFP8_COPIES.get(kernel.__name__) == copies:
        return replace(facts, remade=bool(copies))
    why = f"what {kernel.__name__} makes of MXFP8 is not known here ({', '.join(copies) or 'no copy'} of its scales)"
    return replace(facts, effect=why, final=True)


def _copies(module: nn.Module) -> list[str]:
    """The copies of scales, or of weights, that a linear layer computes with."""
    return [name for name in _LINEAR_COPIES if isinstance(getattr(module, name, None), torch.Tensor)]


def _plain(kernel: Any) -> Any:
    """In 0.5.23 a layer's kernel may be a partial of the function."""
    return getattr(kernel, "func", kernel)


def _facts(module: nn.Module, method: Any, scales: Mapping[str, str]) -> BlockFp8:
    packed = frozenset(
        scale for codes, scale in scales.items() if _is_packed(getattr(module, codes), getattr(module, scale))
    )
    rows, columns = method.weight_block_size
    return BlockFp8(Fp8Blockwise((rows, columns), bool(packed)), scales, packed)


def _is_packed(codes: torch.Tensor, scales: torch.Tensor) -> bool:
    columns = -(-codes.shape[-1] // (_PACKED_BLOCK * _PACKED_SCALES))
    return (
        getattr(scales, "format_ue8m0", False)
        and scales.dtype is torch.int32
        and tuple(scales.shape) == (*codes.shape[:-1], columns)
    )


def _kept(module: nn.Module) -> str:
    """What of the weights that were loaded first SGLang goes on using, in words; empty if nothing."""
    if copies := _copies(module):
        return (
            f"SGLang computes with a copy ({copies[0]}) that is made after loading, for MXFP8 or BF16 kernels"
        )
    if getattr(module.weight_scale_inv, "power_of_two", False):
        return "SGLang has chosen DeepGEMM since the scales that were loaded are powers of two, and others may come"
    return ""


def _linear_effect(method: Any) -> str:
    kernel = _plain(method.w8a8_block_fp8_linear)
    if kernel in _PLAIN_KERNELS:
        return ""
    return f"process_weights_after_loading for {kernel.__name__} may rewrite the layout"


def _runner(method: Any) -> MoeRunnerBackend:
    """What computes with experts; where SGLang made no runner, its setting says what the method calls itself."""
    runner = getattr(method, "runner", None)
    return get_moe_runner_backend() if runner is None else runner.runner_backend


def _experts_effect(runner: MoeRunnerBackend) -> str:
    if runner in _PLAIN_RUNNERS or runner is MoeRunnerBackend.HPC_OPS:
        return ""
    return f"process_weights_after_loading for the {runner.value} runner of experts may rewrite the layout"
