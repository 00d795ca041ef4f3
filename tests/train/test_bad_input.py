"""What a user gets for bad input: one clear error, the right exit code, and nothing started."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from rlrefit.recipes.config.load import TrainConfig, load_config
from rlrefit.recipes.tiny.checkpoints import make_checkpoint

from .command import run_here

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What ``rlrefit train recipe=grpo_tiny`` tells of arguments that it refuses."""

    def run(*arguments: str) -> str:
        command = ("train", "recipe=grpo_tiny", *arguments)
        code, output = run_here(*command, cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
        assert code == 2
        assert "Traceback" not in output
        return output

    return run


def test_bad_records_are_listed_by_file_and_line_before_anything_starts(refused, tmp_path: Path) -> None:
    data, held_out = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    data.write_text('{"prompt": "1+2=", "answer": "3"}\n{"prompt": "1+2="}\n{"prompt": \n')
    held_out.write_text("no JSON\n")
    output = refused(f"data.train={data}", f"data.validation={held_out}", "reward.function=no_such.module")
    places = ("train.jsonl line 2", "train.jsonl line 3", "held_out.jsonl line 1", "no_such")
    assert [place for place in places if place not in output] == []
    assert not (tmp_path / "runs" / "grpo_tiny").exists()


def test_a_folder_without_weights_and_a_name_that_is_taken_are_told_with_all_else_before_anything_starts(
    refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint("qwen3", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    saved = tmp_path / "runs" / "grpo_tiny" / "checkpoints" / "step_000020"
    saved.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    output = refused(f"model.path={folder}", "algorithm.steps=0", "run_root='~/runs'")
    for told in ("model.path: ", "name: ", "resume=true", "algorithm.steps: "):
        assert told in output
    assert list((tmp_path / "runs").rglob("*")) == [saved.parent.parent, saved.parent, saved]


def test_a_folder_that_takes_no_files_is_told_before_anything_starts(refused, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", Path("/proc/nowhere")):
        assert f"run_root: {root}" in refused(f"run_root={root}")
    model = make_checkpoint("qwen3", tmp_path / "model")
    assert "run_root: " in refused(f"run_root={tmp_path / 'file'}", f"model.path={model}")


def test_a_ray_cluster_that_is_not_there_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:  # bound, so that nobody else listens there
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = ("train", "recipe=grpo_tiny", f"ray.address={address}")
        code, output = run_here(*command, cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 1
    assert f"no Ray cluster at {address}" in output
    assert "token" not in output


def _without_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _of_another_model(folder: Path) -> None:
    other = make_checkpoint("qwen3-moe", folder.with_name("other"))
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")


def _with_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    own = {"model_type": "of_its_own", "auto_map": {"AutoConfig": "configuration.Config"}}
    (folder / "config.json").write_text(json.dumps(config | own))
    (folder / "configuration.py").write_text("raise SystemExit('it ran')\n")


def _without_a_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def _with_a_size_as_text(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_window_layers": "2"}))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_with_a_size_as_text, "max_window_layers"),
        (_without_a_tokenizer, "has no tokenizer"),
        (_without_a_tensor, "model.layers.1.mlp.up_proj.weight"),
        (_of_another_model, "mlp"),
        (_with_code, "model.trust_remote_code"),
    ],
)
def test_a_checkpoint_that_can_not_be_trained_is_refused_before_anything_starts(
    refused, tmp_path: Path, change: Callable[[Path], None], told: str
) -> None:
    folder = make_checkpoint("qwen3", tmp_path / "model")
    change(folder)
    assert told in refused(f"model.path={folder}")


def test_a_prompt_of_tokens_that_the_model_does_not_know_is_refused_before_anything_starts(
    refused, tmp_path: Path
) -> None:
    folder = make_checkpoint("qwen3", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(folder)
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1+2=", "answer": "3"}\n{"prompt": "<think>1+2=", "answer": "3"}\n')
    told = refused(f"model.path={folder}", f"data.train={data}")
    assert "data.train: " in told
    assert "train.jsonl line 2" in told
    assert "data.validation" not in told


def test_the_demo_has_a_run_of_its_own_each_time_and_takes_a_name(tmp_path: Path) -> None:
    (tmp_path / "runs" / "grpo_tiny" / "checkpoints" / "step_000020").mkdir(parents=True)

    def config(*arguments: str) -> TrainConfig:
        # Without what `make test ARGS=…` hands on to the tests.
        env = {
            key: value
            for key, value in os.environ.items()
            if key not in ("ARGS", "MAKEFLAGS", "MAKEOVERRIDES")
        }
        said = subprocess.run(
            ["make", "-n", "demo", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=True
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
