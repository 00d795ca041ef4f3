"""Refits of a live vLLM in MXFP8 (:mod:`.quantized_engines`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from rlrefit.recipes.rollout.arguments import mxfp8

from .needs import needs
from .quantized_engines import (
    Case,
    Format,
    Scene,
    require_the_engine_that_was_started_from_the_weights,
    running,
)
from .vllm_checkpoints import mxfp8_of_modelopt, quantize_to_mxfp8
from .vllm_live import CUDA_GRAPHS, EAGER
from .vllm_trainer import Trainer

pytestmark = [*needs("vllm", "transformers"), pytest.mark.timeout(150)]

BLACKWELL = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)
LINEAR = "FlashInferCutlassMxfp8LinearKernel" if BLACKWELL else "MarlinMxfp8LinearKernel"
MXFP8 = Format("trainer_quantize_fp8", quantize_to_mxfp8, "mxfp8_kernels", {})
CASES = {
    "CUDA graphs": Case(mxfp8_of_modelopt(), CUDA_GRAPHS, [LINEAR]),
    "experts": Case(mxfp8(), EAGER, ["MARLIN", LINEAR], experts=True),
    "experts, as in a recipe": Case(mxfp8(), EAGER, ["MARLIN", LINEAR], experts=True, dummy=True),
}
on_every_engine = pytest.mark.parametrize(
    "scene",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                BLACKWELL and case.experts, reason="there vLLM takes experts whose rows are shuffled"
            ),
        )
        for name, case in CASES.items()
    ],
    indirect=True,
)


@pytest.fixture(scope="module")
def scene(
    request: pytest.FixtureRequest,
    trainer: Trainer,
    tmp_path_factory: pytest.TempPathFactory,
    tell: Callable[[str], None],
) -> Iterator[Scene]:
    name = request.param
    yield from running(name, CASES[name], MXFP8, tmp_path_factory.mktemp("mxfp8"), trainer, tell)


@on_every_engine
def test_two_refits_give_the_engine_that_was_started_from_the_weights(scene: Scene) -> None:
    require_the_engine_that_was_started_from_the_weights(scene)
