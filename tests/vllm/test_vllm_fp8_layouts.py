"""Which modules in FP8 blocks are written in place: by the kernel that vLLM chose, and by what the trainer promised."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassFp8BlockScaledMMKernel
from vllm.model_executor.kernels.linear.scaled_mm.deep_gemm import DeepGemmFp8BlockScaledMMKernel
from vllm.model_executor.kernels.linear.scaled_mm.flashinfer import (
    FlashInferFp8DeepGEMMDynamicBlockScaledKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.marlin import MarlinFP8ScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.triton import TritonFp8BlockScaledMMKernel
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod, Fp8OnlineLinearMethod
from vllm.model_executor.layers.quantization.utils.flashinfer_utils import prepare_fp8_moe_layer_for_fi
from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace

from rlrefit.integration.errors import PlanError
from rlrefit.integration.quantize import fp8_blockwise
from rlrefit.integration.quantize.formats import Fp8Blockwise
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.workers.engines.common.loader_trace.quantized import formats_of, promised_modules
from rlrefit.workers.engines.common.loader_trace.trace import Landing, LoaderTrace, trace_loader
from rlrefit.workers.engines.vllm import fp8
from rlrefit.workers.engines.vllm.layouts import VllmLayout, module_layout
from rlrefit.workers.engines.vllm.reload import refresh_expert_scales

IN_PLACE = VllmLayout(placed=True)


class _Module(nn.Module):
    """Parameters of the given shapes, codes in float8 and scales in FP32, under one of vLLM's methods."""

    def __init__(self, method: Any, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            dtype = torch.float32 if "scale" in name else torch.float8_e4m3fn
            setattr(self, name, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))
        self.quant_method = method


def _linear(kernel_class: type, *, e8m0: bool = False, method: type = Fp8LinearMethod) -> _Module:
    made = method.__new__(method)
    made.block_quant, made.weight_block_size = True, [128, 128]
    made.fp8_linear = kernel_class.__new__(kernel_class)
    if kernel_class is FlashInferFp8DeepGEMMDynamicBlockScaledKernel:
        made.fp8_linear.fallback = DeepGemmFp8BlockScaledMMKernel.__new__(DeepGemmFp8BlockScaledMMKernel)
        made.fp8_linear.fallback.use_deep_gemm_e8m0 = e8m0
    made.fp8_linear.use_deep_gemm_e8m0 = e8m0
    return _Module(made, weight=(256, 128), weight_scale_inv=(2, 1))


def _experts(backend: Fp8MoeBackend) -> _Module:
    made = Fp8MoEMethod.__new__(Fp8MoEMethod)
    made.block_quant, made.weight_block_size, made.fp8_backend = True, [128, 128], backend
    made.moe = SimpleNamespace(is_act_and_mul=True)
    return _Module(
        made,
        w13_weight=(2, 256, 128),
        w2_weight=(2, 128, 128),
        w13_weight_scale_inv=(2, 2, 1),
        w2_weight_scale_inv=(2, 1, 1),
    )


def _layout(module: _Module, promised: bool = False) -> VllmLayout:
    return module_layout("layer", module, module, promised)


@pytest.mark.parametrize(
    ("kernel", "e8m0", "unpromised", "promised"),
    [
        (TritonFp8BlockScaledMMKernel, False, True, True),
        (CutlassFp8BlockScaledMMKernel, False, True, True),
        (MarlinFP8ScaledMMLinearKernel, False, False, False),
        (CPUFp8BlockScaledMMKernel, False, False, False),
        (DeepGemmFp8BlockScaledMMKernel, False, True, True),
        (DeepGemmFp8BlockScaledMMKernel, True, False, True),
        (FlashInferFp8DeepGEMMDynamicBlockScaledKernel, True, False, True),
    ],
)
def test_a_linear_layer_is_written_in_place_where_its_kernel_computes_with_what_was_sent(
    kernel, e8m0, unpromised, promised
):
    """DeepGEMM's with scales that are powers of two: where all of them are promised to be."""
    module = _linear(kernel, e8m0=e8m0)
    for promise, in_place in ((False, unpromised), (True, promised)):
        layout = _layout(module, promised=promise)
        assert (layout.direct, layout.reload, layout.placed) == (in_place, not in_place, in_place)
    if unpromised or promised:
        assert fp8.block_fp8(module).format == Fp8Blockwise((128, 128), ue8m0=e8m0)


def test_scales_that_blackwells_deepgemm_packed_take_the_reload():
    live, fresh = (_linear(DeepGemmFp8BlockScaledMMKernel, e8m0=True) for _ in range(2))
    live.weight_scale_inv = nn.Parameter(torch.zeros(256, 1, dtype=torch.int32), requires_grad=False)
    layout = module_layout("layer", live, fresh, True)
    assert layout.reload


@pytest.mark.parametrize("backend", list(Fp8MoeBackend))
@pytest.mark.parametrize("e8m0", [False, True])
def test_experts_in_blocks_are_written_in_place_for_the_backends_that_keep_them(backend, e8m0, monkeypatch):
    monkeypatch.setattr("vllm.utils.deep_gemm.is_deep_gemm_e8m0_used", lambda: e8m0)
    module = _experts(backend)
    plain = backend.value in ("TRITON", "BATCHED_TRITON", "VLLM_CUTLASS", "BATCHED_VLLM_CUTLASS")
    deep_gemm = backend.value in ("DEEPGEMM", "BATCHED_DEEPGEMM")
    swapping = backend is Fp8MoeBackend.FLASHINFER_CUTLASS
    assert _layout(module, promised=True).direct == (plain or deep_gemm or swapping)
    assert _layout(module, promised=True).swapped == (
        {"w13_weight", "w13_weight_scale_inv"} if swapping else set()
    )
    assert _layout(module).direct == (plain or (deep_gemm and not e8m0))
    assert fp8.block_fp8(module).format.ue8m0 == (deep_gemm and e8m0)
    if not plain and not deep_gemm and not swapping:
        assert "moe_backend='triton'" in _layout(module).reason


def _of_another_library(self: Any, layer: nn.Module) -> None:
    """As NeMo-RL puts it in vLLM's place."""


@pytest.mark.parametrize("method", [Fp8LinearMethod, Fp8MoEMethod, TritonFp8BlockScaledMMKernel])
@pytest.mark.parametrize(
    "replacement",
    [
        _of_another_library,
        functools.wraps(Fp8LinearMethod.process_weights_after_loading)(_of_another_library),
        mock.MagicMock(),
    ],
    ids=["function", "wrapper", "mock"],
)
def test_a_post_load_function_that_is_not_vllms_own_takes_the_reload(method, replacement, monkeypatch):
    experts = method is Fp8MoEMethod
    module = _experts(Fp8MoeBackend.TRITON) if experts else _linear(TritonFp8BlockScaledMMKernel)
    assert _layout(module, promised=True) == IN_PLACE
    monkeypatch.setattr(method, "process_weights_after_loading", replacement)
    layout = _layout(module, promised=True)
    assert (layout.direct, layout.reload) == (False, True)
    assert method.__name__ in layout.reason


def test_landings_are_found_again_where_vllm_swaps_the_halves_for_flashinfer():
    """Against vLLM's own processing of what its loader wrote."""
    generator = torch.Generator().manual_seed(1)
    held = {
        "w13_weight": torch.zeros(2, 256, 256, dtype=torch.float8_e4m3fn),
        "w13_weight_scale_inv": torch.zeros(2, 2, 2),
    }
    wire, places = {}, {}
    for expert, half in itertools.product(range(2), range(2)):
        name = f"half {half} of expert {expert}"
        codes, scales = fp8_blockwise.quantize(torch.randn(128, 256, generator=generator).bfloat16())
        wire |= {name: codes, f"{name}, scales": scales}
        places[name] = ("w13_weight", expert, slice(128 * half, 128 * half + 128))
        places[f"{name}, scales"] = ("w13_weight_scale_inv", expert, slice(half, half + 1))

    def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            parameter, expert, rows = places[name]
            held[parameter][expert, rows].copy_(tensor)

    trace = trace_loader(load, held, [(name, tuple(t.shape), t.dtype) for name, t in wire.items()])
    load(wire.items())
    second = torch.zeros(2, 256, 128, dtype=torch.float8_e4m3fn), torch.ones(2, 2, 1)
    layer = SimpleNamespace(
        moe_config=SimpleNamespace(is_act_and_mul=True),
        weight_block_size=[128, 128],
        activation=SimpleNamespace(is_gated=True),
    )
    w13, _, w13_scale, _ = prepare_fp8_moe_layer_for_fi(
        layer, held["w13_weight"], second[0], held["w13_weight_scale_inv"], None, second[1], None
    )
    expected = {"w13_weight": w13, "w13_weight_scale_inv": w13_scale}
    written = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
    for name, landings in trace.landings.items():
        [landing] = landings
        moved = landing.in_the_other_half(held[landing.parameter])
        assert moved.in_the_other_half(held[landing.parameter]) == landing
        moved.fragment(written[landing.parameter]).view.copy_(wire[name])
    for name, tensor in expected.items():
        assert torch.equal(written[name].view(torch.uint8), tensor.view(torch.uint8))
    both = Landing("w", (3, 3), ((0, 3), (0, 3)), "w13_weight", 12, (3, 1))
    with pytest.raises(PlanError, match="both halves"):
        both.in_the_other_half(torch.zeros(2, 4, 3))


@pytest.mark.parametrize("seed", range(4))
def test_vllms_second_quantization_changes_no_value_where_scales_are_powers_of_two(seed):
    """Why DeepGEMM may be written in place: what it would compute with is, as numbers, what was sent."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.exp2(torch.rand(4, 1, 4, 1, generator=generator) * 30 - 22)
    weight = (torch.randn(4, 128, 4, 128, generator=generator) * magnitudes).view(512, 512).bfloat16()
    weight[:128, :128] = 0.0
    weight[0, 128] = 224.0 * 2.0 ** torch.arange(1)  # its block's largest code is half of what codes reach
    weight[:128, 128:256].clamp_(-224.0, 224.0)
    codes, scales = fp8_blockwise.quantize(weight, scale=fp8_blockwise.ScaleFormat.UE8M0)
    again, scales_again = codes.clone(), scales.clone()
    with torch.compiler.set_stance("force_eager"):  # compiling takes seconds
        requant_weight_ue8m0_inplace(again, scales_again)
    assert torch.equal(fp8_blockwise.dequantize(again, scales_again), fp8_blockwise.dequantize(codes, scales))
    changed = scales_again != scales
    assert torch.equal(scales_again[changed] * 2, scales[changed])
    largest = codes.float().abs().view(4, 128, 4, 128).amax(dim=(1, 3))
    assert torch.equal(changed, largest == 224.0)


def _trace(touched: dict[str, set[str]]) -> LoaderTrace:
    frozen = {name: frozenset(parameters) for name, parameters in touched.items()}
    return LoaderTrace({}, {}, frozen, frozenset(), {}, {}, frozenset())


def _model() -> nn.Module:
    model = nn.Module()
    model.qkv = _linear(DeepGemmFp8BlockScaledMMKernel, e8m0=True)
    model.experts = _experts(Fp8MoeBackend.TRITON)
    model.norm = nn.RMSNorm(4)
    return model


BF16, FP16, FP32, CODES = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("shape", "dtype", "touched", "format"),
    [
        ((128, 128), BF16, {"qkv.weight"}, Fp8Blockwise(ue8m0=True)),
        ((128, 128), FP16, {"experts.w13_weight"}, Fp8Blockwise()),
        ((4,), BF16, {"norm.weight"}, None),
        ((128, 128), CODES, {"qkv.weight"}, None),
        ((128, 128), BF16, set(), None),  # another rank's
        ((2, 128, 128), BF16, {"experts.w13_weight"}, "matrices"),
        ((128, 128), FP32, {"qkv.weight"}, "matrices"),
        ((128, 128), BF16, {"qkv.weight", "norm.weight"}, "differ in format"),
        ((128, 128), BF16, {"qkv.weight", "experts.w2_weight"}, "differ in format"),
    ],
)
def test_each_weight_gets_the_format_of_the_module_that_it_goes_into_and_what_no_trainer_can_make_is_said(
    shape, dtype, touched, format, caplog
):
    found = formats_of([TensorSpec("w", shape, dtype)], _trace({"w": touched}), fp8.block_modules(_model()))
    assert found == ({"w": format} if isinstance(format, Fp8Blockwise) else {})
    assert (format if isinstance(format, str) else "") in caplog.text
    assert bool(caplog.text) == isinstance(format, str)


def test_a_module_is_promised_where_all_its_codes_come_in_the_format_that_was_asked_for():
    blocks = fp8.block_modules(_model())
    trace = _trace({"q": {"qkv.weight"}, "k": {"qkv.weight"}, "s": {"qkv.weight_scale_inv"}})
    asked = {"q": Fp8Blockwise(ue8m0=True), "k": Fp8Blockwise(ue8m0=True)}
    assert "qkv" in promised_modules(trace, blocks, asked)
    assert "qkv" not in promised_modules(trace, blocks, {"q": Fp8Blockwise(ue8m0=True)})
    assert "qkv" not in promised_modules(trace, blocks, asked | {"k": Fp8Blockwise()})
    assert "qkv" not in promised_modules(trace, blocks, {})


def test_an_engine_that_quantizes_by_itself_is_named_once_with_the_remedy(caplog):
    model = nn.Module()
    for name in ("a", "b"):
        setattr(model, name, _linear(TritonFp8BlockScaledMMKernel, method=Fp8OnlineLinearMethod))
    model.ours = _linear(TritonFp8BlockScaledMMKernel)
    fp8.tell_of_own_quantizers(model, fp8.block_modules(model))
    [record] = caplog.records
    assert "Fp8OnlineLinearMethod" in record.getMessage()
    assert fp8.block_modules(model).keys() == {"ours"}


def test_the_scales_of_an_experts_kernel_follow_the_parameters_without_moving():
    layer = _experts(Fp8MoeBackend.TRITON)
    stale = torch.full((2, 2, 1), 7.0)
    layer.quant_method.weight_scale_name = "weight_scale_inv"
    layer.quant_method.moe_quant_config = SimpleNamespace(
        w1_scale=stale, w2_scale=layer.w2_weight_scale_inv, w1_bias=None, w2_bias=None
    )
    layer.w13_weight_scale_inv.fill_(3.0)
    address = stale.data_ptr()
    refresh_expert_scales(layer)
    assert layer.quant_method.moe_quant_config.w1_scale.data_ptr() == address
    assert torch.equal(stale, layer.w13_weight_scale_inv)
