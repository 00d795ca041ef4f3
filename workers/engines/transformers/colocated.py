"""A rank of the transformers engine whose weights sleep while a trainer has the memory; on CPUs."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from ....integration.colocated.memory import MemoryWatch, ProcessMemory, empty_cache
from ....integration.colocated.stages import KV_CACHE, TAGS, WEIGHTS, StageRefused
from ....integration.errors import RefitError
from .engine import TransformersEngine

# All bits set are NaN in every floating-point format that weights have.
_NAN = 0xFF


class TransformersSleeper:
    """One rank as the cycle sees it. It has a KV cache only while it generates, so that its ``kv_cache`` sleeps in name.

    Args:
        engine: of this rank.

    Raises:
        RefitError: the engine is on a GPU, where peers keep its weights mapped.
    """

    def __init__(self, engine: TransformersEngine) -> None:
        if engine.model.device.type != "cpu":
            raise RefitError(
                f"the transformers engine is on {engine.model.device}, and gives its memory back on CPUs only. Nothing has "
                "changed; generate with vLLM (generation.backend=vllm), or on GPUs of its own",
                stage="settings",
            )
        self._engine = engine
        self._watch = MemoryWatch(engine.model.device)
        self._asleep: frozenset[str] = frozenset()
        self._pages = _mapped(engine.model)

    def sleep(self, level: int) -> None:
        """As :meth:`~rlrefit.integration.colocated.stages.SleepingEngine.sleep`; until a refit commits nothing is generated.

        Raises:
            StageRefused: level 1, which would keep the weights where they are: in host memory; or refits bring an adapter alone,
                and so no base weights back.
        """
        if self._engine.brings_adapter:
            raise StageRefused(
                "policy.refit.lora is adapter, so that no refit would bring back the base weights, which a sleep discards. Nothing "
                "has changed; set it to merge",
                stage="sleep",
            )
        if level != 2:
            raise StageRefused(
                f"sleep_level is {level}, but on a CPU the weights are in host memory already. Nothing has changed; give 2",
                stage="sleep",
            )
        self._engine.refit_state.mark_dirty(self._engine.refit_state.version)
        for pages in self._pages:
            pages.madvise(mmap.MADV_DONTNEED)
        self._asleep = TAGS

    def wake(self, tags: Sequence[str]) -> None:
        """As :meth:`~rlrefit.integration.colocated.stages.SleepingEngine.wake`; weights are NaN until a refit brings them.

        Raises:
            StageRefused: a tag is unknown, or awake already.
        """
        if wrong := sorted(set(tags) - self._asleep):
            raise StageRefused(
                f"{', '.join(wrong)} can't be woken: asleep is {' and '.join(sorted(self._asleep)) or 'nothing'}. Nothing "
                f"has changed; wake {WEIGHTS} and {KV_CACHE} once each after a sleep",
                stage="wake_up",
            )
        if WEIGHTS in tags:
            for pages in self._pages:
                torch.frombuffer(pages, dtype=torch.uint8).fill_(_NAN)
        self._asleep -= set(tags)

    def asleep(self) -> frozenset[str]:
        """As :meth:`~rlrefit.integration.colocated.stages.SleepingEngine.asleep`."""
        return self._asleep

    def empty_cache(self) -> None:
        """As :meth:`~rlrefit.integration.colocated.stages.SleepingEngine.empty_cache`."""
        empty_cache(self._engine.model.device)

    def memory(self, *, restart: bool = False) -> list[ProcessMemory]:
        """As :meth:`~rlrefit.integration.colocated.stages.SleepingEngine.memory`."""
        found = self._watch.read("engine rank 0")
        if restart:
            self._watch.restart()
        return [found]


def _mapped(model: torch.nn.Module) -> list[mmap.mmap]:
    """Put pages of their own under all parameters, which can be given back and come again at the same address."""
    found: dict[int, tuple[mmap.mmap, torch.UntypedStorage]] = {}
    with torch.no_grad():
        for parameter in model.parameters():
            old = parameter.untyped_storage()
            if old.data_ptr() not in found:
                pages = mmap.mmap(-1, old.nbytes(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                found[old.data_ptr()] = pages, torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
            storage = found[old.data_ptr()][1].copy_(old)
            parameter.data = torch.empty(0, dtype=parameter.dtype).set_(
                storage, parameter.storage_offset(), parameter.shape, parameter.stride()
            )
    return [pages for pages, _ in found.values()]
