"""Other releases of vLLM than the one that is installed. `make test-engines` runs real ones."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from torch import nn

from rlrefit.workers.engines import vllm as workers_vllm
from rlrefit.workers.engines.vllm import compat

_QUANTIZATION = "vllm.model_executor.layers.quantization"
# Later releases have the last one in place of the two others.
_GONE = (f"{_QUANTIZATION}.gptq", f"{_QUANTIZATION}.gptq_marlin")
_INSTEAD = f"{_QUANTIZATION}.auto_gptq"
_MODULES = sorted(path.stem for path in Path(workers_vllm.__path__[0]).glob("[!_]*.py"))


def _anew(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as it is imported with the modules that vLLM has now; after the test the one of before is there again."""
    spec = importlib.util.find_spec(f"{workers_vllm.__name__}.{name}")
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, made)
    spec.loader.exec_module(made)
    return made


def _auto_gptq() -> ModuleType:
    made = ModuleType(_INSTEAD)
    made.__spec__ = importlib.machinery.ModuleSpec(_INSTEAD, None)
    for name in ("AutoGPTQLinearMethod", "AutoGPTQMoEMethod"):
        setattr(made, name, type(name, (), {"__module__": _INSTEAD}))
    return made


@pytest.fixture(params=["as it is", "with the modules of later releases"])
def has_gptq(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether vLLM has GPTQ's modules of old."""
    installed = importlib.util.find_spec(_GONE[0]) is not None
    if not installed or request.param == "as it is":
        return installed
    for name in _GONE:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, _INSTEAD, _auto_gptq())
    return False


@pytest.mark.parametrize("version", ["0.21.0", "0.32.0", "0.33.0", "0.100.0", "of unknown version"])
def test_a_release_that_the_tests_have_not_run_is_taken_with_a_warning(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("vllm.__version__", version)
    compat.require_supported_vllm()
    told = [record for record in caplog.records if record.name == compat.logger.name]
    assert len(told) == (version not in ("0.21.0", "0.32.0"))


def test_the_extra_names_the_releases_that_are_taken_without_a_warning():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    major, minor = compat.LAST.split(".")
    assert project["optional-dependencies"]["vllm"] == [f"vllm>={compat.FIRST},<{major}.{int(minor) + 1}"]


def test_a_worker_starts_with_the_modules_of_each_release(has_gptq: bool, monkeypatch: pytest.MonkeyPatch):
    compat.require_supported_vllm()
    for name in _MODULES:
        _anew(name, monkeypatch)


def test_gptq_methods_of_later_releases_need_all_of_their_parameters(
    has_gptq: bool, monkeypatch: pytest.MonkeyPatch
):
    method = (
        importlib.import_module(_GONE[0]).GPTQLinearMethod
        if has_gptq
        else importlib.import_module(_INSTEAD).AutoGPTQLinearMethod
    )
    made = method.__new__(method)  # vLLM's own constructor asks for a GPU
    made.quant_config = SimpleNamespace(desc_act=False)
    model = nn.ModuleDict({"layer": nn.Module()})
    model["layer"].__dict__["quant_method"] = made
    assert _anew("completeness", monkeypatch).unused_parameters(model) == (
        {"layer.g_idx"} if has_gptq else frozenset()
    )


def test_a_dense_engine_in_bf16_is_asked_for_nothing_of_quantized_weights_experts_or_adapters(
    monkeypatch: pytest.MonkeyPatch,
):
    for name in (
        f"{_QUANTIZATION}.modelopt",
        f"{_QUANTIZATION}.fp8",
        "vllm.model_executor.layers.fused_moe.oracle.fp8",
        "vllm.model_executor.layers.fused_moe.oracle.nvfp4",
        "vllm.model_executor.kernels.linear.scaled_mm.deep_gemm",
        "vllm.utils.deep_gemm",
        "vllm.lora.lora_model",
    ):
        monkeypatch.setitem(sys.modules, name, None)
    compat.require_supported_vllm()
    for name in ("fp8", "layouts", "completeness", "reload", "destination", "worker_refit"):
        _anew(name, monkeypatch)
