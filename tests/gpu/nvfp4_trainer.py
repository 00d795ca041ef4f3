"""A trainer of a tiny Qwen3 in NVFP4, in a process of its own, that exports its model, sends it, and says what it gives."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlrefit.integration.control import Rendezvous
from rlrefit.workers.trainers.fsdp.mixin import FSDPRefitMixin
from rlrefit.workers.trainers.fsdp.source import FSDPSource
from rlrefit.workers.trainers.qat.checkpoint import write_checkpoint
from rlrefit.workers.trainers.qat.config import QATConfig
from rlrefit.workers.trainers.qat.fsdp import quantize_module
from rlrefit.workers.trainers.qat.mixin import QATRefitMixin

from . import vllm_checkpoints
from .vllm_trainer import CONFIG

# Before the export, and before the second version that is sent.
STEPS, FURTHER = 30, 10
TOKENS = torch.randint(3, 1024, (8, 48), generator=torch.Generator().manual_seed(5))


@dataclass(frozen=True)
class Training:
    """What to train: experts or none, inputs quantized too or weights alone; ``exported`` and more go into ``folder``."""

    folder: Path
    experts: bool
    activations: bool


@dataclass(frozen=True)
class Question:
    """What a version gives each token of the contexts but their first, with weights quantized (and inputs not) or as they are."""

    index: int
    quantized: bool
    contexts: list[list[int]]


@dataclass(frozen=True)
class Said:
    """Of one context, from its second token on.

    Attributes:
        given: the log-probability of each token.
        largest: that of the likeliest one in its place.
    """

    given: list[float]
    largest: list[float]


class QATWorker(QATRefitMixin, FSDPRefitMixin):
    """Trains, exports version 0, trains on to version 1; both are kept."""

    refit_config = CONFIG
    refit_dtype = torch.bfloat16

    def __init__(self, training: Training, device: torch.device) -> None:
        self._device = device
        self._original = vllm_checkpoints.write_checkpoint(
            training.folder / "original", 0, fp8=False, experts=training.experts
        )
        self.model = self._loaded(torch.float32)
        self.qat = quantize_module(self.model, QATConfig(activations=training.activations))
        if training.activations:
            with torch.no_grad(), self.qat.calibrating():
                self.model(TOKENS.to(device))
        self.qat.refresh()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.losses = self._train(STEPS)
        self._versions = [self._state()]
        source = FSDPSource(self.model, torch.bfloat16)
        write_checkpoint(training.folder / "exported", self._original, source, self.qat)
        self._train(FURTHER)
        self._versions.append(self._state())

    def take_on(self, index: int) -> None:
        """Hold a version, as a trainer does that has loaded one."""
        self.model.load_state_dict(self._versions[index])
        self.qat.refresh()

    @torch.no_grad()
    def answer(self, question: Question) -> list[Said]:
        """In BF16, as engines compute, by the code that trains."""
        model = self._loaded(torch.bfloat16)
        model.load_state_dict(self._versions[question.index])
        if question.quantized:
            quantize_module(model, QATConfig(activations=False)).refresh()
        return [self._said(model, context) for context in question.contexts]

    def _said(self, model: Any, context: list[int]) -> Said:
        ids = torch.tensor(context, device=self._device)
        found = model(ids[None]).logits[0, :-1].float().log_softmax(-1)
        given = found.gather(-1, ids[1:, None]).squeeze(-1)
        return Said(given.tolist(), found.amax(-1).tolist())

    def _loaded(self, dtype: torch.dtype) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self._original, dtype=dtype).to(self._device)

    def _train(self, steps: int) -> list[float]:
        ids = TOKENS.to(self._device)
        losses = []
        for _ in range(steps):
            loss = self.model(ids, labels=ids).loss
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.qat.refresh()
            losses.append(loss.item())
        return losses

    def _state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def nvfp4_main(device: int, commands: Any, answers: Any) -> None:
    """Obey on a GPU until told None, as :func:`obey` does."""
    torch.cuda.set_device(device)
    obey(torch.device("cuda", device), commands, answers)


def obey(device: torch.device, commands: Any, answers: Any) -> None:
    """Train (a training), say (a question), join (a rendezvous), send (index, version); until told None."""
    worker: QATWorker | None = None
    try:
        while (command := commands.get()) is not None:
            if isinstance(command, Training):
                worker = QATWorker(command, device)
                answers.put(worker.losses)
                continue
            assert worker is not None
            try:
                answers.put(_answered(worker, command))
            except RuntimeError as error:
                answers.put(str(error))
        if worker is not None:
            worker.close_refit()
    except BaseException:
        answers.put(traceback.format_exc())
        raise


def _answered(worker: QATWorker, command: Any) -> Any:
    if isinstance(command, Question):
        return worker.answer(command)
    if isinstance(command, Rendezvous):
        return worker.join_refit(command.to_json(), 0)["misc"]
    index, version = command
    worker.take_on(index)
    return worker.refit(version)
