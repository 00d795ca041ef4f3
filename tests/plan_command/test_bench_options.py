"""What ``rlrefit bench`` refuses before it starts, and how it tells what went wrong later."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlrefit.integration.errors import RefitError
from rlrefit.recipes.bench import command
from rlrefit.recipes.bench.launch import BenchFailed, run_ranks
from rlrefit.recipes.bench.options import BenchOptions
from rlrefit.recipes.cli import main
from rlrefit.recipes.plan.catalog import parse_gen, parse_train


def _bench(moe: str, *arguments: str) -> int:
    given = ("--device", "cpu", "--model", moe, "--train", "tp=1", "--gen", "tp=1", *arguments)
    return main(["bench", *given])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--json", "/nonexist/x.json"), "--json: the folder /nonexist does not exist"),
        (("--json", "/"), "--json: / is a folder"),
        (("--timeline", "x.abc"), "--timeline: x.abc ends in none of .png, .svg, .pdf"),
        (("--transport", "p2p,ipc"), "--transport: ipc needs GPUs"),
        (("--train", ""), "train: the layout is empty"),
        (("--streams", "99"), "--streams: 99 is not between 1 and"),
        (("--bucket-mb", "0"), "--bucket-mb: 0 leaves no room"),
        (("--layers", "0"), "--layers: 0 is too small"),
        (("--delta-base", "host"), "--delta-base: has no effect without --changed"),
        (("--peers", "none,broadcast"), "--peers: none has no others beside it"),
    ],
)
def test_an_option_that_cannot_work_is_the_only_complaint_and_nothing_starts(
    moe: str,
    arguments: tuple[str, ...],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "run_ranks", lambda *_: pytest.fail("it started"))
    assert _bench(moe, *arguments) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith(complaint)
    assert "\n" not in said


@pytest.mark.parametrize("wrong", ["x", "5", "1%%", "-1", "nan"])
def test_what_is_no_share_of_change_is_told_as_it_was_written(
    moe: str, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        _bench(moe, f"--changed=0,{wrong}")
    assert ended.value.code == 2
    assert f"{wrong!r} is no share" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "foreign"),
    [
        (("--live", "--sleep", "--no-check"), ["--sleep", "--check"]),
        (("--live", "--quantize", "off"), ["--quantize"]),
        (("--backend", "vllm", "--engine-log", "x"), ["--backend", "--engine-log"]),
    ],
)
def test_an_option_of_the_other_kind_of_run_is_refused_by_name(
    moe: str, arguments: tuple[str, ...], foreign: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _bench(moe, *arguments) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in said] == foreign


def test_a_file_that_cannot_be_written_is_told_after_the_figures(
    moe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, picture = tmp_path / "bench.json", tmp_path / "stages.png"

    def full(path: Path, records: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(command, "write_json", full)
    quick = ("--layers", "1", "--refits", "1", "--peers", "none", "--no-check")
    assert _bench(moe, *quick, "--json", str(target), "--timeline", str(picture)) == 1
    said = capsys.readouterr()
    assert "refit p2p" in said.out
    assert f"{target} can't be written: [Errno 28] No space left on device" in said.err
    assert picture.exists()


def _refuse(rank: int, options: BenchOptions, store: object) -> None:
    raise RefitError("the second rank has no such weight", stage="handshake", rank=rank)


def _break(rank: int, options: BenchOptions, store: object) -> None:
    raise KeyError("unexpected")


@pytest.mark.parametrize(("fault", "is_traced"), [(_refuse, False), (_break, True)])
def test_only_unexpected_errors_of_a_rank_come_with_a_traceback(
    moe: str, fault: object, is_traced: bool
) -> None:
    options = BenchOptions(
        moe, parse_train("tp=1"), parse_gen("tp=1"), "tp=1", "tp=1", device="cpu", timeout_s=30
    )
    with pytest.raises(BenchFailed) as failed:
        run_ranks(fault, options)  # type: ignore[arg-type]
    assert ("Traceback" in str(failed.value)) == is_traced
    assert ("RefitError: the second rank has no such weight" in str(failed.value)) != is_traced
