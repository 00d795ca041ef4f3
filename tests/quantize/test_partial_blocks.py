"""Weights whose blocks trainer ranks cut: each sends its part, with the bytes of the quantized full tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrefit.integration.engine.shared_scales import CutSlots, SharedScales
from rlrefit.integration.errors import PlanError
from rlrefit.integration.layout import Box, Fragment, box_of, local_slice
from rlrefit.integration.packing import Cast, EncodedView, make_encoders
from rlrefit.integration.plan import analyse
from rlrefit.integration.quantize.formats import Format, Fp8Blockwise
from rlrefit.integration.weights.holdings import Holdings, SpecTable
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.integration.weights.quantizing import QuantizingSource, encoded_fragments, wire_specs
from tests.refit.synthetic import Layout, SyntheticSource, refit_changed, run_world, value_of

from .test_quantized_refit import MX, QUANTIZED, SPECS, by_columns, by_rows, config, uneven, wanted, whole
from .weights import same, weights

BF16 = torch.bfloat16
CPU = torch.device("cpu")
FP8, UE8M0 = Fp8Blockwise(), Fp8Blockwise(ue8m0=True)
# Trainers, how engines cut what they want, the transport and `verify`.
Scene = tuple[type[SyntheticSource], Callable[..., Any], str, str]


class MasterSource(SyntheticSource):
    """A trainer rank that keeps its parameters in FP32, with digits that the export does not have."""

    def __init__(self, specs: Sequence[TensorSpec], layout: Layout):
        super().__init__(specs, layout)
        self._held = {key: storage.float() for key, storage in self._held.items()}

    def set_version(self, version: int) -> None:
        super().set_version(version)
        for storage in self._held.values():
            storage.mul_(1 + 2**-12)

    def fragments(self) -> tuple[list[Fragment], dict[str, str]]:
        held, refused = super().fragments()
        return [
            Fragment(f.name, f.full_shape, f.box, f.view, Cast(self._by_name[f.name].dtype)) for f in held
        ], refused


def shares(n: int, size: int) -> list[tuple[int, int]]:
    """As FSDP cuts a dimension: the last parts may be small or empty."""
    step = -(-n // size)
    return [(min(i * step, n), min((i + 1) * step, n)) for i in range(size)]


def fsdp(ranks: int) -> list[Layout]:
    layouts: list[Layout] = [{} for _ in range(ranks)]
    for spec in SPECS:
        for layout, rows in zip(layouts, shares(spec.shape[0], ranks), strict=True):
            layout[spec.name] = [(rows, *box_of(spec.shape[1:]))]
    return layouts


def fsdp_tp() -> list[Layout]:
    """Two by two: columns by tensor parallelism, 72 and 120 of them, and rows of these by FSDP."""
    layouts: list[Layout] = [{} for _ in range(4)]
    for spec in SPECS:
        for rank, layout in enumerate(layouts):
            rows = shares(spec.shape[0], 2)[rank // 2]
            columns = [shares(n, 2)[rank % 2] for n in spec.shape[1:]]
            layout[spec.name] = [(rows, *columns)]
    return layouts


def heads() -> list[Layout]:
    """As Megatron holds heads of 48 rows under tensor parallelism: several parts on each rank, one of them whole."""
    layouts = fsdp(2)
    for rank, layout in enumerate(layouts):
        layout["column.weight"] = [((a, min(a + 48, 512)), (0, 384)) for a in range(48 * rank, 512, 96)]
    return layouts


def unlike() -> list[Layout]:
    """A rank with all of a weight, and one that has a part of it too, which cuts a block."""
    first, second = fsdp(2)
    first["column.weight"] = [box_of((512, 384))]
    second["column.weight"] = [((256, 320), (0, 384))]
    return [first, second]


TRAINERS = {
    "fsdp 2": lambda: fsdp(2),
    "fsdp 4, ragged": lambda: fsdp(4),
    "fsdp 3, ragged": lambda: fsdp(3),
    "hsdp 2 by 2": lambda: fsdp(2) + fsdp(2),
    "fsdp 2 by tp 2": fsdp_tp,
    "heads": heads,
    "heads of one rank": lambda: [{name: a[name] + b[name] for name in a} for a, b in [heads()]],
    "unlike": unlike,
    "uneven": uneven,
}
CASTING: Scene = (MasterSource, by_columns, "p2p", "full")
SCENES: tuple[Scene, ...] = (
    (SyntheticSource, by_rows, "p2p", "full"),
    CASTING,
    (SyntheticSource, whole, "golden", "sampled"),
)
# The second rounds scales otherwise, and goes the same ways.
FORMATS: dict[str, tuple[Format, tuple[Scene, ...]]] = {
    "fp32 scales": (FP8, SCENES),
    "ue8m0": (UE8M0, (CASTING,)),
    "mxfp8": (MX, SCENES),
}
LANDINGS = [(trainers, kind) for trainers in TRAINERS for kind in ("fp32 scales", "ue8m0")]


@pytest.mark.parametrize(("trainers", "kind"), [*LANDINGS, ("uneven", "mxfp8")])
def test_what_ranks_hold_of_cut_blocks_lands_with_the_full_tensors_bytes(trainers: str, kind: str) -> None:
    format, scenes = FORMATS[kind]
    formats = {s.name: format for s in QUANTIZED if s.shape[1] % 32 == 0 or format is not MX}
    for make, cut, transport, verify in scenes:
        sources = [make(SPECS, layout) for layout in TRAINERS[trainers]()]
        engines = wanted(formats, cut)
        results = run_world(
            sources,
            engines,
            lambda rank, session, end: (
                [refit_changed(session, end, version) for version in (1, 2, 3)],
                {entry.spec.name: entry.route for entry in session.manifest},
            ),
            config(transport=transport, verify=verify),
        )
        for refits, routes in results:
            assert [wrong for _, wrong in refits] == [[], [], []]
            assert set(routes.values()) == {"bulk"}
        if transport == "p2p":
            for (refits, _), engine in zip(results[len(sources) :], engines, strict=True):
                # Codes of one byte and their scales travel, and not 16 bits.
                assert {record.bytes_bulk for record, _ in refits} == {engine.kept_bytes}


@pytest.mark.parametrize("engine", ["nccl_xfer", "colocated_ipc"])
def test_parts_that_moved_are_followed_with_new_scales_whatever_carries_the_maxima(engine: str) -> None:
    def moved(rank, session, end):
        wrong = [refit_changed(session, end, 1)[1]]
        if rank == 1:
            end._held = {key: storage.clone() for key, storage in end._held.items()}
        return [*wrong, *(refit_changed(session, end, version)[1] for version in (2, 3))]

    sources = [SyntheticSource(SPECS, layout) for layout in fsdp(3)]
    engines = wanted(dict.fromkeys((spec.name for spec in QUANTIZED), FP8), by_columns)
    assert run_world(sources, engines, moved, config(), engine=engine) == [[[], [], []]] * 5


def test_a_weight_that_one_rank_keeps_quantized_and_another_cuts_is_refused_by_name() -> None:
    class Keeps(SyntheticSource):
        def quantized_fragments(self, formats):
            codes = torch.zeros(256, 640).to(torch.float8_e4m3fn)
            scales = torch.ones(2, 5)
            kept = [
                Fragment("row.weight", (256, 640), box_of((256, 640)), codes),
                Fragment("row.weight_scale_inv", (2, 5), box_of((2, 5)), scales),
            ]
            return kept, {}, frozenset({"row.weight"})

    keeping, cutting = fsdp(2)
    cutting["row.weight"] = [((64, 256), (0, 640))]
    results = run_world(
        [Keeps(SPECS, keeping), SyntheticSource(SPECS, cutting)],
        wanted({"row.weight": FP8}, whole),
        lambda *_: None,
        config(),
    )
    assert isinstance(results[0], PlanError)
    assert "row.weight" in str(results[0])


def held_parts(weight: torch.Tensor, boxes: Sequence[Box], format: Format) -> tuple[list[Fragment], CutSlots]:
    """Fragments of one rank that holds these boxes, and the slots of a plan whose engine wants all."""
    spec = TensorSpec("w", tuple(weight.shape), BF16)
    source = SyntheticSource([spec], {"w": list(boxes)})
    for (_, box), storage in source._held.items():
        storage.copy_(weight[local_slice(box_of(weight.shape), box)])
    held, refused = QuantizingSource(source, {"w": format}).fragments()
    table = SpecTable(wire_specs(spec, format))
    wants = [
        Fragment(s.name, s.shape, box_of(s.shape), torch.empty(s.shape, dtype=s.dtype)) for s in table.specs
    ]
    sides = [
        Holdings.from_fragments(rank, f, refused, table.positions) for rank, f in enumerate((held, wants))
    ]
    analysis = analyse(table.specs, sides[:1], sides[1:], bucket_bytes=1 << 20)
    return held, CutSlots.find(analysis.classes, table.specs, {"w": format})


@st.composite
def cut_weights(draw: st.DrawFn) -> tuple[torch.Tensor, list[Box], Format]:
    weight = draw(weights(st.integers(1, 300), st.integers(1, 300), dtypes=(BF16,)))
    edges = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))}) for n in weight.shape]
    rows, columns = (list(pairwise(e)) for e in edges)
    format = draw(st.sampled_from([FP8, UE8M0, Fp8Blockwise(block=(32, 16))]))
    return weight, [(r, c) for r in rows for c in columns], format


@settings(deadline=None, max_examples=40)
@given(cut_weights(), st.data())
def test_any_parts_of_cut_codes_are_those_of_the_whole_even_of_nan(
    scene: tuple[torch.Tensor, list[Box], Format], data: st.DataObject
) -> None:
    weight, boxes, format = scene
    fragments, slots = held_parts(weight, boxes, format)
    shared = SharedScales(slots, CPU, None)
    shared.bind(fragments)
    pairs, expected = [], []
    whole_codes, whole_scales = format.encode(weight)
    seen = torch.zeros(whole_scales.shape)
    for fragment in fragments:
        full = whole_codes if fragment.name == "w" else whole_scales
        box = fragment.box
        if fragment.name == "w":
            box = tuple((a, data.draw(st.integers(a + 1, b))) for a, b in box)
        window = tuple((a - f, b - f) for (a, b), (f, _) in zip(box, fragment.box, strict=True))
        index = local_slice(box_of(full.shape), box)
        if fragment.name != "w":
            seen[index] += 1
        if fragment.encoding is None:
            pairs.append((fragment.view, None))
        else:
            view = EncodedView(fragment.view, fragment.encoding, window)
            pairs.append((view, torch.empty(view.shape, dtype=view.dtype)))
        expected.append(full[index])
    assert (seen == 1).all()
    for _ in range(2):
        shared.make()
        for encoder in make_encoders([(view, to) for view, to in pairs if to is not None], CPU):
            encoder.launch()
        for (view, target), right in zip(pairs, expected, strict=True):
            assert same((view if target is None else target).contiguous(), right.contiguous())


def test_a_cut_block_that_nobody_holds_in_full_is_refused_in_the_plan() -> None:
    spec = TensorSpec("w", (256, 128), BF16)
    held = encoded_fragments(
        Fragment("w", spec.shape, ((0, 64), (0, 128)), torch.ones(64, 128, dtype=BF16)), FP8, CPU
    )
    table = SpecTable(wire_specs(spec, FP8))
    wants = [Fragment("w", spec.shape, ((0, 64), (0, 128)), torch.ones(64, 128).to(torch.float8_e4m3fn))]
    sides = [Holdings.from_fragments(rank, f, {}, table.positions) for rank, f in enumerate((held, wants))]
    analysis = analyse(table.specs, sides[:1], sides[1:], bucket_bytes=1 << 20)
    with pytest.raises(PlanError, match=r"\(\(64, 128\), \(0, 128\)\)"):
        CutSlots.find(analysis.classes, table.specs, {"w": FP8})


def test_codes_without_scales_that_ranks_made_are_loud() -> None:
    held = value_of(TensorSpec("w", (96, 64), BF16), 1)
    cut, _ = encoded_fragments(Fragment("w", (128, 64), ((0, 96), (0, 64)), held), FP8, CPU)
    out = torch.empty(96, 64, dtype=torch.float8_e4m3fn)
    (encoder,) = make_encoders([(EncodedView(cut.view, cut.encoding, cut.box), out)], CPU)
    encoder.launch()
    assert out.float().isnan().all()
