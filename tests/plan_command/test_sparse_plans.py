"""``rlrefit plan --changed``: sparse refits beside the dense one."""

from __future__ import annotations

import pytest

# Of BENCHMARKS.md, "Delta refits", over ipc: share of elements that changed → ms, and bytes on the wire, less the entries of all blocks but
# each eighth (BF16) or fourth (codes): blocks are larger since.
MEASURED = {
    "off": {0.0: (0.0, 10.9), 0.001: (0.0021, 15.1), 0.01: (0.0201, 16.5), 0.03: (0.0601, 19.9), 0.1: (0.1626, 31.9)},
    "fp8": {0.0: (0.0, 14.2), 0.00159: (0.0057, 16.8), 0.00317: (0.0113, 18.4), 0.03174: (0.0732, 24.1)},
}  # fmt: skip


@pytest.mark.parametrize("quantize", list(MEASURED))
def test_sparse_refits_are_predicted_as_they_were_measured(plan, quantize: str) -> None:
    measured = MEASURED[quantize]
    changed = ",".join(f"{share:%}" for share in measured)
    options = ("--changed", changed, "--topology", "copy=2130", "--quantize", quantize, "--json")
    found = plan("qwen3-8b", "tp=1", "tp=1", *options).json
    sparse, dense = found["sparse"], found["bytes"]["bulk"]
    assert [one["changed"] for one in sparse["refits"]] == list(measured)
    # Codes and scales do not change alike.
    near = 0.02 if quantize == "off" else 0.25
    for one, (wire, ms) in zip(sparse["refits"], measured.values(), strict=True):
        assert one["wire_ratio"] == pytest.approx(wire, rel=near)
        assert one["wire_bytes"] == pytest.approx(wire * dense, rel=near)
        assert one["seconds"] == pytest.approx(ms / 1e3, rel=0.08)


def test_tables_and_json_agree_and_bases_are_told(plan) -> None:
    arguments = ("qwen3-8b", "tp=2", "tp=2", "--changed", "1%", "--delta-base", "host")
    out, sparse = plan(*arguments).out, plan(*arguments, "--json").json["sparse"]
    [one] = sparse["refits"]
    # Half of 16.4 GB, through PCIe.
    assert one["seconds"] > 8.19 / 50
    assert (
        f"1.00% {one['wire_bytes'] / 1e6:.0f} MB {one['wire_ratio']:.2%} {one['seconds'] * 1e3:.2f} ms" in out
    )
    assert "8.7 GB with gpu, 8.19 GB with host, 512 MB with optimizer" in out
    bases = sparse["base_bytes"]
    assert bases["host"] == pytest.approx(16 * bases["optimizer"], rel=1e-6)
    assert bases["gpu"] == bases["host"] + bases["optimizer"]


@pytest.mark.parametrize("gen", ["tp=2,dp=3", "tp=1,dp=3"])
def test_engines_with_the_same_shards_share_a_base_and_each_is_sent_all_of_it(
    plan, moe: str, gen: str
) -> None:
    one, several = (
        plan(moe, "tp=2,ep=4", layout, "--changed", "2%", "--json", "--compile-ranks", "all").json
        for layout in (gen.partition(",")[0], gen)
    )
    # Trainers that hold the same may share out replicas, but keep no more than they hold.
    assert several["sparse"]["base_bytes"]["host"] <= one["bytes"]["bulk"]
    assert one["sparse"]["base_bytes"]["host"] >= one["bytes"]["bulk"] / 4
    sent = [found["sparse"]["refits"][0]["wire_bytes"] for found in (one, several)]
    assert sent[1] == pytest.approx(3 * sent[0], rel=0.01)


def test_codes_and_scales_take_half_the_base_and_are_made_before_they_are_compared(plan) -> None:
    layouts = ("qwen3-8b", "tp=1", "tp=1", "--changed", "0", "--json", "--quantize")
    plain, quantized = (plan(*layouts, kind).json["sparse"] for kind in ("off", "fp8"))
    assert quantized["base_bytes"]["host"] == pytest.approx(9.4e9, rel=0.01)
    assert quantized["base_bytes"]["optimizer"] == pytest.approx(plain["base_bytes"]["optimizer"], rel=0.001)
    assert plain["refits"][0]["seconds"] < quantized["refits"][0]["seconds"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--delta-base", "host"), "no effect without --changed"),
        (("--changed", "1%", "--topology", "pcie=0"), "pcie is '0'"),
        (("--changed", "1%", "--delta-base", "optimizer", "--quantize", "fp8"), "give gpu or host"),
    ],
)
def test_what_has_no_effect_or_can_not_be_is_a_violation(plan, options: tuple[str, ...], told: str) -> None:
    found = plan("qwen3-8b", "tp=1", "tp=1", *options, "--json")
    [violation] = found.json["violations"]
    assert told in violation
    assert found.json["sparse"] is None
