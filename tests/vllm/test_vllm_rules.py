"""Rules of the vLLM destination on small modules: routes of whole modules, completeness, derived state."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm import _custom_ops
from vllm.model_executor.layers.fused_moe import cpu_fused_moe
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
from vllm.platforms import current_platform

from rlrefit.integration.errors import PlanError, RefitError, RefitMismatch
from rlrefit.workers.engines.common import traced_destination
from rlrefit.workers.engines.common.answers import raise_refit_errors
from rlrefit.workers.engines.common.loader_trace.modules import owners_of, spread_over_modules
from rlrefit.workers.engines.common.loader_trace.trace import LoaderTrace, trace_loader
from rlrefit.workers.engines.vllm import patches, plugin
from rlrefit.workers.engines.vllm.completeness import check_complete
from rlrefit.workers.engines.vllm.extension import VllmRefitExtension
from rlrefit.workers.engines.vllm.layouts import VllmLayout, module_layout
from rlrefit.workers.engines.vllm.reload import refresh_absorbed_projections

BF16 = torch.bfloat16
SHAPES = {"q": (4, 6), "k": (2, 6), "o": (6, 4), "norm": (6,)}
DIRECT, PACKED = VllmLayout(), VllmLayout("layer attn.qkv: packed", reload=True)


class _Linear(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns, dtype=BF16, device="meta"), requires_grad=False)


class _Model(nn.Module):
    """Fused q and k, an output projection and a norm, with a loader that may compute with one of them."""

    def __init__(self, computed: str = "") -> None:
        super().__init__()
        self.attn = nn.ModuleDict({"qkv": _Linear(6, 6), "o": _Linear(6, 4)})
        self.norm = nn.RMSNorm(6, dtype=BF16, device="meta")
        self.computed = computed

    def load_weights(self, weights):
        for name, tensor in weights:
            value = tensor * 2 if name == self.computed else tensor
            if name in ("q", "k"):
                self.attn["qkv"].weight.data[slice(0, 4) if name == "q" else slice(4, 6)].copy_(value)
            else:
                (self.attn["o"] if name == "o" else self.norm).weight.data.copy_(value)


def _traced(model: _Model, *names: str) -> LoaderTrace:
    manifest = [(name, SHAPES[name], BF16) for name in names or SHAPES]
    return trace_loader(model.load_weights, dict(model.named_parameters()), manifest)


def _layouts(**changed: VllmLayout) -> dict[str, VllmLayout]:
    return {"attn.qkv": DIRECT, "attn.o": DIRECT, "norm": DIRECT} | {
        name.replace("_", "."): layout for name, layout in changed.items()
    }


def _blocked(layouts: dict[str, VllmLayout]) -> dict[str, str]:
    return {name: layout.reason for name, layout in layouts.items() if not layout.direct}


def test_one_misc_tensor_takes_its_whole_module_and_no_other():
    model = _Model(computed="q")
    reasons = spread_over_modules(_traced(model), owners_of(model), {})
    assert set(reasons) == {"q", "k"}
    assert "mul" in reasons["q"]
    assert "q takes the misc path" in reasons["k"]


def test_a_module_that_may_not_be_written_directly_sends_all_its_tensors_to_misc():
    model = _Model()
    reasons = spread_over_modules(_traced(model), owners_of(model), _blocked(_layouts(attn_qkv=PACKED)))
    assert reasons == {"q": "layer attn.qkv: packed", "k": "layer attn.qkv: packed"}


def test_tied_parameters_belong_to_every_module_that_holds_them():
    model = _Model()
    model.head = _Linear(6, 6)
    model.head.weight = model.attn["qkv"].weight
    owners = owners_of(model)
    assert owners["attn.qkv.weight"] == {"attn.qkv", "head"}
    packed_head = _layouts() | {"head": VllmLayout("layer head: packed", reload=True)}
    assert set(spread_over_modules(_traced(model), owners, _blocked(packed_head))) == {"q", "k"}


def test_a_manifest_that_leaves_rows_of_a_parameter_stale_is_a_plan_error():
    model = _Model()
    with pytest.raises(PlanError, match=r"12 elements of attn\.qkv\.weight") as caught:
        check_complete(
            _traced(model, "q", "o", "norm"),
            owners_of(model),
            model,
            set(dict(model.named_parameters())),
        )
    assert caught.value.parameter == "attn.qkv.weight"


def test_a_whole_manifest_is_complete_and_one_without_a_tensor_is_not_even_where_the_loader_computes():
    for model in (_Model(), _Model("q")):
        names = set(dict(model.named_parameters()))
        check_complete(_traced(model), owners_of(model), model, names)
        with pytest.raises(
            PlanError, match=r"12 elements of attn\.qkv\.weight \(of what it holds only q comes\)"
        ):
            check_complete(_traced(model, "q", "o", "norm"), owners_of(model), model, names)


class _Blocks(nn.Module):
    """Two blocks of a weight each, a norm, and a buffer in the state; the loader reads one tensor's values."""

    def __init__(self, read: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Linear(2, 3), _Linear(2, 3)])
        self.norm = nn.RMSNorm(6, dtype=BF16, device="meta")
        self.norm.register_buffer("running", torch.zeros(6, dtype=BF16, device="meta"))
        self.norm.register_buffer("rebuilt", torch.zeros(6, dtype=BF16, device="meta"), persistent=False)
        self.read = read

    def load_weights(self, weights):
        tensors = dict(self.named_parameters()) | dict(self.named_buffers())
        for name, tensor in weights:
            if name == self.read:
                float(tensor.sum())
            tensors[name].data.copy_(tensor)

    def check(self, *names: str, dummy: bool = False) -> None:
        tensors = dict(self.named_parameters()) | dict(self.named_buffers())
        manifest = [(name, tuple(tensors[name].shape), BF16) for name in names]
        trace = trace_loader(self.load_weights, tensors, manifest)
        assert set(trace.lost) == ({self.read} if self.read else set())
        parameters = {name for name, _ in self.named_parameters()}
        check_complete(trace, owners_of(self), self, parameters, dummy=dummy)


FIRST, SECOND, NORM, BUFFER = "layers.0.weight", "layers.1.weight", "norm.weight", "norm.running"


@pytest.mark.parametrize("read", [SECOND, NORM])
def test_a_tensor_that_could_not_be_followed_excuses_its_own_module_only(read):
    _Blocks(read).check(FIRST, SECOND, NORM)
    for missing in {FIRST, SECOND, NORM} - {read}:
        with pytest.raises(
            PlanError, match=f"elements of {missing}; the loader could not be followed for {read}"
        ):
            _Blocks(read).check(*{FIRST, SECOND, NORM} - {missing})


class _Fused(nn.Module):
    """Gate and up in one matrix, whose loader reads the values of one of them, and a norm beside."""

    def __init__(self, read: str) -> None:
        super().__init__()
        block = nn.ModuleDict({"mlp": nn.ModuleDict({"gate_up_proj": _Linear(4, 3)}), "norm": _Linear(1, 3)})
        self.layers = nn.ModuleList([block])
        self.read = read

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == self.read:
                float(tensor.sum())
            rows = {"gate_proj": slice(0, 2), "up_proj": slice(2, 4), "norm": slice(0, 1)}[
                name.split(".")[-2]
            ]
            module = self.layers[0]["norm"] if "norm" in name else self.layers[0]["mlp"]["gate_up_proj"]
            module.weight.data[rows].copy_(tensor)

    def check(self, *names: str) -> None:
        shapes = {GATE: (2, 3), UP: (2, 3), BESIDE: (1, 3)}
        parameters = dict(self.named_parameters())
        trace = trace_loader(self.load_weights, parameters, [(name, shapes[name], BF16) for name in names])
        check_complete(trace, owners_of(self), self, set(parameters))


GATE, UP, BESIDE = "layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight", "layers.0.norm.weight"


def test_a_part_that_could_not_be_followed_excuses_no_more_of_a_fused_matrix_than_it_brings():
    _Fused(read=GATE).check(GATE, UP, BESIDE)
    for come, missing in (
        ((GATE, BESIDE), "12 elements of layers.0.mlp.gate_up"),
        ((GATE, UP), "3 elements of layers.0.norm"),
    ):
        with pytest.raises(PlanError, match=missing):
            _Fused(read=GATE).check(*come)


def test_a_buffer_of_the_state_has_to_come_where_it_holds_random_numbers():
    _Blocks().check(FIRST, SECOND, NORM)
    _Blocks().check(FIRST, SECOND, NORM, BUFFER, dummy=True)
    with pytest.raises(
        PlanError,
        match=r"random numbers.*norm\.running is a buffer.*load_format=auto.*parameter norm\.running",
    ):
        _Blocks().check(FIRST, SECOND, NORM, dummy=True)
    with pytest.raises(PlanError) as caught:
        _Blocks().check(FIRST, SECOND, BUFFER, dummy=True)
    assert "load_format=auto" not in str(caught.value)


def test_a_large_misc_share_is_told_with_its_bytes_its_main_reason_and_the_remedy(caplog):
    manifest = [(f"experts.{i}", (100, 10), BF16) for i in range(8)] + [("gate", (10, 10), BF16)]
    experts = "the FlashInfer CUTLASS experts backend rewrites (start vLLM with moe_backend='triton')"
    with caplog.at_level(logging.WARNING, logger=traced_destination.logger.name):
        traced_destination.warn_of_misc(manifest, {"gate": "layer gate: other"})
        assert not caplog.records
        reasons = {name: f"layer model.{name}: {experts}" for name, _, _ in manifest[:8]}
        traced_destination.warn_of_misc(manifest, reasons | {"gate": "layer gate: other"})
    [record] = caplog.records
    assert "100% of the weights" in record.getMessage()
    assert record.getMessage().endswith(experts)


def test_a_tensor_that_the_engine_does_not_know_is_a_mismatch_before_anything_is_written():
    model = _Model()
    with pytest.raises(RefitMismatch, match="the engine's loader rejects"):
        trace_loader(model.load_weights, dict(model.named_parameters()), [("q", (5, 7), BF16)])


def test_norms_are_direct_and_unknown_modules_are_not():
    assert module_layout("norm", nn.RMSNorm(6), nn.RMSNorm(6, device="meta")) == DIRECT
    layout = module_layout("conv", nn.Conv1d(2, 2, 1), nn.Conv1d(2, 2, 1, device="meta"))
    assert not layout.direct
    assert not layout.reload
    assert "Conv1d is not among" in layout.reason


@pytest.mark.parametrize(
    ("live", "word"),
    [
        (torch.empty(0, dtype=BF16), "shape"),
        (torch.empty(6, 4, dtype=torch.float8_e4m3fn), "dtype"),
        (torch.empty(4, 6, dtype=BF16).t(), "strides"),
    ],
)
def test_a_parameter_that_processing_replaced_needs_the_reload_and_says_what_changed(live, word):
    module = _Linear(6, 4)
    module.weight = nn.Parameter(live, requires_grad=False)
    layout = module_layout("layer", module, _Linear(6, 4))
    assert not layout.direct
    assert layout.reload
    assert f"changed the {word} of weight" in layout.reason


def test_a_parameter_that_lost_its_loader_needs_the_reload():
    fresh = _Linear(6, 4)
    fresh.weight.weight_loader = lambda param, loaded: None
    layout = module_layout("layer", _Linear(6, 4), fresh)
    assert layout.reload
    assert "lost its weight loader" in layout.reason


def test_a_linear_layer_with_one_fp8_scale_for_all_is_never_written_directly():
    module = _Linear(6, 4)
    module.quant_method = Fp8LinearMethod.__new__(Fp8LinearMethod)
    module.quant_method.block_quant = False
    layout = module_layout("layer", module, _Linear(6, 4))
    assert not layout.direct
    assert layout.reload
    assert "process_weights_after_loading of Fp8LinearMethod may rewrite the layout" in layout.reason


@pytest.mark.parametrize("backend", list(UnquantizedMoeBackend))
def test_experts_are_direct_only_for_backends_that_keep_the_loaders_layout(backend):
    method = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
    nn.Module.__init__(method)
    method.unquantized_backend, method.cpu_fused_moe = backend, object()
    module = _Linear(6, 4)
    module.quant_method = method
    layout = module_layout("experts", module, _Linear(6, 4))
    assert layout.direct == (backend in (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON))
    assert layout.direct or "experts" in layout.reason
    flashinfer = backend.value.startswith("FlashInfer")
    assert ("moe_backend='triton'" in layout.reason) >= flashinfer


class _LatentAttention(nn.Module):
    """What refresh_absorbed_projections touches of MLAAttention, with its post-load step for 16-bit weights."""

    def __init__(self, weight_dtype: torch.dtype) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(3, 8, bias=False, dtype=weight_dtype)
        for name in ("_q_scale", "_k_scale", "_v_scale", "_prob_scale"):
            self.register_buffer(name, torch.tensor(1.0))
            setattr(self, f"{name}_float", 1.0)
        self.process_weights_after_loading(BF16)

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        weight = self.kv_b_proj.weight.detach().to(dtype).T.view(3, 2, 4)
        key, value = weight.split([2, 2], dim=-1)
        self.W_UV, self.W_UK_T = value.transpose(0, 1), key.permute(1, 2, 0)
        self._k_scale.fill_(1.0)
        self._k_scale_float = 1.0


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_absorbed_projections_follow_new_weights_without_moving(weight_dtype):
    layer = _LatentAttention(weight_dtype)
    addresses = (layer.W_UV.data_ptr(), layer.W_UK_T.data_ptr())
    layer._k_scale.fill_(0.5)
    layer._k_scale_float = 0.5
    with torch.no_grad():
        layer.kv_b_proj.weight.normal_()
        refresh_absorbed_projections(layer, BF16)
    assert (layer.W_UV.data_ptr(), layer.W_UK_T.data_ptr()) == addresses
    expected = layer.kv_b_proj.weight.detach().to(BF16).T.view(3, 2, 4)
    assert torch.equal(layer.W_UV, expected[..., 2:].transpose(0, 1))
    assert torch.equal(layer.W_UK_T, expected[..., :2].permute(1, 2, 0))
    assert layer._k_scale.item() == layer._k_scale_float == 0.5


def test_linear_weights_on_the_cpu_stay_plain_for_our_workers_only_and_the_log_says_it_once(
    monkeypatch, caplog
):
    if not current_platform.is_cpu():
        pytest.fail("these tests need vLLM's CPU build")
    monkeypatch.setattr(_custom_ops, "_supports_onednn", True)
    monkeypatch.setattr(cpu_fused_moe, "_CPU_MOE_ACT_FN", dict(cpu_fused_moe._CPU_MOE_ACT_FN))
    before = dict(cpu_fused_moe._CPU_MOE_ACT_FN)
    plugin.register()
    assert _custom_ops._supports_onednn is True
    assert before == cpu_fused_moe._CPU_MOE_ACT_FN
    with caplog.at_level(logging.INFO, logger=patches.logger.name):
        patches.prepare_worker_process()
        patches.prepare_worker_process()
    assert _custom_ops._supports_onednn is False
    assert len(caplog.records) == 1


def test_without_our_workers_linear_weights_on_the_cpu_are_not_direct(monkeypatch):
    module = _Linear(6, 4)
    module.quant_method = UnquantizedLinearMethod()
    monkeypatch.setattr(_custom_ops, "_supports_onednn", True)
    assert "oneDNN" in module_layout("layer", module, _Linear(6, 4)).reason
    monkeypatch.setattr(_custom_ops, "_supports_onednn", False)
    assert module_layout("layer", module, _Linear(6, 4)) == DIRECT


def test_asking_for_an_unknown_parameter_names_it():
    extension = VllmRefitExtension()
    extension.model_runner = SimpleNamespace(get_model=lambda: nn.Linear(2, 3))
    assert extension.refit_parameter_bytes(["bias"]).keys() == {"bias"}
    assert extension.refit_parameter_digests().keys() == {"weight", "bias"}
    with pytest.raises(RefitError, match="vLLM worker 0: this worker's model has no parameter nonsense"):
        raise_refit_errors([extension.refit_parameter_bytes(["nonsense"])])
