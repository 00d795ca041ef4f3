"""What a user gets for bad input: one clear error, the right exit code, and nothing started."""

from __future__ import annotations

import json
import shlex
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from rlrefit.integration.control import open_rendezvous
from rlrefit.integration.errors import RefitError
from rlrefit.recipes.config.load import TrainConfig, load_config

from .command import run, run_here

ROOT = Path(__file__).resolve().parents[2]


def test_bad_records_are_listed_by_file_and_line_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text(
        '{"prompt": "max(1,2)=", "answer": "2"}\n{"prompt": "max(1,2)="}\n{"prompt": \n{"prompt": "", "answer": "1"}\n'
    )
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("no JSON\n")
    arguments = ("train", "recipe=grpo_tiny", f"data.train={data}", f"data.validation={held_out}")
    code, output = run_here(
        *arguments, "reward.function=no_such.module", cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys
    )
    assert code == 2
    for place in (
        "train.jsonl line 2",
        "train.jsonl line 3",
        "train.jsonl line 4",
        "held_out.jsonl line 1",
        "no_such",
    ):
        assert place in output
    assert "Traceback" not in output
    assert not (tmp_path / "runs" / "grpo_tiny").exists()


def test_every_violation_of_a_configuration_is_told_at_once_with_exit_code_2(tmp_path: Path) -> None:
    code, output = run(
        "train",
        "recipe=grpo_tiny",
        "algorithm.group_sizes=4",
        "algorithm.steps=none",
        "trainer.ranks=3",
        "policy.refit.transport=rdma",
        cwd=tmp_path,
    )
    assert code == 2
    for key in ("algorithm.group_sizes", "algorithm.steps", "trainer.ranks", "policy.refit.transport"):
        assert key in output
    assert "group_size" in output


def test_a_folder_without_weights_and_a_name_that_is_taken_are_told_with_all_else_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlrefit.recipes.tiny.checkpoints import make_checkpoint

    folder = make_checkpoint("qwen3", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    saved = tmp_path / "runs" / "grpo_tiny" / "checkpoints" / "step_000020"
    saved.mkdir(parents=True)
    arguments = ("train", "recipe=grpo_tiny", f"model.path={folder}", "algorithm.steps=0")
    code, output = run_here(*arguments, cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2
    for told in ("model.path: ", "name: ", "resume=true", "algorithm.steps: "):
        assert told in output
    assert list((tmp_path / "runs").rglob("*")) == [saved.parent.parent, saved.parent, saved]


def test_the_demo_has_a_run_of_its_own_each_time_and_takes_a_name(tmp_path: Path) -> None:
    saved = tmp_path / "runs" / "grpo_tiny" / "checkpoints" / "step_000020"
    saved.mkdir(parents=True)

    def config(*arguments: str) -> TrainConfig:
        said = subprocess.run(
            ["make", "-n", "demo", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        (command,) = [line for line in said.splitlines() if "rlrefit train" in line]
        _, _, recipe, *others = shlex.split(command)
        return load_config(
            recipe.removeprefix("recipe="), [*others, f"run_root={tmp_path / 'runs'}"], to_run=True
        )

    first = config()
    (tmp_path / "runs" / first.name / "checkpoints" / "step_000020").mkdir(parents=True)
    time.sleep(1.0)  # a name tells its second
    assert config().name != first.name
    assert config("TRAINER=fsdp").trainer.backend == "fsdp"
    assert config("ARGS=name=mine").name == "mine"
    own = tmp_path / "mine.yaml"
    own.write_text("defaults: [grpo_tiny, _self_]\n")
    assert config(f"RECIPE={own}").name.startswith("mine")


def test_a_checkpoint_without_one_of_its_tensors_names_it_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    from rlrefit.recipes.tiny.checkpoints import make_checkpoint

    folder = make_checkpoint("qwen3", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    arguments = ("train", "recipe=grpo_tiny", f"model.path={folder}")
    code, output = run_here(*arguments, cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2
    assert "model.layers.1.mlp.up_proj.weight" in output
    assert "Traceback" not in output


def test_weights_of_another_model_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlrefit.recipes.tiny.checkpoints import make_checkpoint

    folder = make_checkpoint("qwen3", tmp_path / "model")
    other = make_checkpoint("qwen3-moe", tmp_path / "other")
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")
    arguments = ("train", "recipe=grpo_tiny", f"model.path={folder}")
    code, output = run_here(*arguments, cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2
    assert "mlp" in output


def test_a_checkpoint_that_needs_code_of_its_own_is_refused_and_none_of_it_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlrefit.recipes.tiny.checkpoints import make_checkpoint

    folder = make_checkpoint("qwen3", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    own = {"model_type": "of_its_own", "auto_map": {"AutoConfig": "configuration.Config"}}
    (folder / "config.json").write_text(json.dumps(config | own))
    (folder / "configuration.py").write_text("raise SystemExit('it ran')\n")
    arguments = ("train", "recipe=grpo_tiny", f"model.path={folder}")
    code, output = run_here(*arguments, cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2
    assert "Code that comes with a checkpoint (trust_remote_code) is not run" in output


def test_a_taken_port_is_named_with_the_key_to_change() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RefitError, match=r"policy\.refit\.port") as caught:
            open_rendezvous("127.0.0.1", 1, 1, port=taken.getsockname()[1])
    assert str(taken) not in str(caught.value)


def test_a_reward_that_raises_names_the_record_and_the_function(tmp_path: Path) -> None:
    from rlrefit.recipes.data.prompts import Prompt
    from rlrefit.recipes.rewards.scorer import RewardError, RewardScorer

    def broken(*, prompt: str, completion: str, answer: str, finished: bool) -> float:
        return json.loads(completion)["answer"]

    with pytest.raises(RewardError, match="broken") as caught:
        RewardScorer(broken)(Prompt("max(1,2)=", (1,), "2", "train.jsonl:7"), "2 apples", True)
    assert "train.jsonl:7" in str(caught.value)
