"""The driver's calls around vLLM's sleep mode, and what each of them leaves in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class SleepCalls(ABC):
    """Of a driver of ``vllm.LLM``."""

    _llm: Any

    @abstractmethod
    def _rpc(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        """Answers of all workers."""

    def asleep(self) -> frozenset[str]:
        """What of ``weights`` and ``kv_cache`` has no memory on any worker at the moment."""
        return frozenset(tag for answer in self._rpc("refit_asleep") for tag in answer["asleep"])

    @property
    def busy(self) -> bool:
        """Whether requests are unfinished."""
        return bool(self._llm.llm_engine.has_unfinished_requests())

    @property
    def sleeps(self) -> bool:
        """Whether vLLM can give its memory back; without its sleep mode a sleep on a GPU is passed over in silence."""
        config = self._llm.llm_engine.vllm_config
        return bool(config.model_config.enable_sleep_mode) or config.device_config.device_type == "cpu"

    def sleep(self, level: int) -> None:
        """Give weights and KV cache back, as ``LLM.sleep`` does; running requests would be aborted."""
        self._llm.sleep(level=level)

    def wake_up(self, tags: Sequence[str]) -> None:
        """Take memory for ``weights``, ``kv_cache`` or both; requests run again once nothing sleeps."""
        self._llm.wake_up(tags=list(tags))

    def empty_cache(self) -> None:
        """Have all workers give back what their allocators cache."""
        self._rpc("refit_empty_cache")

    def memory(self, *, restart: bool = False) -> list[dict[str, Any]]:
        """Of each worker, fields of a ``ProcessMemory``; ``restart`` lets the peaks count anew from here."""
        return self._rpc("refit_memory", restart)
