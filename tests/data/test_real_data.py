"""What data sets for real models need: an instruction, prompts that are dropped, columns of their own for validation."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from rlrefit.recipes.config.load import load_config
from rlrefit.recipes.config.schema import DataConfig
from rlrefit.recipes.data.dataset import DataError, Record
from rlrefit.recipes.data.prompts import PromptDataset, held_out, load_prompts
from rlrefit.recipes.tiny.make_tokenizer import load_tokenizer


def records(*prompts: str) -> list[Record]:
    return [Record(prompt, "1", f"data line {i}", i) for i, prompt in enumerate(prompts, start=1)]


def test_the_instruction_stands_on_a_line_after_the_prompt_and_inside_the_template() -> None:
    tokenizer = load_tokenizer()
    config = DataConfig(instruction="max(", max_prompt_tokens=32)
    assert PromptDataset(records("1+2="), tokenizer, config)[0].text == "1+2=\nmax("
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    config.chat_template = True
    assert PromptDataset(records("1+2="), tokenizer, config)[0].text == "<user>1+2=\nmax("


def test_long_prompts_are_dropped_where_that_is_asked_for_and_the_log_says_how_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = DataConfig(max_prompt_tokens=4, overlong_prompts="drop")
    with caplog.at_level(logging.WARNING):
        dataset = PromptDataset(records("1+2+3=", "1+2=", "12+3="), load_tokenizer(), config)
    assert [dataset[i].origin for i in range(len(dataset))] == ["data line 2"]
    assert "2 of 3 prompts are dropped: they have more than data.max_prompt_tokens 4 tokens" in caplog.text
    with pytest.raises(DataError, match="all 1 prompts have more than"):
        PromptDataset(records("1+2+3="), load_tokenizer(), config)


def test_the_held_out_prompts_are_read_by_columns_of_their_own(tmp_path: Path) -> None:
    data = load_config("dapo_qwen3_32b").data
    assert (data.prompt_key, data.answer_key) == ("prompt", "solution")
    validation = held_out(data)
    assert (validation.prompt_key, validation.answer_key) == ("problem", "answer")
    assert held_out(DataConfig()) == DataConfig()
    file = tmp_path / "held_out.jsonl"
    file.write_text(json.dumps({"problem": "1+2=", "answer": "3"}) + "\n")
    config = DataConfig(validation_prompt_key="problem")
    assert load_prompts(str(file), load_tokenizer(), held_out(config))[0].answer == "3"
