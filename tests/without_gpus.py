"""Loaded first by the servers of the tests' processes (``tests/servers.py``): CUDA and OpenMP's threads do not outlive a fork."""

from __future__ import annotations

import gc
import os

# Until tests.loaded_megatron or tests.loaded_vllm, the last to be loaded, is there: what modules make as they load stays.
gc.disable()
os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
