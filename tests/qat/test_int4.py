"""Training in INT4 in one process: it computes with what the engine dequantizes, whose codes and scales any refit makes of the weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from rlrefit.integration.config import INT4_SCALES, RefitConfig
from rlrefit.integration.control import open_rendezvous
from rlrefit.integration.errors import RefitError, RefitMismatch
from rlrefit.integration.layout import box_of
from rlrefit.integration.quantize import int4
from rlrefit.integration.quantize.formats import Format, Int4
from rlrefit.integration.session import RefitSession
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.integration.weights.quantizing import QuantizingSource
from rlrefit.recipes.tiny.checkpoints import make_checkpoint
from rlrefit.workers.trainers.fsdp.mixin import FSDPRefitMixin
from rlrefit.workers.trainers.fsdp.source import FSDPSource
from rlrefit.workers.trainers.qat.checkpoint import write_checkpoint
from rlrefit.workers.trainers.qat.config import DEFAULT_EXCLUDED, Linear, QATConfig, select
from rlrefit.workers.trainers.qat.fsdp import quantize_module
from rlrefit.workers.trainers.qat.functions import linear
from rlrefit.workers.trainers.qat.layers import quantize_experts
from rlrefit.workers.trainers.qat.mixin import QATRefitMixin
from rlrefit.workers.trainers.qat.model import QAT
from rlrefit.workers.trainers.qat.source import PackedSource
from rlrefit.workers.trainers.source_mixin import SourceRefitMixin
from tests.refit.synthetic import SyntheticDestination, run_world

from .models import read
from .ranks import as_bytes, token_ids

BF16, FP32 = torch.bfloat16, torch.float32
GROUP = 32
CONFIG = QATConfig(activations=False, format=Int4(GROUP))
REFIT = RefitConfig(bucket_mb=1, timeout_s=20.0, verify="full", transport="p2p", trainer_quantize_int4=True)


def held_by_the_engine(weight: torch.Tensor, group: int = GROUP, scale: str = INT4_SCALES[0]) -> torch.Tensor:
    """What it computes with in place of a weight that is exported in BF16."""
    return int4.dequantize(*int4.quantize(weight.detach().to(BF16), group, scale)).to(weight.dtype)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return lambda kind: root / kind if (root / kind).exists() else make_checkpoint(kind, root / kind)


def _model(checkpoint: Path, dtype: torch.dtype = FP32) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    return model


def _step(model: nn.Module) -> None:
    """Of an optimizer, and nothing besides."""
    ids = token_ids()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _as_the_engine_has_it(model: nn.Module, checkpoint: Path) -> nn.Module:
    """A model without quantization, of the weights that an engine makes of those of ``model``."""
    plain = _model(checkpoint, next(model.parameters()).dtype)
    plain.load_state_dict(
        {
            name: held_by_the_engine(t) if "layers" in name and t.dim() > 1 and ".gate." not in name else t
            for name, t in model.state_dict().items()
        }
    )
    for module in plain.modules():
        if hasattr(module, "is_transposed"):  # a stack of experts, whose products are grouped
            quantize_experts(module, _Kept(), _Kept())  # type: ignore[arg-type]
    return plain


class _Kept:
    """In the place of the quantizer of a stack of experts: its products stay what they are."""

    def calibrates(self, x: torch.Tensor) -> bool:
        return True


@pytest.mark.parametrize("group", int4.GROUPS)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_layer_computes_with_what_the_engine_dequantizes_and_the_weight_gets_its_gradient(
    dtype: torch.dtype, group: int
) -> None:
    generator = torch.Generator().manual_seed(5)
    x, weight, gradient = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 5, 256), (48, 256), (3, 5, 48))
    )
    weight[3] = 0
    found = []
    for value in (weight, held_by_the_engine(weight, group)):
        x_leaf, leaf = x.clone().requires_grad_(), value.clone().requires_grad_()
        ours = value is weight
        out = (
            linear(x_leaf, leaf, None, None, Int4(group))
            if ours
            else functional.linear(x_leaf.flatten(0, 1), leaf).view(3, 5, 48)
        )
        out.backward(gradient)
        found.append((out.detach(), x_leaf.grad, leaf.grad))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(weight, held_by_the_engine(weight, group))


def test_a_layer_in_another_dtype_of_16_bits_than_the_codes_are_made_of_is_refused() -> None:
    x, weight = torch.randn(2, 64).half(), torch.randn(8, 64).half()
    with pytest.raises(RefitError):
        linear(x, weight, None, None, Int4(64))
    assert linear(x, weight, None, None, Int4(64, "float16")).shape == (2, 8)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe"])
def test_a_model_computes_what_the_engines_weights_give_whatever_was_written_since_without_a_refresh(
    checkpoints: Callable[[str], Path], kind: str, dtype: torch.dtype
) -> None:
    model = _model(checkpoints(kind), dtype)
    before = model(token_ids()).logits
    quantize_module(model, CONFIG)
    assert not torch.equal(model(token_ids()).logits, before)
    for write in (
        lambda: None,
        lambda: _step(model),
        lambda: [parameter.data.mul_(0.9) for parameter in model.parameters()],
        lambda: model.load_state_dict(_model(checkpoints(kind)).state_dict()),
    ):
        write()
        plain = _as_the_engine_has_it(model, checkpoints(kind))
        with torch.no_grad():
            assert torch.equal(model(token_ids()).logits, plain(token_ids()).logits)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe"])
def test_master_weights_get_the_gradients_of_the_engines_weights(
    checkpoints: Callable[[str], Path], kind: str
) -> None:
    model, ids = _model(checkpoints(kind)), token_ids()
    quantize_module(model, CONFIG)
    plain = _as_the_engine_has_it(model, checkpoints(kind))
    for trained in (model, plain):
        trained(ids, labels=ids).loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert ours.grad.any(), name
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-7, msg=name)


class Int4Engine(SyntheticDestination):
    """A rank that stores some weights in INT4."""

    def __init__(self, specs: Sequence[TensorSpec], formats: dict[str, Format]):
        self._formats = formats
        super().__init__(specs, {spec.name: [box_of(spec.shape)] for spec in specs})

    def quantized(self, specs: Sequence[TensorSpec]) -> dict[str, Format]:
        return self._formats

    def poison(self) -> None:
        for storage in self._wanted.values():
            storage.fill_(float("nan") if storage.is_floating_point() else 0x7F)

    def held(self, name: str) -> torch.Tensor:
        (found,) = (storage for (held, _), storage in self._wanted.items() if held == name)
        return found


def _engine(source: FSDPSource, formats: dict[str, Format]) -> Int4Engine:
    return Int4Engine(QuantizingSource(source, formats).specs(), formats)


def _worker(trained: nn.Module, of_it: QAT, config: RefitConfig = REFIT) -> Any:
    class Worker(QATRefitMixin, FSDPRefitMixin):
        model = trained
        qat = of_it
        refit_config = config
        refit_dtype = BF16

    return Worker()


def _exported(model: nn.Module) -> dict[str, torch.Tensor]:
    source = FSDPSource(model, BF16)
    return {name: t.clone() for name, t in source.export([spec.name for spec in source.specs()])}


@pytest.mark.parametrize(
    ("engine", "scale"), zip(["packed_broadcast", "nccl_xfer"], INT4_SCALES, strict=True)
)
def test_what_is_refitted_is_bit_for_bit_what_training_computes_with_after_each_step(
    checkpoints: Callable[[str], Path], engine: str, scale: str
) -> None:
    model = _model(checkpoints("qwen3-moe"))
    qat = quantize_module(model, replace(CONFIG, format=Int4(GROUP, scale_rule=scale)))
    destination = _engine(FSDPSource(model, BF16), dict.fromkeys(qat.weights, CONFIG.format))
    exported: list[dict[str, torch.Tensor]] = []

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        wrong: list[str] = []
        for version in range(3):
            if rank == 0:
                _step(model)
                exported.append(_exported(model))
            else:
                endpoint.poison()
            session.refit(version)
            if rank:
                wrong += [name for name in qat.weights if not computed_with(endpoint, name, version)]
        return wrong

    def computed_with(endpoint: Int4Engine, name: str, version: int) -> bool:
        codes, scales = endpoint.held(f"{name}_packed").contiguous(), endpoint.held(f"{name}_scale")
        wanted = held_by_the_engine(exported[version][name], scale=scale)
        return torch.equal(as_bytes(int4.dequantize(codes, scales)), as_bytes(wanted))

    by = replace(REFIT, int4_scale=scale)
    results = run_world([_worker(model, qat, by)._prepared_source()], [destination], body, by, engine=engine)
    assert results == [[], []]
    name = "model.layers.1.mlp.experts.5.gate_proj.weight"
    assert not torch.equal(exported[0][name], exported[1][name])


def _joined(worker: Any, destination: Int4Engine, config: RefitConfig = REFIT) -> dict[str, Any]:
    """What the trainer's rank is told as it meets an engine."""
    server = open_rendezvous("127.0.0.1", 1, 1)
    try:
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(RefitSession.open, server.rendezvous, 1, lambda: destination, config)
            try:
                told: dict[str, Any] = worker.join_refit(server.rendezvous.to_json(), 0)
            finally:
                held.result().close()
                worker.close_refit()
            return told
    finally:
        server.close()


def test_an_engine_that_holds_other_layers_in_int4_than_are_trained_so_is_refused(
    checkpoints: Callable[[str], Path],
) -> None:
    model = _model(checkpoints("qwen3"))
    qat = quantize_module(model, CONFIG)
    same: dict[str, Format] = dict.fromkeys(qat.weights, CONFIG.format)
    odd = "model.layers.1.self_attn.o_proj.weight"
    source = FSDPSource(model, BF16)
    assert _joined(_worker(model, qat), _engine(source, same))["bulk"]
    without_one = {name: format for name, format in same.items() if name != odd}
    other_groups: dict[str, Format] = dict.fromkeys(same, Int4(128))
    for formats, told in ((without_one, odd), (other_groups, min(same))):
        with pytest.raises(RefitMismatch) as error:
            _joined(_worker(model, qat), _engine(source, formats))
        assert error.value.parameter == told
    by_another_rule = replace(REFIT, int4_scale="amax/7")
    with pytest.raises(RefitMismatch) as error:
        _joined(_worker(model, qat, by_another_rule), _engine(source, same), by_another_rule)
    assert error.value.parameter == min(same)
    assert all(rule in str(error.value) for rule in INT4_SCALES)
    plain = _model(checkpoints("qwen3"))
    but_one = QATConfig((*DEFAULT_EXCLUDED, "*.1.self_attn.o_proj"), activations=False, format=Int4(GROUP))
    with pytest.raises(RefitMismatch) as error:
        _joined(_worker(plain, quantize_module(plain, but_one)), _engine(source, same))
    assert error.value.parameter == odd


@pytest.mark.parametrize("config", [CONFIG, QATConfig()], ids=["int4", "nvfp4"])
def test_the_plain_mixin_sends_no_model_that_is_trained_quantized_to_an_engine_that_is_not(
    config: QATConfig, checkpoints: Callable[[str], Path]
) -> None:
    class Worker(FSDPRefitMixin):
        model = _model(checkpoints("qwen3"))
        refit_config = replace(REFIT, trainer_quantize_int4=False)
        refit_dtype = BF16

    unquantized = _engine(FSDPSource(Worker.model, BF16), {})
    assert _joined(Worker(), unquantized, Worker.refit_config)["bulk"]
    qat = quantize_module(Worker.model, config)
    with pytest.raises(RefitMismatch) as error:
        _joined(Worker(), unquantized, Worker.refit_config)
    assert error.value.parameter == min(qat.weights)


def test_a_source_that_does_not_tell_what_is_trained_is_compared_with_what_the_worker_trains(
    checkpoints: Callable[[str], Path],
) -> None:
    class Silent:
        """What a source has to offer, and no more."""

        def __init__(self, source: FSDPSource) -> None:
            for name in ("device", "specs", "fragments", "prepare", "export", "storage_key"):
                setattr(self, name, getattr(source, name))

    class Mine(SourceRefitMixin):
        def _make_refit_source(self) -> Any:
            return Silent(FSDPSource(self.model, BF16))

        def _refit_model_parts(self) -> tuple[object, ...]:
            return (self.model,)

    class Worker(QATRefitMixin, Mine):
        model = _model(checkpoints("qwen3"))
        refit_config = REFIT

    Worker.qat = quantize_module(Worker.model, CONFIG)
    odd = "model.layers.1.self_attn.o_proj.weight"
    formats: dict[str, Format] = {n: CONFIG.format for n in Worker.qat.weights if n != odd}
    with pytest.raises(RefitMismatch) as error:
        _joined(Worker(), _engine(FSDPSource(Worker.model, BF16), formats))
    assert error.value.parameter == odd


@pytest.mark.parametrize("config", [CONFIG, QATConfig(activations=False)], ids=["int4", "nvfp4"])
def test_the_plain_mixin_sends_no_adapter_of_a_model_that_is_trained_quantized(
    config: QATConfig, checkpoints: Callable[[str], Path]
) -> None:
    from peft import LoraConfig, get_peft_model

    def worker(lora: str, target: str) -> Any:
        trained = _model(checkpoints("qwen3"))
        names.append(min(quantize_module(trained, config).weights))

        class Worker(FSDPRefitMixin):
            model = get_peft_model(trained, LoraConfig(r=4, target_modules=[target]))  # type: ignore[arg-type]
            refit_config = replace(REFIT, lora=lora, trainer_quantize_int4=lora == "merge")
            refit_dtype = BF16

        return Worker()

    names: list[str] = []
    with pytest.raises(RefitMismatch) as error:
        worker("adapter", "lm_head").prepare_refit_info()
    assert error.value.parameter == names[0]
    with pytest.raises(RefitMismatch) as error:
        worker("merge", "q_proj").prepare_refit_info()
    assert error.value.parameter == "model.layers.0.self_attn.q_proj.weight"
    # It is added to a weight that training computes with as it is.
    assert worker("merge", "lm_head").prepare_refit_info()


def test_weights_that_training_leaves_out_of_nvfp4_may_reach_the_engine_in_another_format(
    checkpoints: Callable[[str], Path],
) -> None:
    model = _model(checkpoints("qwen3"))
    left_out = QATConfig((*DEFAULT_EXCLUDED, "*.o_proj"))
    qat = quantize_module(model, left_out)
    with qat.calibrating():
        model(token_ids())
    worker = _worker(model, qat)
    source = worker._prepared_source()
    in_int4: dict[str, Format] = {
        spec.name: CONFIG.format for spec in source.specs() if spec.name.endswith("o_proj.weight")
    }
    assert in_int4
    assert _joined(worker, _engine(source, in_int4))["bulk"]


def test_a_refit_by_which_the_engine_would_get_other_weights_is_refused(
    checkpoints: Callable[[str], Path],
) -> None:
    from peft import LoraConfig, get_peft_model

    model = _model(checkpoints("qwen3"))
    qat = quantize_module(model, CONFIG)
    with pytest.raises(RefitError, match="trainer_quantize_int4"):
        _worker(model, qat, RefitConfig())._prepared_source()
    with pytest.raises(ValueError, match="trainer_quantize_int4"):
        PackedSource(FSDPSource(model, BF16), qat)
    get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj"]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="LoRA"):
        _worker(model, qat)._prepared_source()


def test_a_checkpoint_holds_what_training_computes_with_in_compressed_tensors_form(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    model = _model(checkpoints("qwen3"))
    qat = quantize_module(model, CONFIG)
    _step(model)
    write_checkpoint(tmp_path / "new", checkpoints("qwen3"), FSDPSource(model, BF16), qat)
    held, exported = read(tmp_path / "new"), _exported(model)
    for name, weight in exported.items():
        if name in qat.weights:
            codes, scales = held.pop(f"{name}_packed"), held.pop(f"{name}_scale")
            assert torch.equal(int4.dequantize(codes, scales), held_by_the_engine(weight))
            assert held.pop(f"{name}_shape").tolist() == list(weight.shape)
        else:
            assert torch.equal(held.pop(name), weight)
    assert held == {}
    config = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "pack-quantized")
    assert config["ignore"] == ["lm_head"]
    assert not (tmp_path / "new" / "hf_quant_config.json").exists()


@pytest.mark.parametrize("fault", ["no number", "float32"])
def test_what_has_no_codes_is_not_written(
    checkpoints: Callable[[str], Path], tmp_path: Path, fault: str
) -> None:
    model = _model(checkpoints("qwen3"))
    qat = quantize_module(model, CONFIG)
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "no number":
        model.get_parameter(name).data[3, 5] = torch.nan
    source = FSDPSource(model, FP32 if fault == "float32" else BF16)
    with pytest.raises(RefitError, match=name if fault == "no number" else fault):
        write_checkpoint(tmp_path / "new", checkpoints("qwen3"), source, qat)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_trained_in_int4_is_refused_by_name() -> None:
    linears = [Linear("model.layers.0.a.weight", 48), Linear("model.layers.0.b.weight", 64)]
    names = [linear.name for linear in linears]
    with pytest.raises(ValueError) as error:
        select(QATConfig(format=Int4(64)), linears, names)
    assert "activations is true" in str(error.value)
    assert "a.weight: a rank holds 48 columns, which cuts blocks of 64" in str(error.value)
    assert "b.weight" not in str(error.value)
    assert select(QATConfig(activations=False, format=Int4(32)), linears[1:], names[1:]) == {names[1]}


def test_experts_of_which_parts_would_be_left_out_are_refused(checkpoints: Callable[[str], Path]) -> None:
    model = _model(checkpoints("qwen3-moe"))
    for left_out in ("*.experts.*.down_proj", "*.0.mlp.experts.3.*"):
        config = QATConfig((*DEFAULT_EXCLUDED, left_out), activations=False, format=Int4(GROUP))
        with pytest.raises(ValueError, match="experts"):
            quantize_module(model, config)
