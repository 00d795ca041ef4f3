"""``rlrefit bench`` from end to end over gloo, and what it says when it can't run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import psutil
import pytest
import torch

from rlrefit.recipes.bench import measure
from rlrefit.recipes.bench.launch import run_ranks
from rlrefit.recipes.bench.options import BenchOptions
from rlrefit.recipes.bench.ranks import BenchRanks
from rlrefit.recipes.bench.scene import open_shortened, set_up
from rlrefit.recipes.cli import main
from rlrefit.recipes.plan.catalog import parse_gen, parse_train
from tests.catalog.shrunken import BLOCK_CONFIGS, CONFIGS
from tests.servers import processes

KEYS = {
    "model", "train", "gen", "dtype", "quantize", "sleep", "leave", "transport", "kept_bytes", "seconds_median", "seconds_min", "seconds_max",
    "kept_gb_per_s", "p2p_gb_per_s", "p2p_ratio", "host_seconds", "peak_extra_bytes", "stages", "peers", "bit_exact",
}  # fmt: skip


@pytest.fixture
def moe(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["qwen3_moe"] | {"num_experts": 4, "num_key_value_heads": 2}))
    return str(path)


def bench(*arguments):
    return main(["bench", "--device", "cpu", *map(str, arguments)])


@pytest.mark.parametrize(("quantize", "base"), [("off", "gpu"), ("fp8", "gpu"), ("off", "optimizer")])
def test_sparse_refits_are_timed_for_each_share_of_change_and_checked(quantize, base, moe, tmp_path, capsys):
    figures, model = tmp_path / "bench.json", moe
    if quantize == "fp8":
        model = tmp_path / "blocks.json"
        model.write_text(json.dumps(BLOCK_CONFIGS["qwen3_moe"] | {"num_experts": 3}))
    code = bench(
        "--model", model, "--layers", 2, "--train", "tp=2", "--gen", "tp=1", "--transport", "p2p", "--peers", "none",
        "--refits", 2, "--changed", "0,5%", "--json", figures, "--quantize", quantize, "--delta-base", base,
    )  # fmt: skip
    said = capsys.readouterr()
    assert code == 0, said.err
    assert ("record" in said.out) == (base == "optimizer")
    none, some = json.loads(figures.read_text())["deltas"]
    assert (none["changed"], some["changed"]) == (0.0, 0.05)
    assert none["bit_exact"]
    assert some["bit_exact"]
    assert none["found"] == 0.0 < some["found"] <= 0.06
    assert none["wire_ratio"] < some["wire_ratio"] < 0.2
    assert some["base_bytes"] > 0


def test_a_run_gives_a_record_for_each_transport_peers_that_are_exact_and_a_picture(moe, tmp_path, capsys):
    figures, picture = tmp_path / "bench.json", tmp_path / "timeline.png"
    code = bench(
        "--model", moe, "--layers", 2, "--train", "tp=2,ep=2", "--gen", "tp=2",
        "--transport", "auto,golden", "--refits", 2, "--peer-refits", 1, "--verify", "full",
        "--json", figures, "--timeline", picture,
    )  # fmt: skip
    said = capsys.readouterr()
    assert code == 0, said.err
    records = json.loads(figures.read_text())
    assert [record["transport"] for record in records] == ["p2p", "golden"]
    for record in records:
        assert set(record) == KEYS
        assert record["bit_exact"] is True
        assert (record["train"], record["gen"], record["dtype"]) == ("tp=2,ep=2", "tp=2", "bf16")
        assert record["quantize"] == "off"
        assert 0 < record["seconds_min"] <= record["seconds_median"] <= record["seconds_max"]
        assert record["kept_gb_per_s"] == pytest.approx(record["kept_bytes"] / record["seconds_median"] / 1e9)
        assert record["p2p_ratio"] == pytest.approx(record["kept_gb_per_s"] / record["p2p_gb_per_s"])
        assert {"handshake", "transfer", "commit"} <= set(record["stages"])
        assert record["peers"]["broadcast"] > 0
        assert record["peers"]["per-tensor"] > 0
        assert record["peers"]["vllm"] is None
    assert "2 weights on the misc path, trainer: MoE router" in said.out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("family", "layers", "train", "gen"),
    [("moe", 2, "pp=2", "tp=1,dp=2"), ("moe", 1, "fsdp=3", "tp=1"), ("gpt_oss", 1, "tp=1,dp=2,ep=2", "tp=2")],
)
def test_stages_replicas_fsdp_and_experts_in_another_order_are_exact_in_the_refit_and_the_peers(
    moe, tmp_path, family, layers, train, gen
):
    figures, model = tmp_path / "bench.json", moe
    if family == "gpt_oss":
        model = tmp_path / "gpt_oss.json"
        model.write_text(json.dumps(CONFIGS[family]))
    code = bench(
        "--model", model, "--layers", layers, "--train", train, "--gen", gen, "--peers", "broadcast,per-tensor",
        "--refits", 1, "--peer-refits", 1, "--json", figures,
    )  # fmt: skip
    assert code == 0
    record = json.loads(figures.read_text())
    assert record["bit_exact"] is True
    assert min(record["peers"].values()) > 0


def test_codes_and_scales_of_trainers_under_fsdp_that_cut_blocks_are_exact(tmp_path, capsys):
    # One key head: its block is cut by two ranks, and replicated by the engine.
    config = BLOCK_CONFIGS["qwen3_moe"] | {"num_key_value_heads": 1, "num_experts": 3}
    model, figures = tmp_path / "config.json", tmp_path / "bench.json"
    model.write_text(json.dumps(config))
    code = bench(
        "--model", model, "--layers", 1, "--train", "fsdp=2", "--gen", "tp=2", "--quantize", "fp8",
        "--transport", "p2p,golden", "--refits", 1, "--peer-refits", 1, "--verify", "full", "--json", figures,
    )  # fmt: skip
    said = capsys.readouterr()
    assert code == 0, said.err
    # Half of the queries' rows, keys and values whole, half of the others; the vocabulary padded to 320.
    codes = (256 + 2 * 128) * 256 + 256 * 256 + 3 * 3 * 128 * 256
    kept = codes + codes // 128**2 * 4 + 2 * (2 * 160 * 256 + 3 * 256 + 3 * 256 + 2 * 128)
    for record in json.loads(figures.read_text()):
        assert (record["quantize"], record["bit_exact"]) == ("fp8", True)
        assert record["kept_bytes"] == kept
        assert record["peers"]["broadcast"] > 0
        assert record["peers"]["per-tensor"] is None
    assert "bf16 with linear layers in blocks of fp8 (quantized by the trainers)" in said.out
    assert "on the misc path" not in said.out
    assert "peer per-tensor was not timed: it sends the trainers' own bytes" in said.out


def test_all_that_is_wrong_is_said_at_once(capsys):
    code = main(
        [
            "bench", "--model", "qwen3-8b", "--train", "tp=3", "--gen", "tp=2", "--transport", "pigeon",
            "--peers", "m3", "--refits", "0", "--verify", "maybe",
            "--quantize", "fp8", "--dtype", "fp32",
        ]
    )  # fmt: skip
    said = capsys.readouterr().err
    assert code == 2
    parts = (
        "'pigeon'",
        "'m3'",
        "--refits: 0",
        "'maybe'",
        "need 5 GPUs",
        "can't be divided",
        "fp8 is made of",
    )
    assert [part for part in parts if part not in said] == []


def test_more_layers_than_the_model_has_are_refused_with_their_number(capsys):
    sides = ("--train", "tp=1", "--gen", "tp=1", "--device", "cpu")
    assert bench("--model", "qwen3.5-4b", "--layers", 33, *sides) == 2
    said = capsys.readouterr().err
    assert "--layers: 33" in said
    assert "has 32 decoder layers" in said


def test_fewer_layers_of_a_language_model_leave_its_image_encoder_whole():
    whole, short = (open_shortened("qwen3.5-4b", torch.bfloat16, layers) for layers in (None, 5))
    names = {spec.name for spec in whole.specs()} - {spec.name for spec in short.specs()}
    assert short.architecture.layers == 5
    assert {name.split(".")[3] for name in names} == {str(i) for i in range(5, 32)}


def options(moe, **changes):
    return BenchOptions(
        model=moe, train=parse_train("tp=1"), gen=parse_gen("tp=1"), train_text="tp=1", gen_text="tp=1", layers=1,
        refits=1, device="cpu", probe_bytes=1 << 10, timeout_s=30, **changes,
    )  # fmt: skip


def _damage_what_lands(rank, options, store):
    ranks = BenchRanks(rank, options, store)
    scene = set_up(options, ranks)
    endpoint = scene.endpoint
    if not ranks.is_source:
        honest = endpoint.finish

        def finish(version):
            honest(version)
            if version == 2:
                endpoint.storage.tensors[-1].view(-1)[0] = 3.0

        endpoint.finish = finish
    found = measure.refits(scene, "p2p")
    ranks.close()
    return found.bit_exact, found.faults


def test_one_wrong_element_in_the_second_refit_is_reported_with_its_weight(moe):
    exact, faults = run_ranks(_damage_what_lands, options(moe))
    assert exact is False
    assert len(faults) == 1
    assert "refit 2, rank 1" in faults[0]
    assert "version 2" in faults[0]


def _wait_for_ever(rank, options, store):
    told = Path(options.model).with_name(f"rank{rank}")
    told.with_suffix(".begun").write_text(str(os.getpid()))
    told.with_suffix(".begun").rename(told)
    time.sleep(600)


def test_ranks_do_not_outlive_a_command_that_is_killed(moe):
    command = processes().Process(target=run_ranks, args=(_wait_for_ever, options(moe)))
    command.start()
    try:
        deadline = time.monotonic() + 60
        while len(told := [*Path(moe).parent.glob("rank?")]) < options(moe).world_size:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        ranks = [psutil.Process(int(file.read_text())) for file in told]
    finally:
        command.kill()
        command.join()
    psutil.wait_procs(ranks, 20)
    assert [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE] == []
