"""The worker extension with what tests want to know and do beside it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import torch
from vllm_checkpoints import read_checkpoint

from rlrefit.integration.errors import PeerLost
from rlrefit.workers.engines.vllm.drafters import live_drafter
from rlrefit.workers.engines.vllm.extension import VllmRefitExtension


class ProbeExtension(VllmRefitExtension):
    def probe_trace(self) -> int:
        """Which trace this worker goes by."""
        return id(self.refit_destination._routes)

    def probe_guarded(self) -> bool:
        """Whether the weights are guarded already."""
        return "_rlrefit_worker_refit" in vars(self)

    def probe_fail_next(self) -> None:
        """Let the next refit fail after its first write."""
        refit = self._refit

        def failing(version: int) -> None:
            del refit.refit
            refit.refit_state.mark_dirty(version)
            raise PeerLost("a trainer died in the middle", stage="transfer", rank=2, blamed=1)

        refit.refit = failing

    def probe_end_the_engine_instead_of(self, method: str) -> None:
        """End the engine core, whose worker this is, where this worker would answer."""

        def ending(*args: Any, **kwargs: Any) -> None:
            core = multiprocessing.parent_process()
            assert core is not None
            os.kill(core.pid, signal.SIGKILL)
            time.sleep(60)  # of which the watch on parents leaves a second

        setattr(self, method, ending)

    def probe_pace(self, seconds: float) -> None:
        """Let each step of the model take that much longer, so that a request outlasts what a test does beside it; 0 for none."""
        runner = self.model_runner
        vars(runner).pop("execute_model", None)
        if not seconds:
            return
        execute = runner.execute_model

        def slowly(*args: Any, **kwargs: Any) -> Any:
            time.sleep(seconds)
            return execute(*args, **kwargs)

        runner.execute_model = slowly

    def probe_dirty_replica(self, replica: int) -> None:
        """Let this worker hold weights that are not whole, if it is of that data-parallel replica."""
        if self.vllm_config.parallel_config.data_parallel_index == replica:
            self.refit_state.mark_dirty(99)

    def probe_engine_load(self, path: str) -> None:
        """Load the checkpoint as vLLM itself does in place, through its layerwise reload of the whole model."""
        self.model_runner.reload_weights(weights_iterator=iter(read_checkpoint(path).items()))

    def probe_poison(self) -> None:
        """Fill all parameters with NaN, and those of numbers of tokens with -1, a drafter's too."""
        drafter = live_drafter(self.model_runner)
        with torch.no_grad():
            for model in (self.model_runner.get_model(), *([] if drafter is None else [drafter])):
                for parameter in model.parameters():
                    parameter.fill_(torch.nan if parameter.is_floating_point() else -1)
