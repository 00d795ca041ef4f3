import runpy
import sys

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlrefit.recipes.tiny.checkpoints import KINDS, make_checkpoint, resolve_model_path
from tests.spawn import processes


@pytest.fixture(scope="module", params=sorted(KINDS))
def checkpoint(request, tmp_path_factory):
    return request.param, make_checkpoint(request.param, tmp_path_factory.mktemp("tiny") / request.param)


def tensors_of(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)


def test_a_checkpoint_loads_in_transformers_and_scores_its_tokenizers_prompts(checkpoint):
    kind, folder = checkpoint
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert model.config.model_type == KINDS[kind]["model_type"]
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)
    logits = model(**tokenizer(["max(3,8)="], return_tensors="pt")).logits
    assert logits.shape == (1, 9, 64)
    assert logits.isfinite().all()


def test_weights_are_bf16_under_hugging_face_checkpoint_names(checkpoint):
    kind, folder = checkpoint
    tensors = tensors_of(folder)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert ("lm_head.weight" in tensors) == (kind != "qwen3-tied")
    expert = tensors.get("model.layers.1.mlp.experts.7.down_proj.weight")
    assert (expert is not None) == (kind == "qwen3-moe")
    assert tensors["model.layers.0.self_attn.k_proj.weight"].shape == (64, 128)


def test_the_same_seed_gives_the_same_bytes_and_another_one_other_weights(checkpoint, tmp_path):
    kind, folder = checkpoint
    torch.manual_seed(999)
    again = make_checkpoint(kind, tmp_path / "again")
    for file in sorted(folder.iterdir()):
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name
    other = tensors_of(make_checkpoint(kind, tmp_path / "other", seed=1))
    assert not torch.equal(
        other["model.embed_tokens.weight"], tensors_of(folder)["model.embed_tokens.weight"]
    )


def test_making_a_checkpoint_leaves_the_callers_random_numbers_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    make_checkpoint("qwen3", tmp_path / "model")
    assert torch.equal(torch.rand(3), expected)


def test_sizes_divide_by_two_tensor_parallel_ranks():
    for kind in KINDS.values():
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
        ):
            assert kind[name] % 2 == 0


def test_a_folder_in_use_is_left_as_it_was(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("precious")
    with pytest.raises(FileExistsError, match="left as it is"):
        make_checkpoint("qwen3", tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "mine").read_text() == "precious"


def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rlrefit.recipes.tiny.checkpoints.load_tokenizer", fail)
    with pytest.raises(OSError, match="No space left"):
        make_checkpoint("qwen3", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_kind_lists_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match="qwen3, qwen3-tied, qwen3-moe"):
        make_checkpoint("llama", tmp_path / "model")
    with pytest.raises(ValueError, match="model path 'tiny:llama'"):
        resolve_model_path("tiny:llama", tmp_path)


def test_paths_of_other_models_are_returned_as_they_are(tmp_path):
    for path in ("Qwen/Qwen3-0.6B", "/models/x", "tiny"):
        assert resolve_model_path(path, tmp_path) == path
    assert list(tmp_path.iterdir()) == []


def test_a_tiny_path_is_made_once_and_found_again(tmp_path):
    first = resolve_model_path("tiny:qwen3", tmp_path / "cache")
    stamp = (tmp_path / "cache").stat().st_mtime_ns
    assert resolve_model_path("tiny:qwen3", tmp_path / "cache") == first
    assert (tmp_path / "cache").stat().st_mtime_ns == stamp


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
    assert len(folders) == 1
    assert [str(path) for path in tmp_path.iterdir()] == list(folders)
    assert AutoModelForCausalLM.from_pretrained(folders.pop()).num_parameters() > 0


def test_the_module_is_a_command(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["checkpoints", "qwen3-moe", str(tmp_path / "moe")])
    monkeypatch.delitem(sys.modules, "rlrefit.recipes.tiny.checkpoints")
    runpy.run_module("rlrefit.recipes.tiny.checkpoints", run_name="__main__", alter_sys=True)
    assert (tmp_path / "moe" / "config.json").is_file()
