"""Imported by verl's processes: has its SGLang server start schedulers whose kernels run in Triton's interpreter."""

from __future__ import annotations

import sglang.srt.entrypoints.engine

from tests.sglang.drafting_engine import run_scheduler

# verl looks it up there as it starts the server.
sglang.srt.entrypoints.engine.run_scheduler_process = run_scheduler
