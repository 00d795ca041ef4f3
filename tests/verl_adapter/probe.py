"""What tests ask of the vLLM workers of verl's rollouts. verl's servers discard what workers answer, so it goes to files."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from rlrefit.workers.engines.vllm.drafters import live_drafter
from rlrefit.workers.frameworks.verl.extension import VerlRefitExtension
from rlrefit.workers.frameworks.verl.orders import Order
from tests.digests import digest_of


class Probe:
    """Beside any extension of vLLM's workers."""

    model_runner: Any

    def probe_poison(self) -> None:
        """Make every weight a NaN, so that what no update writes is seen."""
        with torch.no_grad():
            for parameter in self.model_runner.get_model().parameters():
                parameter.fill_(float("nan"))

    def probe_write(self, file: str) -> None:
        """Write the live parameters' digests."""
        parameters = self.model_runner.get_model().named_parameters()
        found = {name: digest_of([parameter]) for name, parameter in parameters}
        Path(file).write_text(json.dumps({"parameters": found, **self._probe_more()}))

    def _probe_more(self) -> dict[str, Any]:
        return {}


class FullProbe(Probe, vLLMColocateWorkerExtension):
    """verl's own extension, for engines of full tensors."""


class ShardProbe(Probe, VerlRefitExtension):
    """The extension for shards; it also tells the version that may be served."""

    _dies = False

    def probe_die_in_the_next_refit(self) -> None:
        self._dies = True

    def _probe_more(self) -> dict[str, Any]:
        return {"version": self.refit_serving_version()}

    def _refit_as_ordered(self, order: Order) -> None:
        if self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._refit_as_ordered(order)


class DraftingProbe(ShardProbe):
    """The same of a worker that drafts; it tells the drafter's own parameters too."""

    def probe_poison(self) -> None:
        super().probe_poison()
        with torch.no_grad():
            for parameter in live_drafter(self.model_runner).parameters():
                parameter.fill_(float("nan"))

    def _probe_more(self) -> dict[str, Any]:
        own = {
            name: digest
            for name, digest in self.refit_parameter_digests().items()
            if name.startswith("drafter.")
        }
        return super()._probe_more() | {"drafter": own}
