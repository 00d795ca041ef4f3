"""Packed INT4 and INT8 layers: vLLM shuffles their weights once for its kernel, and registers parameters that nothing uses."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm import _custom_ops
from vllm.config import VllmConfig
from vllm.model_executor import parameter as vllm_parameters
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16 import (
    CompressedTensorsWNA16MoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16_marlin import (
    CompressedTensorsWNA16MarlinMoEMethod,
)
from vllm.model_executor.layers.quantization.gptq import ExllamaState, GPTQConfig, GPTQLinearMethod
from vllm.model_executor.layers.quantization.gptq_marlin import GPTQMarlinLinearMethod, GPTQMarlinMoEMethod
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from rlrefit.integration.errors import PlanError, RefitError
from rlrefit.integration.layout.rearrangement import NotRearranged
from rlrefit.workers.engines.common.loader_trace.modules import owners_of
from rlrefit.workers.engines.common.loader_trace.trace import LoaderTrace, trace_loader
from rlrefit.workers.engines.vllm import packed_layers
from rlrefit.workers.engines.vllm import reload as reloading
from rlrefit.workers.engines.vllm.completeness import absent_elements, check_complete, unused_parameters
from rlrefit.workers.engines.vllm.layouts import module_layout
from rlrefit.workers.engines.vllm.nvfp4 import Nvfp4
from rlrefit.workers.engines.vllm.packed_layers import VllmPackedLayers
from rlrefit.workers.engines.vllm.reload import ScopedReload

ROWS, COLUMNS, GROUP, BITS = 64, 32, 16, 4
NAMES = {f"layer.{name}" for name in ("qweight", "g_idx", "qzeros", "scales")}
SORTED = {"w13_g_idx_sort_indices", "w2_g_idx_sort_indices"}
GROUPS = {"w13_weight_g_idx", "w2_weight_g_idx"}
Tensors = dict[str, torch.Tensor]


class _Model(nn.Module):
    """One layer of vLLM's own method."""

    def __init__(self, method: Any, *sizes: Any, device: str = "cpu", **options: Any) -> None:
        super().__init__()
        self.layer = nn.Module()
        with torch.device(device):
            method.create_weights(self.layer, *sizes, weight_loader=default_weight_loader, **options)
        self.layer.quant_method = method

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            parameter = self.get_parameter(name)
            parameter.weight_loader(parameter, tensor)

    def served(self, weights: Tensors) -> _Model:
        """As vLLM makes it of a checkpoint when it starts."""
        record_metadata_for_reloading(self)
        self.load_weights(weights.items())
        self.layer.quant_method.process_weights_after_loading(self.layer)
        return self

    def held(self) -> Tensors:
        return {name: parameter.detach().clone() for name, parameter in self.named_parameters()}

    def poison(self) -> None:
        for parameter in self.parameters():
            parameter.data.fill_(torch.nan if parameter.is_floating_point() else -1)

    def reload(self, names: Iterable[str], absent: int = 0) -> ScopedReload:
        modules, needed = {"layer": self.layer}, {"layer": frozenset(names)}
        return ScopedReload(
            self, VllmConfig(), torch.device("cpu"), modules, needed, {}, _nowhere, {"layer": absent}
        )


def _nowhere(landing: Any) -> torch.Tensor:
    raise AssertionError(landing)


def _gptq(ordered: bool = False, ranks: int = 1) -> _Model:
    """``ranks`` share its rows."""
    config = GPTQConfig(BITS, GROUP, ordered, lm_head_quantized=False, dynamic={}, checkpoint_format="gptq")
    return _Model(GPTQLinearMethod(config), ROWS, [COLUMNS], ROWS * ranks, COLUMNS, torch.float16)


def _experts(kind: type, actorder: str | None = None, device: str = "cpu") -> _Model:
    quantization = SimpleNamespace(
        num_bits=4, strategy="group", group_size=4, actorder=actorder, symmetric=True
    )
    method = kind(quantization, None, SimpleNamespace(is_act_and_mul=True))
    return _Model(method, 2, 16, 32, torch.bfloat16, device=device, intermediate_size_full=32)


def _weights(like: _Model, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    found = {
        name: torch.randint(-(2**10), 2**10, parameter.shape, generator=generator).to(parameter.dtype)
        for name, parameter in like.named_parameters()
    }
    if "layer.g_idx" in found:
        found["layer.g_idx"] = (torch.randperm(ROWS, generator=generator) // GROUP).int()
    return found


def _equal(first: Tensors, second: Tensors) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def _shuffle(weight: torch.Tensor, order: torch.Tensor, bits: int) -> None:
    """In the place of the GPU's: in place, other bytes for other weights and for another order, and never the same twice."""
    by_order = (order.to(torch.int32) * torch.arange(1, order.numel() + 1, dtype=torch.int32)).sum().int()
    weight.copy_(weight.flip(0) * 3 + bits + by_order)


@pytest.fixture(autouse=True)
def shuffles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_custom_ops, "gptq_shuffle", _shuffle)
    # Their constructors ask for a group of ranks.
    monkeypatch.setattr(vllm_parameters, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(vllm_parameters, "get_tensor_model_parallel_world_size", lambda: 1)


@pytest.mark.parametrize(
    ("ordered", "ranks", "state"),
    [
        (False, 1, ExllamaState.READY),
        (True, 1, ExllamaState.READY),
        (False, 2, ExllamaState.READY),
        (True, 2, ExllamaState.UNUSED),
    ],
)
def test_refits_shuffle_the_weights_as_the_engine_does_when_it_starts(ordered, ranks, state):
    like = _gptq(ordered, ranks)
    live = _gptq(ordered, ranks).served(_weights(like, 0))
    assert live.layer.exllama_state is state
    held = dict(live.named_parameters())
    layout = module_layout("layer", live.layer, like.layer)
    assert (layout.direct, layout.reload) == (False, True)
    reload = live.reload(NAMES)
    for seed in (1, 2):
        weights = _weights(like, seed)
        live.poison()
        reload.load(weights.items())
        reload.finish()
        assert _equal(live.held(), _gptq(ordered, ranks).served(weights).held())
        assert live.layer.exllama_state is state
        assert all(live.get_parameter(name) is parameter for name, parameter in held.items())


def test_groups_in_their_own_order_need_not_come():
    like = _gptq()
    live = _gptq().served(_weights(like, 0))
    assert unused_parameters(live) == {"layer.g_idx"}
    reload = live.reload(NAMES - {"layer.g_idx"}, absent=ROWS)
    for seed in (1, 2):
        weights = _weights(like, seed)
        reload.load((name, tensor) for name, tensor in weights.items() if name != "layer.g_idx")
        reload.finish()
        assert _equal(live.held(), _gptq().served(weights).held())


@pytest.mark.parametrize("come", [set(), {"layer.qweight"}, NAMES], ids=["nothing", "a part", "all"])
def test_a_refit_that_is_abandoned_leaves_a_layer_whose_weights_are_shuffled_known_as_such(come):
    like = _gptq(ordered=True)
    live = _gptq(ordered=True).served(_weights(like, 0))
    old, new = live.held(), _weights(like, 1)
    shuffled = _gptq(ordered=True).served(new).held()
    reload = live.reload(NAMES)
    reload.load((name, tensor) for name, tensor in new.items() if name in come)
    if come == NAMES:
        reload.abandon()
    else:
        with pytest.raises(RefitError, match="are incomplete"):
            reload.finish()
    assert live.layer.exllama_state is ExllamaState.READY
    assert _equal(live.held(), shuffled if come == NAMES else old)
    reload.load(new.items())
    reload.finish()
    assert _equal(live.held(), shuffled)


def test_what_fails_as_a_failed_refit_is_put_back_does_not_take_the_place_of_its_cause(monkeypatch):
    live = _gptq().served(_weights(_gptq(), 0))
    reload = live.reload(NAMES)
    reload.load(_weights(_gptq(), 1).items())
    errors = iter([ValueError("the kernel refuses"), RuntimeError("nothing to put back")])

    def fails(*_: object) -> None:
        raise next(errors)

    monkeypatch.setattr(reloading, "finalize_layerwise_reload", fails)
    with pytest.raises(ValueError, match="the kernel refuses") as caught:
        reload.finish()
    assert "nothing to put back" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("kind", "always", "unordered"),
    [
        (GPTQMarlinMoEMethod, SORTED, {"w13_g_idx", "w2_g_idx"}),
        (GPTQMarlinLinearMethod, set(), {"g_idx"}),
        (GPTQLinearMethod, set(), {"g_idx"}),
    ],
)
def test_gptq_layers_need_their_indices_where_the_checkpoint_was_quantized_in_an_order(
    kind, always, unordered
):
    model = nn.ModuleDict({"layer": nn.Module()})
    for ordered, unused in ((True, always), (False, always | unordered)):
        # Their constructors ask for a GPU; the configuration is all that counts here.
        method = kind.__new__(kind)
        method.quant_config = SimpleNamespace(desc_act=ordered)
        model["layer"].__dict__["quant_method"] = method
        assert unused_parameters(model) == {f"layer.{name}" for name in unused}


def _trace(twin: _Model, left: set[str]) -> LoaderTrace:
    """Of a manifest of all parameters but those ``left``; checked to be complete."""
    parameters = dict(twin.named_parameters())
    manifest = [
        (name, tuple(p.shape), p.dtype)
        for name, p in parameters.items()
        if name.removeprefix("layer.") not in left
    ]
    trace = trace_loader(twin.load_weights, parameters, manifest)
    check_complete(trace, owners_of(twin), twin, set(parameters), unused=unused_parameters(twin))
    return trace


@pytest.mark.parametrize(
    ("kind", "actorder", "left", "absent", "needed"),
    [
        (CompressedTensorsWNA16MoEMethod, None, GROUPS | SORTED, 4 * (16 + 32), "w13_weight_packed"),
        (CompressedTensorsWNA16MarlinMoEMethod, None, GROUPS | SORTED, 4 * (16 + 32), "w13_weight_packed"),
        (
            CompressedTensorsWNA16MarlinMoEMethod,
            "static",
            GROUPS | SORTED,
            4 * (16 + 32),
            "w13_weight_packed",
        ),
        (CompressedTensorsWNA16MarlinMoEMethod, "group", SORTED, 2 * (16 + 32), "w13_weight_g_idx"),
    ],
)
def test_packed_experts_are_complete_without_indices_that_their_order_does_not_need_and_no_less(
    kind, actorder, left, absent, needed
):
    twin = _experts(kind, actorder, "meta")
    assert absent_elements(twin, _trace(twin, left)) == {"layer": absent}
    with pytest.raises(PlanError) as caught:
        _trace(twin, left | {needed})
    assert caught.value.parameter == f"layer.{needed}"


def test_packed_experts_are_reloaded_in_place_without_indices_twice():
    def made(device: str = "cpu") -> _Model:
        return _experts(CompressedTensorsWNA16MoEMethod, device=device)

    twin = made("meta")
    trace = _trace(twin, GROUPS | SORTED)
    like = _weights(made(), 0)
    live = made().served({name: like[name] for name in trace.landings})
    reload = live.reload(trace.landings, absent_elements(twin, trace)["layer"])
    places = {name: live.get_parameter(name).data_ptr() for name in trace.landings}
    for seed in (1, 2):
        weights = {name: tensor for name, tensor in _weights(made(), seed).items() if name in places}
        live.poison()
        reload.load(weights.items())
        reload.finish()
        fresh = made().served(weights)
        for name, place in places.items():
            assert live.get_parameter(name).data_ptr() == place
            assert torch.equal(live.get_parameter(name), fresh.get_parameter(name)), name


class _Experts(QuantizeMethodBase):
    """Makes a kernel of the experts' weights each time, as vLLM's methods do."""

    dims = 0

    def create_weights(self, layer, *sizes, weight_loader, **_):
        layer.register_parameter("scale", nn.Parameter(torch.zeros(*sizes), requires_grad=False))
        layer.scale.weight_loader = weight_loader

    def apply(self, *_):
        raise AssertionError

    def process_weights_after_loading(self, layer):
        inverse = (1 / layer.scale).reshape(*layer.scale.shape, *(1,) * self.dims)
        self.moe_quant_config = SimpleNamespace(
            _a1=SimpleNamespace(gscale=inverse, dtype="nvfp4"),
            _w1=SimpleNamespace(scale=layer.scale),
            swizzled=True,
        )
        self.moe_kernel = SimpleNamespace(fused_experts=SimpleNamespace(twice=2 * layer.scale))


def _reload_experts(model: _Model, scale: torch.Tensor) -> None:
    reload = model.reload(["layer.scale"])
    reload.load([("layer.scale", scale)])
    reload.finish()


def test_kernels_of_reloaded_experts_get_new_values_where_they_are() -> None:
    model = _Model(_Experts(), 3).served({"layer.scale": torch.tensor([1.0, 2.0, 4.0])})
    method = model.layer.quant_method
    kernel, config = method.moe_kernel, method.moe_quant_config
    kernel.fused_experts.workspace = torch.full((2,), 7.0)  # made as it first ran
    held = config._a1.gscale, config._w1.scale, kernel.fused_experts.twice
    for scale in (torch.tensor([8.0, 16.0, 32.0]), torch.tensor([0.5, 0.25, 2.0])):
        _reload_experts(model, scale)
        assert (method.moe_kernel, method.moe_quant_config) == (kernel, config)
        assert (config._a1.gscale, config._w1.scale, kernel.fused_experts.twice) == held
        assert all(map(torch.equal, held, (1 / scale, scale, 2 * scale)))
        assert kernel.fused_experts.workspace.tolist() == [7.0, 7.0]
    reload = model.reload(["layer.scale"])
    reload.load([])
    reload.abandon()
    assert (method.moe_kernel, method.moe_quant_config) == (kernel, config)
    assert all(map(torch.equal, held, (1 / scale, scale, 2 * scale)))


def test_a_reload_that_makes_another_kernel_of_experts_is_an_error() -> None:
    model = _Model(_Experts(), 3).served({"layer.scale": torch.ones(3)})
    method = model.layer.quant_method
    method.dims = 1
    with pytest.raises(RefitError) as raised:
        _reload_experts(model, torch.ones(3))
    assert raised.value.stage == "post_load"


class _Refused(Nvfp4):
    """A format whose layers can't be asked about, by some error; ``asked_with`` are tensors that were made for it."""

    def __init__(self, kind: type[Exception], text: str) -> None:
        self._kind, self._text = kind, text
        self.asked_with: list[weakref.ref[torch.Tensor]] = []

    def kind(self, live: nn.Module) -> str:
        return "any"

    def kernel(self, live: Any) -> str:
        return "any"

    def asked(self, *_: Any) -> Any:
        tensor = torch.zeros(1)
        self.asked_with.append(weakref.ref(tensor))
        raise self._kind(self._text)


@pytest.mark.parametrize(
    ("kind", "text", "told", "times"),
    [
        (torch.OutOfMemoryError, "CUDA out of memory", "gpu_memory_utilization", 2),
        (NotRearranged, "it does more", "it does more", 1),
    ],
    ids=["another time there may be more memory", "it is so of the kind"],
)
def test_layers_that_cant_be_asked_about_take_vllms_reload_and_keep_no_tensors(
    kind, text, told, times, monkeypatch
):
    refused = _Refused(kind, text)
    monkeypatch.setattr(packed_layers, "_FORMATS", (refused,))
    live = nn.Linear(2, 2)
    live.params_dtype = torch.bfloat16
    layers = VllmPackedLayers(VllmConfig(), torch.device("cpu"))
    for _ in range(2):
        with pytest.raises(NotRearranged, match=told):
            layers.of(live, live)
    assert len(refused.asked_with) == times
    assert all(tensor() is None for tensor in refused.asked_with)
