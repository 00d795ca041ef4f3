"""Rules of the vLLM destination on small modules: routes of whole modules, completeness, derived state."""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm import _custom_ops
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.offloader import get_offloader

from rlrefit.integration.errors import PlanError, RefitError, RefitTimeout
from rlrefit.integration.weights.endpoints import gives_memory_back
from rlrefit.workers.engines.common import traced_destination
from rlrefit.workers.engines.common.answers import failure, heard, raise_refit_errors, told
from rlrefit.workers.engines.common.loader_trace.modules import (
    NumbersStayReal,
    WeightsStayOnMeta,
    owners_of,
    spread_over_modules,
)
from rlrefit.workers.engines.common.loader_trace.trace import LoaderTrace, trace_loader
from rlrefit.workers.engines.vllm import destination, patches, plugin
from rlrefit.workers.engines.vllm.completeness import check_complete
from rlrefit.workers.engines.vllm.copies import Copies, require_read_hooks
from rlrefit.workers.engines.vllm.destination import VllmDestination
from rlrefit.workers.engines.vllm.extension import VllmRefitExtension
from rlrefit.workers.engines.vllm.layouts import VllmLayout, module_layout
from rlrefit.workers.engines.vllm.reload import (
    DerivedState,
    copied_sinks,
    refresh_absorbed_projections,
    with_sinks,
)
from rlrefit.workers.engines.vllm.worker_refit import WorkerRefit
from tests.vllm_cpu import PACKS_EXPERTS

BF16 = torch.bfloat16
DIRECT = VllmLayout()
FUSED = "layers.0.mlp.gate_up_proj"
GATE, UP, DOWN = (f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
NORM, BUFFER = "norm.weight", "norm.running"
SHAPES = {GATE: (4, 6), UP: (2, 6), DOWN: (6, 4), NORM: (6,), BUFFER: (6,)}
WEIGHTS = (GATE, UP, DOWN, NORM)


class _Linear(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns, dtype=BF16, device="meta"), requires_grad=False)


class _Model(nn.Module):
    """A fused matrix, another one and a norm with buffers; the loader may compute with a tensor, or read its values."""

    def __init__(self, computed: str = "", read: str = "") -> None:
        super().__init__()
        mlp = nn.ModuleDict({"gate_up_proj": _Linear(6, 6), "down_proj": _Linear(6, 4)})
        self.layers = nn.ModuleList([nn.ModuleDict({"mlp": mlp})])
        self.norm = nn.RMSNorm(6, dtype=BF16, device="meta")
        self.norm.register_buffer("running", torch.zeros(6, dtype=BF16, device="meta"))
        self.norm.register_buffer("rebuilt", torch.zeros(6, dtype=BF16, device="meta"), persistent=False)
        self.computed, self.read = computed, read

    def load_weights(self, weights):
        held = dict(self.named_parameters()) | dict(self.named_buffers())
        fused = held[f"{FUSED}.weight"].data
        places = held | {GATE: fused[:4], UP: fused[4:]}
        for name, tensor in weights:
            if name == self.read:
                float(tensor.sum())
            places[name].data.copy_(tensor * 2 if name == self.computed else tensor)

    def trace(self, *names: str) -> LoaderTrace:
        held = dict(self.named_parameters()) | dict(self.named_buffers())
        return trace_loader(self.load_weights, held, [(name, SHAPES[name], BF16) for name in names])

    def check(self, *names: str, dummy: bool = False) -> None:
        parameters = {name for name, _ in self.named_parameters()}
        check_complete(self.trace(*names), owners_of(self), self, parameters, dummy=dummy)


def test_one_misc_tensor_takes_its_whole_module_and_no_other():
    model = _Model(computed=GATE)
    reasons = spread_over_modules(model.trace(*WEIGHTS), owners_of(model), {})
    assert set(reasons) == {GATE, UP}
    assert "mul" in reasons[GATE]
    assert GATE in reasons[UP]


def test_a_module_that_may_not_be_written_directly_sends_all_its_tensors_to_misc_also_those_that_it_shares():
    model = _Model()
    reasons = spread_over_modules(model.trace(*WEIGHTS), owners_of(model), {FUSED: "packed"})
    assert reasons == {GATE: "packed", UP: "packed"}
    model.head = _Linear(6, 6)
    model.head.weight = model.layers[0]["mlp"]["gate_up_proj"].weight
    tied = owners_of(model)
    assert tied[f"{FUSED}.weight"] == {FUSED, "head"}
    assert set(spread_over_modules(model.trace(*WEIGHTS), tied, {"head": "packed"})) == {GATE, UP}


@pytest.mark.parametrize("kind", [{}, {"computed": GATE}, {"read": GATE}, {"read": NORM}], ids=str)
def test_a_manifest_without_any_one_tensor_is_an_error_by_name_whatever_the_loader_does_with_another(kind):
    """What could not be followed excuses its own module, and no more of a fused matrix than it brings."""
    _Model(**kind).check(*WEIGHTS)
    for missing in {*WEIGHTS} - {*kind.values()}:
        with pytest.raises(PlanError) as caught:
            _Model(**kind).check(*(name for name in WEIGHTS if name != missing))
        held = f"{FUSED}.weight" if missing in (GATE, UP) else missing
        # A lost gate brings less than both of what stays unwritten beside it.
        beside = (held, f"{FUSED}.weight") if kind.get("read") == GATE and missing == DOWN else (held,)
        assert caught.value.parameter in beside


def test_a_buffer_of_the_state_has_to_come_where_it_holds_random_numbers():
    _Model().check(*WEIGHTS)
    _Model().check(*WEIGHTS, BUFFER, dummy=True)
    with pytest.raises(PlanError, match="load_format=auto") as caught:
        _Model().check(*WEIGHTS, dummy=True)
    assert caught.value.parameter == BUFFER
    with pytest.raises(PlanError) as caught:
        _Model().check(GATE, UP, DOWN, BUFFER, dummy=True)
    assert caught.value.parameter == NORM


class _PaddedExperts(nn.Module):
    """Three experts of 3 rows of gate and up, 12 wide, which vLLM has padded to 4 rows and 16 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.w13_weight = nn.Parameter(torch.empty(3, 8, 16, dtype=BF16, device="meta"))
        self.experts.w2_weight = nn.Parameter(torch.empty(3, 16, 4, dtype=BF16, device="meta"))
        self.experts.moe_config = SimpleNamespace(
            hidden_dim=16,
            hidden_dim_unpadded=12,
            intermediate_size_per_partition=4,
            intermediate_size_per_partition_unpadded=3,
            is_act_and_mul=True,
        )

    def load_weights(self, weights):
        for name, tensor in weights:
            expert, _, part = name.partition(".")
            if not part:
                self.experts.w13_weight.data[:, :6, :12].copy_(tensor)
            elif part == "down":
                self.experts.w2_weight.data[int(expert), :12, :3].copy_(tensor)
            else:
                row = 4 * (part == "up")
                self.experts.w13_weight.data[int(expert), row : row + 3, :12].copy_(tensor)

    def check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        parameters = dict(self.named_parameters())
        trace = trace_loader(
            self.load_weights, parameters, [(name, shape, BF16) for name, shape in shapes.items()]
        )
        check_complete(trace, owners_of(self), self, {*parameters})


def test_of_padded_experts_nothing_but_padding_may_be_missing():
    downs = {f"{expert}.down": (12, 3) for expert in range(3)}
    single = {f"{expert}.{part}": (3, 12) for expert in range(3) for part in ("gate", "up")} | downs
    _PaddedExperts().check(single)
    _PaddedExperts().check({"all": (3, 6, 12)} | downs)
    for left in [{name} for name in single] + [{f"{n}.{part}" for n in range(3)} for part in ("gate", "up")]:
        with pytest.raises(PlanError) as caught:
            _PaddedExperts().check({name: shape for name, shape in single.items() if name not in left})
        of = "w2_weight" if min(left).endswith("down") else "w13_weight"
        assert caught.value.parameter == f"experts.{of}"


def test_a_large_misc_share_is_told_with_its_main_reason(caplog):
    manifest = [(f"experts.{i}", (100, 10), BF16) for i in range(8)] + [("gate", (10, 10), BF16)]
    small, large = {"gate": "other"}, {name: "the backend rewrites" for name, _, _ in manifest[:8]}
    with caplog.at_level(logging.WARNING, logger=traced_destination.logger.name):
        traced_destination.warn_of_misc(manifest, small)
        assert not caplog.records
        traced_destination.warn_of_misc(manifest, large | small)
    assert "the backend rewrites" in caplog.text


class _Processed(_Linear):
    def process_weights_after_loading(self) -> None:
        """Of a kind that nobody has looked at."""


def test_modules_that_vllm_makes_nothing_of_are_direct_and_those_of_unknown_processing_are_not():
    assert module_layout("norm", nn.RMSNorm(6), nn.RMSNorm(6, device="meta")) == DIRECT
    assert module_layout("mixer", _Linear(6, 4), _Linear(6, 4)) == DIRECT
    layout = module_layout("mixer", _Processed(6, 4), _Processed(6, 4))
    assert (layout.direct, layout.reload) == (False, False)


def test_a_module_that_needs_no_reload_is_written_both_ways_but_none_of_its_parameters_is():
    model = _Model(computed=GATE)
    fused = model.layers[0]["mlp"]["gate_up_proj"]
    fused.bias = nn.Parameter(torch.zeros(6, dtype=BF16, device="meta"), requires_grad=False)
    trace = trace_loader(
        lambda weights: [
            fused.bias.data.copy_(w) if name == "bias" else model.load_weights([(name, w)])
            for name, w in weights
        ],
        dict(model.named_parameters()) | dict(model.named_buffers()),
        [*((name, SHAPES[name], BF16) for name in WEIGHTS), ("bias", (6,), BF16)],
    )
    assert set(spread_over_modules(trace, owners_of(model), {}, {FUSED})) == {GATE, UP}
    assert set(spread_over_modules(trace, owners_of(model), {})) == {GATE, UP, "bias"}


def _fresh_with_loader() -> _Linear:
    fresh = _Linear(6, 4)
    fresh.weight.weight_loader = lambda param, loaded: None
    return fresh


@pytest.mark.parametrize(
    ("live", "fresh", "word"),
    [
        (torch.empty(0, dtype=BF16), _Linear(6, 4), "shape"),
        (torch.empty(6, 4, dtype=torch.float8_e4m3fn), _Linear(6, 4), "dtype"),
        (torch.empty(4, 6, dtype=BF16).t(), _Linear(6, 4), "strides"),
        (torch.empty(6, 4, dtype=BF16), _fresh_with_loader(), "lost its weight loader"),
    ],
)
def test_a_parameter_that_processing_replaced_needs_the_reload_and_says_what_changed(live, fresh, word):
    module = _Linear(6, 4)
    module.weight = nn.Parameter(live, requires_grad=False)
    layout = module_layout("layer", module, fresh)
    assert (layout.direct, layout.reload) == (False, True)
    assert word in layout.reason


def test_a_linear_layer_with_one_fp8_scale_for_all_is_never_written_directly():
    module = _Linear(6, 4)
    module.quant_method = Fp8LinearMethod.__new__(Fp8LinearMethod)
    module.quant_method.block_quant = False
    layout = module_layout("layer", module, _Linear(6, 4))
    assert (layout.direct, layout.reload) == (False, True)


@pytest.mark.parametrize("backend", list(UnquantizedMoeBackend))
def test_experts_are_direct_only_for_backends_that_keep_the_loaders_layout(backend):
    method = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
    nn.Module.__init__(method)
    method.unquantized_backend, method.cpu_fused_moe = backend, object()
    module = _Linear(6, 4)
    module.quant_method = method
    layout = module_layout("experts", module, _Linear(6, 4))
    assert layout.direct == (backend in (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON))
    assert ("moe_backend='triton'" in layout.reason) >= backend.value.startswith("FlashInfer")


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


def _attending(*shapes: int) -> tuple[nn.Module, Any]:
    """A layer with parameters of these lengths around attention whose kernel wants sinks."""
    layer = nn.Module()
    for number, n in enumerate(shapes):
        setattr(layer, f"held{number}", nn.Parameter(torch.zeros(n, dtype=BF16), requires_grad=False))
    layer.attn = Attention.__new__(Attention)
    nn.Module.__init__(layer.attn)
    layer.attn.impl = SimpleNamespace(sinks=layer.held0)
    return layer, layer.attn.impl


def test_sinks_that_a_kernel_copied_follow_new_weights_without_moving():
    layer, kernel = _attending(4, 3)
    state = DerivedState(layer)
    assert copied_sinks(with_sinks(layer)) == []
    kernel.sinks = layer.held0.float()
    address = kernel.sinks.data_ptr()
    layer.held0.fill_(2)
    state.refresh(BF16)
    assert kernel.sinks.tolist() == [2.0] * 4
    assert kernel.sinks.data_ptr() == address


def test_copied_sinks_of_an_unknown_parameter_are_refused():
    layer, kernel = _attending(4, 4)
    kernel.sinks = layer.held0.float()
    with pytest.raises(RefitError, match="attention_backend"):
        copied_sinks(with_sinks(layer))


class _Caching(nn.Module):
    """A model that keeps what its first step makes of weights, as some of vLLM's do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.norm = nn.Linear(24, 40, bias=False, dtype=BF16), nn.RMSNorm(24, dtype=BF16)
        self.conv = nn.Conv1d(20, 20, 4, groups=20, dtype=BF16)
        self.places: Any = None
        self.kept: Any = None

    def trained(self) -> _Caching:
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        return self


COPIES = {
    "in FP32 and transposed": lambda m: m.gate.weight.data[20:].t().contiguous().float(),
    "without the first row": lambda m: (
        m.gate.weight.data[1:].reshape(1, 3, 13, 24).permute(0, 3, 1, 2).float()
    ),
    "joined": lambda m: torch.cat([m.conv.weight.data.view(20, 4)] * 2),
    "in a tuple": lambda m: (1, m.norm.weight.data.float()),
    "in FP8": lambda m: m.gate.weight.data[3:].to(torch.float8_e4m3fn),
    "as powers of two": lambda m: {"scales": m.norm.weight.data.abs().to(torch.float8_e8m0fnu)},
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_of_weights_is_refused_whether_it_was_there_at_the_meeting_or_came_with_a_later_step(copied):
    model = nn.Module()
    model.layer = _Caching().trained()
    twin = copy.deepcopy(model).to("meta")
    copies = Copies(model)
    copies.compare(twin)
    # What is computed, a view and constants are none, as often as they come.
    model.layer.places, model.layer.late = torch.randn(9, 24).to(BF16), torch.ones(24, dtype=BF16)
    model.layer.codes = torch.randn(9, 24).to(torch.float8_e4m3fn)
    model.layer.few = model.layer.gate.weight.data[3, :4].to(torch.float8_e4m3fn)
    copies.require_none()
    model.layer.late = model.layer.gate.weight.data[3]
    copies.require_none()
    model.layer.kept = copied(model.layer)
    with pytest.raises(RefitError, match="kept"):
        copies.require_none()
    with pytest.raises(RefitError, match="kept"):
        Copies(model).compare(twin)


def test_a_model_is_refused_that_makes_something_of_its_weights_which_was_not_read():
    class Hooked(nn.Module):
        def process_weights_after_loading(self) -> None: ...

    for module in (Hooked(), nn.Sequential(Hooked())):
        with pytest.raises(RefitError, match="Hooked"):
            require_read_hooks(module)
    sinks = nn.Identity()
    sinks.sink_populated = False
    with pytest.raises(RefitError, match="sinks"):
        require_read_hooks(nn.Sequential(sinks))

    # Methods of experts are modules that a layer has.
    class Method(nn.Module):
        def process_weights_after_loading(self, layer: nn.Module) -> None: ...

    require_read_hooks(nn.Sequential(_Caching(), Method()))


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (
            {"offload_config": SimpleNamespace(prefetch=SimpleNamespace(offload_group_size=4))},
            "offload_group_size",
        ),
        (
            {"load_config": SimpleNamespace(load_format="ipc_cache", model_loader_extra_config={})},
            "ipc_cache",
        ),
    ],
    ids=["host memory", "weight cache"],
)
def test_weights_that_come_from_elsewhere_before_each_step_or_are_lent_to_others_are_refused(settings, word):
    own = {
        "lora_config": None,
        "parallel_config": SimpleNamespace(enable_eplb=False),
        "load_config": SimpleNamespace(load_format="auto", model_loader_extra_config={}),
    }
    with pytest.raises(RefitError, match=word):
        VllmDestination(nn.Linear(2, 2), SimpleNamespace(**own | settings), torch.device("cpu"))
    copied = SimpleNamespace(load_format="ipc_cache", model_loader_extra_config={"mode": "copy"})
    prefetch = SimpleNamespace(offload_group_size=0)
    kept = {"load_config": copied, "offload_config": SimpleNamespace(prefetch=prefetch)}
    VllmDestination(nn.Linear(2, 2), SimpleNamespace(**own | kept), torch.device("cpu"))


def test_a_model_that_can_not_be_built_twice_is_refused_and_nothing_of_the_process_has_changed(monkeypatch):
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(enable_eplb=False),
        load_config=SimpleNamespace(load_format="auto", model_loader_extra_config={}),
        model_config=SimpleNamespace(dtype=BF16),
        compilation_config=SimpleNamespace(),
        lora_config=None,
    )
    engine = VllmDestination(nn.Linear(2, 2), config, torch.device("cpu"))
    monkeypatch.setattr(destination, "initialize_model", lambda **_: torch.empty(2).tolist())
    before = torch.get_default_dtype(), get_offloader()
    with pytest.raises(PlanError, match="Linear") as refused:
        engine.fragments([("weight", (2, 2), BF16)])
    assert refused.value.stage == "trace"
    assert isinstance(refused.value.__cause__, NotImplementedError)
    assert (torch.get_default_dtype(), get_offloader()) == before


def test_values_that_a_constructor_reads_are_there_in_a_model_without_memory():
    with torch.device("meta"), NumbersStayReal():
        weight, experts = torch.empty(3), torch.full((4,), -1, dtype=torch.int32)
        factor = torch.tensor(0.5, dtype=BF16)
    assert weight.is_meta
    assert (experts.tolist(), factor.detach().cpu().float().item()) == ([-1] * 4, 0.5)
    assert (factor * weight).is_meta


def test_a_part_that_a_constructor_moves_to_the_engines_device_stays_without_memory():
    with torch.device("meta"), WeightsStayOnMeta():
        part = nn.Linear(2, 3).to(device=torch.device("cpu"), dtype=BF16)
        moved, real = torch.empty(2).to("cpu"), torch.ones(2, device="cpu").to("cpu")
        copied = [
            torch.empty(2).to(*how, **more)
            for how, more in (((0, BF16, False, True), {}), ((BF16,), {"copy": True}), ((real.to(BF16),), {}))
        ]
    assert all(parameter.is_meta and parameter.dtype == BF16 for parameter in part.parameters())
    assert moved.is_meta
    assert moved.dtype == torch.float32
    assert all(tensor.is_meta and tensor.dtype == BF16 for tensor in copied)
    assert real.tolist() == [1, 1]


def test_memory_is_given_back_between_refits_where_the_engine_may_sleep_unless_its_driver_never_lets_it():
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(enable_eplb=False),
        load_config=SimpleNamespace(load_format="auto", model_loader_extra_config={}),
        model_config=SimpleNamespace(enable_sleep_mode=True),
        lora_config=None,
        speculative_config=None,
    )
    model = nn.Linear(2, 2)
    runner = SimpleNamespace(
        get_model=lambda: model,
        execute_model=lambda: None,
        device=torch.device("cpu"),
        reset_encoder_cache=lambda: None,
    )
    names = ("sleep", "wake_up", "compile_or_warm_up_model", "reload_weights")
    calls = dict.fromkeys(names, lambda: None)
    refit = WorkerRefit(SimpleNamespace(vllm_config=config, model_runner=runner, **calls))
    assert gives_memory_back(refit.destination)
    refit.stays_awake = True
    assert gives_memory_back(refit.destination) is False
    refit.stays_awake = False
    assert gives_memory_back(refit.destination)


def test_linear_weights_on_the_cpu_stay_plain_for_our_workers_only(monkeypatch):
    twin = _Linear(32, 32).float()
    module = _Linear(32, 32).float().to_empty(device="cpu")
    module.quant_method = UnquantizedLinearMethod()
    monkeypatch.setattr(_custom_ops, "_supports_onednn", True)
    functions: dict[Any, Any] = {}
    if not PACKS_EXPERTS:
        from vllm.model_executor.layers.fused_moe import cpu_fused_moe

        functions = dict(cpu_fused_moe._CPU_MOE_ACT_FN)
        monkeypatch.setattr(cpu_fused_moe, "_CPU_MOE_ACT_FN", functions)
    before = dict(functions)
    plugin.register()
    assert _custom_ops._supports_onednn is True
    assert before == functions
    dispatch_cpu_unquantized_gemm(module, remove_weight=False)
    assert "oneDNN" in module_layout("layer", module, twin).reason
    patches.prepare_worker_process()
    assert _custom_ops._supports_onednn is False
    dispatch_cpu_unquantized_gemm(module, remove_weight=False)
    assert module_layout("layer", module, twin) == DIRECT


@pytest.mark.parametrize("cut", [0, 3, 40])
def test_an_error_that_was_cut_on_its_way_keeps_its_stage(cut: int):
    said = told(failure(RefitTimeout("too late", stage="transfer", rank=3)))
    found = heard(said[: len(said) - cut], "worker: ")
    assert found is not None
    assert found.stage == "transfer"
    # The rest of its place is behind its text.
    assert (type(found), found.rank) == ((RefitTimeout, 3) if cut < 3 else (RefitError, -1))


def test_asking_for_an_unknown_parameter_names_it():
    extension = VllmRefitExtension()
    extension.model_runner = SimpleNamespace(get_model=lambda: nn.Linear(2, 3))
    assert extension.refit_parameter_bytes(["bias"]).keys() == {"bias"}
    assert extension.refit_parameter_digests().keys() == {"weight", "bias"}
    with pytest.raises(RefitError, match="nonsense"):
        raise_refit_errors([extension.refit_parameter_bytes(["nonsense"])])
