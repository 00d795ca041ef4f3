"""A trainer and a running engine, and what tests do with the two."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from vllm_checkpoints import dense_config, moe_config, read_checkpoint
from vllm_engines import GEN_RANKS, PROMPTS, TOKENS, Engine, Sampled, ScriptEngine, ServerEngine

from rlrefit.recipes.algorithms.divergence import generation_kl
from tests.ahead import left_to_all
from tests.megatron_trainers import Trainers
from tests.vllm_cpu import PACKS_EXPERTS

CONFIGS = {"qwen3": dense_config(tied=True), "qwen3-moe": moe_config()}
# Of a step of an engine that goes on while a test acts.
_PACE_S = 0.03
ENGINES: dict[str, type[Engine]] = {"qwen3": ScriptEngine, "qwen3-moe": ServerEngine}


def _by(kind: type[Engine]) -> pytest.MarkDecorator:
    """With an engine of one kind; ``make test-all`` and the newer vLLMs of ``make test-engines`` take the other one too."""
    others = {model for model, engine in ENGINES.items() if engine is not kind}
    return pytest.mark.parametrize("scene", left_to_all(CONFIGS, others), indirect=True)


BY_A_SCRIPT, BY_A_SERVER = _by(ScriptEngine), _by(ServerEngine)


@dataclass
class Scene:
    """A trainer, and an engine that was started from what Bridge exported of the trainer's weights A.

    ``paths`` are the checkpoints A and B, both as Bridge exports them.
    """

    model: str
    trainers: Trainers
    engine: Engine
    paths: tuple[str, str]
    sampled_a: list[Sampled] = field(default_factory=list)
    digests_a: list[dict[str, str]] = field(default_factory=list)
    guarded: list[bool] = field(default_factory=list)
    version: int = -1

    def digests(self) -> list[dict[str, str]]:
        return self.engine.call("refit_parameter_digests")

    def meet(self, delta: str = "off") -> None:
        """A new epoch."""
        rendezvous = self.trainers.do("open", self.model, GEN_RANKS)[0]
        joining = self.trainers.start("join", self.model, rendezvous, delta)
        self.engine.init(rendezvous, delta)
        names = read_checkpoint(self.paths[0])
        packed = sum(PACKS_EXPERTS and ".mlp.experts." in name for name in names)
        assert {routes["bulk"] for routes in joining.result()} == {len(names) - self.misc - packed}

    @property
    def misc(self) -> int:
        """Weights without a shard rule: the router of each layer."""
        return CONFIGS[self.model].num_hidden_layers if self.model == "qwen3-moe" else 0

    def serves_a(self) -> bool:
        """Whether the engine generates as it did at its start."""
        return [s.values() for s in self.engine.generate()] == [s.values() for s in self.sampled_a]

    def send(self, index: int) -> Future[list[Any]]:
        """The trainer takes on A (0) or B (1) and sends it."""
        self.version += 1
        return self.trainers.start("refit", self.model, index, self.version)

    def refit(self, index: int) -> list[dict[str, Any]]:
        sending = self.send(index)
        records = self.engine.refit(self.version)
        assert all(isinstance(record, dict) for record in sending.result())
        return records

    def generate_and(
        self, act: Callable[[], None], after: int, prompts: list[list[int]], tokens: int
    ) -> list[Sampled]:
        """What requests give in which ``act`` is called once, when they have gone so far.

        A server's engine goes on meanwhile: slowly, or they would end before that on a busy machine.
        """
        begun = threading.Lock()

        def turn(count: int) -> None:
            if count >= after and begun.acquire(blocking=False):
                try:
                    act()
                finally:
                    self._pace(0.0)

        self._pace(_PACE_S)
        found = self.engine.generate_through(turn, prompts, tokens)
        assert begun.locked()
        return found

    def _pace(self, seconds: float) -> None:
        if isinstance(self.engine, ServerEngine):
            self.engine.call("probe_pace", seconds)

    def refit_in(
        self, index: int, mode: Any, after: int, prompts: list[list[int]], tokens: int
    ) -> list[Sampled]:
        """What requests give in which the engine is refitted with A (0) or B (1)."""
        sending: list[Any] = []

        def act() -> None:
            sending.append(self.send(index))
            self.engine.refit(self.version, mode)

        found = self.generate_and(act, after, prompts, tokens)
        assert all(isinstance(record, dict) for record in sending[0].result())
        return found

    def kl(self, sampled: list[Sampled], index: int) -> float:
        """Generation KL, in nats, of what the engine gave to ``PROMPTS``, with A (0) or B (1) in the trainer."""
        contexts = [prompt + found.tokens for prompt, found in zip(PROMPTS, sampled, strict=True)]
        ours = self.trainers.do("log_probs", self.model, index, contexts)[0]
        theirs = torch.tensor([found.logprobs for found in sampled])
        return generation_kl(torch.tensor([row[-TOKENS:] for row in ours]), theirs, torch.ones_like(theirs))
