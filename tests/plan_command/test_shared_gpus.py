"""``rlrefit plan --topology shared_gpus=true``: trainers and engines that share GPUs, without a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlrefit.recipes.cli import main
from tests.catalog.shrunken import CONFIGS


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["qwen3_moe"]))
    return str(path)


def test_copies_within_a_gpu_set_the_time_at_the_rate_that_is_given(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def bound(train: str, gen: str, rate: str) -> float:
        topology = f"shared_gpus=true,copy={rate},nvlink=400"
        assert (
            main(["plan", "--model", model, "--train", train, "--gen", gen, "--topology", topology, "--json"])
            == 0
        )
        found = json.loads(capsys.readouterr().out)
        assert found["bound_seconds"] <= found["predicted_seconds"]
        return float(found["bound_seconds"])

    # On one GPU all bytes stay there, those of the misc path too.
    assert bound("tp=1", "tp=1", "1000") == pytest.approx(2 * bound("tp=1", "tp=1", "2000"))
    # Between two, the experts of the other GPU cross NVLink, which a faster copy does not change.
    assert bound("ep=2", "tp=2", "1000000") == pytest.approx(bound("ep=2", "tp=2", "2000000"))


def test_worlds_of_two_sizes_and_more_than_one_host_can_not_share_gpus(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    topology = "shared_gpus=true,gpus_per_host=1"
    assert main(["plan", "--model", model, "--train", "ep=2", "--gen", "tp=1", "--topology", topology]) == 2
    said = capsys.readouterr().err
    assert "2 trainer and 1 engine ranks can't share GPUs one to one" in said
    assert "have to be on one host, and gpus_per_host is 1; raise it" in said
    assert (
        main(
            [
                "plan",
                "--model",
                model,
                "--train",
                "tp=1",
                "--gen",
                "tp=1",
                "--topology",
                "shared_gpus=1,copy=0",
            ]
        )
        == 2
    )
    said = capsys.readouterr().err
    assert "shared_gpus is '1'; give true or false" in said
    assert "copy is '0'; give a number above 0" in said
