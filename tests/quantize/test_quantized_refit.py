"""Refits whose trainer quantizes: codes and scales of the full tensors land, whatever the ranks hold and want."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import PeerLost, RefitError, RefitMismatch
from rlrefit.integration.layout import Box, box_of
from rlrefit.integration.layout.fragments import local_slice
from rlrefit.integration.quantize import blocks
from rlrefit.integration.quantize.formats import Format, Fp8Blockwise, Int4, Mxfp8, Nvfp4
from rlrefit.integration.session import RefitSession, ServingState
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.integration.weights.quantizing import quant_weights_by_name, wire_specs
from tests.refit.synthetic import (
    DivergedSource,
    Layout,
    SyntheticDestination,
    SyntheticSource,
    ended,
    refit_changed,
    run_world,
    value_of,
)

BF16 = torch.bfloat16
FP8, UE8M0, MX = Fp8Blockwise(), Fp8Blockwise(ue8m0=True), Mxfp8()
INT4 = Int4(64)

COLUMN = TensorSpec("column.weight", (512, 384), BF16)
ROW = TensorSpec("row.weight", (256, 640), BF16)
RAGGED = TensorSpec("ragged.weight", (300, 200), torch.float16)
CUT = TensorSpec("cut.weight", (256, 128), BF16)
ROUTER = TensorSpec("router.weight", (8, 384), BF16)
NORM = TensorSpec("norm.weight", (384,), BF16)
SPECS = [NORM, COLUMN, ROW, RAGGED, CUT, ROUTER]
QUANTIZED = (COLUMN, ROW, RAGGED, CUT)


class QuantizedDestination(SyntheticDestination):
    """An engine rank that stores some weights as codes and scales."""

    def __init__(self, formats: dict[str, Format], layout: Layout, device: str = "cpu"):
        self._formats = formats
        wire = [w for s in SPECS for w in (wire_specs(s, formats[s.name]) if s.name in formats else [s])]
        super().__init__(wire, layout, device)

    def quantized(self, specs: Sequence[TensorSpec]) -> dict[str, Format]:
        assert list(specs) == SPECS
        return self._formats

    def poison(self) -> None:
        for storage in self._wanted.values():
            plain = storage.is_floating_point() and storage.element_size() > 1
            raw = storage.view(torch.uint8) if storage.element_size() == 1 else storage
            raw.fill_(float("nan") if plain else 0x7F)

    def wrong(self, version: int) -> list[str]:
        expected: dict[str, torch.Tensor] = {}
        for spec in SPECS:
            value, format = value_of(spec, version), self._formats.get(spec.name)
            if format is None:
                expected[spec.name] = value
            else:
                names = [wire.name for wire in wire_specs(spec, format)]
                expected |= zip(names, format.encode(value), strict=True)
        parts = {
            (name, box): expected[name][local_slice(box_of(expected[name].shape), box)]
            for name, box in self._wanted
        }
        return [
            f"{name} {box}"
            for (name, box), held in self._wanted.items()
            if not torch.equal(_raw(held.cpu()), _raw(parts[name, box]))
        ]


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.contiguous()
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def uneven() -> list[Layout]:
    """Two trainers: rows, columns, rows that end raggedly, rows that cut a block, replicas."""
    columns, split = (0, 384), {"column": 256, "ragged": 256, "cut": 64}
    held: list[Layout] = []
    for rank in (0, 1):
        layout: Layout = {"norm.weight": [(columns,)], "router.weight": [((0, 8), columns)]}
        layout["row.weight"] = [((0, 256), (256, 640) if rank else (0, 256))]
        for spec in (COLUMN, RAGGED, CUT):
            at, (rows, width) = split[spec.name.partition(".")[0]], spec.shape
            layout[spec.name] = [((at, rows) if rank else (0, at), (0, width))]
        held.append(layout)
    return held


def sources() -> list[SyntheticSource]:
    return [SyntheticSource(SPECS, layout) for layout in uneven()]


def wanted(
    formats: dict[str, Format], cut: Callable[[TensorSpec, int, int], Box]
) -> list[QuantizedDestination]:
    """Two engine ranks that each want a part of everything; scales of all blocks that the part touches."""
    engines = []
    for rank in range(2):
        layout: Layout = {spec.name: [cut(spec, rank, 2)] for spec in SPECS}
        for spec in SPECS:
            if (format := formats.get(spec.name)) is not None:
                codes, scales = wire_specs(spec, format)
                [box] = layout.pop(spec.name)
                layout[codes.name] = [blocks.scale_box(box, (1, format.packed))]
                layout[scales.name] = [blocks.scale_box(box, format.block)]
        engines.append(QuantizedDestination(formats, layout))
    return engines


def by_columns(spec: TensorSpec, rank: int, size: int) -> Box:
    """Cuts blocks on the engine's side, where that is no matter."""
    last = spec.shape[-1]
    share = -(-last // size)
    return (*box_of(spec.shape[:-1]), (rank * share, min((rank + 1) * share, last)))


def by_rows(spec: TensorSpec, rank: int, size: int) -> Box:
    share = -(-spec.shape[0] // size)
    return ((rank * share, min((rank + 1) * share, spec.shape[0])), *box_of(spec.shape[1:]))


def whole(spec: TensorSpec, rank: int, size: int) -> Box:
    return box_of(spec.shape)


QUANTIZES_NOT: dict[str, object] = {"trainer_quantize_fp8": False}
BY_INT4 = QUANTIZES_NOT | {"trainer_quantize_int4": True}


def config(**values: object) -> RefitConfig:
    usual = {"bucket_mb": 1, "timeout_s": 20.0, "verify": "full", "transport": "p2p"}
    return RefitConfig(**usual | {"trainer_quantize_fp8": True} | values)


@pytest.mark.parametrize(
    ("format", "codes", "setting"),
    [
        (MX, "column.weight", "trainer_quantize_fp8"),
        (INT4, "column.weight_packed", "trainer_quantize_int4"),
    ],
)
def test_parts_that_cut_blocks_of_a_row_are_quantized_as_full_tensors_which_rank_0_tells_once(
    caplog: pytest.LogCaptureFixture, format: Format, codes: str, setting: str
) -> None:
    others = {s.name: [box_of(s.shape)] for s in SPECS if s is not COLUMN}
    results = run_world(
        [
            SyntheticSource(SPECS, others | {COLUMN.name: [((0, 512), columns)]})
            for columns in ((0, 144), (144, 384))
        ],
        wanted({COLUMN.name: format}, by_rows),
        lambda rank, session, end: (
            [refit_changed(session, end, version)[1] for version in (1, 2)],
            {e.spec.name for e in session.manifest if e.route == "misc"},
        ),
        config(**QUANTIZES_NOT | {setting: True}),
    )
    assert results == [([[], []], {codes, "column.weight_scale"})] * 4
    [record] = [r for r in caplog.records if "do not go shard to shard" in r.getMessage()]
    assert COLUMN.name in record.getMessage()


IN_GROUPS = (COLUMN, ROW, CUT)


@pytest.mark.parametrize("cut", [by_rows, by_columns, whole])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_codes_travel_packed_under_their_own_names(
    group: int, cut: Callable[[TensorSpec, int, int], Box]
) -> None:
    formats: dict[str, Format] = {spec.name: Int4(group) for spec in IN_GROUPS}
    results = run_world(
        sources(),
        wanted(formats, cut),
        lambda rank, session, end: (
            [refit_changed(session, end, version)[1] for version in (1, 2, 3)],
            {e.spec.name for e in session.manifest if e.route == "bulk"},
        ),
        config(**BY_INT4),
    )
    packed = {f"{s.name}_{part}" for s in IN_GROUPS for part in ("packed", "scale")}
    assert results == [([[], [], []], packed | {NORM.name, RAGGED.name, ROUTER.name})] * 4


def test_the_conventional_path_quantizes_full_tensors() -> None:
    formats: dict[str, Format] = {spec.name: FP8 for spec in QUANTIZED}
    results = run_world(
        sources(),
        wanted(formats, whole),
        lambda rank, session, end: [refit_changed(session, end, version) for version in (1, 2)],
        config(),
        engine="packed_broadcast",
    )
    assert [[wrong for _, wrong in refits] for refits in results] == [[[], []]] * 4


# Shard to shard, in a weight that a shard cuts, and on the conventional path.
@pytest.mark.parametrize(
    ("bad", "engine", "format"),
    [
        ("column.weight", "nccl_xfer", FP8),
        ("row.weight", "nccl_xfer", UE8M0),
        ("column.weight", "nccl_xfer", MX),
        ("cut.weight", "nccl_xfer", FP8),
        ("row.weight", "packed_broadcast", FP8),
        ("column.weight", "nccl_xfer", INT4),
        ("row.weight", "packed_broadcast", INT4),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_that_is_no_number_ends_the_refit_by_name_before_it_commits(
    bad: str, engine: str, format: Format, value: float
) -> None:
    formats: dict[str, Format] = {
        spec.name: format for spec in QUANTIZED if format.block[0] > 1 or spec.shape[1] % 64 == 0
    }
    states = {2: ServingState(), 3: ServingState()}

    def body(rank: int, session: RefitSession, end: Any) -> tuple[list[str], BaseException]:
        _, wrong = refit_changed(session, end, 1)
        with pytest.raises(RefitError) as raised:
            refit_changed(session, end, 2)
        return wrong, raised.value

    at = 200, 2 if bad == "cut.weight" else 130
    results = run_world(
        [DivergedSource(source, bad, value, at) for source in sources()],
        wanted(formats, by_rows),
        body,
        config(**(BY_INT4 if format is INT4 else {}), verify="off"),
        engine=engine,
        states=states,
    )
    for wrong, error in results:
        assert wrong == []
        assert f"parameter {bad}" in str(error)
    found = [error for _, error in results if not isinstance(error, PeerLost)]
    assert found
    height, width = format.block
    row, column = at[0] // height * height, at[1] // width * width
    assert f"first at [{row}:{row + height}, {column}:{column + width}]" in str(found[0])
    for state in states.values():
        assert (state.version, state.dirty) == (1, True)


@pytest.mark.parametrize("engine", ["nccl_xfer", "packed_broadcast"])
def test_codes_and_scales_are_what_they_were_after_a_trainer_rank_refused_and_the_next_epoch_refits(
    engine: str,
) -> None:
    formats: dict[str, Format] = {spec.name: FP8 for spec in QUANTIZED}
    trainers, engines = sources(), wanted(formats, by_rows if engine == "nccl_xfer" else whole)
    states = {2: ServingState(), 3: ServingState()}

    def refuse() -> None:
        del trainers[1].prepare
        raise RefitError("no weights today", stage="export")

    def refused(rank: int, session: RefitSession, end: Any) -> Any:
        wrong = refit_changed(session, end, 1)[1]
        if rank == 1:
            end.prepare = refuse
        return wrong, ended(session, 2)

    results = run_world(trainers, engines, refused, config(), engine, states)
    assert [error.blamed for _, error in results if isinstance(error, PeerLost)] == [1] * 3
    assert [(state.version, state.dirty) for state in states.values()] == [(1, False)] * 2
    assert [one.wrong(1) for one in engines] == [[], []]

    def again(rank: int, session: RefitSession, end: Any) -> Any:
        return [refit_changed(session, end, version)[1] for version in (2, 3)]

    assert run_world(trainers, engines, again, config(), engine, states) == [[[], []]] * 4


def fp32_sources() -> list[SyntheticSource]:
    wide = [TensorSpec(spec.name, spec.shape, torch.float32) for spec in SPECS]
    return [SyntheticSource(wide, {spec.name: [box_of(spec.shape)] for spec in wide}) for _ in range(2)]


def telling(told: dict[str, Format]) -> list[Any]:
    """Engine ranks that name formats for weights of any kind."""
    engines: list[Any] = wanted({}, whole)
    for engine in engines:
        engine.quantized = lambda specs: told
    return engines


# Trainer ranks, engine ranks, and what the errors name.
UNMATCHED: dict[str, tuple[Callable[[], list[Any]], Callable[[], list[Any]], str]] = {
    "no quantized weight": (sources, lambda: wanted({}, whole), "no engine rank"),
    "FP32 beside no quantized weight": (fp32_sources, lambda: telling({}), "refit_dtype"),
    "FP32": (fp32_sources, lambda: telling({"row.weight": FP8}), "refit_dtype"),
    "no matrix": (sources, lambda: telling({"norm.weight": FP8}), "norm.weight"),
    "another key's format": (sources, lambda: wanted({"row.weight": INT4}, whole), "trainer_quantize_fp8"),
    "a format of no key": (sources, lambda: telling({"row.weight": Nvfp4()}), "no engine rank"),
    "two keys' formats": (
        sources,
        lambda: wanted({"row.weight": INT4, "cut.weight": FP8}, whole),
        "trainer_quantize_int4",
    ),
    "two formats": (
        sources,
        lambda: [wanted({"row.weight": FP8}, whole)[0], wanted({"row.weight": UE8M0}, whole)[1]],
        "row.weight",
    ),
}


@pytest.mark.parametrize("case", UNMATCHED)
def test_weights_and_formats_that_do_not_fit_one_another_are_refused_on_all_ranks(case: str) -> None:
    trainers, engines, named = UNMATCHED[case]
    results = run_world(trainers(), engines(), lambda *_: None, config())
    for error in results:
        assert isinstance(error, RefitMismatch)
    assert named in str(results[3])


def test_weights_of_another_dtype_than_the_engine_computes_in_are_refused_by_name() -> None:
    engines = telling({"ragged.weight": Int4(32), "row.weight": Int4(32)})
    results = run_world(sources(), engines, lambda *_: None, config(**BY_INT4))
    for error in results:
        assert isinstance(error, RefitMismatch)
    assert "ragged.weight" in str(results[3])


@pytest.mark.parametrize("engine", ["nccl_xfer", "packed_broadcast"])
def test_an_engine_that_keeps_numbers_never_takes_another_engines_codes_for_them(engine: str) -> None:
    quantized = wanted({"row.weight": FP8}, whole)[0]
    plain = SyntheticDestination(SPECS, {"row.weight": [box_of(ROW.shape)]})
    results = run_world(sources(), [quantized, plain], lambda *_: None, config(), engine=engine)
    assert all(isinstance(error, RefitError) for error in results)
    assert isinstance(results[3], RefitMismatch)
    assert "row.weight" in str(results[3])


def test_full_quantized_tensors_come_one_after_the_other_beside_other_tasks() -> None:
    source = sources()[0]
    source.set_version(4)
    ticks: list[int] = []

    async def other() -> None:
        while True:
            ticks.append(1)
            await asyncio.sleep(0)

    async def collect() -> dict[str, torch.Tensor]:
        task = asyncio.create_task(other())
        found = {name: t async for name, t in quant_weights_by_name(source, {"row.weight": FP8})}
        task.cancel()
        return found

    found = asyncio.run(collect())
    names = [w.name for s in SPECS for w in (wire_specs(s, FP8) if s is ROW else [s])]
    values = [p for s in SPECS for p in (FP8.encode(value_of(s, 4)) if s is ROW else [value_of(s, 4)])]
    assert list(found) == names
    assert all(torch.equal(_raw(a), _raw(b)) for a, b in zip(found.values(), values, strict=True))
    assert len(ticks) >= len(SPECS)
