"""An FSDP source without an engine: names of the checkpoint, live storage, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rlrefit.integration.errors import RefitError
from rlrefit.integration.packing import Cast
from rlrefit.workers.trainers.fsdp.checkpoint import trace_checkpoint
from rlrefit.workers.trainers.fsdp.own_plan import OwnPlan
from rlrefit.workers.trainers.fsdp.part import Part
from rlrefit.workers.trainers.fsdp.source import FSDPSource
from tests.as_sent import as_sent
from tests.catalog.shrunken import CONFIGS
from tests.spawn import run_ranks

from .models import make_model, smallest
from .ranks import Layout, build, mesh_of

# Transformers has no class of the others.
_OTHERS = ("kimi_k2", "kimi_k25", "bailing_moe_v2")
_KNOWN = [name for name, config in CONFIGS.items() if config["model_type"] not in _OTHERS]


@pytest.mark.parametrize("name", _KNOWN)
def test_fragments_and_export_are_what_save_pretrained_writes(name: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(**CONFIGS[name])
    kinds = (AutoModelForCausalLM, AutoModelForImageTextToText)
    model = next(kind for kind in kinds if type(config) in kind._model_mapping).from_config(config)
    model.save_pretrained(tmp_path)
    saved = {
        key: tensor for file in tmp_path.glob("*.safetensors") for key, tensor in load_file(file).items()
    }
    source = FSDPSource(model)
    fragments, refused = source.fragments()
    assert {spec.name: (spec.shape, spec.dtype) for spec in source.specs()} == {
        key: (tuple(tensor.shape), tensor.dtype) for key, tensor in saved.items()
    }
    assert refused == {}
    assert sorted(f.name for f in fragments) == sorted(saved)
    assert [f.name for f in fragments if not torch.equal(f.view, saved[f.name])] == []
    assert [key for key, tensor in source.export(list(saved)) if not torch.equal(tensor, saved[key])] == []


def test_writes_in_place_are_counted_by_name() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS["qwen3"]))
    source = FSDPSource(model)
    before = source.writes()
    model(torch.arange(4)[None])
    assert source.writes() == before
    with torch.no_grad():
        model.model.norm.weight.mul_(1.0)
    assert [name for name, a, b in zip(*before[:2], source.writes().counts, strict=True) if a != b] == [
        "model.norm.weight"
    ]
    model.load_state_dict(model.state_dict())
    assert all(a < b for a, b in zip(before.counts, source.writes().counts, strict=True))


def _writes_on_two_ranks(rank: int, checkpoint: str) -> dict[str, Any]:
    layout = Layout(2, reshard=False)
    model = build(checkpoint, layout, mesh_of(layout))
    source = FSDPSource(model)
    tokens = torch.arange(6).view(1, 6)
    weight = model.lm_head.weight
    changes: dict[str, Callable[[], Any]] = {
        "trained": lambda: model(input_ids=tokens, labels=tokens).loss.backward(),
        "gathered": lambda: model(input_ids=tokens),
        "through the DTensor": lambda: weight.mul_(1.0),
        "to the shard": lambda: weight.to_local().mul_(1.0),
        "loaded": lambda: model.load_state_dict(model.state_dict()),
    }
    found = {}
    for how, change in changes.items():
        before = source.writes()
        with torch.set_grad_enabled(how == "trained"):
            change()
        now = source.writes()
        found[how] = [name for name, a, b in zip(*before[:2], now.counts, strict=True) if a != b]
        found[f"{how}: elsewhere"] = [] if before.places == now.places else ["moved"]
    return found | {"all": list(source.writes().names)}


def test_writes_are_counted_that_reach_shards_through_their_dtensors(tmp_path: Path) -> None:
    ranks = run_ranks(_writes_on_two_ranks, 2, make_model("qwen3-tied", tmp_path / "model"), timeout_s=120.0)
    for found in ranks:
        every = found.pop("all")
        written = {how: names for how, names in found.items() if names}
        tied = ["model.embed_tokens.weight"]
        assert written == {"through the DTensor": tied, "to the shard": tied, "loaded": every}


def test_what_a_conversion_computes_is_refused_with_its_sources() -> None:
    def convert(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = {}
        if "a" in state:
            made["joined"] = torch.cat((state["a"], state["b"]))
            made["every second"] = state["c"][::2]
            made["diagonal"] = state["c"].diagonal()
            made["repeated"] = state["c"][:1].expand(3, 6)
        if "d" in state:
            made["turned"] = state["d"].t()
            made["scaled"] = state["d"] * 2
        if "e" in state:
            made["written"] = state["e"].mul_(2)[:1]
        return made

    shapes = dict.fromkeys("abcde", ((4, 6), torch.float32))
    traced = {weight.name: weight for weight in trace_checkpoint(convert, shapes)}
    assert traced["turned"].part == Part(((0, 4), (0, 6)), (1, 0))
    refused = {name: weight.made_of for name, weight in traced.items() if weight.part is None}
    assert {name: "".join(parts) for name, parts in refused.items()} == {
        "joined": "ab",
        "every second": "c",
        "diagonal": "c",
        "repeated": "c",
        "scaled": "d",
        "written": "e",
    }


def test_parameters_kept_in_fp32_are_cast_as_they_are_packed_and_buffers_are_not() -> None:
    model = smallest()
    model.register_buffer("scale", torch.ones(2))
    source = FSDPSource(model, torch.bfloat16)
    dtypes = {spec.name: spec.dtype for spec in source.specs()}
    assert dtypes.pop("scale") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}
    fragments = {fragment.name: fragment for fragment in source.fragments()[0]}
    assert (fragments["scale"].dtype, fragments["scale"].encoding) == (torch.float32, None)
    head = fragments["lm_head.weight"]
    assert (head.dtype, head.encoding) == (torch.bfloat16, Cast(torch.bfloat16))
    for value in (1.2345, 2.3456):
        model.lm_head.weight.data.fill_(value)
        source.prepare()
        assert torch.equal(as_sent(head), model.lm_head.weight.bfloat16())


def test_what_transformers_keeps_in_fp32_is_not_cast() -> None:
    model = smallest()
    model._keep_in_fp32_modules_strict = {"q_norm"}
    kept = [s.name for s in FSDPSource(model, torch.bfloat16).specs() if s.dtype == torch.float32]
    assert kept == ["model.layers.0.self_attn.q_norm.weight"]


def test_a_storage_that_moves_changes_the_key_and_the_next_fragments() -> None:
    model = smallest()
    source = FSDPSource(model)
    before = source.storage_key()
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
    assert source.storage_key() != before
    fragment = next(f for f in source.fragments()[0] if f.name == "lm_head.weight")
    assert fragment.view.data_ptr() == model.lm_head.weight.data_ptr()


def _replaced(model: Any) -> None:
    model.lm_head = copy.deepcopy(model.lm_head)


def _moved(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.k_proj, attention.v_proj = attention.v_proj, attention.k_proj


def _untied(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


@pytest.mark.parametrize(
    ("change", "tied", "named"),
    [
        (_replaced, False, "lm_head.weight"),
        (_moved, False, "model.layers.0.self_attn.k_proj.weight"),
        (_untied, True, "model.embed_tokens.weight"),
    ],
)
def test_a_model_that_computes_with_other_modules_than_are_read_ends_the_refit(
    change: Callable[[Any], None], tied: bool, named: str
) -> None:
    model = smallest(tie_word_embeddings=tied)
    source = FSDPSource(model)
    model.model.layers[0].mlp.dropout = torch.nn.Dropout()  # which has no weights
    model.model.layers[0].mlp.up_proj = torch.compile(model.model.layers[0].mlp.up_proj)
    model.model.layers[0].mlp = checkpoint_wrapper(torch.compile(model.model.layers[0].mlp))
    source.prepare()
    change(model)
    with pytest.raises(RefitError) as refused:
        source.prepare()
    assert (refused.value.stage, refused.value.parameter) == ("bind", named)
    FSDPSource(model).prepare()


def test_what_is_not_its_parameters_alone_is_refused() -> None:
    quantized, extra, pruned = smallest(), smallest(), smallest()
    quantized.hf_quantizer = object()
    with pytest.raises(RefitError, match="without quantization"):
        FSDPSource(quantized)
    extra.register_state_dict_post_hook(lambda module, state, prefix, meta: state.update(odd=torch.ones(1)))
    with pytest.raises(RefitError, match="odd"):
        FSDPSource(extra)
    source = FSDPSource(pruned)
    pruned.lm_head.weight = None
    with pytest.raises(RefitError, match="no weight any more"):
        source.storage_key()


def test_a_joined_tensor_that_transformers_cut_by_an_unfit_style_is_refused() -> None:
    plan = OwnPlan.__new__(OwnPlan)
    plan._cuts, plan._styles, plan._shapes = {"p": (0, 1)}, {"p": "colwise"}, {"p": (8, 2)}
    weights = trace_checkpoint(
        lambda state: dict(zip(("gate", "up"), state["p"].chunk(2), strict=True)),
        {"p": ((8, 2), torch.float32)},
    )
    with pytest.raises(RefitError, match="'colwise' does not say how it is joined of weights like"):
        plan.check(weights)
    plan._cuts, plan._styles = {"p": (0, 2)}, {"p": "packed_colwise"}
    plan.check(weights)


def _on_two_ranks(rank: int, checkpoint: str) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor, Partial

    seen: dict[str, Any] = {}
    plain = smallest()
    names = [spec.name for spec in FSDPSource(plain).specs()]
    plain.model.layers[0] = torch.compile(plain.model.layers[0])
    seen["compiled"] = [spec.name for spec in FSDPSource(torch.compile(plain)).specs()] == names

    gathering = Layout(2, reshard=False)
    model = build(checkpoint, gathering, mesh_of(gathering))
    tokens = torch.arange(6).view(1, 6)
    model(input_ids=tokens, labels=tokens).loss.backward()
    with torch.no_grad():
        model(input_ids=tokens)
    before = not isinstance(model.lm_head.weight, DTensor)
    source = FSDPSource(model)
    with torch.no_grad():
        model(input_ids=tokens)
    seen["gathered"] = before and not isinstance(model.lm_head.weight, DTensor)
    key = source.storage_key()
    shard = next(
        s for s in model._get_fsdp_state()._fsdp_param_group.fsdp_params if "lm_head" in s._param_fqn
    )
    with torch.no_grad():
        shard.sharded_param.fill_(7)  # as an optimizer does, which knows nothing of the gathered copy
    (held,) = (f for f in source.fragments()[0] if f.name == "lm_head.weight")
    seen["rows"] = held.box[0]
    seen["values"] = held.view.unique().tolist()
    seen["kept key"] = source.storage_key() == key

    around = fully_shard(torch.compile(smallest()))
    of_around = FSDPSource(around)
    around.unshard()
    with torch.no_grad():
        for parameter in around._get_fsdp_state()._fsdp_param_group.fsdp_params:
            parameter.sharded_param.fill_(7)
    seen["around a compiled model"] = {v for f in of_around.fragments()[0] for v in f.view.unique().tolist()}

    around = fully_shard(torch.nn.Sequential(smallest(), torch.nn.Linear(2, 1)))
    shards = [*around[0].parameters()]
    of_part = FSDPSource(around[0])
    key = of_part.storage_key()
    around.unshard()
    with torch.no_grad():
        for parameter in shards:
            parameter.fill_(7)
    seen["part"] = {v for f in of_part.fragments()[0] for v in f.view.unique().tolist()}
    seen["part's key"] = of_part.storage_key() == key

    model.reshard()
    summed = DTensor.from_local(torch.ones(62, 32), model.lm_head.weight.device_mesh, [Partial()])
    model.lm_head.register_parameter("weight", torch.nn.Parameter(summed))
    unsure = FSDPSource(model)
    seen["refused"] = unsure.fragments()[1]
    ((_, whole),) = unsure.export(["lm_head.weight"])
    seen["summed"] = whole.unique().tolist()

    own = Layout(1, tensor=2, own_plan=True)
    planned = build(checkpoint, own, mesh_of(own))
    planned.lm_head.register_buffer("odd", torch.ones(1))
    try:
        FSDPSource(planned)
    except RefitError as error:
        seen["odd"] = str(error)
    del planned.lm_head.odd
    planned._tp_plan["model.layers.*.self_attn.o_proj"] = "colwise"
    planned._tp_plan["model.layers.*.mlp.down_proj"] = "of another version"
    try:
        FSDPSource(planned)
    except RefitError as error:
        seen["plan"] = str(error)
    return seen


def test_ranks_read_gathered_parameters_as_shards_see_through_compile_and_refuse_unsure_layouts(
    tmp_path: Path,
) -> None:
    ranks = run_ranks(_on_two_ranks, 2, make_model("qwen3", tmp_path / "model"), timeout_s=120.0)
    for rank, seen in enumerate(ranks):
        assert seen["compiled"]
        assert seen["gathered"]
        assert seen["rows"] == (31 * rank, 31 * rank + 31)
        assert seen["values"] == [7.0]
        assert seen["kept key"]
        assert seen["around a compiled model"] == seen["part"] == {7.0}
        assert seen["part's key"]
        assert list(seen["refused"]) == ["lm_head.weight"]
        assert "redistribute the tensor" in seen["refused"]["lm_head.weight"]
        assert seen["summed"] == [2.0]
        assert "lm_head.odd: Qwen3ForCausalLM has no tensor of this name" in seen["odd"]
        assert "no shard rule for the style 'of another version'" in seen["plan"]
        assert "is not what the style 'colwise' makes of [32, 32]" in seen["plan"]
