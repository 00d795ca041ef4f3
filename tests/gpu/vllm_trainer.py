"""A trainer on the last GPU, in a process of its own, that sends one checkpoint after the other."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control import Rendezvous

from .vllm_checkpoints import read_checkpoint

# With the number of a GPU and the queues of commands and answers.
Main = Callable[[int, Any, Any], None]
CONFIG = RefitConfig(bucket_mb=4, timeout_s=120.0, verify="full")


class CheckpointSource:
    """A trainer rank that holds all weights whole, and takes them from one checkpoint after the other."""

    def __init__(self, paths: Sequence[str], device: torch.device) -> None:
        self.device = device
        self._paths = paths
        self._held = {name: tensor.to(device) for name, tensor in read_checkpoint(paths[0]).items()}

    def take_on(self, index: int) -> None:
        for name, tensor in read_checkpoint(self._paths[index]).items():
            self._held[name].copy_(tensor)

    def specs(self) -> list[Any]:
        from rlrefit.integration.weights.manifest import TensorSpec

        return [TensorSpec(name, tuple(t.shape), t.dtype) for name, t in self._held.items()]

    def fragments(self) -> tuple[list[Any], dict[str, str]]:
        from rlrefit.integration.layout import Fragment

        found = [
            Fragment(name, tuple(t.shape), tuple((0, n) for n in t.shape), t)
            for name, t in self._held.items()
        ]
        return found, {}

    def prepare(self) -> None:
        pass

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self._held[name]) for name in names)

    def storage_key(self) -> Any:
        return tuple(t.data_ptr() for t in self._held.values())


def trainer_main(device: int, commands: Any, answers: Any) -> None:
    """Obey until told None: another configuration, weights of other checkpoints (paths), join (a rendezvous), send
    (index, version)."""
    from rlrefit.integration.session import RefitSession

    config = CONFIG
    try:
        torch.cuda.set_device(device)
        source: CheckpointSource | None = None
        session: RefitSession | None = None
        while (command := commands.get()) is not None:
            if isinstance(command, RefitConfig):
                config = command
                continue
            if isinstance(command, list):
                source = CheckpointSource(command, torch.device("cuda", device))
                continue
            assert source is not None
            try:
                if isinstance(command, Rendezvous):
                    if session is not None:
                        session.close()
                    session = None
                    session = RefitSession.open(command, 0, lambda held=source: held, config)
                    answers.put(len(session.manifest.specs("misc")))
                    continue
                assert session is not None
                index, version = command
                source.take_on(index)
                answers.put(session.refit(version).to_json())
            except RuntimeError as error:
                answers.put(str(error))
    except BaseException:
        answers.put(traceback.format_exc())
        raise


class Trainer:
    """The process on the last GPU; one for all engines, since it takes seconds to start.

    Args:
        main: what it runs.
    """

    def __init__(self, main: Main = trainer_main) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.commands, self.answers = spawn.Queue(), spawn.Queue()
        device = torch.cuda.device_count() - 1
        self._process = spawn.Process(target=main, args=(device, self.commands, self.answers))
        self._process.start()

    def answer(self, timeout_s: float = 60.0) -> Any:
        return self.answers.get(timeout=timeout_s)

    def close(self) -> None:
        self.commands.put(None)
        self._process.join(20)
        self._process.kill()
