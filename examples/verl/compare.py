"""Runs verl's trainer once for each checkpoint engine and tells reward, KL and seconds of each update as JSON.

``python examples/verl/compare.py FOLDER ENGINE... [-- OVERRIDE...]``; see arithmetic.sh.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# What each engine needs beside its name.
_ROLLOUT = "actor_rollout_ref.rollout"
_NO_EXTENSION = f"~{_ROLLOUT}.engine_kwargs.vllm.worker_extension_cls"
ENGINES = {
    "nccl_xfer_shards": [],
    "nccl_xfer": [
        _NO_EXTENSION,
        f"{_ROLLOUT}.checkpoint_engine.custom_backend_module=rlrefit.workers.frameworks.verl.full_tensors",
        f"+{_ROLLOUT}.checkpoint_engine.engine_kwargs.nccl_xfer.timeout_s=120.0",
    ],
    "nccl": [_NO_EXTENSION, f"{_ROLLOUT}.checkpoint_engine.custom_backend_module=null"],
}
_TOLD = ("reward", "score", "kl", "rollout_probs_diff", "timing_s/update_weights", "timing_s/step")
_PREFIX = "checkpoint_engine/"
# Of one run.
_LONGEST_S = 3600.0


def run(engine: str, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """One training run; its output goes to ``FOLDER/ENGINE.log``."""
    metrics, log = folder / f"{engine}.jsonl", folder / f"{engine}.log"
    here = Path(__file__).resolve().parent
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-dir", str(here)]
    command += ["--config-name", "grpo_arithmetic", f"{_ROLLOUT}.checkpoint_engine.backend={engine}"]
    metrics.unlink(missing_ok=True)  # verl would append to those of a run before
    start = time.monotonic()
    with log.open("w") as output:
        try:
            code = subprocess.run(
                [*command, *ENGINES[engine], *overrides],
                env={**os.environ, "VERL_FILE_LOGGER_PATH": str(metrics)},
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_LONGEST_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            output.write(f"\n{engine} was killed after {_LONGEST_S} s\n")
            code = -signal.SIGKILL
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    steps = [
        {
            "step": line["step"],
            **{
                name: value
                for name, value in line["data"].items()
                if name.startswith(_PREFIX) or any(part in name for part in _TOLD)
            },
        }
        for line in lines
    ]
    seconds = [step["timing_s/update_weights"] for step in steps if "timing_s/update_weights" in step]
    return {
        "engine": engine,
        "exit_code": code,
        "seconds": round(time.monotonic() - start, 1),
        # The first joins the workers.
        "update_seconds_warm": statistics.median(seconds[1:]) if len(seconds) > 1 else None,
        "steps": steps,
    }


def main() -> int:
    """Entry; the exit code tells whether all runs succeeded."""
    folder, *rest = sys.argv[1:]
    cut = rest.index("--") if "--" in rest else len(rest)
    engines, overrides = rest[:cut], rest[cut + 1 :]
    found = [run(engine, Path(folder), overrides) for engine in engines]
    (Path(folder) / "compare.json").write_text(json.dumps(found, indent=1))
    for one in found:
        print(json.dumps({**one, "steps": one["steps"][-1:]}))
    return int(any(one["exit_code"] != 0 for one in found))


if __name__ == "__main__":
    sys.exit(main())
