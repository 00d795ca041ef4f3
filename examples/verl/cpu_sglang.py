"""SGLang on CPUs under verl, beside cpu_platform.py: ``VERL_USE_EXTERNAL_MODULES`` names this module too."""

from __future__ import annotations

# Before verl's own loading, under which SGLang on a CPU asks for kernels that a host may lack.
import verl.workers.rollout.sglang_rollout.async_sglang_server  # noqa: F401
from sglang.srt import server_args

# verl's rollout workers make settings of a server without its device.
server_args.get_device = lambda: "cpu"
