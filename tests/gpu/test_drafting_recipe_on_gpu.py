"""A recipe whose Megatron trainer trains MTP layers, and whose vLLM drafts with them, in turns on one GPU.

Where vLLM has its packages in folders of its own, ENGINE_PATH is the PYTHONPATH of the engine's processes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlrefit.recipes.run.files import read_json_lines
from rlrefit.recipes.tiny.make_tokenizer import EOS, PAD, load_tokenizer, vocabulary
from tests.families.checkpoints import write_checkpoint

from .needs import needs
from .test_colocated_recipe_on_gpu import STEPS, run

pytestmark = [
    *needs("ray", "hydra", "datasets", "transformers", "vllm", "megatron", "transformer_engine"),
    pytest.mark.timeout(540),
]
SIZES = {
    "hidden_size": 128,
    "head_dim": 64,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "max_position_embeddings": 512,
    "norm_topk_prob": True,
    "vocab_size": len(vocabulary()),
    "bos_token_id": None,
    "eos_token_id": vocabulary()[EOS],
    "pad_token_id": vocabulary()[PAD],
}


def test_sampled_drafts_leave_log_probabilities_the_policys_and_mtp_layers_follow(
    tmp_path: Path, tell: Callable[[str], None]
) -> None:
    model = write_checkpoint("glm4_moe", tmp_path / "model", short=True, changes=SIZES)
    load_tokenizer().save_pretrained(model)
    overrides = (
        f"model.path={model}",
        "trainer.mtp_loss_scaling_factor=0.1",
        "generation.vllm.speculative_config={method: mtp, num_speculative_tokens: 1}",
        # Tokens enough that most of them were drafted, and a temperature that the engine has to know of.
        "generation.max_new_tokens=32",
        "generation.temperature=0.7",
    )
    code, output = run(tmp_path, overrides, 1)
    assert code == 0, output
    rows = read_json_lines(tmp_path / "run" / "metrics.jsonl")
    for row in rows:
        tell(f"generation KL {row['generation_kl']:.1e}, MTP accuracy {row['train/mtp_accuracy']:.3f}")
    assert [row["weights/version"] for row in rows] == list(range(STEPS))
    assert max(row["generation_kl"] for row in rows) <= 1e-2
    assert all(0 <= row["train/mtp_accuracy"] <= 1 for row in rows)
    refits = read_json_lines(tmp_path / "run" / "refits.jsonl")
    assert all(record["bytes_verified"] > 0 for record in refits if record["role"] == "generation")
