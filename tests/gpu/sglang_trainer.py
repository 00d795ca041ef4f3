"""A trainer beside an SGLang engine: shard to shard as :mod:`.vllm_trainer`, and SGLang's own broadcast to compare with."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from dataclasses import replace
from typing import Any

import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control import Rendezvous

from .vllm_trainer import CheckpointSource

CONFIG = RefitConfig(bucket_mb=64, timeout_s=120.0, verify="sampled")


def sglang_trainer_main(device: int, commands: Any, answers: Any) -> None:
    """Obey until told None: ``(method, arguments)`` of :class:`_Trainer`."""
    try:
        # As SGLang sets it for the engine's processes; ranks of one communicator have to agree in it.
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
        torch.cuda.set_device(device)
        import sglang.srt.utils  # takes its time, while the engine starts

        trainer = _Trainer(torch.device("cuda", device), sglang.srt.utils.init_custom_process_group)
        while (command := commands.get()) is not None:
            method, arguments = command
            try:
                answers.put((True, getattr(trainer, method)(*arguments)))
            except RuntimeError:
                answers.put((False, traceback.format_exc()))
    except BaseException:
        answers.put((False, traceback.format_exc()))
        raise


class _Trainer:
    def __init__(self, device: torch.device, make_group: Any) -> None:
        self._device, self._make_group = device, make_group
        self._config = CONFIG
        self._source: CheckpointSource | None = None
        self._session: Any = None
        self._group: Any = None

    def hold(self, paths: list[str], quantize: bool = False) -> list[tuple[str, list[int], str]]:
        """Take on the first of these checkpoints; names, shapes and dtypes of its weights.

        With ``quantize`` it sends FP8 blocks of them where the engine holds such.
        """
        self._config = replace(CONFIG, trainer_quantize_fp8=quantize)
        self._source = CheckpointSource(paths, self._device)
        return [
            (name, list(shape), str(dtype).removeprefix("torch."))
            for name, shape, dtype in self._source.specs()
        ]

    def take_on(self, index: int) -> None:
        assert self._source is not None
        self._source.take_on(index)
        torch.cuda.synchronize(self._device)

    def join(self, meeting: Rendezvous) -> int:
        from rlrefit.integration.session import RefitSession

        source = self._source
        assert source is not None
        self._session = RefitSession.open(meeting, 0, lambda: source, self._config)
        return len(self._session.manifest.specs("misc"))

    def send(self, version: int) -> dict[str, Any]:
        record: dict[str, Any] = self._session.refit(version).to_json()
        return record

    def leave(self) -> None:
        self._session.close()
        self._session = None

    def join_broadcast(self, port: int, world: int) -> None:
        self._group = self._make_group(
            backend="nccl",
            init_method=f"tcp://127.0.0.1:{port}",
            world_size=world,
            rank=0,
            group_name="weight_update_group",
        )

    def broadcast(self) -> float:
        """Seconds, until the last weight has left."""
        assert self._source is not None
        began = time.perf_counter()
        handles = [
            torch.distributed.broadcast(tensor, 0, group=self._group, async_op=True)
            for _, tensor in self._source.export([name for name, *_ in self._source.specs()])
        ]
        for handle in handles:
            handle.wait()
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - began


class SglangTrainer:
    """The process on the last GPU."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._commands, self._answers = spawn.Queue(), spawn.Queue()
        device = torch.cuda.device_count() - 1
        self._process = spawn.Process(
            target=sglang_trainer_main, args=(device, self._commands, self._answers)
        )
        self._process.start()

    def begin(self, method: str, *arguments: Any) -> None:
        """Have it do something; :meth:`end` waits for it."""
        self._commands.put((method, arguments))

    def end(self) -> Any:
        """What it answers."""
        succeeded, found = self._answers.get(timeout=150)
        assert succeeded, found
        return found

    def do(self, method: str, *arguments: Any) -> Any:
        """Both."""
        self.begin(method, *arguments)
        return self.end()

    def close(self) -> None:
        self._commands.put(None)
        self._process.join(20)
        self._process.kill()
