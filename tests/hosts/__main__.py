"""What takes minutes over two hosts of this machine: tensor parallelism over both, and recipes on Ray. Run by hand, as root:

    python -m tests.hosts FOLDER [NAME…]

``FOLDER`` is what both hosts see, as a file system of a cluster is; it can't be in /tmp, which each has of its own. It prints what
each part saw, and ends with 1 if one is not as it has to be, or if this machine makes no such hosts.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from .megatron import tensor_parallel_over_both
from .namespaces import Host, cluster, refused
from .recipes import refused_without_a_shared_folder, trained_over

Hosts = tuple[Host, Host]
# name → part, of a folder and the hosts
PARTS: dict[str, Callable[[Path, Hosts], str]] = {
    "tensor-parallel": tensor_parallel_over_both,
    "recipe": lambda folder, hosts: trained_over(folder, hosts, (2, 2), "apart"),
    "recipe-engine-over-both": lambda folder, hosts: trained_over(folder, hosts, (3, 1), "engine_over_both"),
    "recipe-trainer-over-both": lambda folder, hosts: trained_over(
        folder, hosts, (3, 3), "trainer_over_both", "trainer.ranks=4"
    ),
    "recipe-private-folder": lambda folder, hosts: refused_without_a_shared_folder(hosts),
}


def main(folder: Path, names: list[str]) -> int:
    """Returns the exit code."""
    reason = refused()
    if reason:
        print(f"nothing has run: {reason}")  # noqa: T201
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in names or PARTS:
        start = time.monotonic()
        with cluster() as network:
            hosts = network.host("a", {"eth0": "10.77.0.1/24"}), network.host("b", {"eth0": "10.77.0.2/24"})
            try:
                told = PARTS[name](folder, hosts)
            except Exception:
                failed = 1
                told = traceback.format_exc()
        print(f"{name}: {told} ({time.monotonic() - start:.0f} s)", flush=True)  # noqa: T201
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), sys.argv[2:]))
