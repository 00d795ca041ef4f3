"""Refits of a live vLLM in INT4, whose codes and scales the trainer makes by its kernel from BF16.

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

from rlrefit.recipes.rollout.arguments import int4

from .needs import needs
from .vllm_checkpoints import quantize_to_int4, write_checkpoint
from .vllm_live import CUDA_GRAPHS, EAGER, LiveEngine, engine_environment
from .vllm_trainer import CONFIG, Trainer

pytestmark = [*needs("vllm", "transformers"), pytest.mark.timeout(150)]

LINEAR = "MarlinLinearKernel"
# vLLM's own choice on Hopper, for groups of 64 and 128.
OTHERS = {"VLLM_DISABLED_KERNELS": "MacheteLinearKernel"}
WITH_EXPERTS = EAGER | {"moe_backend": "marlin"}


@dataclass(frozen=True)
class Case:
    """A checkpoint, an engine of it, and the kernels that vLLM has to choose.

    ``dummy``: the engine starts as a recipe's does, from the checkpoint in BF16 and with random codes and scales.
    """

    group: int
    arguments: dict[str, Any]
    kernels: list[str]
    experts: bool = False
    dummy: bool = False


CASES = {
    "CUDA graphs": Case(32, CUDA_GRAPHS, [LINEAR]),
    "CUDA graphs, groups of 128": Case(128, CUDA_GRAPHS, [LINEAR]),
    "experts": Case(128, WITH_EXPERTS, ["MARLIN", LINEAR], experts=True),
    "experts, as in a recipe": Case(32, WITH_EXPERTS, ["MARLIN", LINEAR], experts=True, dummy=True),
}


class Scene(LiveEngine):
    """An engine and a trainer of two versions of the same model."""

    def __init__(self, folder: Path, trainer: Trainer, case: Case) -> None:
        trained = [
            write_checkpoint(folder / f"trained_{seed}", seed, fp8=False, experts=case.experts)
            for seed in (0, 1)
        ]
        path, arguments, quantization = trained[0], dict(case.arguments), int4(case.group)
        if case.dummy:
            arguments |= {"hf_overrides": {"quantization_config": quantization}, "load_format": "dummy"}
        else:
            path = write_checkpoint(folder / "served", 0, fp8=False, experts=case.experts)
            quantize_to_int4(Path(path), quantization)
        config = replace(CONFIG, trainer_quantize_int4=True)
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
    with engine_environment(OTHERS):
        tell(f"starting vLLM: {request.param}")
        began = time.monotonic()
        started = Scene(tmp_path_factory.mktemp("int4"), trainer, CASES[request.param])
        tell(f"vLLM runs after {time.monotonic() - began:.0f} s: {request.param}")
        yield started
        started.close()


@pytest.mark.parametrize("scene", CASES, indirect=True)
def test_two_refits_give_the_engine_that_was_started_from_the_weights(scene: Scene) -> None:
    assert scene.llm.collective_rpc("int4_kernels") == [scene.case.kernels]
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
