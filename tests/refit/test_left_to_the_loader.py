"""Weights that an engine could be written of in place, and that take the misc path all the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.engine.refusals import refused_on_engine
from rlrefit.integration.layout import Axes, Fragment, box_of
from rlrefit.integration.quantize.formats import Format, Fp8Blockwise, Mxfp8
from rlrefit.integration.session import RefitSession
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.integration.weights.quantizing import QuantizingSource, packed_in, packed_specs, wire_specs

from .synthetic import BF16, Layout, SyntheticDestination, SyntheticSource, run_world, value_of, whole

CONFIG = RefitConfig(bucket_mb=1, timeout_s=20.0, verify="full", transport="p2p")
WEIGHT = TensorSpec("weight", (256, 256), BF16)
TURNED = Axes(((256,), (256,)), (1, 0))
ALTERNATING = Axes(((128, 2), (256,)), (1, 0, 2))


class Coded(SyntheticDestination):
    """An engine rank that holds the weight as codes and scales, and its own loader as the rest takes them."""

    def __init__(self, format: Format, axes: Axes | None = None, refused: Sequence[str] = ()):
        self._format, self._refused = format, refused
        wire = wire_specs(WEIGHT, format)
        layout: Layout = whole(wire) if axes is None else whole(wire) | {"weight": [box_of(axes.shape)]}
        super().__init__(wire, layout, axes={} if axes is None else {"weight": axes})

    def quantized(self, specs: Sequence[TensorSpec]) -> dict[str, Format]:
        return {"weight": self._format}

    def fragments(self, specs: Sequence[TensorSpec]) -> tuple[list[Fragment], dict[str, str]]:
        found, _ = super().fragments(specs)
        return [f for f in found if f.name not in self._refused], dict.fromkeys(
            self._refused, "its kernel's order"
        )

    def poison(self) -> None:
        for storage in self._wanted.values():
            storage.view(torch.uint8).fill_(0x7F)

    def wrong(self, version: int) -> list[str]:
        """What is not, bit for bit, what the whole weight is quantized to."""
        found = []
        for (name, box), held in self._wanted.items():
            full = dict(zip(self._specs, self._format.encode(value_of(WEIGHT, version)), strict=True))[name]
            seen = full.view(torch.uint8) if full.itemsize == 1 else full
            seen = self._axes[name].see(seen) if name in self._axes else seen
            if not torch.equal(held.contiguous().view(torch.uint8), seen.contiguous().view(torch.uint8)):
                found.append(f"{name} {box}")
        return found


def refits(config: RefitConfig, sources: list[Any], engines: list[Any]) -> dict[str, str]:
    """Three refits, all of them right on all engines; the routes that they took."""

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        for version in (1, 2, 3):
            if session.world.is_source:
                endpoint.set_version(version)
            elif config.delta == "off":
                endpoint.poison()
            session.refit(version)
            assert session.world.is_source or endpoint.wrong(version) == []
        return {entry.spec.name: entry.route for entry in session.manifest}

    results = run_world(sources, engines, body, config)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return dict(results[0])


@pytest.mark.parametrize("axes", [TURNED, ALTERNATING], ids=["turned", "alternating"])
@pytest.mark.parametrize("format", [Fp8Blockwise(), Mxfp8()], ids=lambda format: format.kind)
@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_blocks_are_those_of_the_whole_weight_where_a_side_has_its_elements_in_another_order(
    side: str, format: Format, axes: Axes
) -> None:
    on_trainer = side == "trainer"
    source = SyntheticSource(
        [WEIGHT],
        {"weight": [box_of(axes.shape if on_trainer else WEIGHT.shape)]},
        axes={"weight": axes} if on_trainer else {},
    )
    routes = refits(
        replace(CONFIG, trainer_quantize_fp8=True), [source], [Coded(format, None if on_trainer else axes)]
    )
    assert {*routes.values()} == {"misc"}


def test_scales_of_blocks_that_trainers_cut_are_made_where_the_engine_loads_the_codes_itself() -> None:
    held: list[Layout] = [{"weight": [(rows, (0, 256))]} for rows in ((0, 70), (70, 256))]
    engine = Coded(Fp8Blockwise(), refused=["weight"])
    routes = refits(
        replace(CONFIG, trainer_quantize_fp8=True), [SyntheticSource([WEIGHT], one) for one in held], [engine]
    )
    assert {*routes.values()} == {"misc"}


def test_reasons_that_a_trainer_keeps_are_left_as_they_are() -> None:
    source = SyntheticSource([WEIGHT], {"weight": [((0, 256), (0, 40))]}, {"router": "MoE router"})
    _, refused = QuantizingSource(source, {"weight": Mxfp8()}).fragments()
    assert refused.keys() == {"router", "weight", "weight_scale"}
    assert source.refused == {"router": "MoE router"}


TIED = [
    TensorSpec("embedding", (64, 32), BF16),
    TensorSpec("head", (64, 32), BF16),
    TensorSpec("norm", (32,), BF16),
]


class Tied(SyntheticDestination):
    """An engine rank whose head lies in its embedding's memory."""

    def __init__(self) -> None:
        super().__init__(TIED, whole(TIED))
        embedding, head = (("embedding", box_of((64, 32))), ("head", box_of((64, 32))))
        self._wanted[head] = self._wanted[embedding]

    def rewritten(self, specs: Sequence[TensorSpec]) -> dict[str, str]:
        return {}

    def wrong(self, version: int) -> list[str]:
        """As its loader leaves them, which has got the head last."""
        return [one for one in super().wrong(version) if "embedding" not in one]


@pytest.mark.parametrize("verify", ["off", "sampled"])
@pytest.mark.parametrize("delta", ["off", "always"])
def test_names_that_share_memory_are_left_to_the_engines_loader(delta: str, verify: str) -> None:
    config = replace(CONFIG, delta=delta, verify=verify)
    routes = refits(config, [SyntheticSource(TIED, whole(TIED))], [Tied()])
    assert routes == {"embedding": "misc", "head": "misc", "norm": "bulk"}


def test_views_that_lie_between_each_other_share_nothing_and_those_that_meet_are_named() -> None:
    memory = torch.zeros(8, 4)

    def fragment(name: str, view: torch.Tensor) -> Fragment:
        return Fragment(name, tuple(view.shape), box_of(view.shape), view)

    apart = [
        fragment("gate", memory[:, ::2]),
        fragment("up", memory[:, 1::2]),
        fragment("none", memory[:0]),
        fragment("other", torch.zeros(3)),
    ]
    assert refused_on_engine(apart, {}, {}) == {}
    meeting = [
        fragment("upper", memory[:5]),
        fragment("lower", memory[4:]),
        fragment("up again", memory[:, 1::2]),
    ]
    assert refused_on_engine([*apart, *meeting], {"none": "why"}, {}).keys() == {
        "none",
        "gate",
        "upper",
        "lower",
        "up",
        "up again",
    }
    # With columns of padding, and fewer rows.
    padded = [fragment("embedding", memory[:, :3]), fragment("head", memory[:6, :3])]
    assert refused_on_engine(padded, {}, {}).keys() == {"embedding", "head"}


def test_nvfp4_in_another_order_than_rows_and_columns_is_left_to_the_engines_loader() -> None:
    specs = packed_specs(TensorSpec("x.weight", (32, 64), BF16))
    fragments = []
    for spec in specs[:2]:
        n, k = spec.shape
        axes = Axes(((n,), (k,)), (1, 0))
        held = torch.zeros(k, n, dtype=spec.dtype)
        fragments.append(Fragment(spec.name, spec.shape, box_of(held.shape), held, axes=axes))
    found = refused_on_engine(fragments, {}, {}, packed_in([*specs, WEIGHT]))
    assert found.keys() == {"x.weight", "x.weight_scale"}
