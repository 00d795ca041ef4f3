import json

import pytest
from datasets import Dataset

from rlrefit.recipes.data.dataset import DataError, load_records


def write_lines(path, lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return str(path)


def good(prompt="1+1=", answer="2"):
    return json.dumps({"prompt": prompt, "answer": answer})


def test_json_lines_give_records_with_their_lines_and_answers_stay_the_strings_that_they_are(tmp_path):
    # A byte order mark is no part of the first record, and a date no other answer.
    lines = [b"\xef\xbb\xbf" + good().encode(), "", good("2+3=", "2020-01-01"), good("7=", "007")]
    path = write_lines(tmp_path / "train.jsonl", lines)
    assert [(r.prompt, r.answer, r.origin) for r in load_records(path)] == [
        ("1+1=", "2", f"{path} line 1"),
        ("2+3=", "2020-01-01", f"{path} line 3"),
        ("7=", "007", f"{path} line 4"),
    ]


def test_parquet_gives_the_same_records_as_json_lines(tmp_path):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    for prompts in ([f"{i}+1=" for i in range(5)], [messages] * 3):
        rows = [{"q": prompt, "a": str(i), "unused": [i]} for i, prompt in enumerate(prompts)]
        parquet = str(tmp_path / "train.parquet")
        Dataset.from_list(rows).to_parquet(parquet)
        lines = write_lines(tmp_path / "train.jsonl", [json.dumps(row) for row in rows])
        from_parquet, from_lines = load_records(parquet, "q", "a"), load_records(lines, "q", "a")
        assert [(r.prompt, r.answer) for r in from_parquet] == [(r.prompt, r.answer) for r in from_lines]
        assert from_parquet[2].origin == f"{parquet} row 3"
    assert [dict(m) for m in from_parquet[0].prompt] == messages


def test_one_error_names_every_bad_line_with_what_is_wrong_and_tells_what_many_have_in_common_once(tmp_path):
    bad = [
        ('{"prompt": "1+1=", ', "broken JSON at column 20"),
        ('["prompt"]', "a JSON list"),
        ('{"prompt": "1+1=", "label": "2"}', "no field 'answer', only 'prompt', 'label'"),
        ('{"prompt": "  ", "answer": 2}', "'prompt' is empty"),
        ('{"prompt": "1+1=", "answer": 2}', "'answer' is 2 of type int"),
        ('{"prompt": 7, "answer": "2"}', "'prompt' is of type int"),
        ('{"prompt": [{"role": "user"}], "answer": "2"}', "message 0 of 'prompt'"),
        (b'{"prompt": "\xff", "answer": "2"}', "not UTF-8 (byte 13 of the line)"),
        ('{"prompt": [], "answer": null}', "empty list of messages"),
        ('{"prompt": "1", "answer": ' + "9" * 5000 + "}", "JSON that can't be read"),
        ('{"prompt": "\\ud83d\\ude00 \\ud83d", "answer": "\\ude00"}', "character 3 of 'prompt' is '\\ud83d'"),
        ('{"prompt": [{"role": "user", "content": "\\ud83d"}], "answer": "2"}', "'prompt[0].content'"),
    ]
    path = write_lines(tmp_path / "bad.jsonl", [good(), *(line for line, _ in bad), *["{"] * 35, good()])
    with pytest.raises(DataError, match="47 records") as caught:
        load_records(path)
    lines = str(caught.value).splitlines()
    assert len(caught.value.problems) == 47
    assert len(lines) == 14
    assert lines[13].startswith(f"  {path} line 14, 15, 16, ")
    assert "33 and 15 more: broken JSON" in lines[13]
    for number, (line, (_, problem)) in enumerate(zip(lines[1:13], bad, strict=True), start=2):
        assert line.startswith(f"  {path} line {number}: ")
        assert problem in line


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"prompt": "a", "answer": "1"}, {"prompt": "", "answer": None}], "row 2: 'prompt' is empty"),
        ([{"question": "a", "label": "1"}], r"no column 'prompt'.*'answer', only question, label"),
    ],
)
def test_bad_parquet_rows_and_columns_are_named(tmp_path, rows, told):
    path = str(tmp_path / "bad.parquet")
    Dataset.from_list(rows).to_parquet(path)
    with pytest.raises(DataError, match=told):
        load_records(path)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("broken.parquet", "not parquet at all", "can't be read as Parquet"),
        ("none.jsonl", None, "isn't there"),
        ("data.csv", "prompt,answer\n", "of no known kind"),
        ("empty.jsonl", "\n\n", "no records"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path, name, text, told):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=rf"{tmp_path / name}.* {told}"):
        load_records(str(tmp_path / name))


def test_a_hub_data_set_that_cannot_be_had_says_how_to_name_one(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"nobody/nothing:main@train.*NAME\[:CONFIGURATION\]\[@SPLIT\]"):
        load_records("nobody/nothing:main@train")
