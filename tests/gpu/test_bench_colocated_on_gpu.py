"""``rlrefit bench --colocated`` on GPUs: a trainer and an engine on each, straight into live parameters, by either side, and through
buckets."""

from __future__ import annotations

import json

import pytest
import torch

from rlrefit.recipes.cli import main

from .needs import needs

pytestmark = needs()


def records(tmp_path, capsys, *arguments):
    figures = tmp_path / "bench.json"
    code = main(
        [
            "bench", "--colocated", "--transport", "ipc,pull,buckets,p2p,golden", "--refits", "3", "--verify", "full",
            "--json", str(figures), *arguments,
        ]
    )  # fmt: skip
    said = capsys.readouterr()
    assert code == 0, said.err
    found = json.loads(figures.read_text())
    assert [record["transport"] for record in found] == ["ipc", "pull", "buckets", "p2p", "golden"]
    assert all(record["bit_exact"] for record in found)
    assert all(record["copy_gb_per_s"] > 100 for record in found)
    return found


@pytest.mark.parametrize(
    "moves", [(), ("--sleep",), ("--leave",), ("--sleep", "--leave"), ("--quantize", "fp8")], ids=" ".join
)
def test_on_one_gpu_every_byte_stays_there_and_is_exact(tmp_path, capsys, moves):
    ipc, pull, buckets, p2p, golden = records(
        tmp_path, capsys, "--model", "qwen3-0.6b", "--train", "tp=1", "--gen", "tp=1", *moves
    )
    assert ("bind" in ipc["stages"]) == bool({"--sleep", "--leave"} & {*moves})
    # Engines that wake at the same addresses ask for nothing.
    assert ("bind" in pull["stages"]) == ("--leave" in moves)
    for record in (ipc, pull, buckets, p2p):
        assert record["stayed_bytes"] == record["kept_bytes"]
        assert (record["crossed_bytes"], record["p2p_gb_per_s"]) == (0, None)
    assert golden["stayed_bytes"] is None


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs at least two CUDA devices")
def test_on_two_gpus_what_a_trainer_holds_of_its_engines_shard_stays_and_the_rest_crosses(tmp_path, capsys):
    ipc, pull, buckets, p2p, _ = records(
        tmp_path, capsys, "--model", "qwen3-30b-a3b", "--layers", "2", "--train", "ep=2", "--gen", "tp=2"
    )
    for record in (ipc, pull, buckets, p2p):
        # Half of the experts of either GPU's engine are its trainer's; of attention and vocabulary it holds all.
        assert record["crossed_bytes"] < record["stayed_bytes"] < record["kept_bytes"]
        assert record["p2p_gb_per_s"] > 10
