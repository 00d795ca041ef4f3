"""Refits of a live vLLM in MXFP8, whose codes and scales the trainer makes by its kernel from BF16.

The checkpoints that the engine is compared with were quantized by torch on the CPU. The trainer is a process on the last GPU,
which may be the engine's. Each case starts an engine, in half a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlrefit.recipes.rollout.arguments import mxfp8

from .needs import needs
from .vllm_checkpoints import mxfp8_of_modelopt, quantize_to_mxfp8, write_checkpoint
from .vllm_live import CUDA_GRAPHS, EAGER, LiveEngine, engine_environment
from .vllm_trainer import CONFIG, Trainer

pytestmark = [*needs("vllm", "transformers"), pytest.mark.timeout(150)]

BLACKWELL = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)
LINEAR = "FlashInferCutlassMxfp8LinearKernel" if BLACKWELL else "MarlinMxfp8LinearKernel"


@dataclass(frozen=True)
class Case:
    """A checkpoint, an engine of it, and the kernels that vLLM has to choose.

    ``dummy``: the engine starts as a recipe's does, from the checkpoint in BF16 and with random codes and scales.
    """

    quantization: dict[str, Any]
    arguments: dict[str, Any]
    kernels: list[str]
    experts: bool = False
    dummy: bool = False


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


class Scene(LiveEngine):
    """An engine and a trainer of two versions of the same model."""

    def __init__(self, folder: Path, trainer: Trainer, case: Case) -> None:
        trained = [
            write_checkpoint(folder / f"trained_{seed}", seed, fp8=False, experts=case.experts)
            for seed in (0, 1)
        ]
        path, arguments = trained[0], dict(case.arguments)
        if case.dummy:
            arguments |= {"hf_overrides": {"quantization_config": case.quantization}, "load_format": "dummy"}
        else:
            path = write_checkpoint(folder / "served", 0, fp8=False, experts=case.experts)
            quantize_to_mxfp8(Path(path), case.quantization)
        config = replace(CONFIG, trainer_quantize_fp8=True)
        super().__init__(path, trainer, config, arguments)
        self.case = case
        trainer.commands.put(config)
        trainer.commands.put(trained)


@pytest.fixture(scope="module")
def scene(
    request: pytest.FixtureRequest,
    trainer: Trainer,
    tmp_path_factory: pytest.TempPathFactory,
    tell: Callable[[str], None],
) -> Iterator[Scene]:
    with engine_environment({}):
        tell(f"starting vLLM: {request.param}")
        began = time.monotonic()
        started = Scene(tmp_path_factory.mktemp("mxfp8"), trainer, CASES[request.param])
        tell(f"vLLM runs after {time.monotonic() - began:.0f} s: {request.param}")
        yield started
        started.close()


@on_every_engine
def test_two_refits_give_the_engine_that_was_started_from_the_weights(scene: Scene) -> None:
    assert scene.llm.collective_rpc("mxfp8_kernels") == [scene.case.kernels]
    # Codes and scales land as they are and are put in the kernel's order where they are: nothing goes through vLLM's loader.
    assert scene.meet() == 0
    if scene.case.dummy:
        scene.refit(0)
    reference, digests_a = scene.generate(), scene.digests()
    digests_b = None
    for _ in range(2):
        scene.poison()
        records = scene.refit(1)
        assert [record["bytes_misc"] for record in records] == [0]
        assert digests_b in (None, scene.digests())
        digests_b = scene.digests()
        assert digests_b != digests_a
        assert scene.generate() != reference
        scene.poison()
        scene.refit(0)
        assert scene.digests() == digests_a
        assert scene.generate() == reference
