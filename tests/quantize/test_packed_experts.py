"""Refits whose trainer packs GPT-OSS's experts in MXFP4: what the packed checkpoint has lands, whatever the ranks hold and want."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import PeerLost, RefitError, RefitMismatch
from rlrefit.integration.layout import Axes, Box
from rlrefit.integration.quantize import mxfp4
from rlrefit.integration.session import RefitSession, ServingState
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.integration.weights.packing_experts import ExpertPackingSource, packed_experts
from tests.refit.synthetic import (
    DivergedSource,
    Layout,
    SyntheticDestination,
    SyntheticSource,
    refit_changed,
    run_world,
    value_of,
)

BF16 = torch.bfloat16
E, K, N = 4, 64, 128
UP = TensorSpec("layers.0.mlp.experts.gate_up_proj", (E, K, 2 * N), BF16)
UP_BIAS = TensorSpec("layers.0.mlp.experts.gate_up_proj_bias", (E, 2 * N), BF16)
DOWN = TensorSpec("layers.0.mlp.experts.down_proj", (E, N, K), BF16)
NORM = TensorSpec("layers.0.norm.weight", (K,), BF16)
SPECS = [UP, UP_BIAS, DOWN, NORM]
CONFIG = RefitConfig(bucket_mb=1, timeout_s=20.0, verify="full", transport="p2p", trainer_quantize_mxfp4=True)
# As Megatron's rules see them: gate and up rows of each expert apart, and rows before columns.
ALTERNATING = Axes(((E,), (K,), (N, 2)), (0, 2, 3, 1))
TRANSPOSED = Axes(((E,), (N,), (K,)), (0, 2, 1))


def packed(spec: TensorSpec, version: int) -> dict[str, torch.Tensor]:
    """What a checkpoint in MXFP4 has of a weight."""
    names, value = packed_experts(spec), value_of(spec, version)
    if names is None:
        return {spec.name: value}
    codes, scales = mxfp4.quantize(value.transpose(1, 2))
    return {names.blocks.name: codes.view(names.blocks.shape), names.scales.name: scales}


class PackedDestination(SyntheticDestination):
    """An engine rank that holds experts in MXFP4."""

    def poison(self) -> None:
        for storage in self._wanted.values():
            storage.fill_(0xFF if storage.dtype == torch.uint8 else float("nan"))

    def wrong(self, version: int) -> list[str]:
        whole = {name: tensor for spec in SPECS for name, tensor in packed(spec, version).items()}
        return [
            f"{name} {box}"
            for (name, box), held in self._wanted.items()
            if not torch.equal(held, whole[name][tuple(slice(*part) for part in box)])
        ]


def megatron(rank: int, rows_of_down: tuple[int, int]) -> SyntheticSource:
    """One of two tensor-parallel ranks, which has each expert in a parameter of its own."""
    half = N // 2
    layout: Layout = {
        UP.name: [
            ((e, e + 1), (rank * half, rank * half + half), (which, which + 1), (0, K))
            for e in range(E)
            for which in (0, 1)
        ],
        UP_BIAS.name: [((0, E), (rank * N, rank * N + N))],
        DOWN.name: [((e, e + 1), (0, K), rows_of_down) for e in range(E)],
    }
    if rank == 0:
        layout[NORM.name] = [((0, K),)]
    return SyntheticSource(SPECS, layout, axes={UP.name: ALTERNATING, DOWN.name: TRANSPOSED})


def fsdp(rank: int) -> SyntheticSource:
    """One of two ranks that share the experts."""
    experts = (rank * E // 2, rank * E // 2 + E // 2)
    layout: Layout = {s.name: [(experts, *((0, n) for n in s.shape[1:]))] for s in (UP, UP_BIAS, DOWN)}
    if rank == 0:
        layout[NORM.name] = [((0, K),)]
    return SyntheticSource(SPECS, layout)


def engine(rank: int) -> PackedDestination:
    """One of two tensor-parallel ranks of vLLM."""
    wire = [w for spec in SPECS for w in (packed_experts(spec) or (spec,))]
    columns = N // mxfp4.BLOCK // 2
    cut: dict[str, Box] = {
        f"{UP.name}_blocks": ((0, E), (rank * N, rank * N + N), (0, K // 32), (0, 16)),
        f"{UP.name}_scales": ((0, E), (rank * N, rank * N + N), (0, K // 32)),
        UP_BIAS.name: ((0, E), (rank * N, rank * N + N)),
        f"{DOWN.name}_blocks": ((0, E), (0, K), (rank * columns, (rank + 1) * columns), (0, 16)),
        f"{DOWN.name}_scales": ((0, E), (0, K), (rank * columns, (rank + 1) * columns)),
        NORM.name: ((0, K),),
    }
    return PackedDestination(wire, {name: [box] for name, box in cut.items()})


WORLDS: dict[str, tuple[list[Any], set[str]]] = {
    "Megatron": ([megatron(rank, (rank * N // 2, (rank + 1) * N // 2)) for rank in (0, 1)], set()),
    "Megatron, blocks cut": (
        [megatron(0, (0, 80)), megatron(1, (80, N))],
        {f"{DOWN.name}_blocks", f"{DOWN.name}_scales"},
    ),
    "FSDP": ([fsdp(rank) for rank in (0, 1)], set()),
}


@pytest.mark.parametrize("world", WORLDS)
def test_engines_get_what_the_packed_checkpoint_has_at_each_refit(world: str) -> None:
    sources, misc = WORLDS[world]

    def refit(rank: int, session: RefitSession, endpoint: Any) -> tuple[set[str], list[list[str]]]:
        taken = {spec.name for spec in session.manifest.specs("misc")}
        return taken, [refit_changed(session, endpoint, version)[1] for version in (1, 2)]

    for found in run_world(sources, [engine(0), engine(1)], refit, CONFIG):
        assert found == (misc, [[], []])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("spec", "value"), [(UP, float("nan")), (DOWN, float("-inf"))])
def test_experts_that_are_no_numbers_end_the_refit_by_name_before_it_commits(
    world: str, spec: TensorSpec, value: float
) -> None:
    states = {2: ServingState(), 3: ServingState()}

    def refit(rank: int, session: RefitSession, endpoint: Any) -> tuple[list[str], BaseException]:
        _, wrong = refit_changed(session, endpoint, 1)
        with pytest.raises(RefitError) as raised:
            refit_changed(session, endpoint, 2)
        return wrong, raised.value

    sources = [DivergedSource(source, spec.name, value, (1, 40, 0)) for source in WORLDS[world][0]]
    results = run_world(sources, [engine(0), engine(1)], refit, CONFIG, states=states)
    for wrong, error in results:
        assert wrong == []
        assert f"parameter {spec.name}_blocks" in str(error)
    found = [error for _, error in results if not isinstance(error, PeerLost)]
    assert found
    assert "first at [1:2, 0:1, 32:64]" in str(found[0])
    for state in states.values():
        assert (state.version, state.dirty) == (1, True)


def test_weights_that_moved_between_refits_are_packed_where_they_are() -> None:
    source = fsdp(0)
    packing = ExpertPackingSource(source)
    held, _ = packing.fragments()
    source.set_version(1)
    packing.prepare()
    before = packing.storage_key()
    for key, tensor in source._held.items():
        source._held[key] = tensor.clone()
    assert packing.storage_key() != before
    source.set_version(2)
    again, _ = packing.fragments()
    packing.prepare()
    for fragment in (*held, *again):
        whole = packed(next(s for s in SPECS if fragment.name.startswith(s.name)), 2)
        if fragment.name in whole and fragment.view.dtype == torch.uint8:
            assert torch.equal(fragment.view, fragment.part_of(whole[fragment.name]))


@pytest.mark.parametrize(
    "specs",
    [
        [NORM],
        [NORM, TensorSpec(UP.name, (E, 40, N), BF16)],
        [NORM, TensorSpec(UP.name, (E, K, N), torch.float32)],
        [TensorSpec(UP.name, (K, N), BF16)],
    ],
)
def test_a_trainer_without_experts_that_can_be_packed_is_refused(specs: Sequence[TensorSpec]) -> None:
    with pytest.raises(RefitMismatch) as raised:
        ExpertPackingSource(SyntheticSource(specs, {}))
    assert raised.value.stage == "handshake"
    assert (raised.value.parameter == UP.name) == any(spec.name == UP.name for spec in specs)
