"""Experts that vLLM packs after loading: found out by its own code, written in place, or refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.utils.flashinfer_utils import swap_w13_to_w31

from rlrefit.integration.layout.rearrangement import NotRearranged, Rearrangement
from rlrefit.workers.engines.common.loader_trace.modules import ModuleLayout
from rlrefit.workers.engines.common.loader_trace.trace import Landing, trace_loader
from rlrefit.workers.engines.common.packed.making import Padded
from rlrefit.workers.engines.common.traced_destination import _routed
from rlrefit.workers.engines.vllm.kernel_layouts import KernelLayouts

BF16, CPU = torch.bfloat16, torch.device("cpu")
SHAPES = {"w13_weight": (3, 8, 6), "w2_weight": (3, 6, 4), "e_score_correction_bias": (3,)}


def experts(device: str, packed: Callable[[nn.Module], Any] | None = None, isa: str = "vec") -> nn.Module:
    """A layer of unquantized experts as vLLM's build for CPUs has it, whose step after loading ends with ``packed``."""
    layer = nn.Module()
    for name, shape in SHAPES.items():
        dtype = torch.float32 if name.endswith("bias") else BF16
        values = torch.zeros(shape, dtype=dtype, device=device)
        layer.register_parameter(name, nn.Parameter(values, requires_grad=False))
    method = UnquantizedFusedMoEMethod.__new__(_packing(packed) if packed else UnquantizedFusedMoEMethod)
    nn.Module.__init__(method)
    method.unquantized_backend, method.moe_kernel = UnquantizedMoeBackend.CPU, None
    method.cpu_fused_moe = CPUFusedMOE.__new__(CPUFusedMOE)
    method.cpu_fused_moe.isa = isa
    layer.quant_method = method
    return layer


def _packing(packed: Callable[[nn.Module], Any]) -> type[UnquantizedFusedMoEMethod]:
    """This vLLM's class, on a CPU that packs: the libraries' own code for that needs AVX-512."""

    class Method(UnquantizedFusedMoEMethod):
        def process_weights_after_loading(self, layer: nn.Module) -> None:
            super().process_weights_after_loading(layer)
            packed(layer)

    for name in ("__module__", "__qualname__"):
        setattr(Method, name, getattr(UnquantizedFusedMoEMethod, name))
    return Method


def _swapped(layer: nn.Module) -> None:
    layer.w13_weight = nn.Parameter(swap_w13_to_w31(layer.w13_weight.data), requires_grad=False)


def _grown(layer: nn.Module) -> None:
    layer.w2_weight = nn.Parameter(nn.functional.pad(layer.w2_weight, (0, 4)), requires_grad=False)


def _turned(layer: nn.Module) -> None:
    layer.w2_weight = nn.Parameter(layer.w2_weight.transpose(1, 2).contiguous(), requires_grad=False)


def test_halves_that_are_swapped_after_loading_are_written_where_they_are():
    live, twin = experts("cpu", _swapped), experts("meta")
    held, kernel = dict(live.named_parameters()), live.quant_method.cpu_fused_moe
    found = KernelLayouts(VllmConfig(), CPU).of(live, twin)
    assert found.keys() == {"w13_weight"}
    assert dict(live.named_parameters()) == held
    assert live.quant_method.cpu_fused_moe is kernel
    names = {f"{part}{e}": (4, 6) for e in range(3) for part in ("gate", "up")}

    def load(weights: Any, into: nn.Module = twin) -> None:
        for name, tensor in weights:
            row = 0 if name.startswith("gate") else 4
            into.w13_weight.data[int(name[-1])].narrow(0, row, 4).copy_(tensor)

    before = dict(twin.named_parameters())
    trace = trace_loader(load, before, [(name, shape, BF16) for name, shape in names.items()])
    layouts = {"": ModuleLayout(placed=True, rearranged=found, otherwise=ModuleLayout("packed"))}
    routed, as_found, reasons = _routed(trace, before, dict.fromkeys(before, frozenset({""})), layouts)
    assert (as_found, reasons) == (layouts, {})
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        values = {name: torch.randn(shape, generator=generator).to(BF16) for name, shape in names.items()}
        live.w13_weight.fill_(torch.nan)
        for landings in routed.landings.values():
            for landing in landings:
                landing.write(values[landing.name], live.w13_weight)
        loaded = experts("cpu", _swapped)
        load(values.items(), loaded)
        loaded.quant_method.process_weights_after_loading(loaded)
        assert torch.equal(live.w13_weight, loaded.w13_weight)
        assert torch.equal(live.w13_weight[1, :4], values["up1"])


def test_layers_alike_are_asked_once_and_those_for_another_kernel_anew():
    runs: list[nn.Module] = []
    layouts = KernelLayouts(VllmConfig(), CPU)
    first, second = (experts("cpu", runs.append) for _ in range(2))
    assert layouts.of(first, experts("meta")) == {}
    assert len(runs) > 5
    runs.clear()
    assert layouts.of(second, experts("meta")) == {}
    assert runs == []
    assert layouts.of(experts("cpu", _swapped, isa="amx"), experts("meta")).keys() == {"w13_weight"}


def _fails(layer: nn.Module) -> None:
    raise RuntimeError("no room")


@pytest.mark.parametrize(
    ("packed", "told"),
    [
        (lambda layer: layer.w2_weight.mul_(0.5), "changed"),
        (lambda layer: delattr(layer, "w2_weight"), "w2_weight"),
        (_grown, "w2_weight is padded"),
        (_turned, "live ones"),
        (_fails, "no room"),
    ],
    ids=["values change", "a weight goes", "padding", "another shape than the live one's", "an error"],
)
def test_what_is_more_than_another_order_is_refused_with_the_reason(
    packed: Callable[[nn.Module], Any], told: str
):
    with pytest.raises(NotRearranged, match=told):
        KernelLayouts(VllmConfig(), CPU).of(experts("cpu", packed), experts("meta"))


def test_a_step_without_memory_is_told_as_that_and_asked_again():
    left = [torch.OutOfMemoryError("CUDA out of memory")]

    def packed(layer: nn.Module) -> None:
        if left:
            raise left.pop()

    layouts, live = KernelLayouts(VllmConfig(), CPU), experts("cpu", packed)
    with pytest.raises(NotRearranged, match="gpu_memory_utilization"):
        layouts.of(live, experts("meta"))
    assert layouts.of(live, experts("meta")) == {}


def test_kernels_that_have_not_been_run_are_not_asked():
    layouts = KernelLayouts(VllmConfig(), CPU)
    other = experts("cpu")
    other.quant_method.cpu_fused_moe = object()
    on_gpus = experts("cpu")
    del on_gpus.quant_method.cpu_fused_moe
    for live in (other, on_gpus, experts("cpu", isa="neon"), nn.Linear(2, 2)):
        assert layouts.of(live, experts("meta")) is None


TILES = Rearrangement((8, 2), 0, ((0, 1, 4, 5, 8, 9, 12, 13), (0, 2)))


@pytest.mark.parametrize(
    ("rows", "load_a", "load_b", "whole"),
    [
        (4, lambda w, a: w[2:6].copy_(a), lambda v, b: v.copy_(b), True),
        (3, lambda w, a: w[2:5].copy_(a), lambda v, b: v.copy_(b), False),
        (4, lambda w, a: [w[:4].copy_(a), w[4:6].copy_(a[:2])], lambda v, b: v.copy_(b), False),
        (4, lambda w, a: w[2:6].copy_(a.zero_()), lambda v, b: v.copy_(b), False),
        (4, lambda w, a: w[2:6].copy_(a), lambda v, b: v.copy_(b * 2), False),
    ],
    ids=["whole tiles", "a cut tile", "places by two axes", "zeros", "another tensor takes the misc path"],
)
def test_a_module_is_written_where_the_kernel_has_it_whole_or_not_at_all(
    rows: int, load_a: Callable[..., Any], load_b: Callable[..., Any], whole: bool
):
    twin = nn.ParameterDict(
        {"w": torch.empty(TILES.shape, dtype=BF16, device="meta"), "v": torch.empty(4, dtype=BF16)}
    )

    def load(weights: Any) -> None:
        for name, tensor in weights:
            if name == "a":
                load_a(twin["w"].data, tensor)
            else:
                load_b(twin["v"].data, tensor)

    trace = trace_loader(load, dict(twin), [("a", (rows, 2), BF16), ("b", (4,), BF16)])
    otherwise = ModuleLayout("packed for a kernel")
    layouts = {"": ModuleLayout(placed=True, rearranged={"w": TILES}, otherwise=otherwise)}
    owners = dict.fromkeys(("v", "w"), frozenset({""}))
    _, routed, reasons = _routed(trace, dict(twin), owners, layouts)
    assert routed == (layouts if whole else {"": otherwise})
    assert reasons.keys() == (set() if whole else {"a", "b"})


@pytest.mark.parametrize(("start", "full"), [(0, 12), (4, 12), (8, 12)])
def test_parts_of_a_tensor_that_are_whole_tiles_land_by_the_tensors_own_tiles(start: int, full: int):
    parameter = torch.empty(8, 2)
    landing = Landing("a", (full, 2), ((start, start + 4), (0, 2)), "w", 4, (2, 1))
    moved = landing.rearranged(parameter, TILES)
    assert moved.bounds == landing.box
    whole = torch.arange(2.0 * full).reshape(full, 2)
    out = torch.full((16,), -1.0)
    moved.write(whole, out)
    expected = torch.full((16,), -1.0)
    for row in range(4):
        for column in range(2):
            expected[TILES.steps[0][2 + row] + TILES.steps[1][column]] = whole[start + row, column]
    assert torch.equal(out, expected)


def test_what_a_kernel_pads_is_loaded_apart_from_its_zeros() -> None:
    # Two experts of gate and up, three rows of four columns each, with zeros up to four rows and six columns.
    padded = Padded((((2, 2),), ((2, 2), (3, 4)), ((4, 6),)))
    assert padded.shape == (2, 8, 6)
    numbers = torch.arange(2 * 8 * 6).view(padded.shape)
    loaded = torch.cat([numbers[:, 0:3, :4], numbers[:, 4:7, :4]], dim=1)
    assert torch.equal(padded.loaded(numbers).reshape(2, 6, 4), loaded)
    by = padded.places
    assert by.shape == (2, 6, 4)
    experts, rows, columns = (torch.tensor(steps) for steps in by.steps)
    assert torch.equal(by.first + experts[:, None, None] + rows[:, None] + columns, loaded)
    for zeros in padded.zeros(numbers):
        zeros.fill_(-1)
    assert torch.equal(padded.loaded(numbers).reshape(2, 6, 4), loaded)
    assert set(numbers.flatten().tolist()) == {-1, *loaded.flatten().tolist()}
