"""Sources of a model under peft without an engine: the merge against peft's own, the adapter's names, what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model, get_peft_model_state_dict
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import RefitError
from rlrefit.integration.session import RefitSession
from rlrefit.workers.engines.transformers.adapter_destination import TransformersAdapterDestination
from rlrefit.workers.trainers.fsdp.adapter_source import AdapterSource
from rlrefit.workers.trainers.fsdp.source import FSDPSource
from rlrefit.workers.trainers.low_rank import Delta, Part, merge
from tests.as_sent import as_sent
from tests.fsdp.models import smallest
from tests.refit.synthetic import run_world
from tests.spawn import run_ranks

from .ranks import prepare_unevenly

_PLAIN = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "down_proj"]}
_WIDE = {
    "r": 4,
    "lora_alpha": 3,
    "use_rslora": True,
    "target_modules": ["q_proj", "down_proj", "embed_tokens"],
    "modules_to_save": ["lm_head"],
    "bias": "all",
}


def _base(**changes: Any) -> Any:
    torch.manual_seed(3)
    return smallest(**{"tie_word_embeddings": False, "attention_bias": True, **changes})


def _adapted(fields: dict[str, Any], **changes: Any) -> Any:
    dtype = changes.pop("dtype", torch.float32)
    return get_peft_model(_base(**changes).to(dtype), LoraConfig(init_lora_weights=False, **fields))


def _change(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.5)


def _wrong(source: FSDPSource, model: Any) -> list[str]:
    """Names that the source sends with other values than peft merges into a copy of the model."""
    held = {fragment.name: fragment for fragment in source.fragments()[0]}
    for fragment in held.values():
        if any(fragment.name.endswith(f"{kind}.weight") for kind in ("q_proj", "down_proj")):
            fragment.view.fill_(float("nan"))
    source.prepare()
    expected = copy.deepcopy(model).merge_and_unload().state_dict()
    exported = dict(source.export(list(expected)))
    wrong = sorted(expected.keys() ^ held.keys())
    for name, tensor in expected.items():
        sent = tensor.to(exported[name].dtype)
        if not sent.equal(as_sent(held[name])) or not sent.equal(exported[name]):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exported", [None, torch.bfloat16])
@pytest.mark.parametrize("fields", [_PLAIN, _WIDE])
def test_every_weight_is_what_peft_merges_again_after_a_step(
    fields: dict[str, Any], dtype: torch.dtype, exported: torch.dtype | None
) -> None:
    model = _adapted(fields, dtype=dtype)
    source = FSDPSource(model, exported)
    assert _wrong(source, model) == []
    _change(model)
    assert _wrong(source, model) == []


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, torch.compile])
def test_adapters_in_modules_that_torch_has_put_others_around_are_merged_and_named_as_ever(wrap: Any) -> None:
    fields = {**_WIDE, "target_modules": ["q_proj", "down_proj"], "bias": "none"}
    for saved in ([], ["lm_head"]):
        plain, wrapped = (_adapted({**fields, "modules_to_save": saved}) for _ in range(2))
        layer = wrapped.get_base_model().model.layers[0]
        layer.self_attn.q_proj, layer.mlp = wrap(layer.self_attn.q_proj), wrap(layer.mlp)
        wrapped.get_base_model().model.layers[0] = wrap(layer)
        source = FSDPSource(wrapped)
        held = {fragment.name: fragment.view for fragment in source.fragments()[0]}
        source.prepare()
        expected = copy.deepcopy(plain).merge_and_unload().state_dict()
        assert held.keys() == expected.keys()
        assert [name for name, tensor in expected.items() if not tensor.equal(held[name])] == []
        assert all(tensor.equal(expected[name]) for name, tensor in source.export(list(expected)))
    plain, wrapped = (_adapted({**fields, "modules_to_save": None}) for _ in range(2))
    layer = wrapped.get_base_model().model.layers[0]
    layer.mlp.down_proj, layer.self_attn = wrap(layer.mlp.down_proj), wrap(layer.self_attn)
    assert AdapterSource(wrapped).specs() == AdapterSource(plain).specs()


def test_the_adapters_that_are_active_are_added_in_peft_s_order_and_no_others() -> None:
    model = _adapted(_PLAIN)
    model.add_adapter("b", LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    source = FSDPSource(model)
    assert _wrong(source, model) == []
    for active in (["default", "b"], ["b"], ["b", "default"]):
        model.base_model.set_adapter(active)
        assert _wrong(source, model) == []


def test_disabled_adapters_leave_the_base_model_and_merged_ones_are_not_added_twice() -> None:
    model = _adapted(_PLAIN)
    source = FSDPSource(model)
    name = "model.layers.0.self_attn.q_proj.weight"
    (held,) = (fragment for fragment in source.fragments()[0] if fragment.name == name)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    with model.disable_adapter():
        source.prepare()
        assert held.view.equal(layer.base_layer.weight)
    source.prepare()
    merged = held.view.clone()
    assert not merged.equal(layer.base_layer.weight)
    model.merge_adapter()
    source.prepare()
    assert held.view.equal(merged)
    layer.enable_adapters(False)
    with pytest.raises(RefitError, match="merged into the weight and disabled at once"):
        source.prepare()


def test_ranks_that_would_gather_different_factors_or_wait_for_one_that_failed_all_say_so() -> None:
    first, second = run_ranks(prepare_unevenly, 2, timeout_s=60.0)
    for told in (first, second):
        assert told["alike"] == told["none on both"] == ""
        assert "different adapters at work" in told["another layer on each"]
        assert "different adapters at work" in told["scaled on rank 0"]
    alone = "merged and disabled on rank 1"
    assert "rank 1 of the trainer" in first[alone]
    assert "merged into the weight and disabled at once" in second[alone]


def test_adapters_that_came_after_the_preparation_end_the_refit() -> None:
    for late, base in (("an adapter 'late'", _adapted(_PLAIN)), ("adapters", _base())):
        source = FSDPSource(base)
        source.fragments()
        if late == "adapters":
            get_peft_model(base, LoraConfig(**_PLAIN))
        else:
            base.add_adapter("late", LoraConfig(r=2, target_modules=["q_proj"]))
        with pytest.raises(RefitError, match=f"{late} that it had not"):
            source.prepare()


def test_layers_and_factors_that_an_adapter_put_in_later_end_the_refit() -> None:
    model = _adapted(_PLAIN)
    source = FSDPSource(model)
    source.fragments()
    model.add_adapter("default 2", LoraConfig(r=2, target_modules=["v_proj"]))
    with pytest.raises(RefitError, match="v_proj") as refused:
        source.prepare()
    assert refused.value.stage == "bind"
    model = _adapted(_PLAIN)
    source = FSDPSource(model)
    source.fragments()
    model.delete_adapter("default")
    model.add_adapter("default", LoraConfig(init_lora_weights=False, **_PLAIN))
    model.set_adapter("default")
    with pytest.raises(RefitError, match="lora_A") as refused:
        source.prepare()
    assert refused.value.stage == "bind"


def test_another_copy_of_a_trained_module_ends_the_refit() -> None:
    model = _adapted(_WIDE)
    source = FSDPSource(model)
    source.fragments()
    with model.disable_adapter(), pytest.raises(RefitError, match="lm_head"):
        source.prepare()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("most", [1 << 30, 40])
def test_any_cut_of_a_weight_gets_the_same_bits(transposed: bool, most: int) -> None:
    shape = (23, 10)
    torch.manual_seed(5)
    weight, a, b = torch.randn(shape), torch.randn(3, 10), torch.randn(23, 3)
    if transposed:
        a, b = torch.randn(3, 23), torch.randn(10, 3)
    deltas = [Delta(a, b, 0.7, transposed)]
    whole = torch.full(shape, float("nan"))
    merge([Part(weight, ((0, 23), (0, 10)), whole)], shape, deltas, most)
    assert torch.allclose(whole, weight + ((b @ a).T if transposed else b @ a) * 0.7)
    for rows in ((0, 7), (3, 4), (7, 23)):
        for columns in ((0, 10), (2, 5)):
            place = slice(*rows), slice(*columns)
            out = torch.full(shape, float("nan"))[place]
            merge([Part(weight[place], (rows, columns), out)], shape, deltas, most)
            assert out.equal(whole[place])


def test_virtual_tokens_beside_the_base_model_are_refused() -> None:
    model = get_peft_model(_base(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(RefitError, match=r"prompt_encoder\.default"):
        FSDPSource(model)


def test_an_adapter_goes_by_the_names_of_its_checkpoint() -> None:
    model = _adapted({**_PLAIN, "target_modules": ["q_proj", "embed_tokens"]})
    expected = get_peft_model_state_dict(model, save_embedding_layers=False)
    source = AdapterSource(model)
    held, refused = source.fragments()
    assert list(refused) == ["adapter_config.json"]
    source.prepare()
    assert {fragment.name for fragment in held} == expected.keys()
    assert all(fragment.view.equal(expected[fragment.name]) for fragment in held)
    exported = dict(source.export([spec.name for spec in source.specs()]))
    del exported["adapter_config.json"]
    assert exported.keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in exported.items())


def test_writes_of_an_adapter_are_counted_by_name() -> None:
    model = _adapted(_PLAIN)
    source = AdapterSource(model)
    before = source.writes()
    _change(model)
    after = source.writes()
    assert set(after.names) == get_peft_model_state_dict(model).keys()
    assert before.places == after.places
    assert all(a > b for a, b in zip(after.counts, before.counts, strict=True))


def test_writes_of_factors_that_are_merged_are_counted_beside_those_of_weights() -> None:
    model = _adapted(_PLAIN)
    source = FSDPSource(model)
    source.prepare()
    before = source.writes()
    source.prepare()
    assert source.writes() == before
    _change(model)
    written = [name for name, a, b in zip(*before[:2], source.writes().counts, strict=True) if a != b]
    assert len(written) == len(get_peft_model_state_dict(model))
    assert all(".lora_" in name for name in written)


def test_an_adapter_whose_settings_changed_ends_the_refit() -> None:
    model = _adapted(_PLAIN)
    source = AdapterSource(model, torch.bfloat16)
    model.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"] = 9.0
    with pytest.raises(RefitError, match="another rank, scaling"):
        source.prepare()


def test_more_than_an_adapter_and_none_are_refused_with_all_reasons() -> None:
    model = _adapted(_WIDE)
    model.add_adapter("b", LoraConfig(r=2, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "b"])
    with pytest.raises(RefitError, match=r"(?s)lm_head.modules_to_save.default.weight.*2 active adapters"):
        AdapterSource(model)
    with pytest.raises(RefitError, match="no adapter"):
        AdapterSource(_base())


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_adapter_whose_making_wrote_the_base_weights_does_not_travel_alone_and_is_merged(
    init: str,
) -> None:
    model = get_peft_model(_base(), LoraConfig(**_PLAIN, init_lora_weights=init))
    with pytest.raises(RefitError, match=f"init_lora_weights='{init}'") as refused:
        AdapterSource(model)
    assert refused.value.stage == "prepare"
    assert _wrong(FSDPSource(model), model) == []


def test_what_is_no_plain_lora_is_refused_with_all_reasons() -> None:
    fields = {**_PLAIN, "target_modules": ["q_proj", "embed_tokens"], "use_dora": True}
    with pytest.raises(RefitError, match=r"(?s)DoraLinearVariant.*tied to lm_head.weight"):
        FSDPSource(_adapted(fields, tie_word_embeddings=True))
    with pytest.raises(RefitError, match="lora_bias=True"):
        FSDPSource(_adapted({**_PLAIN, "target_modules": ["q_proj"], "lora_bias": True}))


@pytest.mark.parametrize("way", ["nccl_xfer", "packed_broadcast"])
def test_an_engine_whose_adapter_moves_or_is_replaced_between_refits_gets_the_factors_where_they_are(
    way: str,
) -> None:
    trained, served = (
        _adapted({**_PLAIN, "target_modules": [*_PLAIN["target_modules"], "embed_tokens"]}),
        _base(),
    )
    source = AdapterSource(trained)

    def factors() -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in served.named_parameters() if "lora_" in name}

    def body(rank: int, session: RefitSession, _: Any) -> Any:
        session.refit(1)
        if rank == 1:
            _change(trained)
            (moved, *_), (replaced, *_) = factors().items(), reversed(factors().items())
            moved[1].data = moved[1].data.clone()
            owner, _, leaf = replaced[0].rpartition(".")
            new = torch.nn.Parameter(replaced[1].detach().clone(), requires_grad=False)
            served.get_submodule(owner)._parameters[leaf] = new
            for factor in factors().values():
                factor.data.fill_(float("nan"))
        session._channel.barrier("changed")
        session.refit(2)
        return True

    config = RefitConfig(bucket_mb=1, timeout_s=20.0, verify="full", lora="adapter")
    destination = TransformersAdapterDestination(served)
    assert run_world([source], [destination], body, config, way) == [True, True]
    expected = {name: p for name, p in trained.named_parameters() if "lora_" in name}
    assert len(expected) == len(factors()) == 6
    found = {name.replace(".refit", ".default"): p for name, p in factors().items()}
    for name, factor in expected.items():
        assert torch.equal(found[name.removeprefix("base_model.model.")], factor)
