"""A vLLM that follows a trainer, each in a process of its own; they meet only through the refit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.workers.trainers.fsdp.mixin import FSDPRefitMixin
from rlrefit.workers.trainers.source_mixin import SourceRefitMixin
from tests.meeting import tell_meeting
from tests.spawn import PATIENT_S, run_alone, run_together
from tests.vllm_processes import vllm_processes

CONFIG = {"bucket_mb": 1, "timeout_s": 120.0, "verify": "full"}
# Of the engine: a small one, whose start is short.
ENGINE = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "bfloat16",
    "kv_cache_memory_bytes": 64 << 20,
}
_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}


def follow[Found](serve: Callable[[Path], Found], train: Callable[[Path], None], folder: Path) -> Found:
    """What the engine's process returns, with the trainer's beside it; ``folder`` is theirs alone."""
    _, found = run_together(
        lambda: run_alone(train, folder, environment={}, timeout_s=PATIENT_S),
        lambda: run_alone(
            serve, folder, environment=_ENVIRONMENT, timeout_s=PATIENT_S, made_by=vllm_processes
        ),
    )
    served: Found = found
    return served


@contextmanager
def joined(
    trained: torch.nn.Module, folder: Path, config: RefitConfig, engine_ranks: int, epoch: int = 0
) -> Iterator[FSDPRefitMixin]:
    """The only rank of a trainer of this model, from where the engine has met it to the end of the epoch."""

    class Trainer(FSDPRefitMixin):
        model = trained
        refit_config = config
        refit_dtype = torch.bfloat16

    trainer = Trainer()
    with met(trainer, folder, engine_ranks, epoch):
        yield trainer


@contextmanager
def met(trainer: SourceRefitMixin, folder: Path, engine_ranks: int, epoch: int = 0) -> Iterator[None]:
    """The same of any trainer, and of a later epoch."""
    rendezvous = trainer.open_refit_rendezvous("127.0.0.1", 1, engine_ranks, epoch)
    tell_meeting(folder, rendezvous, epoch)
    trainer.join_refit(rendezvous, 0)
    yield
    trainer.close_refit()


def likeliest(tokens: int = 6, **more: Any) -> Any:
    """Parameters of a request that takes so many of the likeliest tokens, and ends at no other place."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more)
