"""A live vLLM whose codes and scales the trainer makes by its kernel from BF16, and what each such format has to do.

The checkpoints that the engine is compared with were quantized by torch on the CPU. The trainer is a process on the last GPU,
which may be the engine's. Each case starts an engine, in half a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .vllm_checkpoints import write_checkpoint
from .vllm_live import LiveEngine, engine_environment, require_refits_to_another_version_and_back
from .vllm_trainer import CONFIG, Trainer


@dataclass(frozen=True)
class Format:
    """How weights are quantized.

    Attributes:
        setting: by which the trainer does it.
        quantize: a checkpoint in BF16, as a ``quantization_config`` says.
        told_by: what tells of the engine's kernels (:mod:`.vllm_extension`).
        environment: of the engine.
    """

    setting: str
    quantize: Callable[[Path, dict[str, Any]], None]
    told_by: str
    environment: Mapping[str, str]


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


class Scene(LiveEngine):
    """An engine and a trainer of two versions of the same model."""

    def __init__(self, folder: Path, trainer: Trainer, case: Case, format: Format) -> None:
        trained = [
            write_checkpoint(folder / f"trained_{seed}", seed, fp8=False, experts=case.experts)
            for seed in (0, 1)
        ]
        path, arguments = trained[0], dict(case.arguments)
        if case.dummy:
            arguments |= {"hf_overrides": {"quantization_config": case.quantization}, "load_format": "dummy"}
        else:
            path = write_checkpoint(folder / "served", 0, fp8=False, experts=case.experts)
            format.quantize(Path(path), case.quantization)
        config = replace(CONFIG, **{format.setting: True})
        super().__init__(path, trainer, config, arguments)
        self.case = case
        self.format = format
        trainer.commands.put(config)
        trainer.commands.put(trained)


def running(
    name: str, case: Case, format: Format, folder: Path, trainer: Trainer, tell: Callable[[str], None]
) -> Iterator[Scene]:
    """The engine of a case, which is closed in the end."""
    with engine_environment(dict(format.environment)):
        tell(f"starting vLLM: {name}")
        began = time.monotonic()
        started = Scene(folder, trainer, case, format)
        tell(f"vLLM runs after {time.monotonic() - began:.0f} s: {name}")
        yield started
        started.close()


def require_the_engine_that_was_started_from_the_weights(scene: Scene) -> None:
    """Two refits give it, each to another version and back, from poisoned memory, and in place."""
    assert scene.llm.collective_rpc(scene.format.told_by) == [scene.case.kernels]
    # Codes and scales land as they are and are put in the kernel's order where they are: nothing goes through vLLM's loader.
    assert scene.meet() == 0
    if scene.case.dummy:
        scene.refit(0)
    require_refits_to_another_version_and_back(scene)
