"""Scales of an FP8 KV cache in whole refits: with the weights, committed with them, or refused before anything moves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import PeerLost, RefitError, RefitMismatch
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.workers.engines.common.destination_mixin import DestinationRefitMixin
from rlrefit.workers.kv_scales.endpoints import AttentionLayer, KvScaleDestination, KvScaleSource, Scales
from rlrefit.workers.trainers.source_mixin import SourceRefitMixin
from tests.delta import scene
from tests.refit.synthetic import (
    Layout,
    SyntheticDestination,
    SyntheticSource,
    refit_changed,
    run_world,
    whole,
)

LAYERS = [f"model.layers.{i}.self_attn" for i in range(3)]
SPECS = [
    *(TensorSpec(f"{layer}.k_proj.weight", (8, 6), torch.bfloat16) for layer in LAYERS),
    TensorSpec("model.layers.0.mlp.gate.weight", (4, 6), torch.bfloat16),
]
WHOLE: Layout = {spec.name: [((0, spec.shape[0]), (0, 6))] for spec in SPECS}
REFUSED = {SPECS[-1].name: "MoE router"}
ENGINES = ("nccl_xfer", "packed_broadcast")


class Cache:
    """The layers of an engine that has some of the model's, each with the scales that vLLM starts with."""

    def __init__(self, layers: Sequence[AttentionLayer]) -> None:
        self.scales = dict.fromkeys(layers, Scales(1.0, 1.0, 1.0))

    def claim(self, layers: Sequence[AttentionLayer]) -> tuple[list[AttentionLayer], list[str]]:
        return [each for each in layers if each in self.scales], [
            each for each in self.scales if each not in layers
        ]

    def set(self, scales: Mapping[AttentionLayer, Scales]) -> None:
        for layer, new in scales.items():
            old = self.scales[layer]
            self.scales[layer] = Scales(*(o if math.isnan(n) else n for n, o in zip(new, old, strict=True)))

    def reset(self) -> None:
        """As a reload of a layer does."""
        self.scales = dict.fromkeys(self.scales, Scales(1.0, 1.0, 1.0))


class Engine(KvScaleDestination, SyntheticDestination):
    """A synthetic rank with a cache; poisoned weights and all."""

    def __init__(self, layers: Sequence[AttentionLayer] = LAYERS) -> None:
        self.weights = SyntheticDestination(SPECS, WHOLE)
        self.cache = Cache(layers)
        KvScaleDestination.__init__(self, self.weights, self.cache)

    def poison(self) -> None:
        self.weights.poison()

    def wrong(self, version: int) -> list[str]:
        return self.weights.wrong(version)


class Trainer(KvScaleSource):
    def __init__(self) -> None:
        self.weights = SyntheticSource(SPECS, WHOLE, REFUSED)
        super().__init__(self.weights)

    def set_version(self, version: int) -> None:
        self.weights.set_version(version)


def float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def scales(seed: int, queries: bool = True) -> dict[str, float]:
    """Any two differ, and all are values of float32."""
    kinds = ("k", "v", "q") if queries else ("k", "v")
    return {
        f"{layer}.{kind}_scale": float32(0.01 + seed + i / 7 + j / 70)
        for i, layer in enumerate(LAYERS)
        for j, kind in enumerate(kinds)
    }


def of_layers(given: Mapping[str, float], layers: Sequence[str] = LAYERS) -> dict[str, Scales]:
    return {layer: Scales(*(given.get(f"{layer}.{kind}_scale", 1.0) for kind in "kvq")) for layer in layers}


CONFIG = RefitConfig(transport="p2p", bucket_mb=1, timeout_s=20.0, verify="full", kv_scales=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_scales_arrive_with_their_refit_and_stay_until_others_are_given(engine: str) -> None:
    trainers = [Trainer(), Trainer()]
    # Two pipeline stages, and an engine whose second layer is not quantized.
    engines = [Engine(LAYERS[:2]), Engine(LAYERS[2:]), Engine(LAYERS[::2])]
    first, second = scales(1), scales(2, queries=False)

    def body(rank: int, session: Any, endpoint: Any) -> list[Any]:
        seen = []
        for version, given in enumerate((None, first, None, second), start=1):
            if session.world.is_source:
                if given is not None:
                    endpoint.give(given)
            else:
                endpoint.cache.reset()
            record, wrong = refit_changed(session, endpoint, version)
            assert wrong == []
            assert not session.state.dirty
            seen.append(None if session.world.is_source else dict(endpoint.cache.scales))
        assert record.bytes_misc > 0 or rank == 1
        return seen

    results = run_world(trainers, engines, body, CONFIG, engine)
    for result, layers in zip(results[2:], (LAYERS[:2], LAYERS[2:], LAYERS[::2]), strict=True):
        # Queries keep the scales of the calibration that had them.
        assert result == [
            of_layers({}, layers),
            of_layers(first, layers),
            of_layers(first, layers),
            of_layers(first | second, layers),
        ]


class Silent(scene.Destination):
    """Does not say whether it leaves codes as they were written."""

    rewritten: Any = None


@pytest.mark.parametrize("kind", [scene.Destination, Silent])
def test_scales_arrive_beside_weights_of_which_only_what_differs_travels_if_the_engine_below_leaves_those_alone(
    kind: type[scene.Destination],
) -> None:
    specs = [*SPECS[:-1], TensorSpec("code", (130, 30), torch.float8_e4m3fn)]
    weights, cache = kind(specs, whole(specs)), Cache(LAYERS)
    trainer = scene.Source(specs, whole(specs))
    source, destination = KvScaleSource(trainer), KvScaleDestination(weights, cache)

    def body(rank: int, session: Any, endpoint: Any) -> list[Any]:
        seen = []
        for version in (1, 2, 3):
            if session.world.is_source:
                trainer.set_version(version)
                source.give(scales(version))
            record = session.refit(version)
            if not session.world.is_source:
                assert weights.wrong(version) == []
                assert cache.scales == of_layers(scales(version))
            seen.append(record.changed_share is not None)
        return seen

    sparse = kind is not Silent
    results = run_world([source], [destination], body, replace(CONFIG, delta="always"))
    assert results == [[False, sparse, sparse]] * 2


def test_an_engine_of_a_later_epoch_gets_the_scales_that_were_given_last() -> None:
    trainer, given = Trainer(), scales(3)

    def body(rank: int, session: Any, endpoint: Any) -> None:
        refit_changed(session, endpoint, 1)

    trainer.give(given)
    for engine in (Engine(), Engine()):
        run_world([trainer], [engine], body, CONFIG)
        assert engine.cache.scales == of_layers(given)


class Worker(SourceRefitMixin):
    """A trainer's worker as the mixin sees it."""

    def __init__(self, kv_scales: bool = True) -> None:
        self.refit_config = RefitConfig(**{**vars(CONFIG), "kv_scales": kv_scales})
        self.weights = SyntheticSource(SPECS, WHOLE, REFUSED)

    def _make_refit_source(self) -> SyntheticSource:
        return self.weights


class EngineWorker(DestinationRefitMixin):
    def __init__(self) -> None:
        self.engine = Engine()

    def _make_refit_destination(self) -> SyntheticDestination:
        return self.engine.weights

    def _make_scaled_cache(self) -> Cache:
        return self.engine.cache


Q_OF_ONE = scales(1, queries=False) | {f"{LAYERS[1]}.q_scale": 1.0}
NO_NUMBERS = {f"{LAYERS[0]}.k_scale": 0.0, f"{LAYERS[1]}.v_scale": 1e-60, f"{LAYERS[2]}.q_scale": math.nan}
# What is given, and what is told of it.
BAD = {
    "unknown": (
        {"model.layers.7.self_attn.v_scale": 1.0, "model.layers.0.mlp.k_scale": 1.0},
        "no attention layer",
    ),
    "missing": ({f"{LAYERS[0]}.k_scale": 1.0}, f"{LAYERS[0]}.v_scale, {LAYERS[1]}.k_scale"),
    "no scales": (scales(1) | NO_NUMBERS, ", ".join(NO_NUMBERS)),
    "queries of one layer": (Q_OF_ONE, f"{LAYERS[0]}.q_scale, {LAYERS[2]}.q_scale are missing"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("engine", ENGINES)
def test_wrong_scales_end_the_refit_on_all_ranks_before_anything_is_written(engine: str, bad: str) -> None:
    given, told = BAD[bad]
    trainer, served, shards = Worker(), EngineWorker(), engine == "nccl_xfer"

    def body(rank: int, session: Any, endpoint: Any) -> Any:
        if session.world.is_source:
            trainer._refit_session = session
            trainer.weights.set_version(1)
            send = trainer.nccl_xfer_refit if shards else trainer.broadcast_weights_for_collective
            send(1, scales(5))
            return send(2, given)
        served._refit_session = session
        receive = served.nccl_xfer_refit if shards else served.update_weights_from_collective
        receive(1)
        try:
            return receive(2)
        finally:
            assert served.engine.wrong(1) == []
            assert not session.state.dirty
            assert session.state.version == 1
            assert served.engine.cache.scales == of_layers(scales(5))

    source, destination = (
        trainer._prepared_source(),
        KvScaleDestination(served.engine.weights, served.engine.cache),
    )
    ours, theirs = run_world([source], [destination], body, CONFIG, engine)
    assert type(ours) is RefitError
    assert type(theirs) is PeerLost
    assert told in str(ours)
    assert told in str(theirs)


def test_vllms_form_of_a_name_is_understood() -> None:
    trainer, given = Trainer(), scales(4)
    trainer.give({name.replace("self_attn.q", "self_attn.attn.q"): value for name, value in given.items()})
    names = [spec.name for spec in trainer.specs() if spec.name in given]
    assert names == list(given)
    assert {name: value.item() for name, value in trainer.export(names)} == given


def test_scales_are_refused_where_they_do_not_travel() -> None:
    trainer, served = Worker(kv_scales=False), EngineWorker()

    def body(rank: int, session: Any, endpoint: Any) -> Any:
        if not session.world.is_source:
            return session.refit(1)
        trainer._refit_session = session
        return trainer.nccl_xfer_refit(1, scales(1))

    config = RefitConfig(**{**vars(CONFIG), "kv_scales": False})
    ours, theirs = run_world([trainer._prepared_source()], [served.engine.weights], body, config)
    assert "policy.refit.kv_scales=false" in str(ours)
    assert isinstance(theirs, PeerLost)


def test_an_engine_layer_without_a_calibrated_one_ends_the_meeting() -> None:
    engine = Engine([*LAYERS, "model.layers.9.self_attn"])
    ours, theirs = run_world([Trainer()], [engine], lambda *_: None, CONFIG)
    assert isinstance(ours, PeerLost)
    assert isinstance(theirs, RefitMismatch)
    assert "no scales for model.layers.9.self_attn" in str(theirs)


def test_a_model_without_keys_to_calibrate_is_refused() -> None:
    latent = SyntheticSource(
        [TensorSpec("model.layers.0.self_attn.kv_b_proj.weight", (8, 6), torch.bfloat16)], {}
    )
    with pytest.raises(RefitError, match="latent attention"):
        KvScaleSource(latent)


def test_an_engine_without_a_quantized_cache_refuses() -> None:
    class Plain(DestinationRefitMixin):
        pass

    with pytest.raises(RefitError, match="KV cache of Plain is not quantized"):
        Plain()._make_scaled_cache()
