"""Buckets of codes and scales that the trainer makes, in each of the three ways to an engine, over a double."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlrefit.integration.config import INT4_SCALES
from rlrefit.integration.errors import EngineDirty, PlanError, RefitError, RefitMismatch
from rlrefit.integration.quantize.formats import (
    Format,
    Fp8Blockwise,
    Int4,
    Mxfp8,
    as_made,
    to_json,
    wire_names,
)
from rlrefit.workers.engines.sglang.callers import EngineCaller
from rlrefit.workers.engines.sglang.driver import SglangRefit, merged
from rlrefit.workers.engines.sglang.sender import SglangSender
from rlrefit.workers.trainers.fsdp.source import FSDPSource
from rlrefit.workers.trainers.qat.config import QATConfig
from rlrefit.workers.trainers.qat.fsdp import quantize_module
from tests.spawn import run_ranks

from .engine_double import EngineDouble, Holder, ManagerDouble, modules, weights
from .ways import Driven

pytestmark = pytest.mark.usefixtures("sglang")
# What is a matrix of 16 bits, on two kinds of kernels.
BLOCKS: dict[str, Format] = {"a.weight": Fp8Blockwise(), "c.weight": Fp8Blockwise(ue8m0=True)}
# Several buckets, none of which holds a weight without its scale.
BUCKET_BYTES = 128


@pytest.fixture(params=[False, True], ids=["SGLang loads", "the refit places"])
def holding(request: pytest.FixtureRequest, driven: Driven) -> Driven:
    manager = driven.manager
    manager.worker.hold_in_blocks(BLOCKS)
    manager.worker.placing = request.param
    return driven


def _sender(refit: SglangRefit, *, quantize: bool = True) -> tuple[SglangSender, Holder]:
    source = Holder(0)
    return SglangSender(source, refit, "cpu", BUCKET_BYTES, trainer_quantize_fp8=quantize), source


def _expected(index: int) -> dict[str, torch.Tensor]:
    found = weights(index)
    for name, format in BLOCKS.items():
        found[name], found[f"{name}_scale_inv"] = format.encode(found[name])
    return found


def _holds(manager: ManagerDouble, index: int) -> bool:
    held, expected = manager.holder.held, _expected(index)
    assert held.keys() == expected.keys()
    return all(
        held[name].dtype == tensor.dtype
        and torch.equal(held[name].view(torch.uint8), tensor.view(torch.uint8))
        for name, tensor in expected.items()
    )


def test_two_refits_leave_codes_and_scales_of_the_full_tensors(holding: Driven) -> None:
    manager, refit = holding.manager, holding.refit
    sender, source = _sender(refit)
    for version, index in enumerate((1, 2)):
        source.take_on(index)
        manager.holder.poison()
        record = sender.refit(version)
        assert record.bytes_misc == sum(t.nbytes for t in manager.holder.held.values())
        assert _holds(manager, index)
        assert (refit.version, refit.weight_version()) == (version, str(version))
        assert not manager.paused
        assert not manager.stale_prefixes
    calls = manager.calls
    taken, others = ("load", "bucket") if manager.worker.placing else ("bucket", "load")
    assert calls.count(taken) > 2
    assert others not in calls
    assert calls.count("formats") == calls.count("commit") == 2
    # Asked for once the engine is paused.
    asked = calls.index("pause in_place")
    assert calls[asked : calls.index("begin") + 1] == ["pause in_place", "flush_cache", "formats", "begin"]


def test_an_engine_without_blocks_is_refused_and_goes_on_as_it_was(driven: Driven) -> None:
    sender, source = _sender(driven.refit)
    source.take_on(1)
    with pytest.raises(RefitMismatch, match="FP8 blocks"):
        sender.refit(0)
    driven.require_served(0)
    assert "begin" not in driven.manager.calls


def test_an_engine_of_blocks_does_not_take_unquantized_weights(holding: Driven) -> None:
    with pytest.raises(PlanError):
        _sender(holding.refit, quantize=False)[0].refit(0)
    holding.refit.require_servable()
    _sender(holding.refit)[0].refit(0)
    assert _holds(holding.manager, 0)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_ends_the_refit_by_name_before_it_commits(
    holding: Driven, number: float
) -> None:
    refit, manager = holding.refit, holding.manager
    sender, source = _sender(refit)
    source.held["c.weight"][3, 2] = number
    with pytest.raises(RefitError, match=r"c\.weight"):
        sender.refit(0)
    assert not {"finish", "commit"} & set(manager.calls)
    assert manager.paused
    with pytest.raises(EngineDirty, match="did not commit"):
        refit.require_servable()
    source.take_on(2)
    sender.refit(1)
    refit.require_servable()
    assert _holds(manager, 2)


def _trained_on(rank: int) -> tuple[list[bool], list[str], list[int]]:
    """On one of two trainer ranks, of which the first shares the engine's device and has its driver."""
    sys.modules.update(modules())
    engine, source = EngineDouble(), Holder(0)
    manager = engine.tokenizer_manager
    manager.worker.hold_in_blocks(BLOCKS)
    leader = rank == 0
    refit = SglangRefit(EngineCaller(engine)) if leader else None
    device = "cpu" if leader else "one without a worker"
    sender = SglangSender(source, refit, device, BUCKET_BYTES, dist.group.WORLD, trainer_quantize_fp8=True)
    held: list[bool] = []
    handed: list[int] = []

    def send(version: int, index: int) -> None:
        source.take_on(index)
        manager.holder.poison()
        handed.append(sender.refit(version).bytes_misc)
        held.append(not leader or _holds(manager, index))

    for version, index in enumerate((1, 2)):
        send(version, index)
    source.held["a.weight"][7, 0] = torch.nan
    told = [_told(sender, 2)]
    manager.worker.blocks = {}
    told.append(_told(sender, 3))
    manager.worker.blocks = BLOCKS
    send(4, 1)
    engine.loop.close()
    return held, told, handed


def _told(sender: SglangSender, version: int) -> str:
    try:
        sender.refit(version)
    except RefitError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_all_trainer_ranks_quantize_what_the_leaders_engine_asks_for_and_hear_of_its_refusals() -> None:
    nbytes = sum(tensor.nbytes for tensor in _expected(1).values())
    for rank, (held, told, handed) in enumerate(run_ranks(_trained_on, 2)):
        assert held == [True] * 3
        assert "a.weight" in told[0]
        assert told[1].startswith("RefitMismatch: ")
        assert "holds a weight in FP8 blocks" in told[1]
        assert handed == [0 if rank else nbytes] * 3


@pytest.mark.parametrize("nbytes", [1, 80, 120, 1 << 20])
def test_a_weight_and_its_scales_share_a_bucket_however_small(
    alone: Driven, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    buckets: list[set[str]] = []
    holding = alone.manager
    holding.worker.hold_in_blocks(BLOCKS)
    load = holding.holder.load_weights

    def loaded(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        named = dict(weights)
        buckets.append(set(named))
        load(named.items())

    monkeypatch.setattr(holding.holder, "load_weights", loaded)
    SglangSender(Holder(1), alone.refit, "cpu", nbytes, trainer_quantize_fp8=True).refit(0)
    assert _holds(holding, 1)
    for name in BLOCKS:
        assert [{name, f"{name}_scale_inv"} <= bucket for bucket in buckets].count(True) == 1
    assert nbytes > 1 or len(buckets) == len(weights(0))


class _Trained(Holder):
    """The one linear layer of a model in training, by its name there."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.held = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def take_on(self, index: int) -> None:
        for tensor in self.held.values():
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(index)))


@pytest.mark.parametrize("told", [False, True], ids=["the source tells", "it is told"])
@pytest.mark.parametrize("rule", INT4_SCALES)
def test_an_engine_that_would_compute_with_other_weights_than_int4_training_does_is_refused_and_goes_on(
    driven: Driven, rule: str, told: bool
) -> None:
    name, other = "linear.weight", next(found for found in INT4_SCALES if found != rule)
    model = torch.nn.ModuleDict({"linear": torch.nn.Linear(64, 8, bias=False, dtype=torch.bfloat16)})
    qat = quantize_module(model, QATConfig(activations=False, format=Int4(32, scale_rule=rule)))
    training, worker, held = _Trained(model), driven.manager.worker, driven.manager.holder.held
    source, telling = (training, {"qat": qat}) if told else (FSDPSource(model), {})
    held.clear()
    held |= {name: torch.zeros(8, 64, dtype=torch.bfloat16)}

    def sender(**keys: Any) -> SglangSender:
        return SglangSender(source, driven.refit, "cpu", BUCKET_BYTES, **telling, **keys)

    def refused(**keys: Any) -> None:
        before = {held_name: tensor.clone() for held_name, tensor in held.items()}
        with pytest.raises(RefitMismatch) as met:
            sender(**keys).refit(9)
        assert (met.value.parameter, met.value.stage) == (name, "handshake")
        assert "begin" not in driven.manager.calls[asked:]
        assert not driven.manager.paused
        driven.refit.require_servable()
        assert all(torch.equal(held[held_name], tensor) for held_name, tensor in before.items())

    asked = 0
    refused()
    for group in (64, 32):
        # As an engine tells it, which has no rule.
        worker.blocks = {name: Int4(group)}
        codes, scales = worker.blocks[name].encode(torch.zeros(8, 64, dtype=torch.bfloat16))
        held.clear()
        held |= dict(zip(wire_names(name, Int4(group)), (codes, scales), strict=True))
        refused(trainer_quantize_int4=True, int4_scale=rule if group == 64 else other)
    for version, index in enumerate((1, 2)):
        training.take_on(index)
        driven.manager.holder.poison()
        sender(trainer_quantize_int4=True, int4_scale=rule).refit(version)
        made = as_made(worker.blocks, rule)[name].encode(training.held[name])
        assert all(torch.equal(found, wanted) for found, wanted in zip(held.values(), made, strict=True))
    asked = len(driven.manager.calls)
    refused(trainer_quantize_int4=True, int4_scale=other)
    # Of a source that does not tell, nothing is known.
    SglangSender(
        training, driven.refit, "cpu", BUCKET_BYTES, trainer_quantize_int4=True, int4_scale=other
    ).refit(2)


def _answer(weights: dict[str, int], *formats: Format) -> dict[str, Any]:
    return {"weights": weights, "formats": [to_json(format) for format in formats]}


def test_what_workers_hold_is_taken_together_and_has_to_agree() -> None:
    plain, powers = Fp8Blockwise(), Fp8Blockwise(ue8m0=True)
    shared = _answer({"attention": 0, "expert.0": 1}, plain, powers)
    other = _answer({"expert.1": 0, "attention": 1}, powers, plain)
    assert merged([shared, other, _answer({})]) == {
        "attention": plain,
        "expert.0": powers,
        "expert.1": powers,
    }
    with pytest.raises(RefitMismatch, match=r"worker 1 holds it as .*ue8m0=True") as met:
        merged([shared, _answer({"attention": 0}, powers)])
    assert met.value.parameter == "attention"
    with pytest.raises(RefitMismatch, match=r"group=64.*group=32") as met:
        merged([_answer({"attention": 0}, Int4(32)), _answer({"attention": 0}, Int4(64))])
    # Of scales' rules engines know nothing.
    assert not [rule for rule in INT4_SCALES if rule in str(met.value)]
    with pytest.raises(RefitError, match="unknown here"):
        merged([{"weights": {}, "formats": [to_json(Mxfp8()) | {"kind": "another"}]}])
