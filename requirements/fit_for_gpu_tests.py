"""Whether this Python can run the GPU tests (``make test-gpu``); it may be any Python 3, without rlrefit."""

import importlib.util
import platform
import sys

LACKING = [name for name in ("rlrefit", "pytest", "pytest_timeout") if importlib.util.find_spec(name) is None]
if not (3, 12) <= sys.version_info[:2] < (3, 14) or LACKING:
    told = ", ".join(
        [f"{sys.executable} is Python {platform.python_version()}", *(f"has no {name}" for name in LACKING)]
    )
    sys.exit(
        f"{told}. Name a Python 3.12 or 3.13 that has them, and what is to be tested: make test-gpu PYTHON=..."
    )
