"""The picture of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlrefit.recipes.run.report import write_report


def _row(step: int, **refit: Any) -> dict[str, Any]:
    told = {f"refit/{key}": value for key, value in refit.items()}
    return {
        "step": step,
        "reward/mean": 0.1,
        "generation_kl": 1e-6,
        "time/train": 1.0,
        "refit/seconds": 0.1,
    } | told


def _height(rows: list[dict[str, Any]], path: Path) -> int:
    write_report(rows, path, "a run of $_$")  # which is no formula
    return int.from_bytes(path.read_bytes()[20:24])


DENSE = _row(1, bytes_wire=1000, bytes_dense=1000)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> int:
    """The height without a sparse refit."""
    return _height([DENSE, {**DENSE, "step": 2}], tmp_path_factory.mktemp("plain") / "dense.png")


@pytest.mark.filterwarnings("error::UserWarning")  # other tests leave sockets, which may be found here
@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
def test_what_changed_and_what_travelled_is_drawn_where_a_refit_was_sparse(
    share: float, plain: int, tmp_path: Path
) -> None:
    sparse = _row(2, bytes_wire=int(1000 * share), bytes_dense=1000, changed_share=share)
    assert _height([DENSE, sparse], tmp_path / "sparse.png") == 1.5 * plain


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_run_that_was_resumed_draws_its_one_step_at_first(plain: int, tmp_path: Path) -> None:
    sparse = _row(2, bytes_wire=20, bytes_dense=1000, changed_share=0.02)
    assert _height([sparse], tmp_path / "one.png") == 1.5 * plain


@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")
def test_sides_that_compute_alike_to_the_last_bit_are_drawn_too(tmp_path: Path) -> None:
    _height([_row(1) | {"generation_kl": 0.0}, _row(2) | {"generation_kl": 0.0}], tmp_path / "alike.png")
