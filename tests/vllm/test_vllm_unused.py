"""Packed INT4 and INT8 layers: the parameters that vLLM registers and nothing computes with need not come."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16 import (
    CompressedTensorsWNA16MoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16_marlin import (
    CompressedTensorsWNA16MarlinMoEMethod,
)
from vllm.model_executor.layers.quantization.gptq import GPTQLinearMethod
from vllm.model_executor.layers.quantization.gptq_marlin import GPTQMarlinLinearMethod, GPTQMarlinMoEMethod
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from rlrefit.integration.errors import PlanError
from rlrefit.workers.engines.common.loader_trace.modules import owners_of
from rlrefit.workers.engines.common.loader_trace.trace import LoaderTrace, trace_loader
from rlrefit.workers.engines.vllm.completeness import absent_elements, check_complete, unused_parameters
from rlrefit.workers.engines.vllm.reload import ScopedReload

SORTED = {"w13_g_idx_sort_indices", "w2_g_idx_sort_indices"}
GROUPS = {"w13_weight_g_idx", "w2_weight_g_idx"}


class _Experts(nn.Module):
    """One layer of two packed experts, with the parameters that vLLM's own method registers."""

    def __init__(self, kind: type, actorder: str | None = None, device: str = "cpu") -> None:
        super().__init__()
        quantization = SimpleNamespace(
            num_bits=4, strategy="group", group_size=4, actorder=actorder, symmetric=True
        )
        method = kind(quantization, None, SimpleNamespace(is_act_and_mul=True))
        self.experts = nn.Module()
        with torch.device(device):
            method.create_weights(
                self.experts,
                2,
                16,
                32,
                torch.bfloat16,
                intermediate_size_full=32,
                weight_loader=default_weight_loader,
            )
        self.experts.quant_method = method

    def load_weights(self, weights):
        for name, tensor in weights:
            parameter = self.get_parameter(name)
            parameter.weight_loader(parameter, tensor)


def _trace(twin: _Experts, left: set[str]) -> LoaderTrace:
    """Of a manifest of all parameters but those ``left``; checked to be complete."""
    parameters = dict(twin.named_parameters())
    manifest = [
        (name, tuple(p.shape), p.dtype)
        for name, p in parameters.items()
        if name.removeprefix("experts.") not in left
    ]
    trace = trace_loader(twin.load_weights, parameters, manifest)
    check_complete(trace, owners_of(twin), twin, set(parameters), unused=unused_parameters(twin))
    return trace


@pytest.mark.parametrize(
    ("kind", "actorder"),
    [
        (CompressedTensorsWNA16MoEMethod, None),
        (CompressedTensorsWNA16MarlinMoEMethod, None),
        (CompressedTensorsWNA16MarlinMoEMethod, "static"),
    ],
)
def test_packed_experts_without_an_order_of_groups_are_complete_without_indices_and_no_less(kind, actorder):
    twin = _Experts(kind, actorder, "meta")
    trace = _trace(twin, GROUPS | SORTED)
    assert absent_elements(twin, trace) == {"experts": 2 * 2 * (16 + 32)}
    with pytest.raises(PlanError, match=r"256 elements of experts\.w13_weight_packed"):
        _trace(twin, GROUPS | SORTED | {"w13_weight_packed"})


def test_packed_experts_with_an_order_of_groups_need_it_but_not_sorted():
    twin = _Experts(CompressedTensorsWNA16MarlinMoEMethod, "group", "meta")
    assert absent_elements(twin, _trace(twin, SORTED)) == {"experts": 2 * (16 + 32)}
    with pytest.raises(PlanError, match=r"32 elements of experts\.w13_weight_g_idx"):
        _trace(twin, GROUPS | SORTED)


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


def test_packed_experts_are_reloaded_in_place_without_indices_twice():
    live = _Experts(CompressedTensorsWNA16MoEMethod)
    twin = _Experts(CompressedTensorsWNA16MoEMethod, device="meta")
    record_metadata_for_reloading(live)
    trace = _trace(twin, GROUPS | SORTED)
    live.experts.quant_method.process_weights_after_loading(live.experts)
    names = frozenset(trace.landings)
    reload = ScopedReload(
        live,
        VllmConfig(),
        torch.device("cpu"),
        {"experts": live.experts},
        {"experts": names},
        {},
        absent_elements(live, trace),
    )
    kept = {name: live.get_parameter(name) for name in names}
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        weights = {
            name: torch.randint(-(2**20), 2**20, twin.get_parameter(name).shape, generator=generator).to(
                twin.get_parameter(name).dtype
            )
            for name in sorted(names)
        }
        for parameter in kept.values():
            parameter.data.fill_(torch.nan if parameter.is_floating_point() else 99)
        reload.load(weights.items())
        reload.finish()
        fresh = _Experts(CompressedTensorsWNA16MoEMethod)
        fresh.load_weights(weights.items())
        fresh.experts.quant_method.process_weights_after_loading(fresh.experts)
        for name, parameter in kept.items():
            assert live.get_parameter(name).data_ptr() == parameter.data_ptr()
            assert torch.equal(parameter, fresh.get_parameter(name)), name
