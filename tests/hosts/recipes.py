"""A Ray cluster of two hosts, and ``rlrefit train`` on it."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .namespaces import Host

_PORT = 6379
_START_S, _RUN_S = 120, 400
# All processes of the clusters ask for it; Ray would take that of this user's home, or none.
_ENV = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
_SHORT = (
    "algorithm.steps=2", "algorithm.prompts_per_step=8", "algorithm.group_size=4", "algorithm.minibatches=2", "validation.samples=8",
    "policy.refit.verify=full", "checkpoint.every=1", "ray.timeout_s=200",
)  # fmt: skip


@contextmanager
def ray_on(hosts: Sequence[Host], cores: Sequence[int]) -> Iterator[str]:
    """A cluster of hosts that offer so many cores each; yields its address. Its processes are ended with the block."""
    address = f"{hosts[0].address}:{_PORT}"
    common = ("--disable-usage-stats", "--object-store-memory=100000000", "--block")
    started = []
    try:
        for host, offered in zip(hosts, cores, strict=True):
            joins = host is not hosts[0]
            where = (
                (f"--address={address}",)
                if joins
                else ("--head", f"--port={_PORT}", "--include-dashboard=false")
            )
            own = (f"--node-ip-address={host.address}", f"--num-cpus={offered}")
            argv = host.command(sys.executable, "-m", "ray.scripts.scripts", "start", *where, *own, *common)
            started.append(
                subprocess.Popen(argv, env=_ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
            _wait_for(hosts[0], address, len(started))
        yield address
    finally:
        for process in started:
            process.terminate()
        for process in started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def run(
    host: Host, address: str, root: Path | str, *overrides: str, name: str
) -> subprocess.CompletedProcess[str]:
    """Two steps of GRPO of the tiny recipe, driven from ``host``."""
    argv = (
        sys.executable,
        "-m",
        "rlrefit.recipes.cli",
        "train",
        "recipe=grpo_tiny",
        f"ray.address={address}",
    )
    where = (f"run_root={root}", f"name={name}")
    return subprocess.run(
        host.command(*argv, *where, *_SHORT, *overrides),
        env=_ENV,
        capture_output=True,
        text=True,
        timeout=_RUN_S,
    )


def trained_over(
    folder: Path, hosts: Sequence[Host], cores: Sequence[int], name: str, *overrides: str
) -> str:
    """Train, and check steps, refits and divergence. Raises AssertionError where they are not as they have to be."""
    shutil.rmtree(folder / name, ignore_errors=True)
    with ray_on(hosts, cores) as address:
        ended = run(hosts[0], address, folder, *overrides, name=name)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    steps = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    records = [json.loads(line) for line in (folder / name / "refits.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(math.isfinite(row["loss"]) and abs(row["generation_kl"]) < 1e-6 for row in steps), steps
    received = [record for record in records if record["role"] == "generation"]
    assert {record["transport"] for record in records} == {"p2p"}
    assert all(one["bytes_verified"] == one["bytes_bulk"] + one["bytes_misc"] for one in received), received
    assert (folder / name / "checkpoints" / "step_000002").is_dir()
    kl = max(abs(row["generation_kl"]) for row in steps)
    return f"2 steps, {len(records)} records of {len({r['rank'] for r in records})} ranks, all verified, generation KL {kl:.0e}"


def refused_without_a_shared_folder(hosts: Sequence[Host]) -> str:
    """A run whose folder is on the driver's host alone ends before it trains, and says which host lacks what."""
    with ray_on(hosts, (2, 2)) as address:
        ended = run(hosts[0], address, "/tmp/runs", name="private")
    said = " ".join((ended.stdout + ended.stderr).split())
    assert ended.returncode != 0, said
    assert f"on {hosts[1].address} does not have /tmp/runs" in said, said
    return "refused, by the host that does not have it"


def _wait_for(host: Host, address: str, nodes: int) -> None:
    ask = (
        f"import ray, time; ray.init(address={address!r}, log_to_driver=False, logging_level=40)\n"
        f"end = time.monotonic() + {_START_S}\n"
        f"while sum(node['Alive'] for node in ray.nodes()) < {nodes}:\n"
        "    assert time.monotonic() < end, ray.nodes()\n"
        "    time.sleep(0.5)\n"
    )
    last: subprocess.CompletedProcess[str] | None = None
    for _ in range(3):
        last = subprocess.run(
            host.command(sys.executable, "-c", ask), env=_ENV, capture_output=True, text=True
        )
        if last.returncode == 0:
            return
    raise AssertionError(f"Ray did not come up: {last.stderr if last else ''}")
