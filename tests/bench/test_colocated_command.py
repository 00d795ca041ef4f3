"""``rlrefit bench --colocated``: trainer rank i and engine rank i on one device, over gloo and over shared memory."""

from __future__ import annotations

import contextlib
import io
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrefit.recipes.bench.room import Need, shortages
from rlrefit.recipes.bench.sharing import sharing
from rlrefit.recipes.bench.sleeping import arrange
from rlrefit.recipes.cli import main
from tests.catalog.shrunken import CONFIGS


def write_model(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIGS["qwen3_moe"]))
    return str(path)


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path)


def bench(*arguments):
    return main(["bench", "--device", "cpu", "--colocated", *map(str, arguments)])


def refit_every_way(folder):
    """Exit code, what was told, and the records."""
    figures, said = folder / "bench.json", io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = bench(
            "--model", write_model(folder), "--layers", 1, "--train", "ep=2", "--gen", "tp=2",
            "--transport", "buckets,p2p,golden", "--refits", 2, "--warm-up", 1, "--bucket-mb", 1, "--verify", "full",
            "--json", figures,
        )  # fmt: skip
    return code, said.getvalue(), json.loads(figures.read_text()) if code == 0 else []


AHEAD = (refit_every_way,)


def test_refits_over_buckets_and_every_transport_are_exact_and_tell_what_stayed_beside_the_copy_rate(
    found_ahead,
):
    code, said, records = found_ahead.by(refit_every_way)
    assert code == 0, said
    buckets, p2p, golden = records
    assert [record["transport"] for record in records] == ["buckets", "p2p", "golden"]
    for record in records:
        assert (record["bit_exact"], record["colocated"], record["peers"]) == (True, True, {})
        assert 0 < record["seconds_min"] <= record["seconds_median"] <= record["seconds_max"]
        assert record["copy_ratio"] == pytest.approx(record["kept_gb_per_s"] / record["copy_gb_per_s"])
        assert record["p2p_ratio"] == pytest.approx(record["kept_gb_per_s"] / record["p2p_gb_per_s"])
    for record in (buckets, p2p):
        # Each trainer holds half of the experts, and each engine keeps half of each of them.
        assert 0 < record["stayed_bytes"] < record["kept_bytes"]
        assert record["stayed_bytes"] + record["crossed_bytes"] >= 0.9 * record["kept_bytes"]
        assert record["bound_seconds"] >= record["crossed_bytes"] / record["p2p_gb_per_s"] / 1e9
    assert golden["stayed_bytes"] is golden["crossed_bytes"] is golden["bound_seconds"] is None
    for part in ("device copy", "of copy", "of bound", "all to all", "colocated_ipc was asked for"):
        assert part in said


def test_one_device_is_enough_and_a_model_that_does_not_fit_twice_is_refused_with_figures(
    model, tmp_path, capsys
):
    figures = tmp_path / "bench.json"
    one = ("--train", "tp=1", "--gen", "tp=1", "--transport", "buckets", "--refits", 1, "--warm-up", 1)
    assert bench("--model", model, "--layers", 1, *one, "--bucket-mb", 1, "--json", figures) == 0
    record = json.loads(figures.read_text())
    assert record["bit_exact"] is True
    # All but the router, which takes the misc path.
    assert record["stayed_bytes"] == pytest.approx(record["kept_bytes"], rel=0.02)
    assert record["crossed_bytes"] == 0
    assert record["p2p_gb_per_s"] is record["p2p_ratio"] is None
    assert record["bound_seconds"] == pytest.approx(record["stayed_bytes"] / record["copy_gb_per_s"] / 1e9)
    capsys.readouterr()
    huge = tmp_path / "huge.json"
    huge.write_text(json.dumps(CONFIGS["qwen3_moe"] | {"vocab_size": 1 << 36}))
    assert bench("--model", huge, "--layers", 1, *one) == 1
    said = capsys.readouterr().err
    assert "this host has " in said
    # Embedding and head: 2 x 2**36 rows of 64 elements of 2 bytes.
    assert "trainer rank 0 17592.2 GB of weights, engine rank 0 17592.2 GB of weights, and" in said
    assert "Nothing was allocated; spread the layouts" in said


def test_all_that_shared_gpus_rule_out_is_told_at_once(model, capsys):
    layouts = ("--model", model, "--train", "ep=2", "--gen", "tp=1")
    peers = ("--peers", "broadcast,per-tensor", "--refits", 0, "--transport", "pull", "--sleep", "--leave")
    assert bench(*layouts, *peers) == 2
    told = dict(line.split(": ", 1) for line in capsys.readouterr().err.splitlines())
    assert told["--colocated"].startswith("2 trainer and 1 engine ranks can't share GPUs one to one")
    assert told["--peers"].startswith("broadcast, per-tensor can't run with --colocated")
    assert told["--transport"].startswith("pull needs GPUs")
    assert told["--transport"].endswith("give auto, p2p, golden or buckets")
    assert told.keys() == {"--colocated", "--peers", "--refits", "--transport", "--sleep", "--leave"}
    assert main(["bench", "--device", "cpu", *layouts, "--transport", "buckets"]) == 2
    assert capsys.readouterr().err.startswith("--transport: buckets joins trainers and engines that share")


def test_the_busiest_of_copies_and_links_bounds_a_refit():
    pairs = np.zeros((4, 4), dtype=np.int64)
    pairs[0, 2], pairs[1, 3], pairs[0, 3], pairs[1, 2] = 6000, 5000, 300, 200
    found = sharing(pairs, 1500.0, 300.0)
    assert (found.stayed_bytes, found.crossed_bytes) == (5000, 300)
    assert found.bound_seconds == pytest.approx(6000 / 1500e9)
    assert sharing(pairs, 15000.0, 300.0).bound_seconds == pytest.approx(300 / 300e9)


def test_each_device_is_held_against_the_needs_of_its_own_ranks():
    def need(device, weights, free):
        return Need(device, weights, 1 << 30, free)

    told = [need("GPU 0", 30 << 30, 70 << 30), need("GPU 1", 30 << 30, 60 << 30)] * 2
    (short,) = shortages(told, 2)
    assert short.startswith("GPU 1 has 64.4 GB free, and its ranks need 66.6: ")


@settings(deadline=None)
@given(st.lists(st.integers(1, 64 << 20), max_size=40))
def test_tensors_of_an_engine_that_sleeps_lie_apart_in_chunks_of_the_drivers_granularity(sizes):
    chunks, places = arrange(sizes)
    assert all(chunk % (2 << 20) == 0 for chunk in chunks)
    taken = sorted(
        (chunk, offset, offset + size) for (chunk, offset), size in zip(places, sizes, strict=True)
    )
    assert all(stop <= chunks[chunk] and start % 512 == 0 for chunk, start, stop in taken)
    for (a, _, stop), (b, start, _) in itertools.pairwise(taken):
        assert a < b or stop <= start
    assert {chunk for chunk, _, _ in taken} == set(range(len(chunks)))
