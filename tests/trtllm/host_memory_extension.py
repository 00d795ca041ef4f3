"""The worker extension of engines that live in host memory: it approves one more way of rebuilding a tensor."""

from __future__ import annotations

from typing import ClassVar

from rlrefit.workers.engines.trtllm.extension import TrtllmRefit
from rlrefit.workers.engines.trtllm.payload import Imports

from .host_memory import APPROVED_HERE


class HostMemoryRefit(TrtllmRefit):
    refit_approved_imports: ClassVar[Imports] = APPROVED_HERE
