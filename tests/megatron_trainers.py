"""Two Megatron ranks (TP2, gloo) in processes of their own, that do what a test tells them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.spawn import run_ranks

RANKS = 2
CONFIG = {"transport": "auto", "bucket_mb": 1, "timeout_s": 120.0, "verify": "full"}


class Trainers:
    """A trainer of each model.

    Args:
        models: checkpoint folders by the model's name.
        kind: of trainer, for each rank.
        args: of that kind, beside.
        built_with: of ``build_megatron``.
    """

    def __init__(
        self,
        models: dict[str, Sequence[str]],
        *args: Any,
        kind: type[MegatronTrainer] | None = None,
        **built_with: Any,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._commands = [context.Queue() for _ in range(RANKS)]
        self._answers = context.Queue()
        self._pool = ThreadPoolExecutor(2)
        self._ranks = self._pool.submit(
            run_ranks,
            obey,
            RANKS,
            kind or MegatronTrainer,
            (models, built_with, *args),
            self._commands,
            self._answers,
            timeout_s=580.0,
        )

    def do(self, method: str, *args: Any) -> list[Any]:
        """Have both ranks call a method of :class:`MegatronTrainer`, and return what they return."""
        for commands in self._commands:
            commands.put((method, args))
        found: dict[int, Any] = {}
        while len(found) < RANKS:
            rank, answer = self._answers.get(timeout=240)
            found[rank] = answer
        return [found[rank] for rank in range(RANKS)]

    def start(self, method: str, *args: Any) -> Future[list[Any]]:
        """As :meth:`do`, without waiting."""
        return self._pool.submit(self.do, method, *args)

    def close(self) -> None:
        for commands in self._commands:
            commands.put(None)
        self._ranks.result(60)
        self._pool.shutdown()


class MegatronTrainer:
    def __init__(self, rank: int, models: dict[str, Sequence[str]], built_with: dict[str, Any]) -> None:
        from rlrefit.integration.config import RefitConfig
        from rlrefit.workers.trainers.megatron.mixin import MegatronRefitMixin
        from rlrefit.workers.trainers.megatron.model import MegatronLayout, build_megatron

        class Worker(MegatronRefitMixin):
            def __init__(self, path: str) -> None:
                built = build_megatron(path, MegatronLayout(tensor_parallel=2), **built_with)
                self.model, self.bridge, self.refit_config = built.model, built.bridge, RefitConfig(**CONFIG)

        self._rank = rank
        self._models = models
        self._workers = {name: Worker(paths[0]) for name, paths in models.items()}

    def export(self, model: str, index: int, folder: str) -> None:
        """Write what Bridge exports after the trainer took on checkpoint ``index``."""
        from safetensors.torch import save_file

        worker = self._workers[model]
        self._take_on(model, index)
        tensors = dict(worker.bridge.export_hf_weights(worker.model, cpu=True, show_progress=False))
        if self._rank == 0:
            save_file({n: t.contiguous() for n, t in tensors.items()}, Path(folder) / "model.safetensors")

    def open(self, model: str, gen_ranks: int) -> dict[str, Any] | None:
        if self._rank:
            return None
        return self._workers[model].open_refit_rendezvous("127.0.0.1", RANKS, gen_ranks)

    def join(self, model: str, rendezvous: dict[str, Any], delta: str = "off") -> dict[str, Any]:
        worker = self._workers[model]
        worker.refit_config = replace(worker.refit_config, delta=delta)
        return worker.join_refit(rendezvous, self._rank)

    def refit(self, model: str, index: int, version: int) -> dict[str, Any] | str:
        """Take on checkpoint ``index`` and send it; the record, or the error's text."""
        from rlrefit.integration.errors import RefitError

        self._take_on(model, index)
        try:
            return self._workers[model].refit(version)
        except RefitError as error:
            return f"{type(error).__name__}: {error}"

    def refuse_next(self, model: str) -> None:
        """Have rank 1 alone refuse to send its weights in the next refit."""
        from rlrefit.integration.errors import RefitError

        source = self._workers[model]._prepared_source()

        def refuse() -> None:
            del source.prepare
            raise RefitError("no weights today", stage="export")

        if self._rank == 1:
            source.prepare = refuse

    def log_probs(self, model: str, index: int, contexts: Sequence[Sequence[int]]) -> list[list[float]]:
        """What the weights of checkpoint ``index`` give each token but the first of every context."""
        import torch

        self._take_on(model, index)
        width = max(map(len, contexts))
        width += width % RANKS  # sequence parallelism cuts it in equal parts
        tokens = torch.tensor([[*context, *[0] * (width - len(context))] for context in contexts])
        positions = torch.arange(width).expand_as(tokens)
        with torch.no_grad():
            losses = self._workers[model].model[0](tokens, positions, None, labels=tokens.roll(-1, dims=1))
        return [(-row[: len(c) - 1].float()).tolist() for row, c in zip(losses, contexts, strict=True)]

    def close(self, model: str) -> None:
        self._workers[model].close_refit()

    def _take_on(self, model: str, index: int) -> None:
        worker = self._workers[model]
        type(worker.bridge).from_hf_pretrained(self._models[model][index]).load_hf_weights(worker.model)


def obey(
    rank: int,
    kind: type[MegatronTrainer],
    args: tuple[Any, ...],
    commands: Sequence[Any],
    answers: Any,
) -> None:
    trainer = kind(rank, *args)
    while (command := commands[rank].get()) is not None:
        method, args = command
        answers.put((rank, getattr(trainer, method)(*args)))
