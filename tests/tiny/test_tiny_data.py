import json
from collections import Counter

from rlrefit.recipes.tiny import make_data
from rlrefit.recipes.tiny.make_data import records, write_data
from rlrefit.recipes.tiny.make_tokenizer import TOKENIZER_FILE, VOCAB_SIZE, load_tokenizer, write_tokenizer

FOLDER = TOKENIZER_FILE.parent


def test_the_shipped_data_are_what_their_maker_writes(tmp_path):
    write_data(tmp_path)
    for name in ("train.jsonl", "validation.jsonl"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()


def test_no_prompt_is_held_out_and_trained_on():
    train, validation = records()
    prompts = [record["prompt"] for record in train + validation]
    assert len(prompts) == len(set(prompts)) == 200
    assert len(validation) == 40


def test_every_answer_is_right_and_as_frequent_as_any_other():
    for part, count in zip(records(), (16, 4), strict=True):
        assert Counter(record["answer"] for record in part) == {str(digit): count for digit in range(10)}
        for record in part:
            name, operands = record["prompt"][:3], json.loads("[" + record["prompt"][4:-2] + "]")
            assert record["answer"] == str(make_data.OPERATORS[name](operands))


def test_the_shipped_tokenizer_is_what_its_maker_writes(tmp_path):
    write_tokenizer(tmp_path / "tokenizer.json")
    assert (tmp_path / "tokenizer.json").read_bytes() == TOKENIZER_FILE.read_bytes()


def test_every_prompt_and_answer_is_one_known_token_per_character():
    tokenizer = load_tokenizer()
    assert len(tokenizer) == VOCAB_SIZE == 64
    for part in records():
        for record in part:
            for text in record.values():
                ids = tokenizer(text)["input_ids"]
                assert len(ids) == len(text)
                assert tokenizer.unk_token_id not in ids
                assert tokenizer.decode(ids) == text


def test_reserved_tokens_stay_visible_when_special_ones_are_skipped():
    tokenizer = load_tokenizer()
    ids = [*tokenizer("7")["input_ids"], VOCAB_SIZE - 1, tokenizer.eos_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "7<reserved_7>"


def test_a_character_outside_the_vocabulary_is_the_unknown_token():
    tokenizer = load_tokenizer()
    assert tokenizer("7€")["input_ids"][1:] == [tokenizer.unk_token_id]


def test_batches_are_padded_on_the_left():
    tokenizer = load_tokenizer()
    batch = tokenizer(["7", "78"], padding=True)
    assert batch["input_ids"][0][0] == tokenizer.pad_token_id
    assert batch["attention_mask"] == [[0, 1], [1, 1]]
