"""Payloads by UUID leave the trainer's process as it was, and hold under SGLang's own replaced reductions too."""

from __future__ import annotations

import base64
import copyreg
import io
import pickle
import sys
import types
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from rlrefit.workers.engines.sglang.sender import serialized

from .ways import Driven

pytestmark = pytest.mark.usefixtures("sglang")


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reductions as SGLang 0.5.17's ``monkey_patch_torch_reductions`` leaves them."""
    original = reductions.reduce_tensor

    def reduce_tensor_modified(tensor: torch.Tensor) -> Any:
        function, arguments = original(tensor)
        return function, (*arguments[:6], str(arguments[6]), *arguments[7:])

    monkeypatch.setattr(reductions, "_reduce_tensor_original", original, raising=False)
    monkeypatch.setattr(reductions, "reduce_tensor", reduce_tensor_modified)
    for kind in (torch.Tensor, torch.nn.Parameter):
        monkeypatch.setitem(ForkingPickler._extra_reducers, kind, reduce_tensor_modified)


def test_cpu_tensors_can_be_pickled_for_processes_after_a_refit(alone: Driven) -> None:
    before = reductions.reduce_tensor, dict(ForkingPickler._extra_reducers), dict(copyreg.dispatch_table)
    for version, index in enumerate((1, 2)):
        alone.bring(version, index)
    held = torch.arange(5)
    assert torch.equal(pickle.loads(ForkingPickler.dumps(held)), held)
    assert before == (reductions.reduce_tensor, ForkingPickler._extra_reducers, copyreg.dispatch_table)


@pytest.mark.usefixtures("replaced")
def test_refits_hold_where_an_engine_of_the_process_has_replaced_the_reductions(alone: Driven) -> None:
    with pytest.raises(IndexError):
        ForkingPickler.dumps(torch.arange(5))
    for version, index in enumerate((1, 2)):
        alone.bring(version, index)


@pytest.mark.parametrize("by_sglang", [False, True], ids=["torch's reductions", "SGLang's"])
def test_a_cuda_handle_names_its_device_by_uuid(monkeypatch: pytest.MonkeyPatch, by_sglang: bool) -> None:
    patch_torch: Any = types.ModuleType("sglang.srt.utils.patch_torch")

    def _rebuild_cuda_tensor_modified(*arguments: Any) -> Any:
        return arguments

    _rebuild_cuda_tensor_modified.__module__ = patch_torch.__name__
    _rebuild_cuda_tensor_modified.__qualname__ = "_rebuild_cuda_tensor_modified"
    patch_torch._rebuild_cuda_tensor_modified = _rebuild_cuda_tensor_modified
    patch_torch._device_to_uuid = lambda device: f"GPU-{device}"
    monkeypatch.setitem(sys.modules, patch_torch.__name__, patch_torch)
    sys.modules["sglang.srt.utils"].patch_torch = patch_torch  # type: ignore[attr-defined]
    if by_sglang:
        monkeypatch.setattr(reductions, "rebuild_cuda_tensor", _rebuild_cuda_tensor_modified)

    # What torch makes of a tensor of device 3.
    def reduce(tensor: torch.Tensor) -> Any:
        return reductions.rebuild_cuda_tensor, ("type", (3,), (1,), 0, "storage", "dtype", 3, b"handle")

    name = "_reduce_tensor_original" if by_sglang else "reduce_tensor"
    monkeypatch.setattr(reductions, name, reduce, raising=False)
    found = pickle.load(io.BytesIO(base64.b64decode(serialized({"flattened_tensor": torch.ones(3)}))))
    assert found["flattened_tensor"] == ("type", (3,), (1,), 0, "storage", "dtype", "GPU-3", b"handle")
