"""Parameters that a trainer keeps in FP8 blocks: sent as they are where their blocks are the weight's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlrefit.integration.errors import RefitError
from rlrefit.integration.layout import Fragment
from rlrefit.integration.quantize import fp8_blockwise
from rlrefit.integration.quantize.formats import Format, Fp8Blockwise, Mxfp8
from rlrefit.recipes.policy.state import _tensors
from rlrefit.workers.trainers.megatron.native_fp8 import (
    NativeBlocks,
    as_codes,
    is_native,
    native_blocks,
    native_storage_key,
    with_scales,
)
from rlrefit.workers.trainers.megatron.rules import Refused, fragments_of_task
from rlrefit.workers.trainers.megatron.self_check import refusals
from tests.refit.synthetic import SyntheticSource, refit_changed, run_world, value_of

from .test_quantized_refit import COLUMN, CUT, ROW, SPECS, by_columns, by_rows, config, sources, wanted

FP8 = Fp8Blockwise()


def kept(weight: torch.Tensor, powers_of_two: bool = True) -> NativeBlocks:
    """As Transformer Engine keeps a weight: scales padded to a multiple of four columns."""
    codes, scales = FP8.encode(weight)
    room = torch.full((scales.shape[0], -(-scales.shape[1] // 4) * 4), float("nan"))
    room[:, : scales.shape[1]] = scales
    return NativeBlocks(codes, room[:, : scales.shape[1]], powers_of_two)


def test_gate_and_up_of_one_parameter_have_the_scales_of_their_own_rows() -> None:
    native = kept(torch.randn(2 * 256, 384).bfloat16())
    for number, name in enumerate(("gate", "up")):
        rows = slice(256 * number, 256 * (number + 1))
        fragment = Fragment(name, (1024, 384), ((512, 768), (0, 384)), native.codes[rows])
        codes, scales = with_scales(fragment, native, FP8)
        assert codes is fragment
        assert (scales.name, scales.full_shape, scales.box) == (f"{name}_scale_inv", (8, 3), ((4, 6), (0, 3)))
        assert scales.view.data_ptr() == native.scales[2 * number :].data_ptr()
        assert torch.equal(
            fp8_blockwise.dequantize(codes.view, scales.view),
            fp8_blockwise.dequantize(native.codes, native.scales)[rows],
        )


def test_a_last_block_may_end_early_on_both_sides() -> None:
    native = kept(torch.randn(200, 130).bfloat16())
    whole = Fragment("w", (200, 130), ((0, 200), (0, 130)), native.codes)
    assert with_scales(whole, native, FP8)[1].box == ((0, 2), (0, 2))


# Shape of the parameter and of the weight, box in the weight, rows of the parameter, format of the engine.
REFUSED = {
    "begins elsewhere in the weight": ((256, 256), (512, 256), ((64, 192), (0, 256)), slice(0, 128), FP8),
    "begins elsewhere in the parameter": ((256, 256), (512, 256), ((0, 128), (0, 256)), slice(64, 192), FP8),
    "ends early in the parameter alone": ((200, 130), (456, 130), ((0, 200), (0, 130)), slice(None), FP8),
    "another format": ((128, 128), (128, 128), ((0, 128), (0, 128)), slice(None), Mxfp8()),
    "other scales": ((128, 128), (128, 128), ((0, 128), (0, 128)), slice(None), Fp8Blockwise(ue8m0=True)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_blocks_that_are_not_those_of_the_weight_or_of_the_engine_are_refused(case: str) -> None:
    of_parameter, of_weight, box, rows, format = REFUSED[case]
    native = kept(torch.randn(of_parameter).bfloat16(), powers_of_two=False)
    with pytest.raises(Refused):
        with_scales(Fragment("w", of_weight, box, native.codes[rows]), native, format)


class Float8BlockwiseQTensor(torch.Tensor):
    """Stands in for Transformer Engine's class: its name and ``get_metadata``."""

    __module__ = "transformer_engine.pytorch.tensor.float8_blockwise_tensor"

    def get_metadata(self) -> dict[str, Any]:
        if not hasattr(self, "_kept"):
            codes, scales = FP8.encode(torch.ones(self.shape).bfloat16())
            padded = torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4))
            self._kept = {"rowwise_data": codes.view(torch.uint8), "rowwise_scale_inv": padded}
        return self._kept | {
            "is_2D_scaled": True,
            "fp8_dtype": SimpleNamespace(name="kFloat8E4M3"),
            "quantizer": SimpleNamespace(block_len=128, force_pow_2_scales=True),
        }


def test_a_parameter_whose_memory_was_freed_is_never_read() -> None:
    weight = torch.zeros(128, 256).as_subclass(Float8BlockwiseQTensor)
    assert native_blocks(weight).codes.shape == (128, 256)
    weight.get_metadata()["rowwise_data"].untyped_storage().resize_(0)
    with pytest.raises(RefitError) as raised:
        native_blocks(weight)
    assert raised.value.stage == "bind"


def test_a_checkpoint_holds_what_such_a_parameter_is_made_of() -> None:
    chunk = torch.nn.Module()
    chunk.weight = torch.nn.Parameter(torch.ones(256, 128).as_subclass(Float8BlockwiseQTensor))
    found = dict(_tensors([chunk], False))
    assert {name: (t.dtype, tuple(t.shape)) for name, t in found.items()} == {
        "0.weight.rowwise_data": (torch.uint8, (256, 128)),
        "0.weight.rowwise_scale_inv": (torch.float32, (2, 4)),
    }
    kept = chunk.weight.get_metadata()
    assert all(kept[name.rpartition(".")[2]].data_ptr() == t.data_ptr() for name, t in found.items())


@pytest.mark.parametrize("part", ["rowwise_data", "rowwise_scale_inv"])
@pytest.mark.parametrize(
    "other",
    [
        torch.clone,
        lambda t: t.view(torch.int8),
        lambda t: t.as_strided(t.shape, (1, t.shape[0])),
        lambda t: None,
    ],
    ids=["moved", "of another dtype", "by other strides", "gone"],
)
def test_the_key_of_parameters_kept_in_blocks_tells_where_and_how_each_part_lies(
    other: Any, part: str
) -> None:
    held = {"rowwise_data": torch.zeros(4, 6), "rowwise_scale_inv": torch.zeros(2, 4)}
    weights = [SimpleNamespace(get_metadata=lambda: held)]
    before, kept_alive = native_storage_key(weights), held[part]
    assert native_storage_key(weights) == before
    held[part] = other(kept_alive)
    assert native_storage_key(weights) != before


@dataclass(frozen=True)
class Task:
    """What rules read of Bridge's conversion tasks."""

    global_param_name: str
    param_weight: Any
    mapping: Any
    export_hook: Any = None
    weight_dtype: Any = None


def test_the_self_check_tries_rules_on_parameters_that_are_kept_in_blocks() -> None:
    mapping = type("ReplicatedMapping", (), {"hf_param": "w", "tp_rank": 0, "tp_size": 1})
    mapping.__module__ = "megatron.bridge.models.conversion.param_mapping"
    weight = torch.empty(256, 192, dtype=torch.bfloat16).as_subclass(Float8BlockwiseQTensor)
    task = Task("decoder.layers.0.linear_proj.weight", weight, mapping())
    assert is_native(weight)
    # As it is, no rule takes it: its memory is no BF16.
    with pytest.raises(Refused):
        fragments_of_task(task)
    assert refusals([task], {("kind",): [0]}, {"w": (256, 192)}) == {("kind",): ""}
    found = native_blocks(weight)
    (fragment,) = fragments_of_task(as_codes(task, found))
    assert [f.name for f in with_scales(fragment, found, FP8)] == ["w", "w_scale_inv"]


class NativeSource(SyntheticSource):
    """A trainer rank that keeps two weights in FP8 blocks, one of which it can't send so."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.native = {
            name: (box, kept(torch.zeros([b - a for a, b in box]).bfloat16()))
            for (name, box) in self._held
            if name in (ROW.name, CUT.name)
        }

    def set_version(self, version: int) -> None:
        super().set_version(version)
        for name, (box, blocks) in self.native.items():
            whole = value_of(self._by_name[name], version)
            part = whole[tuple(slice(a, b) for a, b in box)]
            codes, scales = FP8.encode(part)
            blocks.codes.view(torch.uint8).copy_(codes.view(torch.uint8))
            blocks.scales.copy_(scales)

    def quantized_fragments(
        self, formats: Mapping[str, Format]
    ) -> tuple[list[Fragment], dict[str, str], frozenset[str]]:
        held, refused = [], {}
        for name, (box, blocks) in self.native.items():
            fragment = Fragment(name, self._by_name[name].shape, box, blocks.codes)
            try:
                held += with_scales(fragment, blocks, formats[name])
            except Refused as reason:
                refused[name] = str(reason)
        return held, refused, frozenset(self.native)

    def fragments(self) -> tuple[list[Fragment], dict[str, str]]:
        held, _ = super().fragments()
        return [f for f in held if f.name not in self.native], dict.fromkeys(self.native, "no plain tensor")


@pytest.mark.parametrize("transport", ["p2p", "golden"])
def test_what_is_kept_quantized_lands_beside_what_is_quantized_on_the_way(transport: str) -> None:
    formats: dict[str, Format] = {spec.name: FP8 for spec in (COLUMN, ROW, CUT)}
    trainers = [NativeSource(SPECS, {name: [box] for name, box in source._held}) for source in sources()]
    for cut in (by_rows, by_columns):
        results = run_world(
            trainers,
            wanted(formats, cut),
            lambda rank, session, end: (
                [refit_changed(session, end, version)[1] for version in (1, 2, 3)],
                {entry.spec.name for entry in session.manifest if entry.route == "misc"},
            ),
            config(transport=transport),
        )
        for wrong, misc in results:
            assert wrong == [[], [], []]
            assert misc == {"cut.weight", "cut.weight_scale_inv"}
