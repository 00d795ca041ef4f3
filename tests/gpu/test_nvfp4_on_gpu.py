"""NVFP4 checkpoints of our training in a live vLLM on GPUs without FP4 units, and refits of their packed tensors.

There vLLM 0.21 computes with weights alone in four bits (Marlin), whatever a checkpoint says of inputs, and so it is
compared with training's model without quantized inputs. The trainer is a process on the last GPU, which may be the engine's. Each
case starts an engine, in half a minute.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from .needs import needs
from .nvfp4_trainer import TOKENS, Question, Said, Training, nvfp4_main
from .vllm_live import CUDA_GRAPHS, EAGER, PROMPTS, LiveEngine, engine_environment
from .vllm_trainer import CONFIG, Main, Trainer

pytestmark = [
    *needs("vllm", "transformers"),
    pytest.mark.timeout(150),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0),
        reason="with FP4 units vLLM takes other kernels, which quantize inputs, too",
    ),
]

MARLIN = "MarlinNvFp4LinearKernel"


@dataclass(frozen=True)
class Case:
    """A checkpoint, an engine of it, and what that does with it.

    Attributes:
        experts: in every layer.
        activations: whether training quantizes inputs.
        arguments: of ``LLM``.
        kernels: that vLLM has to choose.
        most: by how much log-probabilities of one token may differ.
    """

    experts: bool
    activations: bool
    arguments: dict[str, Any]
    kernels: list[str]
    most: float


# Both sides compute in BF16: the trainer with weights that are rounded to it, Marlin with exact ones and a scale behind the
# sum. On CPUs BF16 and FP32 differ by 0.09 at most and 0.008 on average for the dense model, and quantization changes it by
# 1.5 and 0.17.
MOST, MEAN = 0.25, 0.04
# A rounding may send a token to another expert.
MOST_OF_EXPERTS = 2.0
CASES = {
    "CUDA graphs": Case(False, True, CUDA_GRAPHS, [MARLIN], MOST),
    "experts": Case(True, True, EAGER, ["MARLIN", MARLIN], MOST_OF_EXPERTS),
    "weights alone": Case(False, False, EAGER, [MARLIN], MOST),
}


class Scene(LiveEngine):
    """An engine that was started from version 0 of the trainer's model."""

    def __init__(self, folder: Path, trainer: Trainer, case: Case, tell: Callable[[str], None]) -> None:
        trainer.commands.put(Training(folder, case.experts, case.activations))
        importlib.import_module("vllm")  # takes seconds, as training does
        losses = trainer.answer(100.0)
        assert isinstance(losses, list), losses
        self.case, self.losses, self._tell = case, losses, tell
        super().__init__(str(folder / "exported"), trainer, CONFIG, case.arguments)
        self.reference, self.digests_a = self.generate(), self.digests()

    def trainer_says(self, index: int, quantized: bool, contexts: list[list[int]]) -> list[Said]:
        self._trainer.commands.put(Question(index, quantized, contexts))
        said = self.sent()
        assert isinstance(said, list), said
        return said

    def check_against_the_trainer(self, index: int) -> None:
        """The engine's greedy tokens and log-probabilities against the fake-quantized model's of this version."""
        sampled = self.generate()
        rows: list[list[int]] = TOKENS.tolist()
        contexts = [p + tokens for p, (tokens, _) in zip(PROMPTS, sampled, strict=True)] + rows
        ours = self.trainer_says(index, True, contexts)
        plain = self.trainer_says(index, False, contexts)
        decoded = [values for _, values in sampled]
        said = decoded + self.prefilled(contexts)

        def joined(found: list[list[float]]) -> torch.Tensor:
            """Of what the trainer gave the contexts, what the engine gave: to tokens that it sampled, and to prompts."""
            values = [*found[: len(decoded)], *found]
            return torch.cat(
                [torch.tensor(v[-len(wanted) :]) for v, wanted in zip(values, said, strict=True)]
            )

        given = joined([s.given for s in ours])
        apart = (torch.cat([torch.tensor(values) for values in said]) - given).abs()
        from_plain = (joined([s.given for s in plain]) - given).abs()
        short = (joined([s.largest for s in ours]) - given)[: sum(map(len, decoded))]
        figures = (
            f"version {index}: log-probabilities are apart by {apart.max():.4f} at most and {apart.mean():.4f} on average, "
            f"from those without quantization by {from_plain.mean():.4f}; greedy tokens are less likely than others by "
            f"{short.max():.4f} at most"
        )
        self._tell(figures)
        assert apart.max() < self.case.most, figures
        assert apart.mean() < MEAN, figures
        assert short.max() < self.case.most, figures
        # So close by quantization, and not because quantization changes little.
        assert apart.mean() < from_plain.mean() / 2, figures


@pytest.fixture(scope="module")
def what_trainer_runs() -> Main:
    return nvfp4_main


@pytest.fixture(scope="module")
def scene(
    request: pytest.FixtureRequest,
    trainer: Trainer,
    tmp_path_factory: pytest.TempPathFactory,
    tell: Callable[[str], None],
) -> Iterator[Scene]:
    case = CASES[request.param]
    with engine_environment({}):
        tell(f"training and starting vLLM: {request.param}")
        began = time.monotonic()
        started = Scene(tmp_path_factory.mktemp("nvfp4"), trainer, case, tell)
        tell(f"vLLM runs after {time.monotonic() - began:.0f} s: {request.param}")
        yield started
        started.close()


@pytest.mark.parametrize("scene", CASES, indirect=True)
def test_vllm_gives_an_exported_checkpoint_the_log_probabilities_of_training(scene: Scene) -> None:
    assert scene.losses[-1] < scene.losses[0] / 2, scene.losses
    assert scene.llm.collective_rpc("nvfp4_kernels") == [scene.case.kernels]
    scene.check_against_the_trainer(0)


@pytest.mark.parametrize("scene", CASES, indirect=True)
def test_two_refits_of_packed_weights_give_the_engine_that_was_started_from_them(scene: Scene) -> None:
    # Packed tensors land as they are and are put in Marlin's order where they are: nothing goes through vLLM's loader.
    assert scene.meet() == 0
    digests_b = None
    for _ in range(2):
        scene.poison()
        records = scene.refit(1)
        assert [record["bytes_misc"] for record in records] == [0]
        assert all(record["bytes_bulk"] > 0 for record in records)
        assert digests_b in (None, scene.digests())
        digests_b = scene.digests()
        assert digests_b != scene.digests_a
        scene.check_against_the_trainer(1)
        scene.poison()
        scene.refit(0)
        assert scene.digests() == scene.digests_a
        assert scene.generate() == scene.reference


def test_a_model_on_the_host_trains_and_exports_beside_a_gpu() -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "qat_nvfp4.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
