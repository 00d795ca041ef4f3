"""TensorRT-LLM under the contract: rlrefit's worker extension, driver and sender over a double of the package and its engine."""

from __future__ import annotations

from contextlib import contextmanager

import torch

from rlrefit.integration.colocated.stages import KV_CACHE, WEIGHTS
from tests.gpu.vllm_checkpoints import read_checkpoint
from tests.trtllm.conftest import extension_over
from tests.trtllm.engine_double import expected
from tests.trtllm.scene import Scene

from .contract import JOINED, TURNS, UNKNOWN, WHOLE, Seen, refusal_of


def show(paths: list[str]) -> list[Seen]:
    with contextmanager(extension_over)("both") as extension:
        return _Contract(Scene(extension, weights=read_checkpoint(paths[0])), paths).run()


class _Contract:
    """Of an engine of one worker."""

    def __init__(self, scene: Scene, paths: list[str]) -> None:
        self._scene = scene
        self._weights = [read_checkpoint(path) for path in paths]
        self._seen = [Seen() for _ in scene.workers]
        self._version = 0

    def run(self) -> list[Seen]:
        for index in TURNS:
            self._refit(f"buckets {self._version}", index)
        self._arrive("lacking", [name for name in self._weights[0] if name != JOINED])
        self._refit("filled", 0)
        self._arrive("unknown", changed={UNKNOWN: torch.ones(16, 16)})
        self._refit("known", 1)
        # TensorRT-LLM's loader would convert it.
        self._arrive("computed", changed={WHOLE: self._weights[0][WHOLE].float()})
        self._scene.workers[-1].fail_at(self._scene.workers[-1].counts()["buckets"] + 2)
        self._try("failing", lambda: self._scene.sender.refit(self._version))
        self._step("after a failure")
        self._refit("mended", 0)
        self._scene.driver.sleep()
        self._step("asleep")
        self._try("asleep", lambda: self._scene.sender.refit(self._version))
        self._scene.driver.wake([WEIGHTS])
        self._step("woken")
        self._poison()
        self._scene.source.weights = self._weights[1]
        self._scene.sender.refit(self._version)
        self._scene.driver.wake([KV_CACHE])
        self._look("slept", 1)
        return self._seen

    def _refit(self, occasion: str, index: int) -> None:
        self._scene.source.weights = self._weights[index]
        self._poison()
        self._scene.sender.refit(self._version)
        self._look(occasion, index)
        for seen in self._seen:
            seen.versions.append(self._scene.driver.version)
        self._version += 1

    def _arrive(
        self, occasion: str, names: list[str] | None = None, changed: dict[str, torch.Tensor] | None = None
    ) -> None:
        """A refit of other weights than were announced."""
        scene = self._scene

        def arrive() -> None:
            scene.driver.begin(self._version, scene.source.specs())
            scene.driver.load(scene.handles(names, changed))
            scene.driver.finish()

        self._try(occasion, arrive)
        self._step(f"after {occasion}")

    def _try(self, occasion: str, call: object) -> None:
        refused = refusal_of(call)  # type: ignore[arg-type]
        for seen in self._seen:
            seen.refused[occasion] = refused

    def _step(self, occasion: str) -> None:
        for seen, worker in zip(self._seen, self._scene.workers, strict=True):
            seen.steps[occasion] = refusal_of(lambda worker=worker: worker.step("a"))

    def _poison(self) -> None:
        for worker in self._scene.workers:
            model = worker.engine.model_engine.model
            model.derived = {}
            for tensor in model.held.values():
                tensor.view(torch.uint8).fill_(0xFF)

    def _look(self, occasion: str, index: int) -> None:
        own = expected(self._weights[index])
        for seen, worker in zip(self._seen, self._scene.workers, strict=True):
            held = worker.held()
            seen.differing[occasion] = [name for name in own if held[name] != own[name]]
        self._step(occasion)
