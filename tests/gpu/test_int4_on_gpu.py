"""Refits of a live vLLM in INT4 (:mod:`.quantized_engines`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from rlrefit.recipes.rollout.arguments import int4

from .needs import needs
from .quantized_engines import (
    Case,
    Format,
    Scene,
    require_the_engine_that_was_started_from_the_weights,
    running,
)
from .vllm_checkpoints import quantize_to_int4
from .vllm_live import CUDA_GRAPHS, EAGER
from .vllm_trainer import Trainer

pytestmark = [*needs("vllm", "transformers"), pytest.mark.timeout(150)]

LINEAR = "MarlinLinearKernel"
# vLLM's own choice on Hopper, for groups of 64 and 128.
OTHERS = {"VLLM_DISABLED_KERNELS": "MacheteLinearKernel"}
INT4 = Format("trainer_quantize_int4", quantize_to_int4, "int4_kernels", OTHERS)
WITH_EXPERTS = EAGER | {"moe_backend": "marlin"}
CASES = {
    "CUDA graphs": Case(int4(32), CUDA_GRAPHS, [LINEAR]),
    "CUDA graphs, groups of 128": Case(int4(128), CUDA_GRAPHS, [LINEAR]),
    "experts": Case(int4(128), WITH_EXPERTS, ["MARLIN", LINEAR], experts=True),
    "experts, as in a recipe": Case(int4(32), WITH_EXPERTS, ["MARLIN", LINEAR], experts=True, dummy=True),
}


@pytest.fixture(scope="module")
def scene(
    request: pytest.FixtureRequest,
    trainer: Trainer,
    tmp_path_factory: pytest.TempPathFactory,
    tell: Callable[[str], None],
) -> Iterator[Scene]:
    name = request.param
    yield from running(name, CASES[name], INT4, tmp_path_factory.mktemp("int4"), trainer, tell)


@pytest.mark.parametrize("scene", CASES, indirect=True)
def test_two_refits_give_the_engine_that_was_started_from_the_weights(scene: Scene) -> None:
    require_the_engine_that_was_started_from_the_weights(scene)
