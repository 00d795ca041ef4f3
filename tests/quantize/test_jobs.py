"""Parts of what is computed of a held weight: whatever is wanted, its bytes are those of the quantized whole."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrefit.integration.errors import RefitError
from rlrefit.integration.layout import Box, box_of
from rlrefit.integration.packing import (
    Cast,
    EncodedView,
    EncodingsByHost,
    NotComputable,
    Strided,
    make_encoders,
)
from rlrefit.integration.quantize import nvfp4
from rlrefit.integration.quantize.formats import (
    Codes,
    Format,
    Fp8Blockwise,
    Mxfp8,
    Nvfp4,
    Scales,
    WholeBlocks,
    from_json,
    to_json,
)
from rlrefit.integration.quantize.jobs import GlobalScale, make_jobs
from rlrefit.integration.transport.ipc.copy_order import slices

from .weights import same

BF16 = torch.bfloat16
CPU = torch.device("cpu")
FP8 = Fp8Blockwise()


@st.composite
def parts(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    box = []
    for n in shape:
        start = draw(st.integers(0, n - 1))
        box.append((start, draw(st.integers(start + 1, n))))
    return tuple(box)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Format, tuple[int, int], list[Box], list[Box]]:
    kinds = [FP8, Fp8Blockwise(block=(32, 16)), Fp8Blockwise(ue8m0=True), Mxfp8(), Nvfp4()]
    format = draw(st.sampled_from(kinds))
    rows = draw(st.integers(1, 300))
    whole = isinstance(format, Mxfp8 | Nvfp4)
    columns = draw(st.integers(1, 10)) * format.block[1] if whole else draw(st.integers(1, 300))
    scales = Scales(WholeBlocks(format)).shape((rows, columns))
    return (
        format,
        (rows, columns),
        draw(st.lists(parts(Codes(WholeBlocks(format)).shape((rows, columns))), max_size=3)),
        draw(st.lists(parts(scales), max_size=3)),
    )


@settings(deadline=None, max_examples=60)
@given(scenes())
def test_any_parts_of_codes_and_scales_are_those_of_the_whole(
    scene: tuple[Format, tuple[int, int], list[Box], list[Box]],
) -> None:
    format, shape, *parts_of_both = scene
    held = torch.randn(*shape).bfloat16()
    shared = GlobalScale(torch.ones(())) if format.has_global_scale else None
    given = () if shared is None else (shared.value,)
    encodings = Codes(WholeBlocks(format), shared), Scales(WholeBlocks(format), shared)
    pairs = []
    for encoding, boxes in zip(encodings, parts_of_both, strict=True):
        for box in boxes:
            rows, columns = (stop - start for start, stop in box)
            target = torch.empty(columns, rows + 1, dtype=encoding.dtype).t()[:rows]
            pairs.append((EncodedView(held, encoding, box), target))
    encoders = make_encoders(pairs, CPU)
    assert sum(encoder.nbytes for encoder in encoders) == sum(target.nbytes for _, target in pairs)
    for factor in (1.0, -0.25):  # changed weights and scales before the second launch
        held.mul_(factor)
        for one in given:
            one.fill_(nvfp4.global_scale(held.abs().amax()).item())
        for encoder in encoders:
            encoder.launch()
        whole = dict(zip(encodings, format.encode(held, *given), strict=True))
        for view, target in pairs:
            index = tuple(slice(start, stop) for start, stop in view.window)
            assert same(target.contiguous(), whole[view.encoding][index].contiguous())


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 900), st.integers(1, 700), st.sampled_from([1 << 14, 1 << 16, 1 << 18]), st.data())
def test_pieces_of_codes_and_of_their_scales_need_the_same_blocks(
    rows: int, columns: int, most: int, data: st.DataObject
) -> None:
    held = torch.empty(rows, columns, dtype=torch.bfloat16)
    # What an engine rank wants: whole blocks, and all of their scales.
    blocks = data.draw(parts(Scales(WholeBlocks(FP8)).shape((rows, columns))))
    cut = tuple((a * 128, min(b * 128, n)) for (a, b), n in zip(blocks, (rows, columns), strict=True))
    written = []
    codes, scales = Codes(WholeBlocks(FP8)), Scales(WholeBlocks(FP8))
    for encoding, box in ((codes, cut), (scales, blocks)):
        view = EncodedView(held, encoding, box)
        target = Strided.packed(1 << 20, view.shape, view.dtype.itemsize)
        cuts = list(slices((view, target), most))
        assert sum(source.nbytes for source, _ in cuts) == view.nbytes
        assert all(source.shape == place.shape for source, place in cuts)
        addresses = [place.address for _, place in cuts]
        assert addresses == sorted(set(addresses))
        if encoding is codes:
            assert all(source.nbytes <= max(most, 128 * columns) for source, _ in cuts)
        written += cuts
    jobs = make_jobs(written)
    assert all(job.codes is not None and job.scales is not None for job in jobs)


def test_the_host_computes_what_it_copies_and_keeps_nothing_of_it() -> None:
    weights = [torch.randn(200, 160).bfloat16(), torch.randn(130, 64).bfloat16()]
    encodings = Codes(WholeBlocks(FP8)), Scales(WholeBlocks(FP8)), Cast(torch.float32)
    pairs = []
    for held in weights:
        for encoding in encodings:
            view = EncodedView(held, encoding, box_of(encoding.shape(held.shape)))
            pairs.append((view, torch.empty(view.shape, dtype=view.dtype)))
    by_host = EncodingsByHost(pairs)
    for sign in (1, -1):  # changed weights before the second launch
        for held in weights:
            held.mul_(sign)
        by_host.launch()
        expected = [tensor for held in weights for tensor in (*FP8.encode(held), held.float())]
        for (_, target), right in zip(pairs, expected, strict=True):
            assert same(target, right)
    freed = weakref.ref(weights[0].untyped_storage())
    del pairs, view, held, weights
    gc.collect()
    assert freed() is None
    with pytest.raises(RefitError, match="was freed"):
        by_host.launch()


@pytest.mark.parametrize("format", [FP8, Fp8Blockwise((64, 32), True, "_scale"), Mxfp8("down")])
def test_formats_cross_processes_as_plain_data(format: Format) -> None:
    assert from_json(to_json(format)) == format
    for change in ({"kind": "fp7"}, {"colour": 1}, {"rounding": 1}, {"block": [128]}):
        with pytest.raises(ValueError):
            from_json(to_json(format) | change)
    with pytest.raises(ValueError):
        from_json([1])


def test_a_format_without_a_kernel_is_not_computed_into_a_peers_memory() -> None:
    held = torch.randn(4, 64).bfloat16()
    view = EncodedView(held, Codes(WholeBlocks(Fp8Blockwise(block=(2, 32)))), box_of(held.shape))
    with pytest.raises(NotComputable, match="transport to p2p"):
        make_encoders([(view, Strided.packed(0, (4, 64), 1))], torch.device("cuda"))
    with pytest.raises(ValueError, match="items of 2 bytes"):
        make_encoders([(view, torch.empty(4, 64, dtype=torch.bfloat16))], CPU)
