"""Loaded first by the servers of the tests' processes (``tests/servers.py``): CUDA and OpenMP's threads do not outlive a fork."""

from __future__ import annotations

import os

os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
