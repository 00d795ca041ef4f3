from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_checkpoints import write_checkpoint
from safetensors.torch import load_file, save_file

from rlrefit.workers.trainers.megatron.hf_checkpoint import (
    CheckpointMismatch,
    check_checkpoint,
    expected_tensors,
)


@pytest.fixture(params=["qwen3", "qwen3_moe", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, request.param)


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


def change(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


def test_a_whole_checkpoint_passes_in_one_file_or_in_shards(folder: Path) -> None:
    check_checkpoint(folder)
    split_into_shards(folder)
    check_checkpoint(folder)


def test_the_expected_tensors_are_exactly_those_that_transformers_saves(folder: Path) -> None:
    saved = {name: tensor.shape for name, tensor in load_file(folder / "model.safetensors").items()}
    assert expected_tensors(check_checkpoint(folder)) == saved


def test_tied_embeddings_need_no_output_layer_in_the_file(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    check_checkpoint(folder)


def test_a_missing_shard_is_named_with_what_was_in_it(folder: Path) -> None:
    split_into_shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointMismatch, match=r"shard model-00002-of-00002\.safetensors is missing \(\d+"):
        check_checkpoint(folder)


def test_a_truncated_shard_is_named_with_its_sizes(folder: Path) -> None:
    split_into_shards(folder)
    shard = folder / "model-00001-of-00002.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-10])
    with pytest.raises(CheckpointMismatch, match=f"has {len(data) - 10} bytes where its header describes"):
        check_checkpoint(folder)


@pytest.mark.parametrize("content", [b"", b"{}", b"\x08\0\0\0\0\0\0\0notjson!"])
def test_a_file_that_is_no_safetensors_file_is_named(tmp_path: Path, content: bytes) -> None:
    folder = write_checkpoint(tmp_path, "llama")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointMismatch, match=r"shard model\.safetensors"):
        check_checkpoint(folder)


def test_a_missing_parameter_is_named(folder: Path) -> None:
    change(folder, "model.layers.1.self_attn.o_proj.weight", None)
    with pytest.raises(
        CheckpointMismatch, match=r"model\.layers\.1\.self_attn\.o_proj\.weight \[64, 64\] is in none"
    ):
        check_checkpoint(folder)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen3_moe")
    change(folder, "model.layers.0.mlp.experts.3.up_proj.weight", None)
    with pytest.raises(CheckpointMismatch, match=r"experts\.3\.up_proj\.weight"):
        check_checkpoint(folder)


def test_a_parameter_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    change(folder, "model.norm.weight", torch.ones(32))
    with pytest.raises(
        CheckpointMismatch,
        match=r"model\.norm\.weight has shape \[32\] in model\.safetensors where .* \[64\]",
    ):
        check_checkpoint(folder)


def test_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    moe = write_checkpoint(tmp_path / "moe", "qwen3_moe")
    dense = write_checkpoint(tmp_path / "dense", "qwen3")
    (moe / "model.safetensors").write_bytes((dense / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointMismatch, match=r"whole qwen3_moe model: .*mlp\.experts\.0\..*and 23 more"):
        check_checkpoint(moe)


def test_an_index_that_lies_about_a_shard_is_found(folder: Path) -> None:
    split_into_shards(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointMismatch, match=r"model\.extra\.weight is in the index"):
        check_checkpoint(folder)


def test_a_damaged_index_is_named(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointMismatch, match="is not a safetensors index"):
        check_checkpoint(folder)


def test_a_folder_without_config_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatch, match=r"has no config\.json.*hf download"):
        check_checkpoint(tmp_path)
