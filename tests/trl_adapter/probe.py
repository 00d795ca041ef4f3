"""What tests ask of the server's worker."""

from __future__ import annotations

import os
import signal

import torch

from rlrefit.workers.engines.vllm.extension import VllmRefitExtension
from tests.vllm.vllm_checkpoints import read_checkpoint


class ServerProbe(VllmRefitExtension):
    def probe_poison(self) -> None:
        """Make every weight a NaN, so that what no refit writes is seen."""
        with torch.no_grad():
            for parameter in self.model_runner.get_model().parameters():
                parameter.fill_(torch.nan)

    def probe_engine_load(self, path: str) -> None:
        """Load a checkpoint as vLLM itself does."""
        self.model_runner.reload_weights(weights_iterator=iter(read_checkpoint(path).items()))

    def probe_epoch(self) -> dict[str, bool]:
        return {"open": self._refit._refit_session is not None}

    def probe_die_in_the_next_refit(self) -> None:
        """End this process once all ranks have met for the next refit and its bytes are on their way."""
        session = self._refit._refit_session

        def dying(*args: object, **kwargs: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        session._move = dying
