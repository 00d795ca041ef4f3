"""Refits whose trainer quantizes: codes and scales of the full tensors land, whatever the ranks hold and want."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import PeerLost, RefitError, RefitMismatch
from rlrefit.integration.layout import Box, Fragment, box_of
from rlrefit.integration.layout.fragments import local_slice
from rlrefit.integration.quantize.formats import Format, Fp8Blockwise, Mxfp8
from rlrefit.integration.session import RefitSession, ServingState
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.integration.weights.quantizing import quant_weights_by_name, wire_specs
from rlrefit.integration.weights.scale_watch import ScaleWatch
from tests.refit.synthetic import (
    Layout,
    SyntheticDestination,
    SyntheticSource,
    refit_changed,
    run_world,
    value_of,
)

BF16 = torch.bfloat16
FP8, UE8M0, MX = Fp8Blockwise(), Fp8Blockwise(ue8m0=True), Mxfp8()

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

    def __init__(self, formats: dict[str, Format], layout: Layout):
        self._formats = formats
        wire = [w for s in SPECS for w in (wire_specs(s, formats[s.name]) if s.name in formats else [s])]
        super().__init__(wire, layout)

    def quantized(self, specs: Sequence[TensorSpec]) -> dict[str, Format]:
        assert list(specs) == SPECS
        return self._formats

    def poison(self) -> None:
        for storage in self._wanted.values():
            raw = storage.view(torch.uint8) if storage.element_size() == 1 else storage
            raw.fill_(0x7F if storage.element_size() == 1 else float("nan"))

    def wrong(self, version: int) -> list[str]:
        expected: dict[str, torch.Tensor] = {}
        for spec in SPECS:
            value = value_of(spec, version)
            if spec.name in self._formats:
                format = self._formats[spec.name]
                parts = format.encode(value)
                expected |= {w.name: p for w, p in zip(wire_specs(spec, format), parts, strict=True)}
            else:
                expected[spec.name] = value
        return [
            f"{name} {box}"
            for (name, box), storage in self._wanted.items()
            if not torch.equal(
                _raw(storage), _raw(expected[name][local_slice(box_of(expected[name].shape), box)])
            )
        ]


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.contiguous()
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def sources() -> list[SyntheticSource]:
    """Two trainers: rows, columns, rows that end raggedly, rows that cut a block, one whole weight each, replicas."""
    held: list[Layout] = [
        {
            "column.weight": [((0, 256), (0, 384))],
            "row.weight": [((0, 256), (0, 256))],
            "ragged.weight": [((0, 256), (0, 200))],
            "cut.weight": [((0, 64), (0, 128))],
            "norm.weight": [((0, 384),)],
            "router.weight": [((0, 8), (0, 384))],
        },
        {
            "column.weight": [((256, 512), (0, 384))],
            "row.weight": [((0, 256), (256, 640))],
            "ragged.weight": [((256, 300), (0, 200))],
            "cut.weight": [((64, 256), (0, 128))],
            "norm.weight": [((0, 384),)],
            "router.weight": [((0, 8), (0, 384))],
        },
    ]
    return [SyntheticSource(SPECS, layout) for layout in held]


def wanted(
    formats: dict[str, Format], cut: Callable[[TensorSpec, int, int], Box]
) -> list[QuantizedDestination]:
    """Two engine ranks that each want a part of everything; scales of all blocks that the part touches."""
    engines = []
    for rank in range(2):
        layout: Layout = {}
        for spec in SPECS:
            box = cut(spec, rank, 2)
            layout[spec.name] = [box]
            if spec.name in formats:
                _, scales = wire_specs(spec, formats[spec.name])
                block = formats[spec.name].block
                layout[scales.name] = [
                    tuple((a // b, -(-e // b)) for (a, e), b in zip(box, block, strict=True))
                ]
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


def config(**values: object) -> RefitConfig:
    return RefitConfig(
        **{
            "bucket_mb": 1,
            "timeout_s": 20.0,
            "verify": "full",
            "transport": "p2p",
            "trainer_quantize_fp8": True,
        }
        | values
    )


@pytest.mark.parametrize("format", [FP8, UE8M0, MX], ids=["fp32 scales", "ue8m0", "mxfp8"])
@pytest.mark.parametrize("transport", ["p2p", "golden"])
def test_codes_and_scales_of_the_full_tensors_land_in_every_refit(format: Format, transport: str) -> None:
    formats: dict[str, Format] = {
        spec.name: format for spec in QUANTIZED if spec.shape[1] % format.block[1] == 0 or format is not MX
    }
    for cut in (by_columns, by_rows, whole):
        results = run_world(
            sources(),
            wanted(formats, cut),
            lambda rank, session, end: (
                [refit_changed(session, end, version) for version in (1, 2, 3)],
                {e.spec.name: e.route for e in session.manifest},
            ),
            config(transport=transport, verify="sampled" if cut is whole else "full"),
        )
        assert [[wrong for _, wrong in refits] for refits, _ in results] == [[[], [], []]] * 4
        assert set(results[0][1].values()) == {"bulk"}


def test_parts_that_cut_the_blocks_of_mxfp8_are_quantized_as_full_tensors() -> None:
    trainers = sources()
    for source, columns in zip(trainers, ((0, 144), (144, 384)), strict=True):
        source._held["column.weight", ((0, 512), columns)] = torch.zeros(
            512, columns[1] - columns[0]
        ).bfloat16()
        del source._held["column.weight", next(b for n, b in source._held if n == "column.weight")]
    results = run_world(
        trainers,
        wanted({"column.weight": MX}, by_rows),
        lambda rank, session, end: (
            [refit_changed(session, end, version)[1] for version in (1, 2)],
            {e.spec.name: (e.route, e.reason) for e in session.manifest},
        ),
        config(),
    )
    assert [wrong for wrong, _ in results] == [[[], []]] * 4
    routes = results[0][1]
    assert {name for name, (route, _) in routes.items() if route == "misc"} == {
        "column.weight",
        "column.weight_scale",
    }
    assert "0:512, 0:144, which cuts blocks of 1 by 32" in routes["column.weight"][1]


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


class DivergedSource(SyntheticSource):
    """From version 2 on one element of a weight is NaN, in whatever rank's part and in the export."""

    def __init__(self, held: SyntheticSource, name: str, value: float):
        self.__dict__.update(held.__dict__)
        self._bad, self._value = name, value

    def set_version(self, version: int) -> None:
        super().set_version(version)
        if version < 2:
            return
        for (name, box), storage in self._held.items():
            (top, bottom), (left, right) = box if len(box) == 2 else ((0, 0), (0, 0))
            column = 130 % self._by_name[name].shape[-1]
            if name == self._bad and top <= 200 < bottom and left <= column < right:
                storage[200 - top, column - left] = self._value

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().export(names):
            if name == self._bad and self.version >= 2:
                tensor[200, 130 % tensor.shape[1]] = self._value
            yield name, tensor


# Shard to shard, in a weight that a shard cuts, and on the conventional path.
@pytest.mark.parametrize(
    ("bad", "engine", "format"),
    [
        ("column.weight", "nccl_xfer", FP8),
        ("row.weight", "nccl_xfer", UE8M0),
        ("column.weight", "nccl_xfer", MX),
        ("cut.weight", "nccl_xfer", FP8),
        ("row.weight", "packed_broadcast", FP8),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_that_is_no_number_ends_the_refit_by_name_before_it_commits(
    bad: str, engine: str, format: Format, value: float
) -> None:
    formats: dict[str, Format] = {
        spec.name: format for spec in QUANTIZED if format is not MX or spec.shape[1] % 32 == 0
    }
    states = {2: ServingState(), 3: ServingState()}

    def body(rank: int, session: RefitSession, end: Any) -> tuple[list[str], BaseException]:
        _, wrong = refit_changed(session, end, 1)
        with pytest.raises(RefitError) as raised:
            refit_changed(session, end, 2)
        return wrong, raised.value

    results = run_world(
        [DivergedSource(source, bad, value) for source in sources()],
        wanted(formats, by_rows),
        body,
        config(verify="off"),
        engine=engine,
        states=states,
    )
    for wrong, error in results:
        assert wrong == []
        assert "hold NaN or infinity" in str(error)
        assert f"parameter {bad}" in str(error)
    found = [error for _, error in results if not isinstance(error, PeerLost)]
    assert found
    height, width = format.block
    row, column = 200 // height * height, (2 if bad == "cut.weight" else 130) // width * width
    assert f"first at [{row}:{row + height}, {column}:{column + width}]" in str(found[0])
    for state in states.values():
        assert (state.version, state.dirty) == (1, True)


def test_scales_in_place_and_loaded_ones_are_seen_wherever_they_lie() -> None:
    watch = ScaleWatch({"up": FP8, "down": FP8, "loaded": FP8, "mx": MX}, 3)
    place = {"up": torch.ones(4, 4), "down": torch.ones(4, 6)[:, :4], "loaded": torch.ones(8, 4)}
    fragments = [
        Fragment(f"{name}_scale_inv", (8, 4), ((4, 8), (0, 4)), place[name]) for name in ("up", "down")
    ]
    fragments.append(Fragment("other", (4, 4), ((0, 4), (0, 4)), torch.full((4, 4), torch.nan)))
    mx = place["mx"] = torch.full((4, 4), 254, dtype=torch.uint8)
    fragments.append(Fragment("mx_scale", (8, 4), ((4, 8), (0, 4)), mx))
    watch.bind(fragments, [TensorSpec("loaded_scale_inv", (8, 4), torch.float32)], torch.device("cpu"))

    def look() -> None:
        assert dict(watch.passing([("loaded_scale_inv", place["loaded"])])).keys() == {"loaded_scale_inv"}
        watch.look()

    for name, view in place.items():
        look()
        watch.require_finite()
        good = view[2, 1].clone()
        view[2, 1] = 255 if name == "mx" else torch.inf
        look()
        where = {"mx": r"6:7, 32:64", "loaded": r"256:384, 128:256"}.get(name, "768:896, 128:256")
        with pytest.raises(RefitError, match=rf"1 of \d+ blocks .* \[{where}\].*rank 3, parameter {name}"):
            watch.require_finite()
        view[2, 1] = good


def test_half_the_bytes_travel() -> None:
    def moved(formats: dict[str, Format], quantize: bool) -> int:
        results = run_world(
            sources(),
            wanted(formats, by_rows),
            lambda rank, session, end: refit_changed(session, end, 1)[0].bytes_bulk,
            config(trainer_quantize_fp8=quantize),
        )
        return sum(results[2:])

    plain, quantized = moved({}, False), moved({spec.name: FP8 for spec in (COLUMN, ROW)}, True)
    saved = sum(spec.nbytes // 2 - spec.nbytes // 2 // 128**2 * 4 for spec in (COLUMN, ROW))
    assert quantized == plain - saved


def test_an_engine_without_quantized_weights_is_no_match() -> None:
    results = run_world(sources(), wanted({}, whole), lambda *_: None, config())
    assert all(isinstance(error, RefitMismatch) for error in results)
    assert "no engine rank stores a weight in a format that the trainer makes" in str(results[0])


@pytest.mark.parametrize(
    "named", [{}, {"row.weight": FP8}], ids=["an engine that leaves them out", "that names one"]
)
def test_weights_that_come_in_fp32_are_refused_with_the_dtype_as_the_remedy(named: dict[str, Format]) -> None:
    wide = [TensorSpec(spec.name, spec.shape, torch.float32) for spec in SPECS]
    engines = wanted(named, whole)
    for engine in engines:
        engine.quantized = lambda specs: named
    held = [SyntheticSource(wide, {spec.name: [box_of(spec.shape)] for spec in wide}) for _ in range(2)]
    results = run_world(held, engines, lambda *_: None, config())
    for error in results:
        assert isinstance(error, RefitMismatch)
        assert "refit_dtype = torch.bfloat16 of FSDPRefitMixin" in str(error)
        assert "Start the engine from" not in str(error)


def test_trainer_rank_0_tells_once_what_shards_that_cut_blocks_cost(caplog: pytest.LogCaptureFixture) -> None:
    formats: dict[str, Format] = {COLUMN.name: MX}
    others = {s.name: [box_of(s.shape)] for s in SPECS if s is not COLUMN}
    held = [
        SyntheticSource(SPECS, others | {COLUMN.name: [((0, 512), columns)]})
        for columns in ((0, 144), (144, 384))
    ]
    run_world(held, wanted(formats, whole), lambda rank, session, end: session.refit(1), config())
    [record] = [r for r in caplog.records if "do not go shard to shard" in r.getMessage()]
    misc = 512 * 384 + 512 * 384 // 32
    plain = sum(spec.nbytes for spec in SPECS if spec is not COLUMN)
    text = record.getMessage()
    assert text.startswith(f"{100 * misc / (misc + plain):.0f}% of the weights (0.2 MB of ")
    assert "column.weight: trainer: a rank holds 0:512, 0:144, which cuts blocks of 1 by 32" in text
    assert "Choose a layout whose shards are whole blocks, or compare with" in text


def test_fp32_shards_that_nobody_casts_are_told_with_the_dtype_as_the_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wide = [TensorSpec(spec.name, spec.shape, torch.float32) for spec in SPECS]
    held = [SyntheticSource(wide, {spec.name: [box_of(spec.shape)] for spec in wide}) for _ in range(2)]
    run_world(
        held,
        wanted({}, whole),
        lambda rank, session, end: session.refit(1),
        config(trainer_quantize_fp8=False),
    )
    [record] = [r for r in caplog.records if "do not go shard to shard" in r.getMessage()]
    assert record.getMessage().startswith("100% of the weights")
    assert "refit_dtype = torch.bfloat16 of FSDPRefitMixin" in record.getMessage()


def test_layouts_of_whole_blocks_warn_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    run_world(
        sources(), wanted({COLUMN.name: FP8}, whole), lambda rank, session, end: session.refit(1), config()
    )
    assert not [r for r in caplog.records if "do not go shard to shard" in r.getMessage()]


def test_engines_that_store_one_weight_differently_are_no_match() -> None:
    one, other = wanted({"row.weight": FP8}, whole)[0], wanted({"row.weight": UE8M0}, whole)[1]
    results = run_world(sources(), [one, other], lambda *_: None, config())
    assert all(isinstance(error, RefitMismatch) for error in results)
    assert "row.weight" in str(results[3])


@pytest.mark.parametrize("engine", ["nccl_xfer", "packed_broadcast"])
def test_an_engine_that_keeps_numbers_never_takes_another_engines_codes_for_them(engine: str) -> None:
    quantized, plain = (
        wanted({"row.weight": FP8}, whole)[0],
        SyntheticDestination(SPECS, {"row.weight": [box_of(ROW.shape)]}),
    )
    results = run_world(sources(), [quantized, plain], lambda *_: None, config(), engine=engine)
    assert all(isinstance(error, RefitError) for error in results)
    assert isinstance(results[3], RefitMismatch)
    assert "row.weight" in str(results[3])
    assert "as bfloat16, but all get the same" in str(results[3])


def test_what_is_no_matrix_of_16_bits_is_refused_by_name() -> None:
    engines = wanted({}, whole)
    for engine in engines:
        engine._formats = {"norm.weight": FP8}
    results = run_world(sources(), engines, lambda *_: None, config())
    assert all(isinstance(error, RefitMismatch) and "norm.weight" in str(error) for error in results)


def test_full_quantized_tensors_come_one_after_the_other_beside_other_tasks() -> None:
    source = sources()[0]
    source.set_version(4)
    ticks: list[int] = []

    async def other() -> None:
        while True:
            ticks.append(1)
            await asyncio.sleep(0)

    async def collect() -> list[tuple[str, torch.Tensor]]:
        task = asyncio.create_task(other())
        found = [pair async for pair in quant_weights_by_name(source, {"row.weight": FP8})]
        task.cancel()
        return found

    found = dict(asyncio.run(collect()))
    assert list(found) == [w.name for s in SPECS for w in (wire_specs(s, FP8) if s is ROW else [s])]
    codes, scales = FP8.encode(value_of(ROW, 4))
    assert torch.equal(_raw(found["row.weight"]), _raw(codes))
    assert torch.equal(found["row.weight_scale_inv"], scales)
    assert torch.equal(found["norm.weight"], value_of(NORM, 4))
    assert len(ticks) >= len(SPECS)
