"""The benchmark's true values: they must tell weights, places and versions apart, or a check would pass for nothing."""

from __future__ import annotations

import pytest
import torch

from rlrefit.integration.layout import Fragment, box_of
from rlrefit.integration.quantize.blocks import scale_box, scale_shape
from rlrefit.integration.quantize.formats import Fp8Blockwise
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.recipes.bench import encoded_values, values
from rlrefit.recipes.bench.storage import BenchDestination, BenchSource, Storage

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]


def fragment(name, shape, box=None, dtype=torch.bfloat16):
    box = box or box_of(shape)
    return Fragment(name, shape, box, torch.zeros([stop - start for start, stop in box], dtype=dtype))


def full(name, shape, version, dtype=torch.bfloat16):
    whole = fragment(name, shape, dtype=dtype)
    values.write([whole], version)
    return whole.view


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (7,), (6, 10), (4, 6, 10), (2, 3, 4, 5)])
def test_a_box_has_the_values_that_the_full_tensor_has_there_also_in_pieces(shape, dtype, monkeypatch):
    whole = full("w", shape, 3, dtype)
    monkeypatch.setattr(values, "_CHUNK", 50)
    box = tuple((n // 3, n - n // 4) for n in shape)
    place = tuple(slice(*r) for r in box)
    storage = torch.zeros(shape, dtype=dtype)
    part = Fragment("w", shape, box, storage[place])
    values.write([part], 3)
    assert values.wrong([part], 3) == []
    assert torch.equal(values.bits(part.view), values.bits(whole[place]))
    assert (
        values.bits(storage).count_nonzero() <= part.view.numel()
    )  # written in place, and nothing beside it


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_finite_below_two_and_never_the_poison(dtype):
    tensor = full("w", (64, 96), 5, dtype)
    assert torch.isfinite(tensor.float()).all()
    assert tensor.float().abs().max() <= 2
    assert values.poisoned(tensor) == 0
    values.poison([tensor])
    assert torch.isnan(tensor.float()).all()
    assert values.poisoned(tensor) == tensor.numel()


def test_advancing_equals_writing_the_next_version_and_changes_every_element():
    for dtype in DTYPES:
        moved = full("w", (16, 24), 0, dtype)
        for version in range(4):
            before = moved.clone()
            values.advance([moved], version, version + 1)
            assert torch.equal(values.bits(moved), values.bits(full("w", (16, 24), version + 1, dtype)))
            assert (values.bits(before) != values.bits(moved)).all()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_each_step_changes_its_share_of_all_elements_alike_in_whole_and_parts(share):
    whole, part = fragment("w", (200, 300)), fragment("w", (200, 300), ((20, 90), (7, 260)))
    for one in (whole, part):
        values.write([one], 5)
    for step in (1, 2, 3):
        before = values.bits(whole.view).clone()
        taken = values.Change(share, step)
        for one in (whole, part):
            values.change([one], taken)
        changed = (values.bits(whole.view) != before).float().mean().item()
        assert changed == pytest.approx(share, rel=0.1)
        assert values.wrong([whole, part], 5, [taken]) == []
        # All elements flipped twice are what they were.
        assert len(values.wrong([whole], 5)) == (share > 0 and (share < 1 or step != 2))


def test_changed_weights_advance_alike_on_both_sides():
    """As a second transport's dense refits follow the first one's sparse ones."""
    specs, device = [TensorSpec("w", (60, 70), torch.bfloat16)], torch.device("cpu")
    source = BenchSource(specs, Storage.allocate([], specs, device), {}, device)
    destination = BenchDestination(specs, Storage.allocate([], specs, device), {}, device, {})
    for both in (source, destination):
        for share in (0.2, 0.2, 0.05):
            both.change(share)
        both.advance()
        both.change(0.2)
    destination.load_weights(source.export(["w"]))
    assert destination.faults() == []
    source.advance()
    destination.load_weights(source.export(["w"]))
    assert destination.faults()


def test_a_wrong_bit_a_neighbour_a_namesake_and_an_old_version_are_all_noticed():
    good = fragment("layers.0.w", (32, 48))
    values.write([good], 2)
    assert values.wrong([good], 2) == []
    assert values.wrong([good], 1) == [good]
    renamed = Fragment("layers.1.w", (32, 48), good.box, good.view)
    assert values.wrong([renamed, good], 2) == [renamed]
    swapped = good.view.clone()
    swapped[[3, 4]] = good.view[[4, 3]]
    assert values.wrong([Fragment("layers.0.w", (32, 48), good.box, swapped)], 2)
    shifted = Fragment("layers.0.w", (33, 48), ((1, 33), (0, 48)), good.view)
    assert values.wrong([shifted], 2) == [shifted]
    values.bits(good.view)[31, 47] ^= 1
    assert values.wrong([good], 2) == [good]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_tell_blocks_weights_and_refits_apart(dtype):
    scales = [
        Fp8Blockwise().encode(full(name, (1024, 1024), version, dtype=dtype))[1].flatten()
        for name, version in (("w", 3), ("v", 3), ("w", 4))
    ]
    for one, other in ((0, 1), (0, 2)):
        assert (scales[one] == scales[other]).float().mean() < 0.25
    assert len(scales[0].unique()) >= 12


def test_wrong_codes_scales_places_and_versions_of_a_quantized_part_are_all_noticed(monkeypatch):
    monkeypatch.setattr(encoded_values, "_CHUNK", 128 * 256)  # two strips
    spec, format, box = TensorSpec("w", (512, 384), torch.bfloat16), Fp8Blockwise(), ((128, 384), (128, 384))
    codes, scales = format.encode(full("w", spec.shape, 3))
    rows, columns = (slice(*side) for side in box)
    part = scale_box(box, format.block)
    held = {
        "w": [Fragment("w", spec.shape, box, codes[rows, columns].clone())],
        "w_scale_inv": [
            Fragment("w_scale_inv", scale_shape(spec.shape, format.block), part, scales[1:3, 1:3].clone())
        ],
    }

    def wrong(version=3, name="w"):
        found = encoded_values.wrong(held, {"w": spec._replace(name=name)}, {"w": format}, version)
        return sorted(fragment.name for fragment in found)

    assert wrong() == []
    assert "w" in wrong(version=2)
    assert "w" in wrong(name="v")
    for fragments in held.values():
        (fragment,) = fragments
        raw = values.bits(fragment.view)
        raw[1, 1] ^= 1
        assert wrong() == [fragment.name]
        raw[1, 1] ^= 1
        values.poison([fragment.view])
        assert wrong() == [fragment.name]
        source = codes[rows, columns] if fragment.name == "w" else scales[1:3, 1:3]
        fragment.view.copy_(source)
    assert wrong() == []
