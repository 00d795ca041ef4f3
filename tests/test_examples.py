"""The examples run as their text says."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.ahead import FoundAhead
from tests.catalog.shrunken import CONFIGS
from tests.servers import spawn_context
from tests.spawn import PATIENT_S, free_port, run_alone, run_together
from tests.vllm_processes import vllm_processes

EXAMPLES = Path(__file__).parent.parent / "examples"


def inherit_the_mixin(folder: Path) -> str:
    """What it prints; its ranks are forks, but where they take GPUs, which nothing forked can."""
    if not Path("/dev/nvidiactl").exists():
        return str(run_alone(_inherit_the_mixin, environment={}, timeout_s=PATIENT_S))
    command = [sys.executable, str(EXAMPLES / "inherit_the_mixin.py")]
    # The server of the tests' processes hides GPUs.
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENT_S, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _inherit_the_mixin() -> str:
    example = _imported("inherit_the_mixin")
    printed = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["inherit_the_mixin.py"]),
        mock.patch.object(example.multiprocessing, "get_context", return_value=spawn_context()),
        contextlib.redirect_stdout(printed),
    ):
        assert example.main() == 0, printed.getvalue()
    return printed.getvalue()


def _imported(name: str) -> Any:
    sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


TRAINERS = 2


def megatron_to_vllm(folder: Path) -> str:
    """What trainer rank 0 prints; the ranks are forks, as is the vLLM that it starts."""
    world = {"WORLD_SIZE": str(TRAINERS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = world | {"CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        partial(run_alone, _rank_of_megatron_to_vllm, folder, environment=environment | {"RANK": str(rank)})
        for rank in range(TRAINERS)
    ]
    return str(run_together(*ranks)[0])


def _rank_of_megatron_to_vllm(folder: Path) -> str:
    os.chdir(folder)
    example = _imported("megatron_to_vllm")
    printed = io.StringIO()
    with mock.patch.object(example, "SPAWN", vllm_processes()), contextlib.redirect_stdout(printed):
        assert example.main(["--tp", "2", "--engine-tp", "1", "--steps", "2"]) == 0, printed.getvalue()
    return printed.getvalue()


def _rank_of_own_engine() -> str:
    example = _imported("own_engine")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert example.main() == 0, printed.getvalue()
    return printed.getvalue()


AHEAD = (inherit_the_mixin, megatron_to_vllm)


def test_a_third_party_ppo_worker_that_inherits_the_mixin_learns_from_its_engine_while_it_is_offloaded(
    found_ahead: FoundAhead,
) -> None:
    lines = found_ahead.by(inherit_the_mixin).splitlines()
    assert sum("bytes shard to shard" in line for line in lines) == 6
    assert lines[-2:] == ["the engine follows the actor", "the actor learns"]


def test_a_vllm_that_begins_with_random_weights_has_those_of_a_megatron_ppo_worker_after_each_refit(
    found_ahead: FoundAhead,
) -> None:
    lines = found_ahead.by(megatron_to_vllm).splitlines()
    told = re.compile(r"refit \d: ([\d,]+) bytes .*, (\d+) over .* generation KL (\S+), (\S+) when")
    refits = [found.groups() for found in map(told.match, lines) if found]
    assert len(refits) == 2, lines
    for bulk, misc, refitted, stale in refits:
        assert (int(bulk.replace(",", "")) > 0, misc) == (True, "0")
        assert float(refitted) < 1e-4
        assert float(stale) > 100 * float(refitted)
    assert lines[-1] == "the engine follows the trainer"


def test_an_engine_that_says_where_its_parameters_stand_computes_what_its_trainer_computes() -> None:
    world = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environments = [world | {"RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""} for rank in range(4)]
    told = run_together(*(partial(run_alone, _rank_of_own_engine, environment=e) for e in environments))
    lines = told[2].splitlines()
    assert len(lines) == 3
    assert all("4,288 bytes shard to shard" in line for line in lines)


def children_of(pid: int) -> list[int]:
    """Ranks that the example's process has started."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(p) for p in listed if "spawn_main" in Path(f"/proc/{p}/cmdline").read_text()]


@pytest.mark.timeout(120)
def test_the_example_ends_with_an_error_when_one_of_its_ranks_is_killed(tmp_path: Path) -> None:
    # No rank comes to read the checkpoint.
    command = [sys.executable, str(EXAMPLES / "inherit_the_mixin.py"), "--model", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as example:
        try:
            while len(ranks := children_of(example.pid)) < 3:
                assert example.poll() is None, example.communicate()
                time.sleep(0.02)
            os.kill(ranks[1], signal.SIGKILL)
            out, err = example.communicate(timeout=60)
        finally:
            example.kill()
    assert example.returncode == 1, out + err
    assert "trainer rank 1 (exit code -9)" in err
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks), "a rank was left behind"


def _changed_share(*arguments: str) -> None:
    example = _imported("changed_share")
    with (
        mock.patch.object(sys, "argv", ["changed_share.py", *arguments]),
        mock.patch.object(example.multiprocessing, "get_context", return_value=spawn_context()),
    ):
        assert example.main() == 0


def test_sparse_refits_after_training_steps_leave_the_engine_the_trainers_weights(tmp_path: Path) -> None:
    shapes, out = tmp_path / "config.json", tmp_path / "refits.jsonl"
    shapes.write_text(json.dumps(CONFIGS["qwen3"]))
    arguments = [
        "--shapes",
        str(shapes),
        "--steps",
        "3",
        "--tokens",
        "8",
        "--rates",
        "1e-6",
        "--base",
        "optimizer",
        "--out",
        str(out),
    ]
    run_alone(_changed_share, *arguments, environment={}, timeout_s=300.0)
    dense, *sparse = [json.loads(line) for line in out.read_text().splitlines()]
    assert dense["wire"] == 1.0
    assert all(0.0 < row["changed"] < 0.2 and row["wire"] < 0.5 for row in sparse)


def test_the_third_party_worker_knows_nothing_of_rlrefit() -> None:
    assert "rlrefit." not in (EXAMPLES / "ppo_worker.py").read_text()


@pytest.mark.parametrize(
    ("example", "lacks"),
    [
        ("own_engine.py", "torchrun --nproc-per-node 4"),
        ("trl/grpo.py", "no package trl"),
        ("nemo_rl/train.py", "no package nemo_rl"),
    ],
)
def test_an_example_that_lacks_something_says_what_and_shows_no_traceback(
    example: str, lacks: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(sys, "argv", [example])
    for name in ("trl", "nemo_rl"):
        monkeypatch.setitem(sys.modules, name, None)  # as where it is not installed
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / example), run_name="__main__")
    assert lacks in f"{ended.value.code}{capsys.readouterr().err}"
