import json
from collections import Counter

from rlrefit.recipes.tiny import make_data
from rlrefit.recipes.tiny.make_data import records, write_data
from rlrefit.recipes.tiny.make_tokenizer import TOKENIZER_FILE, VOCAB_SIZE, load_tokenizer, write_tokenizer


def test_the_shipped_data_and_tokenizer_are_what_their_makers_write(tmp_path):
    write_data(tmp_path)
    write_tokenizer(tmp_path / "tokenizer.json")
    for name in ("train.jsonl", "validation.jsonl", "tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (TOKENIZER_FILE.parent / name).read_bytes()


def test_every_answer_is_right_and_as_frequent_as_any_other_and_no_prompt_is_in_both_parts():
    prompts = [record["prompt"] for part in records() for record in part]
    assert len(prompts) == len(set(prompts)) == 200
    for part, count in zip(records(), (16, 4), strict=True):
        assert Counter(record["answer"] for record in part) == {str(digit): count for digit in range(10)}
        for record in part:
            name, operands = record["prompt"][:3], json.loads("[" + record["prompt"][4:-2] + "]")
            assert record["answer"] == str(make_data.OPERATORS[name](operands))


def test_every_prompt_and_answer_is_one_known_token_per_character():
    tokenizer = load_tokenizer()
    assert len(tokenizer) == VOCAB_SIZE == 64
    for text in (text for part in records() for record in part for text in record.values()):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
    assert tokenizer("7€")["input_ids"][1:] == [tokenizer.unk_token_id]
    # Reserved tokens stay visible where special ones are skipped.
    ids = [*tokenizer("7")["input_ids"], VOCAB_SIZE - 1, tokenizer.eos_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "7<reserved_7>"
    batch = tokenizer(["7", "78"], padding=True)
    assert batch["input_ids"][0][0] == tokenizer.pad_token_id
    assert batch["attention_mask"] == [[0, 1], [1, 1]]
