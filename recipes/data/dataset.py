"""Reads prompts and answers from JSON lines, Parquet or the Hugging Face hub, and checks every record.

JSON lines are parsed here, line by line, and not by `datasets`: it knows no line numbers, and infers a
column's type, which turns answers such as "2020-01-01" into timestamps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SHOWN = 20
_JSON_LINES = (".jsonl", ".json")
_PARQUET = ".parquet"

Message = Mapping[str, str]


@dataclass(frozen=True)
class Record:
    """One usable record.

    Attributes:
        prompt: a string, or chat messages with ``role`` and ``content``.
        answer: what a reward function judges by.
        origin: for messages: ``FILE line N`` or ``SOURCE row N``, counted from 1.
        position: N.
    """

    prompt: str | tuple[Message, ...]
    answer: str
    origin: str
    position: int


@dataclass(frozen=True)
class BadRecord:
    """One record that can't be used.

    Attributes:
        origin: as of :class:`Record`.
        position: as of :class:`Record`.
        problem: what is wrong, and the remedy.
    """

    origin: str
    position: int
    problem: str


class DataError(ValueError):
    """Data that can't be trained on.

    Attributes:
        problems: all bad records; the message shows those with the same problem in one line, no more than 20 lines, and 20 records in
            each. Empty if the source as a whole is at fault.
    """

    def __init__(self, problems: Sequence[BadRecord] | str) -> None:
        if isinstance(problems, str):
            self.problems: tuple[BadRecord, ...] = ()
            super().__init__(problems)
            return
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = [f"{count} record{'s' if count > 1 else ''} can't be used; nothing was started:"]
        alike: dict[str, list[BadRecord]] = {}
        for bad in self.problems:
            alike.setdefault(bad.problem, []).append(bad)
        lines += [f"  {_places(found)}: {problem}" for problem, found in [*alike.items()][:_SHOWN]]
        if len(alike) > _SHOWN:
            lines.append(f"  … and {len(alike) - _SHOWN} more problems")
        super().__init__("\n".join(lines))


def _places(found: Sequence[BadRecord]) -> str:
    """Where records of one source are: ``FILE line 3, 4, 9``."""
    places = ", ".join([found[0].origin, *(str(bad.position) for bad in found[1:_SHOWN])])
    return places + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


def load_records(source: str, prompt_key: str = "prompt", answer_key: str = "answer") -> list[Record]:
    """All records of a data source.

    Args:
        source: a ``.jsonl`` (or ``.json`` with one object a line) or ``.parquet`` file; or a hub data set as
            ``NAME[:CONFIGURATION][@SPLIT]``, e.g. ``openai/gsm8k:main@train``. A data set of one split
            needs no ``@SPLIT``.
        prompt_key: field with the prompt: a string, or a list of chat messages.
        answer_key: field with the answer: a string.

    Raises:
        DataError: the source can't be read or holds no record, or some of its records can't be used: all
            of them are listed in one error.
    """
    records, problems = read_records(source, prompt_key, answer_key)
    if problems:
        raise DataError(problems)
    require_records(records, source)
    return records


def read_records(source: str, prompt_key: str, answer_key: str) -> tuple[list[Record], list[BadRecord]]:
    """The usable and the bad records of a source, for callers that have checks of their own.

    Raises:
        DataError: the source as a whole can't be read.
    """
    records: list[Record] = []
    problems: list[BadRecord] = []
    for origin, position, row in _rows(source, (prompt_key, answer_key)):
        problem = row if isinstance(row, str) else _problem(row, prompt_key, answer_key)
        if problem is None:
            assert isinstance(row, Mapping)
            prompt = row[prompt_key]
            stored = prompt if isinstance(prompt, str) else tuple(prompt)
            records.append(Record(stored, row[answer_key], origin, position))
        else:
            problems.append(BadRecord(origin, position, problem))
    return records, problems


def require_records(records: Sequence[Record], source: str) -> None:
    """Refuses an empty data set.

    Raises:
        DataError: there are no records.
    """
    if not records:
        raise DataError(f"{source} holds no records; give a source with at least one prompt")


# Origin, position and either the row or, where there is none, what is wrong.
_Row = tuple[str, int, Mapping[str, Any] | str]


def _rows(source: str, keys: tuple[str, str]) -> Iterator[_Row]:
    path = Path(source).expanduser()
    suffix = path.suffix.lower()
    if suffix in (*_JSON_LINES, _PARQUET) or path.exists():
        if not path.is_file():
            raise DataError(f"data file {path} isn't there; correct the path")
        if suffix not in (*_JSON_LINES, _PARQUET):
            raise DataError(
                f"data file {path} is of no known kind; give .jsonl (one JSON object a line) or .parquet"
            )
        yield from _parquet_rows(path, keys) if suffix == _PARQUET else _json_rows(path)
    else:
        yield from _hub_rows(source, keys)


def _json_rows(path: Path) -> Iterator[_Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            row: Mapping[str, Any] | str
            try:
                # Without its end, beyond which a column would count from 1 again.
                parsed = json.loads(line.rstrip(b"\r\n").decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                row = f"not UTF-8 (byte {error.start + 1} of the line); save the file as UTF-8"
            except json.JSONDecodeError as error:
                row = f"broken JSON at column {error.colno}: {error.msg}; write one JSON object on the line"
            # Numbers of thousands of digits, and brackets nested as deep.
            except (ValueError, RecursionError) as error:
                row = f"JSON that can't be read ({error}); drop the record or write the value as a string"
            else:
                wrong = f"a JSON {type(parsed).__name__}, not an object; write one JSON object on the line"
                row = parsed if isinstance(parsed, dict) else wrong
            yield f"{path} line {number}", number, row


def _parquet_rows(path: Path, keys: tuple[str, str]) -> Iterator[_Row]:
    import pyarrow
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        dataset = Dataset.from_parquet(str(path))
    except (DatasetGenerationError, pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path} can't be read as Parquet: {_cause(error)}; write the file anew") from error
    yield from _dataset_rows(dataset, str(path), keys)


def _hub_rows(source: str, keys: tuple[str, str]) -> Iterator[_Row]:
    from datasets import DatasetDict, load_dataset
    from datasets.exceptions import DatasetGenerationError

    name, _, split = source.partition("@")
    name, _, configuration = name.partition(":")
    try:
        loaded = load_dataset(name, configuration or None, split=split or None)
    # Unknown names, configurations and splits, and all that a network does.
    except (DatasetGenerationError, OSError, ValueError) as error:
        raise DataError(
            f"{source} is no file here and can't be loaded as a hub data set: {_cause(error)}; give a file, or "
            "NAME[:CONFIGURATION][@SPLIT] of a data set that this machine can reach"
        ) from error
    if isinstance(loaded, DatasetDict):
        if len(loaded) != 1:
            raise DataError(
                f"data set {source} has splits {', '.join(loaded)}; name one: {source}@{next(iter(loaded))}"
            )
        loaded = next(iter(loaded.values()))
    yield from _dataset_rows(loaded, source, keys)


def _dataset_rows(dataset: Any, source: str, keys: tuple[str, str]) -> Iterator[_Row]:
    if absent := [key for key in keys if key not in dataset.column_names]:
        raise DataError(
            f"{source} has no column {' and no column '.join(map(repr, absent))}, only "
            f"{', '.join(dataset.column_names)}; set data.prompt_key and data.answer_key to columns that it has"
        )
    # Other columns (pictures, long traces) may be dear to decode.
    for number, row in enumerate(dataset.select_columns(list(dict.fromkeys(keys))), start=1):
        yield f"{source} row {number}", number, row


def _problem(row: Mapping[str, Any], prompt_key: str, answer_key: str) -> str | None:
    """What is wrong with a row, both fields at once, or None."""
    found: list[str | None] = []
    for key in (prompt_key, answer_key):
        if key not in row:
            present = ", ".join(map(repr, row)) or "nothing"
            found.append(
                f"no field {key!r}, only {present}; add it, or set data.prompt_key and data.answer_key"
            )
    if prompt_key in row:
        found.append(_prompt_problem(row[prompt_key], prompt_key))
    if answer_key in row:
        found.append(_answer_problem(row[answer_key], answer_key))
    return "; ".join(problem for problem in found if problem) or None


def _answer_problem(answer: Any, key: str) -> str | None:
    if isinstance(answer, str):
        return _half_character(answer, key)
    return f"{key!r} is {answer!r} of type {type(answer).__name__}, not a string; quote or convert it"


def _half_character(text: str, what: str) -> str | None:
    """A complaint if the text is none: JSON can write one half of what UTF-16 writes in two."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return (
            f"character {error.start + 1} of {what!r} is {text[error.start]!a}, half of a surrogate pair, which tokenizers refuse; "
            "correct the text or drop the record"
        )
    return None


def _prompt_problem(prompt: Any, key: str) -> str | None:
    if isinstance(prompt, str):
        empty = f"{key!r} is empty; write a prompt or drop the record"
        return _half_character(prompt, key) if prompt.strip() else empty
    if not isinstance(prompt, list):
        kind = type(prompt).__name__
        return f"{key!r} is of type {kind}, neither a string nor a list of chat messages; convert it"
    if not prompt:
        return f"{key!r} is an empty list of messages; write a prompt or drop the record"
    for index, message in enumerate(prompt):
        good = isinstance(message, Mapping) and all(
            isinstance(message.get(k), str) for k in ("role", "content")
        )
        if not good:
            return f"message {index} of {key!r} isn't an object with strings 'role' and 'content'; correct it"
        if problem := _half_character(message["content"], f"{key}[{index}].content"):
            return problem
    return None


def _cause(error: BaseException) -> str:
    """The innermost message: `datasets` wraps what went wrong into "an error occurred"."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
