"""``rlrefit bench --live``: a live Megatron, a live vLLM, and what is told when something is wrong with them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlrefit.integration.errors import RefitError
from rlrefit.recipes.bench.live.engine_process import EngineProcess
from rlrefit.recipes.bench.live.measure import Held, LiveResult, Oracle, PathResult
from rlrefit.recipes.bench.measure import Timing
from rlrefit.recipes.bench.options import LiveOptions
from rlrefit.recipes.bench.render import live_record
from rlrefit.recipes.cli import main
from rlrefit.recipes.plan.catalog import parse_gen, parse_train
from tests.vllm_processes import vllm_processes
from tests.warm_python import warm_python

ROOT = Path(__file__).resolve().parents[2]
MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 120,  # vLLM pads it to 128
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,  # which no library of vLLM's for CPUs packs
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def write_moe(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(MOE | changes))
    return str(path)


@pytest.fixture
def moe(tmp_path):
    return write_moe(tmp_path)


def options(**changes):
    layouts = {
        "train": parse_train("ep=2"),
        "gen": parse_gen("tp=1"),
        "train_text": "ep=2",
        "gen_text": "tp=1",
    }
    return LiveOptions(**{"model": "qwen3-0.6b", "device": "cpu", "timeout_s": 60.0, **layouts, **changes})


def run_of(folder, *arguments, **changes):
    """Exit code, record, and what was told and logged."""
    model, figures = write_moe(folder, **changes), folder / "live.json"
    log, told = folder / "engine.log", io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        code = main(
            [
                *("bench", "--live", "--device", "cpu", "--model", model, "--train", "ep=2", "--gen", "tp=1"),
                *("--refits", "2", "--warm-up", "1", "--peer-refits", "1", "--json", str(figures)),
                *("--engine-log", str(log), *arguments),
            ]
        )
    record = json.loads(figures.read_text()) if code == 0 else {}
    return code, record, told.getvalue(), log.read_text() if log.exists() else ""


def run_live(folder):
    """With vLLM loaded already: an interpreter of its own, and one of its worker, would load for half a minute."""
    with warm_python(vllm_processes) as python:
        return run_of(folder, "--engine-python", str(python))


AHEAD = (run_live,)


def test_a_live_megatron_refits_a_live_vllm_and_all_paths_leave_the_same_bytes(found_ahead):
    code, record, told, log = found_ahead.by(run_live)
    assert code == 0, told + log
    assert record["bit_exact"] is True
    assert record["backend"] == "vllm"
    assert record["engine"].keys() == {"vllm", "torch", "python"}
    sharded, broadcast, vllm = record["paths"]
    assert sharded["carrier"] == "p2p"
    assert sharded["weights"] == {"bulk": 43, "misc": 2, "unused": 0}
    assert list(sharded["misc_reasons"].values()) == [2]
    assert (
        sharded["bytes_bulk"] + sharded["bytes_misc"] == record["kept_bytes"] - 2 * 8 * 64 * 2
    )  # padded rows
    assert 0.9 < sharded["bulk_share"] < 1
    assert len(sharded["seconds"]) == 3
    assert sharded["seconds_min"] <= sharded["seconds_median"] <= sharded["seconds_max"]
    assert 0 < sharded["own_seconds_median"] <= sharded["seconds_max"]
    assert [point["number"] for point in sharded["memory"]] == [1, 2, 3]
    assert sharded["growth_bytes"].keys() == {"trainer", "engine"}
    assert broadcast["weights"] == {"bulk": 0, "misc": 45, "unused": 0}
    assert len(broadcast["seconds"]) == 2
    # The third weights as well, which the first path left last.
    assert [point["number"] for point in broadcast["memory"]] == [1, 2, 3]
    assert vllm["seconds_median"] is None
    assert "NCCL" in vllm["not_run"]
    assert "2 weights on the misc path, trainer: MoE router" in told


def test_all_that_is_wrong_with_the_options_is_told_at_once(moe, capsys):
    code = main(
        [
            "bench", "--live", "--device", "cpu", "--model", moe, "--train", "ep=2,cp=2", "--gen", "tp=1,dp=2",
            "--transport", "ipc,tcp", "--peers", "gossip", "--refits", "0", "--dtype", "fp4", "--timeout=-5",
            "--engine-python", "/no/python", "--gpu-memory-utilization", "2", "--json", "/no/folder/x.json",
        ]
    )  # fmt: skip
    told = capsys.readouterr().err
    assert code == 2
    for option in (
        "--transport: 'tcp'", "--transport: ipc needs GPUs", "--peers: 'gossip'", "--refits: 0", "--dtype: 'fp4'",
        "--engine-python: /no/python", "--gpu-memory-utilization: 2", "--json: the folder", "--gen: one engine",
        "--train: the live trainer", "--timeout: -5.0 is not above 0",
    ):  # fmt: skip
        assert option in told


def test_a_trainer_under_fsdp_is_refused_before_it_starts(moe, capsys):
    layouts = ("--model", moe, "--train", "fsdp=2", "--gen", "tp=1", "--engine-python", sys.executable)
    assert main(["bench", "--live", "--device", "cpu", *layouts]) == 2
    said = capsys.readouterr().err.strip()
    assert said == "--train: the live trainer is Megatron's; give its sizes (tp, pp, ep) and no fsdp"


def held(number, *, sums=(7, 8), nans=0, tokens=(1, 2)):
    return Held(number, [{"embed": [*sums, nans]}], [list(tokens)])


@pytest.mark.parametrize(
    ("later", "fault"),
    [
        ([held(1), held(2, sums=(9, 9), tokens=(3,))], None),
        (
            [held(1, sums=(7, 9))],
            "refit 1 left other bytes than auto in 1 parameters of worker 0, the first embed",
        ),
        ([held(1, tokens=(1, 3))], "after refit 1 the engine generates other tokens than after auto's"),
        ([held(1, nans=3)], "refit 1 left the poison in 1 parameters of worker 0, the first embed"),
        (
            [held(1), held(5)],
            "refits 1 and 5 left the same bytes in 1 parameters of worker 0, the first embed",
        ),
    ],
)
def test_the_oracle_names_what_is_wrong(later, fault):
    oracle = Oracle()
    assert oracle.faults("auto", [held(1), held(2, sums=(9, 9), tokens=(3,))]) == []
    assert oracle.faults("broadcast", later)[:1] == ([fault] if fault else [])


def test_nothing_is_called_exact_without_a_second_path_to_compare_with():
    ran = PathResult(
        "auto", timing=Timing.of([0.1]), peak_extra_bytes={"trainer": 0}, growth_bytes={"trainer": 0}
    )
    absent = PathResult("vllm", not_run="no NCCL")
    versions = {"vllm": "0", "torch": "0", "python": "0"}

    def result(*paths):
        return LiveResult("CPU", versions, 1000, {}, list(paths))

    assert live_record(options(), result(ran, absent))["bit_exact"] is None
    assert live_record(options(), result(ran, replace(ran, name="broadcast")))["bit_exact"] is True
    damaged = replace(ran, faults=["refit 1 left the poison"])
    assert live_record(options(), result(damaged, absent))["bit_exact"] is False


def test_an_engine_that_does_not_start_is_told_with_the_end_of_its_log(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no vLLM in this environment\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(RefitError, match=r"(?s)exit code 3.*no vLLM in this environment"):
        EngineProcess(options(engine_python=str(broken)), tmp_path, tmp_path / "log").result()


def test_an_engine_takes_rlrefit_from_its_pythonpath_before_the_one_that_is_installed(tmp_path):
    packages = tmp_path / "packages" / "rlrefit"
    packages.mkdir(parents=True)
    for part in ("integration", "workers", "recipes"):
        (packages / part).symlink_to(ROOT / part)
    # It stands where vLLM does, and tells by whom it is imported.
    telling = "import rlrefit.recipes.bench.live.vllm_engine as asks\nraise ImportError(asks.__file__)\n"
    (packages.parent / "vllm.py").write_text(telling)
    engine = EngineProcess(options(engine_pythonpath=str(packages.parent)), tmp_path, tmp_path / "log")
    with pytest.raises(RefitError, match=f"ImportError: {re.escape(str(packages))}"):
        engine.result()
    engine.close()


def test_the_engine_ends_when_the_trainer_is_gone():
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "rlrefit.recipes.bench.live.engine_main", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
    ours.close()
    assert process.wait(60) == -9


def test_the_engines_workers_get_the_gpus_behind_the_trainers(monkeypatch):
    from rlrefit.recipes.bench.live.engine_process import _environment

    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = _environment(options(device="cuda", gen=parse_gen("tp=2"), engine_pythonpath="/a:/b"))
    assert (found["CUDA_VISIBLE_DEVICES"], found["PYTHONPATH"]) == ("2,3", "/a:/b")
    assert "RANK" not in found
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert _environment(options(device="cuda"))["CUDA_VISIBLE_DEVICES"] == "6"
    assert os.environ["RANK"] == "0"
