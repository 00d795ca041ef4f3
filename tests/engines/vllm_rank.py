"""A rank of vLLM under the contract: its own model, loader and worker refit, without an engine around them."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch

from tests.fp8_refits import State, bytes_of, poison

from .contract import RANKS, Seen, SessionContract, SessionEngine, changed_as_it_loads


def show(rank: int, paths: list[str]) -> Seen:
    return SessionContract(rank, begun(rank, paths), paths).run()


def begun(rank: int, paths: list[str]) -> _Rank:
    """A rank of an engine that holds the first checkpoint."""
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    from vllm import _custom_ops
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(_config(paths[0])):
        init_distributed_environment(RANKS, rank, "env://", rank, "gloo")
        initialize_model_parallel(RANKS)
    _custom_ops._supports_onednn = False  # as with rlrefit's plug-in, which keeps linear weights unpacked
    return _Rank(rank, paths)


class _Worker:
    """What a refit uses of vLLM's ``Worker``; it computes nothing."""

    def __init__(self, rank: int, model: torch.nn.Module, config: Any) -> None:
        self.rank = rank
        self.vllm_config = config
        self.model_runner = SimpleNamespace(
            get_model=lambda: model,
            device=torch.device("cpu"),
            reset_encoder_cache=lambda: None,
            execute_model=lambda scheduled: None,
        )

    def sleep(self, level: int = 1) -> None: ...

    def wake_up(self, tags: list[str] | None = None) -> None: ...

    def compile_or_warm_up_model(self) -> None: ...

    def reload_weights(self) -> None: ...


class _Rank(SessionEngine):
    def __init__(self, rank: int, paths: list[str]) -> None:
        from rlrefit.workers.engines.vllm.destination import VllmDestination
        from rlrefit.workers.engines.vllm.worker_refit import WorkerRefit

        self.destination = VllmDestination
        self._paths = paths
        self._model, config = _loaded(paths[0])
        self._worker = _Worker(rank, self._model, config)
        self.worker = WorkerRefit(self._worker)

    def held(self) -> State:
        return bytes_of(dict(self._model.named_parameters()) | dict(self._model.named_buffers()))

    def loaded(self, index: int) -> State:
        model, _ = _loaded(self._paths[index])
        return bytes_of(dict(model.named_parameters()) | dict(model.named_buffers()))

    def poison(self) -> None:
        poison(self._model.parameters())

    def step(self) -> None:
        self._worker.model_runner.execute_model(SimpleNamespace(total_num_scheduled_tokens=1))

    def sleep(self) -> None:
        self._worker.sleep(2)
        self.poison()

    def wake(self) -> None:
        self._worker.wake_up()

    def computing(self, name: str) -> AbstractContextManager[None]:
        self.worker.destination._routes = None  # the trace of the loader as it was
        return changed_as_it_loads(type(self._model), name)


def _config(path: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=path,
        tensor_parallel_size=RANKS,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=64,
    ).create_engine_config()


def _loaded(path: str) -> tuple[torch.nn.Module, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    config = _config(path)
    with set_current_vllm_config(config):
        return get_model(vllm_config=config), config
