"""Training in NVFP4 in one process: it learns, it is what is exported, and packed weights are refitted bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import RefitError
from rlrefit.integration.layout import box_of
from rlrefit.integration.session import RefitSession
from rlrefit.integration.weights.endpoints import WeightSource
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.recipes.tiny.checkpoints import make_checkpoint
from rlrefit.workers.trainers.fsdp.mixin import FSDPRefitMixin
from rlrefit.workers.trainers.fsdp.source import FSDPSource
from rlrefit.workers.trainers.host_copies import HostCopies
from rlrefit.workers.trainers.qat import scales
from rlrefit.workers.trainers.qat.checkpoint import write_checkpoint
from rlrefit.workers.trainers.qat.config import QATConfig
from rlrefit.workers.trainers.qat.fsdp import quantize_module
from rlrefit.workers.trainers.qat.mixin import QATRefitMixin
from rlrefit.workers.trainers.qat.model import QAT
from rlrefit.workers.trainers.qat.source import PackedSource
from tests.refit.synthetic import SyntheticDestination, run_world

from .models import dequantized, read, train, trainer
from .ranks import as_bytes, token_ids

FP32 = torch.float32


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return lambda kind: root / kind if (root / kind).exists() else make_checkpoint(kind, root / kind)


# W4A4, of experts too, in test_ranks.
@pytest.mark.parametrize(
    "config",
    [{"activations": False, "first_layers": 1}, {"force_dynamic_quantization": True}],
    ids=["W4A16", "dynamic"],
)
def test_training_learns(checkpoints: Callable[[str], Path], config: dict[str, Any]) -> None:
    model, qat = trainer(checkpoints("qwen3"), **config)
    losses = train(model, qat, 4)
    assert all(later < earlier - 0.1 for earlier, later in pairwise(losses)), losses


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, torch.compile])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe"])
def test_layers_in_modules_that_torch_has_put_others_around_are_quantized_and_sent_as_ever(
    checkpoints: Callable[[str], Path], kind: str, wrap: Any
) -> None:
    from transformers import AutoModelForCausalLM

    plain, wrapped = (AutoModelForCausalLM.from_pretrained(checkpoints(kind)) for _ in range(2))
    layer = wrapped.model.layers[0]
    layer.self_attn.q_proj, layer.mlp = wrap(layer.self_attn.q_proj), wrap(layer.mlp)
    if kind == "qwen3-moe":
        layer.mlp.experts = wrap(layer.mlp.experts)
    wrapped.model.layers[0] = wrap(layer)
    made = [(quantize_module(model, QATConfig(activations=False)), model) for model in (plain, wrapped)]
    weights, specs = zip(*((q.weights, PackedSource(FSDPSource(m), q).specs()) for q, m in made), strict=True)
    assert weights[0] == weights[1]
    assert specs[0] == specs[1]


def test_a_model_with_adapters_is_refused_whenever_they_came(checkpoints: Callable[[str], Path]) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoints("qwen3"))
    qat = quantize_module(model, QATConfig(activations=False))
    adapted = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj"]))
    for refused in (qat.refresh, lambda: quantize_module(adapted, QATConfig(activations=False))):
        with pytest.raises(ValueError, match="LoRA"):
            refused()


class _Magnitudes:
    """In the place of a table for a GPU, which reads at the addresses where the views lay when it was made."""

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self._views, self._places = views, [view.data_ptr() for view in views]

    def compute(self) -> torch.Tensor:
        assert [view.data_ptr() for view in self._views] == self._places, (
            "read where the weights are no longer"
        )
        return torch.stack([view.abs().amax() for view in self._views])


def test_the_largest_magnitudes_are_those_of_weights_that_came_back_elsewhere(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlrefit.workers.trainers.qat.scales._table_of", _Magnitudes)
    model, qat = trainer(checkpoints("qwen3"), activations=False)
    kept = []
    for parameter in model.parameters():
        storage = parameter.untyped_storage()
        copy = parameter.detach().clone()
        storage.resize_(0)
        kept.append(torch.empty(copy.numel() + 64))  # so that the old place is taken
        storage.resize_(copy.nbytes)
        parameter.data.copy_(copy)
    qat.watch_contents(model)
    model(token_ids())  # nothing was written
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(2)
    with pytest.raises(RefitError):
        model(token_ids())


def test_a_checkpoint_computes_what_the_trained_model_does_bit_for_bit(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    model, qat = trainer(checkpoints("qwen3"))
    for version in range(2):
        train(model, qat, 1)
        folder = tmp_path / str(version)
        write_checkpoint(folder, checkpoints("qwen3"), FSDPSource(model, FP32), qat, shard_bytes=200_000)
        with torch.no_grad():
            ours, theirs = (m(token_ids()).logits for m in (model, dequantized(folder, FP32)))
        assert torch.equal(ours, theirs)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == read(folder).keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in read(folder).values())
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["quant_algo"], config["ignore"]) == (
        "modelopt",
        "NVFP4",
        ["lm_head"],
    )
    assert (folder / "tokenizer.json").exists()


def _is_refused(model: torch.nn.Module) -> bool:
    try:
        model(token_ids())
    except RefitError:
        return True
    return False


@pytest.mark.parametrize(
    "written", ["model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.experts.down_proj"]
)
def test_a_forward_pass_with_scales_of_old_weights_is_refused(
    checkpoints: Callable[[str], Path], written: str
) -> None:
    model, qat = trainer(checkpoints("qwen3-moe" if "experts" in written else "qwen3"))
    parameter, block = model.get_parameter(written), model.get_submodule("model.layers.1.mlp")
    changes = {
        "loaded": lambda: model.load_state_dict(model.state_dict()),
        "assigned": lambda: block.load_state_dict(
            {name: t.clone() for name, t in block.state_dict().items()}, assign=True
        ),
        "stepped": torch.optim.SGD(model.parameters(), lr=0.1).step,
        "written, with the same maximum": lambda: parameter.view(-1)[0].add_(1e-4),
        "written, of which torch counts no version": lambda: parameter.data.mul_(1.5),
    }
    for how, change in changes.items():
        qat.refresh()
        parameter = model.get_parameter(written)
        model(token_ids())
        with torch.no_grad():
            change()
        assert _is_refused(model), how


def test_a_calibration_that_fails_leaves_the_scales_as_they_were(
    checkpoints: Callable[[str], Path],
) -> None:
    model, qat = trainer(checkpoints("qwen3"))
    before, wanted = qat.state_dict(), model(token_ids()).logits

    def fail() -> None:
        with torch.no_grad(), qat.calibrating():
            model(token_ids()[:1, :2])
            raise MemoryError("in the second batch")

    with pytest.raises(MemoryError):
        fail()
    with pytest.raises(RefitError, match="saw no inputs of"), qat.calibrating():
        pass
    assert qat.state_dict() == before
    assert torch.equal(model(token_ids()).logits, wanted)


def test_without_calibration_static_scales_are_refused_and_saved_ones_do_as_well(
    checkpoints: Callable[[str], Path],
) -> None:
    model, qat = trainer(checkpoints("qwen3"))
    wanted = model(token_ids()).logits
    other, again = trainer(checkpoints("qwen3"), force_dynamic_quantization=True)
    with pytest.raises(RefitError):
        again.prepare_export()
    other, again = trainer(checkpoints("qwen3"), activations=True)
    state = qat.state_dict()
    again.load_state_dict(dict.fromkeys(state, 0.0))
    with pytest.raises(RefitError):
        other(token_ids())
    again.load_state_dict(state)
    assert torch.equal(other(token_ids()).logits, wanted)
    with pytest.raises(ValueError, match="1 differ"):
        again.load_state_dict({**state, "model.layers.7.mlp.down_proj": 1.0})


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_is_told_by_name(
    checkpoints: Callable[[str], Path], value: float
) -> None:
    model, qat = trainer(checkpoints("qwen3"), activations=False)
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 5] = value
    with pytest.raises(RefitError, match=r"model\.layers\.1\.mlp\.gate_up_proj"):
        qat.refresh()


def test_a_failed_export_leaves_nothing_behind(
    checkpoints: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, qat = trainer(checkpoints("qwen3"))
    source = FSDPSource(model, torch.bfloat16)
    with pytest.raises(RefitError, match="FileNotFoundError"):
        write_checkpoint(tmp_path / "new", tmp_path / "missing", source, qat)
    monkeypatch.setattr(QAT, "packed", lambda *_: _raise(torch.OutOfMemoryError("no memory")))
    with pytest.raises(RefitError, match="OutOfMemoryError"):
        write_checkpoint(tmp_path / "new", checkpoints("qwen3"), source, qat)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    # From a folder that is not installed it goes well.
    monkeypatch.setattr(
        "rlrefit.workers.trainers.qat.checkpoint.version", lambda name: _raise(PackageNotFoundError(name))
    )
    write_checkpoint(tmp_path / "new", checkpoints("qwen3"), source, qat)
    assert json.loads((tmp_path / "new" / "hf_quant_config.json").read_text())["producer"]["version"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_export_that_fails_beside_the_weights_leaves_the_scales_of_training(
    checkpoints: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dynamic: bool
) -> None:
    model, qat = trainer(checkpoints("qwen3"), force_dynamic_quantization=dynamic)
    source = FSDPSource(model, torch.bfloat16)
    if not dynamic:  # otherwise no batch has run yet
        monkeypatch.setattr(source, "prepare", lambda: _raise(RuntimeError("no shards here")))
    for _ in range(2):
        # RefitError is one, which other ranks would raise.
        with pytest.raises(RuntimeError, match="saw no inputs of" if dynamic else "no shards here"):
            write_checkpoint(tmp_path / "new", checkpoints("qwen3"), source, qat)
    first = model(token_ids()).logits
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight").mul_(1.5)
    monkeypatch.undo()
    monkeypatch.setattr(source, "prepare", lambda: _raise(RuntimeError("no shards here")))
    with pytest.raises(RuntimeError, match="no shards here"):
        write_checkpoint(tmp_path / "new", checkpoints("qwen3"), source, qat)
    with pytest.raises(RefitError):  # the weight was written before the export that failed
        model(token_ids())
    qat.refresh()
    assert not torch.equal(model(token_ids()).logits, first)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_policy_with_dynamic_inputs_says_so_and_does_not_go_to_engines_without_them(
    checkpoints: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, dynamic: bool
) -> None:
    model, qat = trainer(checkpoints("qwen3"), force_dynamic_quantization=dynamic)
    model(token_ids())
    write_checkpoint(tmp_path / "new", checkpoints("qwen3"), FSDPSource(model, torch.bfloat16), qat)
    written = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
    group = written["config_groups"]["group_0"]
    assert (group["weights"]["dynamic"], group["input_activations"]["dynamic"]) == (False, dynamic)
    assert ("vLLM and SGLang have no such mode" in caplog.text) == dynamic
    if dynamic:
        with pytest.raises(RefitError, match="input_scale"):
            _refitted(model, qat)


def _raise(error: Exception) -> None:
    raise error


class Engine(SyntheticDestination):
    """A rank that holds packed tensors."""

    def poison(self) -> None:
        for storage in self._wanted.values():
            storage.copy_(torch.full(storage.shape, 0x7F, dtype=torch.uint8).to(storage.dtype))

    def differing(self, whole: dict[str, torch.Tensor]) -> list[str]:
        return [
            f"{name} {box}"
            for (name, box), storage in self._wanted.items()
            if not torch.equal(as_bytes(storage), as_bytes(whole[name][tuple(slice(*side) for side in box)]))
        ]


@pytest.mark.parametrize("engine", ["nccl_xfer", "packed_broadcast"])
def test_packed_weights_are_refitted_bit_for_bit_and_again_and_after_writes_that_nobody_told_of(
    checkpoints: Callable[[str], Path], engine: str
) -> None:
    model, qat = trainer(checkpoints("qwen3-moe"))
    source = _refitted(model, qat)
    destinations = [Engine(source.specs(), {s.name: [_half(s, r)] for s in source.specs()}) for r in (0, 1)]
    exported: list[dict[str, torch.Tensor]] = []
    stacked = model.get_parameter("model.layers.1.mlp.experts.gate_up_proj")
    # torch counts a version of the second one, and none of the first.
    written = {2: stacked.data, 3: stacked.detach()}

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        found = []
        for version in range(4):
            if rank == 0:
                train(model, qat, 1)
                trained = stacked.detach().clone()
                if version in written:
                    written[version].mul_(1.5)
                    qat.refresh()
                exported.append(_packed(model, qat))
                if version in written:
                    written[version].copy_(trained)
                    qat.refresh()
                    written[version].mul_(1.5)
            else:
                endpoint.poison()
            record = session.refit(version)
            found.append((record, [] if rank == 0 else endpoint.differing(exported[version])))
        return found

    results = run_world([source], destinations, body, engine=engine)
    for result in results:
        assert not isinstance(result, BaseException), result
        assert [wrong for _, wrong in result] == [[], [], [], []]
    first, second, *_ = exported
    name = "model.layers.1.mlp.experts.5.gate_proj.weight"
    assert not torch.equal(first[name], second[name])
    if engine == "nccl_xfer":
        assert [record.bytes_misc for record, _ in results[1]] == [0, 0, 0, 0]


def test_a_model_whose_memory_was_freed_is_computed_with_after_release_and_refused_without(
    checkpoints: Callable[[str], Path],
) -> None:
    model, qat = trainer(checkpoints("qwen3"))
    copies = HostCopies(torch.device("cpu"))
    with torch.no_grad():
        expected = model(token_ids()).logits
        copies.free([model])
        with pytest.raises(RefitError) as error:
            model(token_ids())
        assert error.value.stage == "quantize"
        copies.restore()
        qat.refresh()
        qat.release()
        copies.free([model])
        assert torch.equal(model(token_ids()).logits, expected)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many views each look at weights read, but for those of their encoding."""
    found: list[int] = []
    of = scales._Magnitudes.of

    def noted(magnitudes: Any, views: Sequence[torch.Tensor]) -> torch.Tensor:
        found.append(len(views))
        return of(magnitudes, views)

    monkeypatch.setattr(scales._Magnitudes, "of", noted)
    return found


@pytest.mark.parametrize("transport", ["p2p", "sparse p2p"])
def test_weights_of_the_last_refresh_are_looked_at_once_a_refit_by_what_encodes_them(
    checkpoints: Callable[[str], Path], looks: list[int], transport: str
) -> None:
    model, qat = trainer(checkpoints("qwen3"))
    source = _refitted(model, qat)
    destination = Keeping(source.specs(), {spec.name: [box_of(spec.shape)] for spec in source.specs()})
    expected: list[dict[str, torch.Tensor]] = []

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        found = []
        for version in range(3):
            if rank == 0:
                train(model, qat, 1)
                (qat.release, qat.free_values)[version % 2]()
                if version == 1:
                    model.get_parameter("model.layers.1.mlp.up_proj.weight").data.mul_(3)
                looks.clear()
            record = session.refit(version)
            if rank == 0:
                found.append(list(looks))
                qat.refresh()
                expected.append(_packed(model, qat))
            session._channel.barrier(f"expected/{version}")
            found += [] if rank == 0 else [(endpoint.differing(expected[version]), record.bytes_misc)]
        return found

    sparse = {"delta": "auto"} if transport != "p2p" else {}
    config = RefitConfig(bucket_mb=1, timeout_s=20.0, verify="full", transport="p2p", **sparse)
    looked, arrived = run_world([source], [destination], body, config)
    all_of_them = len(qat.weights)
    # Where some refits are sparse, not all is encoded in each.
    clean = [all_of_them if sparse else 0]
    assert looked == [clean, [*clean, all_of_them], clean]
    assert arrived == [([], 0)] * 3


def test_of_trainers_that_share_what_is_sent_each_looks_at_what_it_does_not_encode(
    checkpoints: Callable[[str], Path], looks: list[int]
) -> None:
    trainers = [trainer(checkpoints("qwen3")) for _ in range(2)]
    sources = [_refitted(*one) for one in trainers]
    destination = Engine(sources[0].specs(), {s.name: [box_of(s.shape)] for s in sources[0].specs()})
    expected: dict[int, dict[str, torch.Tensor]] = {}
    written = sorted(trainers[0][1].weights)

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        found = []
        for version in range(1 + len(written)):
            if rank < 2:
                model, qat = trainers[rank]
                if version:
                    # By both, as by an average over them; one of the two sends it.
                    model.get_parameter(written[version - 1]).data.mul_(1.5)
                if rank == 0:
                    looks.clear()
            session._channel.barrier(f"written/{version}")
            session.refit(version)
            if rank == 0:
                found.append(list(looks))
                qat.refresh()
                expected[version] = _packed(model, qat)
            session._channel.barrier(f"expected/{version}")
            found += [] if rank < 2 else [endpoint.differing(expected[version])]
        return found

    looked, _, arrived = run_world(sources, [destination], body)
    assert arrived == [[]] * (1 + len(written))
    first, second = looked[0]
    assert 0 < first < len(written)
    assert 0 < second < len(written)


@pytest.mark.parametrize("fault", ["no number", "written again and again"])
def test_what_was_sent_in_vain_is_not_committed(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    model, qat = trainer(checkpoints("qwen3"))
    source = _refitted(model, qat)
    destination = Engine(source.specs(), {spec.name: [box_of(spec.shape)] for spec in source.specs()})
    if fault == "written again and again":
        monkeypatch.setattr(source, "prepare_ahead", lambda encoded: lambda: lambda: False)

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        if rank == 0 and fault == "no number":
            model.get_parameter("model.layers.1.mlp.up_proj.weight").data[0, 0] = torch.nan
        with pytest.raises(RefitError):
            session.refit(0)
        return session.state.version, session.state.dirty

    assert run_world([source], [destination], body)[1] == (-1, True)


def _packed(model: torch.nn.Module, qat: QAT) -> dict[str, torch.Tensor]:
    whole = FSDPSource(model, torch.bfloat16)
    weights = whole.export([spec.name for spec in whole.specs()])
    return {name: tensor.clone() for origin, weight in weights for name, tensor in qat.packed(origin, weight)}


class Keeping(Engine):
    """One that leaves codes and scales as they were written."""

    def rewritten(self, specs: Sequence[TensorSpec]) -> dict[str, str]:
        return {}


@pytest.mark.parametrize("base", ["gpu", "optimizer"])
def test_packed_weights_travel_sparsely_as_they_are_packed_after_each_step(
    checkpoints: Callable[[str], Path], base: str
) -> None:
    model, qat = trainer(checkpoints("qwen3-moe"))
    source = _refitted(model, qat)
    destination = Keeping(source.specs(), {spec.name: [box_of(spec.shape)] for spec in source.specs()})
    packed: list[dict[str, torch.Tensor]] = []

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        found = []
        for version in range(3):
            if rank == 0:
                with session.recording_changes():
                    train(model, qat, 1)
                packed.append(_packed(model, qat))
            record = session.refit(version)
            found.append(
                (record.changed_share is None, [] if rank == 0 else endpoint.differing(packed[version]))
            )
        return found

    config = RefitConfig(bucket_mb=1, timeout_s=20.0, transport="p2p", delta="always", delta_base=base)
    for result in run_world([source], [destination], body, config):
        assert result == [(True, []), (False, []), (False, [])]


def _refitted(trained: torch.nn.Module, of_it: QAT) -> WeightSource:
    """What a trainer's worker sends."""

    class Worker(QATRefitMixin, FSDPRefitMixin):
        model = trained
        qat = of_it
        refit_config = RefitConfig()
        refit_dtype = torch.bfloat16

    return Worker()._prepared_source()


def _half(spec: TensorSpec, rank: int) -> Any:
    """Rows for one rank, all columns; vectors and scalars whole. Down projections by columns."""
    box = list(box_of(spec.shape))
    if len(box) == 2:
        side = 1 if "down_proj" in spec.name or "o_proj" in spec.name else 0
        size = spec.shape[side] // 2
        box[side] = (rank * size, (rank + 1) * size)
    return tuple(box)
