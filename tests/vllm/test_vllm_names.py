"""What rlrefit relies on of vLLM is listed, so that another vLLM is refused with all that it lacks, before anything begins."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM
from vllm.v1.engine.async_llm import AsyncLLM

from rlrefit.integration.errors import RefitError
from rlrefit.workers.engines.vllm import compat
from rlrefit.workers.engines.vllm.compat import require_driver, require_supported_vllm
from tests.vllm_cpu import PACKS_EXPERTS

FOLDER = Path(__file__).parents[2] / "workers" / "engines" / "vllm"
# Where it is not there, weights take another way, or a pause takes longer.
IF_THERE = (
    *compat.CPU_LINEAR,
    *compat.CPU_NVFP4,
    *compat.CPU_EXPERTS,
    *compat.MARLIN_NVFP4,
    *compat.MTP_SWITCH,
    *compat.MODELOPT_SPECS,
    *compat.PAUSING,
    *compat.REFITTING,
)
FEATURES = (
    compat.FP8,
    compat.INT4,
    compat.SPECULATIVE,
    compat.KV_SCALES,
    compat.ADAPTERS,
    compat.WEIGHT_TRANSFER,
)
REQUIRED = tuple(
    needed for of in (compat.WORKER, compat.CORE, *FEATURES, compat.SCRIPT, compat.SERVER) for needed in of
)


def _imports() -> Iterator[tuple[str, str, str]]:
    """Where each name of vLLM is imported, from which module, and its name there."""
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level and f"{node.module}.".startswith("vllm."):
                for imported in node.names:
                    yield f"{path.name}:{node.lineno}", str(node.module), imported.name


def test_every_import_from_vllm_is_listed():
    listed = {(needed.module, needed.name.split(".")[0]) for needed in (*REQUIRED, *IF_THERE)}
    modules = {module for module, _ in listed}
    found = list(_imports())
    assert len(found) > 40
    unlisted = [
        f"{where} imports {name} from {module}"
        for where, module, name in found
        if (module, name) not in listed and f"{module}.{name}" not in modules
    ]
    assert unlisted == []


def test_the_installed_vllm_has_all_that_any_feature_uses():
    require_supported_vllm(REQUIRED)
    assert compat.has(compat.CPU_LINEAR)
    assert compat.has(compat.CPU_NVFP4)
    assert compat.has(compat.CPU_EXPERTS) != PACKS_EXPERTS


@pytest.mark.parametrize(
    ("owner", "name", "needed"), [(LLM, "enqueue", "SCRIPT"), (AsyncLLM, "pause_generation", "SERVER")]
)
def test_a_driver_is_refused_by_a_vllm_whose_call_takes_other_parameters(
    owner: type[Any], name: str, needed: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(owner, name, lambda engine: None)
    engine = object.__new__(owner)
    with pytest.raises(RefitError, match=rf"{owner.__name__}\.{name}"):
        require_driver(engine, getattr(compat, needed), ())
    require_driver(object(), getattr(compat, needed), ("gone",))  # nothing of vLLM's


@pytest.mark.parametrize(("owner", "holds"), [(LLM, compat.SCRIPT_HOLDS), (AsyncLLM, compat.SERVER_HOLDS)])
def test_a_driver_is_refused_by_an_engine_without_one_of_the_attributes_that_it_reads(
    owner: type[Any], holds: tuple[str, ...]
):
    with pytest.raises(RefitError) as caught:
        require_driver(object.__new__(owner), (), holds)
    assert all(name.split("|")[0] in str(caught.value) for name in holds)
