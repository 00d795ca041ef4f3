"""INT4 against compressed-tensors' own arithmetic, and its kernel against the torch form, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrefit.integration.config import INT4_SCALES
from rlrefit.integration.quantize import int4, nvfp4
from rlrefit.integration.quantize.formats import Codes, Int4, Scales, WholeBlocks
from rlrefit.integration.quantize.int4_table import Int4Table
from rlrefit.integration.quantize.jobs import QuantizeJob
from rlrefit.integration.transport.ipc.told_encodings import heard, told
from tests.ahead import FoundAhead, of_all_tests
from tests.triton_interpreter import run_interpreted

from .test_fp8_kernels import hard_weights
from .weights import same, weights

CPU = torch.device("cpu")
KINDS = (torch.bfloat16, torch.float16, torch.float32)
groups = st.sampled_from(int4.GROUPS)


def compressed(weight: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    """What compressed-tensors makes of a weight by round-to-nearest: the module's tensors in a checkpoint."""
    scheme = QuantizationScheme(targets=["Linear"], weights=_arguments(group))
    blocks = weight.unflatten(-1, (-1, group))
    scales, zeros = calculate_qparams(blocks.amin(-1), blocks.amax(-1), _arguments(group))
    state = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}
    return PackedQuantizationCompressor.compress(state, scheme)


def _arguments(group: int) -> QuantizationArgs:
    return QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)


@settings(max_examples=80, deadline=None)
@given(weights(st.integers(1, 5), st.integers(1, 3).map(lambda n: 128 * n), special=False), groups)
def test_codes_and_scales_are_compressed_tensors_own(w: torch.Tensor, group: int) -> None:
    packed, scales = int4.quantize(w, group)
    theirs = compressed(w, group)
    assert packed.dtype == theirs["weight_packed"].dtype
    assert torch.equal(packed, theirs["weight_packed"])
    assert scales.dtype == w.dtype
    assert same(scales, theirs["weight_scale"])
    scheme = QuantizationScheme(targets=["Linear"], weights=_arguments(group))
    back = PackedQuantizationCompressor.decompress(theirs, scheme)["weight"]
    assert torch.equal(int4.dequantize(packed, scales), back)


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_beside_every_maximum_gets_compressed_tensors_code(kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(512, 512, generator=generator)
    # Half-way between two codes, and next to that.
    scale = w.abs().amax(-1, keepdim=True) / 7.5
    ties = (torch.randint(-16, 15, w.shape, generator=generator).float() / 2 + 0.5) * scale
    w = torch.where(torch.rand(w.shape, generator=generator) < 0.5, w, ties).to(kind)
    for group in int4.GROUPS:
        packed, scales = int4.quantize(w, group)
        theirs = compressed(w, group)
        assert torch.equal(packed, theirs["weight_packed"])
        assert same(scales, theirs["weight_scale"])


@settings(max_examples=80, deadline=None)
@given(weights(st.integers(1, 5), st.integers(1, 3).map(lambda n: 128 * n), special=False), groups)
def test_by_the_other_rule_codes_and_scales_are_megatron_bridges_own(w: torch.Tensor, group: int) -> None:
    packed, scales, _ = _bridges_int4().quantize_to_int4(w, group, w.dtype)
    ours = int4.quantize(w, group, int4.BY_LARGEST)
    assert torch.equal(ours[0], packed)
    assert same(ours[1], scales)


def test_the_two_rules_make_other_codes_and_all_other_scales() -> None:
    w = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    by_half_range, by_largest = (int4.quantize(w, 32, scale) for scale in INT4_SCALES)
    codes = nvfp4.unpack(by_largest[0].view(torch.uint8)).int() - 8
    assert [codes.min(), codes.max()] == [-7, 7]
    assert not (by_half_range[1] == by_largest[1]).any()
    assert not torch.equal(by_half_range[0], by_largest[0])


def test_codes_of_what_codes_stand_for_are_the_same_by_bridges_rule_alone() -> None:
    w = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    whole = w.bfloat16()
    made = int4.quantize(whole, 32, int4.BY_LARGEST)
    for a, b in zip(int4.quantize(int4.dequantize(*made), 32, int4.BY_LARGEST), made, strict=True):
        assert torch.equal(a, b)
    # Of a checkpoint that was made from FP32 some scales change by a last bit.
    codes, scales = int4.quantize(w, 32, int4.BY_LARGEST)
    made = codes, scales.bfloat16()
    again = int4.quantize(int4.dequantize(*made), 32, int4.BY_LARGEST)
    assert torch.equal(again[0], codes)
    assert (again[1].view(torch.int16).int() - made[1].view(torch.int16).int()).abs().max() == 1
    made = int4.quantize(whole, 32)
    assert not (int4.quantize(int4.dequantize(*made), 32)[1] == made[1]).any()


def test_receivers_that_quantize_what_they_read_are_told_of_the_rule() -> None:
    method = WholeBlocks(Int4(32, scale_rule=int4.BY_LARGEST))
    for encoding in (Codes(method), Scales(method)):
        assert heard(json.loads(json.dumps(told(encoding, torch.bfloat16)))).encoding == encoding


@cache
def _bridges_int4() -> Any:
    """Its file alone: the package would bring all of Bridge."""
    core = find_spec("megatron.core")
    assert core is not None
    assert core.origin is not None
    file = Path(core.origin).parents[1] / "bridge" / "models" / "conversion" / "quantization_utils.py"
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_group_that_is_not_finite_is_nan_and_its_neighbours_are_not(value: float) -> None:
    w = torch.ones(2, 64).bfloat16()
    w[1, 40] = value
    packed, scales = int4.quantize(w, 32)
    back = int4.dequantize(packed, scales)
    assert torch.equal(back.isnan(), torch.tensor([[False, False], [False, True]]).repeat_interleave(32, 1))
    assert torch.equal(packed[1, 4:], torch.full((4,), -0x77777778, dtype=torch.int32))
    whole, _ = int4.quantize(torch.ones(2, 64).bfloat16(), 32)
    assert torch.equal(packed[0], whole[0])


@settings(max_examples=30, deadline=None)
@given(weights(st.integers(2, 5), st.just(256)), groups, st.data())
def test_parts_that_cut_no_group_have_the_bytes_of_the_whole(
    w: torch.Tensor, group: int, data: st.DataObject
) -> None:
    packed, scales = int4.quantize(w, group)
    cut, down = data.draw(st.integers(1, 256 // group)) * group, data.draw(st.integers(1, w.shape[0]))
    codes, own = int4.quantize(w[:down, :cut], group)
    assert torch.equal(codes, packed[:down, : cut // 8])
    assert same(own, scales[:down, : cut // group])


def test_a_weight_without_elements_has_no_codes() -> None:
    for shape in ((0, 64), (2, 3, 0)):
        packed, scales = int4.quantize(torch.zeros(shape).bfloat16().mT.contiguous().mT, 32)
        assert (packed.shape[:-1], packed.numel(), scales.numel()) == (shape[:-1], 0, 0)


def test_what_no_engine_takes_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of that"):
        int4.quantize(torch.ones(2, 48), 32)
    with pytest.raises(ValueError, match="groups of"):
        int4.quantize(torch.ones(2, 48), 16)
    with pytest.raises(ValueError, match="int8"):
        int4.quantize(torch.ones(2, 32, dtype=torch.int8), 32)


# Groups, whether weights are rounded to BF16 first, and which of INT4_SCALES: each once, and what of each with the others is left to
# make test-all and GPUs.
_WAYS = ((32, False, 0), (128, False, 0), (64, True, 1))
_MORE_WAYS = ((32, True, 0), (64, False, 0), (32, False, 1))


def compare_int4_with_torch(
    device: torch.device, ways: Sequence[tuple[int, bool, int]] = _WAYS + _MORE_WAYS
) -> None:
    """The kernel and :func:`.int4.quantize`, on a device."""
    for group, rounded, rule in ways:
        weights = [w[:70, : w.shape[-1] // group * group] for w in hard_weights(device) if w.dim() == 2]
        weights += [
            weights[0].float() * 2.0**-120,
            weights[2].half(),
            weights[0][:, : 2 * group].t()[:group].t(),
            _every_mantissa_by_every(group).to(device),
        ]
        jobs, found = [], []
        for number, w in enumerate(weights):
            n, k = w.shape
            # Of every third weight all codes, of every third a part, of every third none.
            wanted = [(0, 0, n, k // 8), (5, min(2, k // 8), n - n // 4, k // 8 - 2), (0, 0, 0, 0)]
            top, left, bottom, right = wanted[number % 3]
            room = torch.full((n + 2, k // 8 + 4), 0x55555555, dtype=torch.int32, device=device)
            if number % 2:  # as experts lie in engines
                room = room.t().contiguous().t()
            codes = room[1 + top : 1 + bottom, 2 + left : 2 + right]
            kind = torch.bfloat16 if rounded else w.dtype
            scales = torch.full((k // group, n), 2.0, dtype=kind, device=device).t()
            wants_codes, wants_scales = number % 3 != 2, number % 4 != 1
            jobs.append(
                QuantizeJob(w, codes if wants_codes else None, (top, left), scales if wants_scales else None)
            )
            found.append((room, codes if wants_codes else codes[:0], (top, left, bottom, right), scales))
        table = Int4Table.build(jobs, device, group, rounded, INT4_SCALES[rule])
        assert table.nbytes == sum(job.nbytes for job in jobs)
        for factor in (1, -2):  # changed weights before the second launch
            for w in weights:
                w.mul_(factor)
            table.launch()
            for w, job, (room, codes, (top, left, bottom, right), scales) in zip(
                weights, jobs, found, strict=True
            ):
                packed, expected = int4.quantize(w.bfloat16() if rounded else w, group, INT4_SCALES[rule])
                packed = packed[top:bottom, left:right] if len(codes) else packed[:0, left:right]
                assert torch.equal(codes, packed)
                assert same(scales, torch.full_like(scales, 2.0) if job.scales is None else expected)
                inside = codes.clone()
                codes.fill_(0x55555555)
                assert (room == 0x55555555).all()
                codes.copy_(inside)


def compare_round_trips_with_torch(device: torch.device) -> None:
    from rlrefit.integration.quantize.int4_kernels import round_trip

    for group in int4.GROUPS:
        weights = [
            w[..., :24, : w.shape[-1] // group * group] for w in hard_weights(CPU) if w.shape[-1] >= group
        ]
        weights += [weights[0].float() * 2.0**-120, weights[2].half(), _every_mantissa_by_every(group)]
        for w, rule in product(weights, INT4_SCALES):
            found = round_trip(w.to(device), group, rule)
            assert same(found.cpu(), int4.dequantize(*int4.quantize(w, group, rule))), (group, w.dtype, rule)


def _every_mantissa_by_every(group: int) -> torch.Tensor:
    """BF16: groups whose maxima have each mantissa, each with elements of each mantissa, down to those that vanish."""
    mantissas = 1 + torch.arange(128) / 128
    elements = torch.cat([mantissas * 2.0**exponent for exponent in range(-5, 1)])
    elements = torch.cat((elements, elements[: -len(elements) % (group - 1)])).view(-1, group - 1)
    maxima = (2 * mantissas).repeat_interleave(len(elements))[:, None]
    signs = torch.where(torch.arange(len(maxima)) % 2 == 0, 1.0, -1.0)[:, None]
    whole = torch.cat((signs * maxima, elements.repeat(128, 1)), dim=1)
    return whole.view(64, -1).bfloat16()


def interpret_kernel(folder: Path) -> None:
    run_interpreted(compare_int4_with_torch, CPU, _WAYS)
    run_interpreted(compare_round_trips_with_torch, CPU)


@of_all_tests
def interpret_kernel_in_more_ways(folder: Path) -> None:
    run_interpreted(compare_int4_with_torch, CPU, _MORE_WAYS)


AHEAD = (interpret_kernel, interpret_kernel_in_more_ways)


@pytest.mark.parametrize(
    "interpret", [interpret_kernel, pytest.param(interpret_kernel_in_more_ways, marks=pytest.mark.full)]
)
def test_the_kernel_in_tritons_interpreter_gives_torchs_bytes(
    interpret: Callable[[Path], None], found_ahead: FoundAhead
) -> None:
    found_ahead.by(interpret)


def test_parts_that_cut_groups_are_refused() -> None:
    job = QuantizeJob(torch.ones(2, 48), scales=torch.empty(2, 2))
    with pytest.raises(ValueError, match="cuts blocks of 32"):
        Int4Table.build([job], CPU, 32)
