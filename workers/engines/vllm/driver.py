"""The driver's side: refit a running ``LLM`` or ``AsyncLLM``, also in the middle of requests.

A refit pauses the scheduler, has the workers receive the weights, drops what was computed with the old ones (prefixes,
encoder outputs), and resumes. The keys and values of running requests are computed anew before their next token, so
every token comes from one version alone.
"""

from __future__ import annotations

from .driver_async import AsyncVllmDriver
from .driver_blocking import VllmDriver
from .driver_state import EXTENSION, PauseMode

__all__ = ["EXTENSION", "AsyncVllmDriver", "PauseMode", "VllmDriver"]
