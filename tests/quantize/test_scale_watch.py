"""The look at scales that reach an engine: all are seen, in little memory, and what is wrong is told by name and place."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rlrefit.integration.errors import RefitError
from rlrefit.integration.layout import Fragment
from rlrefit.integration.quantize.formats import Format, Fp8Blockwise, Mxfp8
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.integration.weights.scale_watch import ScaleWatch

CPU = torch.device("cpu")
ROWS, COLUMNS = 10, 7
PLACED, LOADED = range(4), range(4, 6)


def _name(number: int) -> str:
    return f"layers.{number}.weight"


@pytest.fixture(params=[Mxfp8(), Fp8Blockwise()], ids=["MXFP8", "FP8 blocks"])
def format(request: pytest.FixtureRequest) -> Format:
    found: Format = request.param
    return found


class _Arriving:
    """Scales of six weights, of which four land in place and two are loaded."""

    def __init__(self, format: Format, device: torch.device, rewritten: bool = False):
        self._device = device
        self.bad = 255 if format.scale_dtype == torch.uint8 else float("nan")
        self.tensors = [
            torch.full((ROWS, COLUMNS), 100, dtype=format.scale_dtype, device=device)
            for _ in (*PLACED, *LOADED)
        ]
        self._names = [_name(number) + format.scale_name_end for number in (*PLACED, *LOADED)]
        self.watch = ScaleWatch({_name(number): format for number in (*PLACED, *LOADED)}, 3)
        placed = [
            Fragment(self._names[i], (2 * ROWS, COLUMNS), ((ROWS, 2 * ROWS), (0, COLUMNS)), self.tensors[i])
            for i in PLACED
        ]
        loaded = [TensorSpec(self._names[i], (ROWS, COLUMNS), format.scale_dtype) for i in LOADED]
        self.watch.bind(placed, loaded, device, self._names if rewritten else ())

    def refit(self, between: Callable[[], object] = lambda: None) -> None:
        """Raises what the watch does; ``between``: what the engine does with what has arrived."""
        weights: Mapping[str, torch.Tensor] = {self._names[i]: self.tensors[i] for i in LOADED}
        assert dict(self.watch.passing(weights.items())) == weights
        self.watch.look()
        between()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self.watch.require_finite()


def test_what_is_wrong_among_scales_is_told_by_name_and_place(format: Format) -> None:
    look_at_one_after_the_other(format, CPU)


def look_at_one_after_the_other(format: Format, device: torch.device) -> None:
    """One tensor of scales after the other has something wrong."""
    arriving = _Arriving(format, device)
    # What is loaded is looked at beside the engine, one tensor at a time.
    assert arriving.watch.nbytes == 2 * ROWS * COLUMNS * format.scale_dtype.itemsize
    arriving.refit()
    height, width = format.block
    for number, tensor in enumerate(arriving.tensors):
        tensor[3, 5] = arriving.bad
        with pytest.raises(RefitError) as raised:
            arriving.refit()
        assert raised.value.parameter == _name(number)
        assert raised.value.rank == 3
        row = (3 + ROWS * (number in PLACED)) * height
        assert f"[{row}:{row + height}, {5 * width}:{6 * width}]" in str(raised.value)
        tensor[3, 5] = 100
        arriving.refit()
    arriving.tensors[0][0, 0] = arriving.tensors[5][0, 0] = arriving.bad
    with pytest.raises(RefitError) as raised:
        arriving.refit()
    assert raised.value.parameter == _name(0)


@pytest.mark.parametrize("replaces", [False, True])
def test_what_was_wrong_as_it_arrived_is_told_though_the_engine_has_put_it_elsewhere(
    format: Format, replaces: bool
) -> None:
    arriving = _Arriving(format, CPU, rewritten=True)
    arriving.tensors[1][3, 5] = arriving.bad

    def put_elsewhere() -> None:
        arriving.tensors[1][3, 5] = 100
        arriving.tensors[1][4, 4] = arriving.tensors[2][3, 5] = arriving.bad
        if replaces:
            arriving.tensors[1] = arriving.tensors[0]

    with pytest.raises(RefitError) as raised:
        arriving.refit(put_elsewhere)
    assert raised.value.parameter == _name(1)
    assert raised.value.rank == 3
    # No place, of which none is known to be right.
    assert "of the full tensor" not in str(raised.value)


def test_what_lies_in_place_takes_no_memory_and_is_not_kept(format: Format) -> None:
    watch = ScaleWatch({_name(0): format}, 0)
    scales = torch.full((ROWS, COLUMNS), 1, dtype=format.scale_dtype)
    name = _name(0) + format.scale_name_end
    watch.bind([Fragment(name, (ROWS, COLUMNS), ((0, ROWS), (0, COLUMNS)), scales)], [], CPU)
    assert watch.nbytes == 0
    storage = StorageWeakRef(scales.untyped_storage())
    del scales
    assert storage.expired()
