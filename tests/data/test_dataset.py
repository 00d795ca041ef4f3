import json

import pytest
from datasets import Dataset

from rlrefit.recipes.data.dataset import DataError, load_records


def write_lines(path, lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return str(path)


def good(prompt="1+1=", answer="2"):
    return json.dumps({"prompt": prompt, "answer": answer})


def test_json_lines_give_records_with_their_lines(tmp_path):
    path = write_lines(tmp_path / "train.jsonl", [good(), "", good("2+3=", "5")])
    records = load_records(path)
    assert [(r.prompt, r.answer, r.origin) for r in records] == [
        ("1+1=", "2", f"{path} line 1"),
        ("2+3=", "5", f"{path} line 3"),
    ]


def test_an_answer_that_looks_like_a_date_or_a_number_stays_the_string_that_it_is(tmp_path):
    path = write_lines(tmp_path / "dates.jsonl", [good(answer="2020-01-01"), good(answer="007")])
    assert [r.answer for r in load_records(path)] == ["2020-01-01", "007"]


def test_parquet_gives_the_same_records_as_json_lines(tmp_path):
    rows = [{"q": f"{i}+1=", "a": str(i + 1), "unused": [i]} for i in range(5)]
    parquet = tmp_path / "train.parquet"
    Dataset.from_list(rows).to_parquet(str(parquet))
    lines = write_lines(tmp_path / "train.jsonl", [json.dumps(row) for row in rows])
    from_parquet, from_lines = load_records(str(parquet), "q", "a"), load_records(lines, "q", "a")
    assert [(r.prompt, r.answer) for r in from_parquet] == [(r.prompt, r.answer) for r in from_lines]
    assert from_parquet[2].origin == f"{parquet} row 3"


def test_chat_messages_are_a_prompt_in_both_formats(tmp_path):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    lines = write_lines(tmp_path / "chat.jsonl", [json.dumps({"prompt": messages, "answer": "x"})])
    parquet = tmp_path / "chat.parquet"
    Dataset.from_list([{"prompt": messages, "answer": "x"}]).to_parquet(str(parquet))
    for path in (lines, str(parquet)):
        assert [dict(m) for m in load_records(path)[0].prompt] == messages


def test_one_error_names_every_bad_line_with_what_is_wrong_and_the_remedy(tmp_path):
    path = write_lines(
        tmp_path / "bad.jsonl",
        [
            good(),
            '{"prompt": "1+1=", ',
            '["prompt"]',
            '{"prompt": "1+1=", "label": "2"}',
            '{"prompt": "  ", "answer": 2}',
            '{"prompt": 7, "answer": "2"}',
            '{"prompt": [{"role": "user"}], "answer": "2"}',
            b'{"prompt": "\xff", "answer": "2"}',
            '{"prompt": [], "answer": null}',
            '{"prompt": "1", "answer": ' + "9" * 5000 + "}",
            good(),
        ],
    )
    with pytest.raises(DataError) as caught:
        load_records(path)
    lines = str(caught.value).splitlines()
    assert lines[0] == "9 records can't be used; nothing was started:"
    expected = [
        (2, "broken JSON at column 20"),
        (3, "a JSON list, not an object"),
        (4, "no field 'answer', only 'prompt', 'label'; add it, or set data.prompt_key and data.answer_key"),
        (5, "'prompt' is empty; write a prompt or drop the record; 'answer' is 2 of type int, not a string"),
        (6, "'prompt' is of type int, neither a string nor a list of chat messages"),
        (7, "message 0 of 'prompt' isn't an object with strings 'role' and 'content'"),
        (8, "not UTF-8 (byte 13 of the line)"),
        (9, "empty list of messages"),
        (10, "JSON that can't be read (Exceeds the limit"),
    ]
    assert len(lines) == 1 + len(expected)
    for line, (number, problem) in zip(lines[1:], expected, strict=True):
        assert line.startswith(f"  {path} line {number}: ")
        assert problem in line


def test_an_error_shows_twenty_bad_records_and_counts_the_rest(tmp_path):
    path = write_lines(tmp_path / "bad.jsonl", ["{"] * 45)
    with pytest.raises(DataError, match="45 records") as caught:
        load_records(path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 22
    assert f"{path} line 20:" in lines[20]
    assert lines[21] == "  … and 25 more"
    assert len(caught.value.problems) == 45


def test_bad_parquet_rows_are_named_by_row(tmp_path):
    path = tmp_path / "bad.parquet"
    Dataset.from_list([{"prompt": "a", "answer": "1"}, {"prompt": "", "answer": None}]).to_parquet(str(path))
    with pytest.raises(DataError, match=rf"{path} row 2: 'prompt' is empty.*'answer' is None"):
        load_records(str(path))


def test_a_parquet_file_without_the_column_names_the_columns_it_has(tmp_path):
    path = tmp_path / "other.parquet"
    Dataset.from_list([{"question": "a", "label": "1"}]).to_parquet(str(path))
    with pytest.raises(DataError, match=r"no column 'prompt' and no column 'answer', only question, label"):
        load_records(str(path))


def test_a_parquet_file_that_is_none_is_refused_by_name(tmp_path):
    path = tmp_path / "broken.parquet"
    path.write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match=rf"{path} can't be read as Parquet: ArrowInvalid"):
        load_records(str(path))


def test_a_missing_file_and_an_unknown_kind_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl isn't there"):
        load_records(str(tmp_path / "none.jsonl"))
    (tmp_path / "data.csv").write_text("prompt,answer\n")
    with pytest.raises(DataError, match="of no known kind"):
        load_records(str(tmp_path / "data.csv"))


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="holds no records"):
        load_records(str(tmp_path / "empty.jsonl"))


def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path):
    path = write_lines(tmp_path / "bom.jsonl", [b"\xef\xbb\xbf" + good().encode()])
    assert load_records(path)[0].prompt == "1+1="


def test_a_hub_data_set_that_cannot_be_had_says_how_to_name_one(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"nobody/nothing:main@train.*NAME\[:CONFIGURATION\]\[@SPLIT\]"):
        load_records("nobody/nothing:main@train")
