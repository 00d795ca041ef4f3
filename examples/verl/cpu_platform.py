"""CPUs as one of verl's platforms, by verl's own registry: ``VERL_USE_EXTERNAL_MODULES`` names this module.

Ray's GPUs are numbers that nothing stands behind, so that verl places its replicas as it does on GPUs.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.utils import distributed


def _nothing(*_: Any) -> None: ...


class _Device(ModuleType):
    """What verl calls of ``torch.cuda``, for a device that has no queue and no cache."""

    current_device = memory_allocated = memory_reserved = staticmethod(lambda *_: 0)
    max_memory_allocated = max_memory_reserved = memory_allocated
    device_count = staticmethod(lambda: 1)
    get_device_name = staticmethod(lambda *_: "CPU")
    is_available = staticmethod(lambda: True)
    mem_get_info = staticmethod(lambda *_: (1 << 30, 1 << 30))
    get_rng_state = staticmethod(lambda *_: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_: torch.set_rng_state(state))
    synchronize = empty_cache = ipc_collect = set_device = reset_peak_memory_stats = staticmethod(_nothing)
    manual_seed = manual_seed_all = staticmethod(_nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = vendor_name = "cpu"
    device_module = _Device("cpu_as_an_accelerator")

    is_available = staticmethod(device_module.is_available)
    device_count = staticmethod(device_module.device_count)
    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = staticmethod(_nothing)
    empty_cache = profiler_start = profiler_stop = staticmethod(_nothing)
    is_platform_available = staticmethod(lambda use_smi_check=False: True)
    # A number would be a GPU's to torch.
    current_device = staticmethod(lambda: torch.device("cpu"))
    get_device_capability = staticmethod(lambda device_index=0: (None, None))
    communication_backend_name = staticmethod(lambda: "gloo")
    visible_devices_envvar = staticmethod(lambda: "CUDA_VISIBLE_DEVICES")
    nvtx_range = staticmethod(lambda msg: nullcontext())
    ray_resource_name = staticmethod(lambda: "GPU")
    ray_noset_envvars = staticmethod(lambda: ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"])
    is_ipc_supported = staticmethod(lambda: False)
    cudart = staticmethod(SimpleNamespace)


# verl asks for a backend of the host and one of the device, and torch refuses two for the same kind.
distributed.get_device_name = lambda: "cuda"
