"""Runs Ray's agent of a host, whose command line is this one's arguments, as where Ray came without its dashboard.

For that alone it would load twice as much, and measure each of the host's processes again and again.
"""

from __future__ import annotations

import os
import runpy
import sys

sys.modules["ray.dashboard.optional_deps"] = None  # type: ignore[assignment]
sys.argv = [*sys.argv[1:], "--minimal"]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
