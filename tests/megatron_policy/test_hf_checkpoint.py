from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlrefit.workers.trainers.megatron.hf_checkpoint import (
    CheckpointMismatch,
    check_checkpoint,
    expected_tensors,
)
from tests.policy_scenes import write_checkpoint


@pytest.fixture(params=["qwen3", "qwen3-tied", "qwen3-moe", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(write_checkpoint(request.param, tmp_path))


def split_into_shards(folder: Path) -> None:
    """Two shards and an index, as large checkpoints have them."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards: list[dict[str, Any]] = [{}, {}]
    index = {}
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        file = f"model-{number % 2 + 1:05d}-of-00002.safetensors"
        shards[number % 2][name] = tensor
        index[name] = file
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"model-{number + 1:05d}-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def change(name: str, tensor: torch.Tensor | None) -> Callable[[Path], object]:
    def changed(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        del tensors[name]
        if tensor is not None:
            tensors[name] = tensor
        save_file(tensors, folder / "model.safetensors")

    return changed


def overwrite(content: bytes, file: str = "model.safetensors") -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes(content)


def lose_a_shard(folder: Path) -> None:
    split_into_shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def cut_a_shard(folder: Path) -> None:
    split_into_shards(folder)
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])


def lie_in_the_index(folder: Path) -> None:
    split_into_shards(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))


_PROJECTION, _EXPERT = "model.layers.1.self_attn.o_proj.weight", "model.layers.0.mlp.experts.3.up_proj.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard is gone": (lose_a_shard, r"model-00002-of-00002\.safetensors is missing"),
    "a shard ends early": (cut_a_shard, r"model-00001-of-00002\.safetensors has \d+ bytes"),
    "an empty file": (overwrite(b""), r"shard model\.safetensors"),
    "a short file": (overwrite(b"{}"), r"shard model\.safetensors"),
    "no safetensors": (overwrite(b"\x08\0\0\0\0\0\0\0notjson!"), r"shard model\.safetensors"),
    "a parameter is gone": (change(_PROJECTION, None), _PROJECTION),
    "an expert is gone": (change(_EXPERT, None), _EXPERT),
    "another shape": (change("model.norm.weight", torch.ones(16)), r"model\.norm\.weight .*\[16\].* \[32\]"),
    "a lie in the index": (lie_in_the_index, r"model\.extra\.weight"),
    "no index": (overwrite(b"{", "model.safetensors.index.json"), "index"),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), r"config\.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_named(tmp_path: Path, damage: str) -> None:
    do_damage, named = DAMAGES[damage]
    folder = Path(write_checkpoint("qwen3-moe", tmp_path))
    do_damage(folder)
    with pytest.raises(CheckpointMismatch, match=named):
        check_checkpoint(folder)


def test_a_whole_checkpoint_passes_in_one_file_or_in_shards_with_what_transformers_saves(
    folder: Path,
) -> None:
    saved = {name: tensor.shape for name, tensor in load_file(folder / "model.safetensors").items()}
    assert expected_tensors(check_checkpoint(folder)) == saved
    split_into_shards(folder)
    check_checkpoint(folder)


def test_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    moe, dense = (Path(write_checkpoint(kind, tmp_path / kind)) for kind in ("qwen3-moe", "qwen3"))
    (moe / "model.safetensors").write_bytes((dense / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointMismatch, match=r"mlp\.experts\.0\..*and \d+ more"):
        check_checkpoint(moe)
