"""The tiny recipes' model and task for verl, as grpo_arithmetic.yaml asks for them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pandas
import torch

from rlrefit.recipes.plan.catalog import open_model
from rlrefit.recipes.rewards.scorer import arithmetic
from rlrefit.recipes.tiny.checkpoints import make_checkpoint
from rlrefit.recipes.tiny.make_data import records
from rlrefit.recipes.tiny.make_tokenizer import load_tokenizer

SOURCE = "arithmetic"
# A prompt is text and no conversation: verl applies a template to every prompt.
PLAIN = "{% for message in messages %}{{ message['content'] if 'content' in message else '' }}{% endfor %}"


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    """The bundled rule-based reward, as verl's ``custom_reward_function`` is called.

    verl does not say whether a completion ended by itself; one that did not is longer than its answer.
    """
    found = arithmetic(prompt="", completion=solution_str, answer=ground_truth, finished=True)
    return found.value


def write(folder: Path, model: str | None = None) -> None:
    """Writes ``model/``, ``train.parquet`` and ``validation.parquet``; a second call changes nothing.

    Args:
        folder: where.
        model: of the catalogue of ``rlrefit plan``, in its true shapes with random weights; None for the tiny one.
    """
    if not (folder / "model").exists():
        aside = folder / "model.partial"
        shutil.rmtree(aside, ignore_errors=True)
        if model is None:
            make_checkpoint("qwen3", aside)
        else:
            _write_true_shapes(model, aside)
        tokenizer = load_tokenizer()
        tokenizer.chat_template = PLAIN
        tokenizer.save_pretrained(aside)
        aside.rename(folder / "model")
    for name, part in zip(("train", "validation"), records(), strict=True):
        rows = [
            {
                "data_source": SOURCE,
                "prompt": [{"role": "user", "content": record["prompt"]}],
                "reward_model": {"style": "rule", "ground_truth": record["answer"]},
                "extra_info": {"index": index},
            }
            for index, record in enumerate(part)
        ]
        pandas.DataFrame(rows).to_parquet(folder / f"{name}.parquet")


def _write_true_shapes(model: str, folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {key: value for key, value in open_model(model).config.items() if not key.startswith("_")}
    config = AutoConfig.for_model(**settings)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        whole = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    whole.save_pretrained(folder)
    del whole
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # this process stays beside the runs, which want all of the GPU
