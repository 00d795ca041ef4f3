import runpy
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlrefit.recipes.tiny.checkpoints import KINDS, make_checkpoint, resolve_model_path
from tests.spawn import processes


@pytest.fixture(scope="module", params=sorted(KINDS))
def checkpoint(request, tmp_path_factory):
    return request.param, make_checkpoint(request.param, tmp_path_factory.mktemp("tiny") / request.param)


def test_a_checkpoint_loads_in_transformers_and_scores_its_tokenizers_prompts(checkpoint):
    kind, folder = checkpoint
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == KINDS[kind]["model_type"]
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)
    logits = model(**tokenizer(["max(3,8)="], return_tensors="pt")).logits
    assert logits.shape == (1, 9, 64)
    assert logits.isfinite().all()
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    # Of zeros RMSNorm makes gradients that bury all others, under trainers that train the row of padding.
    assert tensors["model.embed_tokens.weight"].float().norm(dim=1).min() > 0.1
    assert ("lm_head.weight" in tensors) == (kind != "qwen3-tied")
    assert ("model.layers.1.mlp.experts.7.down_proj.weight" in tensors) == (kind == "qwen3-moe")


def test_the_same_seed_gives_the_same_bytes_another_one_others_and_random_numbers_are_left_alone(
    checkpoint, tmp_path
):
    kind, folder = checkpoint
    torch.manual_seed(999)
    expected = torch.rand(3)
    torch.manual_seed(999)
    again = make_checkpoint(kind, tmp_path / "again")
    assert torch.equal(torch.rand(3), expected)
    for file in sorted(folder.iterdir()):
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name
    other = make_checkpoint(kind, tmp_path / "other", seed=1)
    embeddings = [load_file(f / "model.safetensors")["model.embed_tokens.weight"] for f in (folder, other)]
    assert not torch.equal(*embeddings)


def test_a_folder_in_use_is_left_as_it_was_and_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("precious")
    with pytest.raises(FileExistsError):
        make_checkpoint("qwen3", tmp_path / "model")
    monkeypatch.setattr("rlrefit.recipes.tiny.checkpoints.load_tokenizer", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make_checkpoint("qwen3", tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "mine").read_text() == "precious"


def test_a_tiny_path_is_made_once_other_paths_stay_and_unknown_kinds_list_the_known_ones(tmp_path):
    for path in ("Qwen/Qwen3-0.6B", "/models/x", "tiny"):
        assert resolve_model_path(path, tmp_path) == path
    with pytest.raises(ValueError, match="qwen3, qwen3-tied, qwen3-moe"):
        resolve_model_path("tiny:llama", tmp_path)
    assert list(tmp_path.iterdir()) == []
    first = resolve_model_path("tiny:qwen3", tmp_path)
    stamp = tmp_path.stat().st_mtime_ns
    assert resolve_model_path("tiny:qwen3", tmp_path) == first
    assert tmp_path.stat().st_mtime_ns == stamp


def resolve_together(barrier, root, results):
    torch.set_num_threads(1)
    barrier.wait(60)
    results.put(resolve_model_path("tiny:qwen3", root))


def test_processes_that_race_for_a_checkpoint_get_the_same_whole_one(tmp_path):
    context = processes()
    barrier, results = context.Barrier(3), context.Queue()
    workers = [
        context.Process(target=resolve_together, args=(barrier, str(tmp_path), results)) for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    folders = {results.get(timeout=120) for _ in workers}
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert [str(path) for path in tmp_path.iterdir()] == list(folders)
    assert AutoModelForCausalLM.from_pretrained(folders.pop()).num_parameters() > 0


def test_the_module_is_a_command(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["checkpoints", "qwen3-moe", str(tmp_path / "moe")])
    monkeypatch.delitem(sys.modules, "rlrefit.recipes.tiny.checkpoints")
    runpy.run_module("rlrefit.recipes.tiny.checkpoints", run_name="__main__", alter_sys=True)
    assert (tmp_path / "moe" / "config.json").is_file()
