"""``rlrefit plan`` from its arguments to what it prints."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlrefit.recipes.cli import main
from tests.catalog.shrunken import BLOCK_CONFIGS, CONFIGS

KEYS = [
    "model",
    "train",
    "gen",
    "quantize",
    "bulk_share",
    "bytes",
    "routes",
    "ranks",
    "links",
    "staging_bytes",
    "round_bytes",
    "misc_reasons",
    "seconds_compile_max",
    "peak_rss_bytes",
    "busiest_link_ratio",
    "predicted_seconds",
    "bound_seconds",
    "misc_seconds",
    "violations",
]


@pytest.fixture
def moe(tmp_path: Path) -> str:
    """The path of a tiny mixture of experts."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["qwen3_moe"]))
    return str(path)


@pytest.fixture
def blocks(tmp_path: Path) -> str:
    """The path of a mixture of experts whose shards are whole blocks."""
    path = tmp_path / "blocks.json"
    path.write_text(json.dumps(BLOCK_CONFIGS["qwen3_moe"]))
    return str(path)


def _plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_json_has_the_promised_keys_and_full_bytes(capsys: pytest.CaptureFixture[str], moe: str) -> None:
    code, out, _ = _plan(capsys, "--model", moe, "--train", "tp=2,ep=4", "--gen", "tp=2,dp=2", "--json")
    found = json.loads(out)
    assert code == 0
    assert list(found) == KEYS
    router = 4 * 8 * 64 * 2
    reason = "trainer: MoE router: engines keep it in a dtype or layout of their own"
    assert found["misc_reasons"] == {reason: router}
    assert found["bytes"]["misc"] == router
    assert found["bulk_share"] == pytest.approx(found["bytes"]["bulk"] / (found["bytes"]["bulk"] + router))
    assert found["violations"] == []
    assert 1.0 <= found["busiest_link_ratio"] < 1.5
    assert 0 < found["bound_seconds"] <= found["predicted_seconds"]
    assert found["train"] == "tp=2,ep=4"


def test_the_scale_goal_holds_and_neither_megatron_nor_vllm_is_loaded() -> None:
    script = (
        "import sys; from rlrefit.recipes.cli import main; code = main(sys.argv[1:]); "
        "loaded = {name.partition('.')[0] for name in sys.modules}; "
        "assert not loaded & {'megatron', 'vllm', 'ray', 'transformers', 'matplotlib'}, loaded; sys.exit(code)"
    )
    layouts = ["--train", "pp=16,ep=16", "--gen", "tp=32,dp=8"]
    done = subprocess.run(
        [sys.executable, "-c", script, "plan", "--model", "deepseek-v3", *layouts, "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["peak_rss_bytes"] <= 1 << 30
    assert found["busiest_link_ratio"] <= 1.1
    assert found["predicted_seconds"] <= 1.2 * found["bound_seconds"]
    assert found["bulk_share"] >= 0.99
    # 2 s is the goal on an idle machine; tests share theirs.
    assert found["seconds_compile_max"] <= 8


def test_tables_tell_routes_links_and_what_planning_took(
    capsys: pytest.CaptureFixture[str], moe: str
) -> None:
    code, out, _ = _plan(capsys, "--model", moe, "--train", "tp=2,pp=2", "--gen", "tp=4")
    assert code == 0
    for text in (
        "MoE router",
        "trainers send",
        "engines receive",
        "NVLink",
        "speed of light T",
        "staging memory",
        "2 x 2 streams x 537 MB = 2.15 GB at most",
        "predicted, total",
        "all on one host",
    ):
        assert text in " ".join(out.split())
    # A line of more than the terminal's 80 columns.
    assert len(out.splitlines()[0]) > 80
    assert out.splitlines()[0].endswith("ranks 0-3 train, ranks 4-7 generate")
    code, out, _ = _plan(
        capsys, "--model", moe, "--train", "tp=1", "--gen", "tp=1", "--bucket-mb", "64", "--streams", "1"
    )
    out = " ".join(out.split())
    assert "rank 0 trains, rank 1 generates" in out
    assert "2 x 1 stream x 67.1 MB = 134 MB at most" in out


def test_all_violations_are_told_at_once_with_exit_code_2(
    capsys: pytest.CaptureFixture[str], moe: str
) -> None:
    arguments = [
        *("--model", moe, "--train", "tp=3,ep=5", "--gen", "tp=2,ep=7", "--topology", "nic=0,port=1"),
        *("--bucket-mb", "0", "--heat-map", "picture.gif", "--compile-ranks", "some"),
    ]
    code, out, err = _plan(capsys, *arguments)
    assert code == 2
    assert not out
    for text in (
        "tp = 3",
        "ep = 5",
        "ep is 7",
        "nic is '0'",
        "port is none of",
        "bucket-mb",
        "picture.gif",
        "'some'",
    ):
        assert text in err
    code, out, _ = _plan(capsys, *arguments, "--json")
    found = json.loads(out)
    assert code == 2
    assert list(found) == KEYS
    assert len(found["violations"]) >= 8
    assert found["bound_seconds"] is None


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        (("--train", ""), "train: the layout is empty"),
        (("--train", "first=1"), "first and last are layers of pipeline stages"),
        (("--train", "tp=-1"), "tp is '-1'; give a whole number of at least 1"),
        (("--streams", "99"), "--streams: 99 is not between 1 and"),
        (("--topology", "bogus"), "'bogus' is neither key=value pairs"),
        (("--json", "--explain", "lm_head.weight"), "explain: tables for people"),
    ],
)
def test_one_wrong_option_is_the_only_violation(
    capsys: pytest.CaptureFixture[str], moe: str, changed: tuple[str, ...], complaint: str
) -> None:
    code, out, err = _plan(capsys, "--model", moe, "--train", "tp=1", "--gen", "tp=1", *changed, "--json")
    found = json.loads(out)
    assert code == 2
    assert not err
    (violation,) = found["violations"]
    assert complaint in violation


def test_what_options_take_the_place_of_in_a_recipe_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    layouts = ("--recipe", "grpo_tiny", "--train", "tp=1", "--streams", "1")
    code, out, err = _plan(capsys, *layouts)
    assert (code, err) == (0, "")
    assert (
        "recipe grpo_tiny: --train tp=1 in place of tp=2, --streams 1 in place of 2; still the recipe's: model"
        in out
    )
    assert "gen tp=2" in out
    code, out, err = _plan(capsys, *layouts, "--json")
    assert (code, json.loads(out)["gen"]) == (0, "tp=2")
    assert "still the recipe's" in err
    code, out, _ = _plan(capsys, "--recipe", "grpo_tiny")
    assert "in place of" not in out


def test_keys_of_a_recipe_are_overridden_as_for_training(
    capsys: pytest.CaptureFixture[str], moe: str
) -> None:
    overrides = ("generation.tensor_parallel=1", "generation.replicas=2")
    code, out, _ = _plan(capsys, "--recipe", "grpo_tiny", *overrides, "--json")
    assert (code, json.loads(out)["gen"]) == (0, "dp=2")
    code, _, err = _plan(capsys, "--recipe", "grpo_tiny", "generation.tensor_paralel=1")
    assert code == 2
    assert "did you mean generation.tensor_parallel?" in err
    code, _, err = _plan(capsys, "--model", moe, "--train", "tp=1", "--gen", "tp=1", *overrides)
    assert code == 2
    assert "key=value overrides keys of a recipe, and none is given" in " ".join(err.split())


def test_misc_bytes_take_their_time_in_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    layouts = (
        "--model",
        "gpt-oss-20b",
        "--train",
        "tp=2",
        "--gen",
        "tp=2",
        "--topology",
        "gpus_per_host=2,nic=25",
    )
    code, out, _ = _plan(capsys, *layouts, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["bulk_share"] < 0.9
    misc = found["bytes"]["misc"] / 25e9
    # Two trainers share out the bulk, and each engine rank keeps half of it at most.
    bulk = found["bytes"]["bulk"] / 2 / 25e9
    assert misc + 0.5 * bulk < found["bound_seconds"] <= found["predicted_seconds"] < misc + 3 * bulk
    code, out, _ = _plan(capsys, *layouts)
    out = " ".join(out.split())
    assert f"warning: only {found['bulk_share']:.1%} of the bytes go shard to shard" in out
    assert f"predicted, total {found['predicted_seconds']:.3f} s" in out
    assert f"predicted, misc at least {misc:.3f} s" in out


def test_stages_that_the_planner_chose_are_told_with_megatrons_setting(
    capsys: pytest.CaptureFixture[str], moe: str
) -> None:
    code, out, _ = _plan(capsys, "--model", moe, "--train", "pp=3", "--gen", "tp=1")
    assert code == 0
    assert "stages of 1,1,2 layers; in Megatron set num_layers_in_last_pipeline_stage=2" in out
    code, out, _ = _plan(capsys, "--model", moe, "--train", "pp=2", "--gen", "tp=1")
    assert "stages of" not in out


def test_a_model_that_is_not_known_is_a_violation(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = _plan(capsys, "--model", "nothing-like-it", "--train", "tp=1", "--gen", "tp=1")
    assert code == 2
    assert "no bundled model" in err


def test_an_unknown_weight_gets_a_suggestion(capsys: pytest.CaptureFixture[str], moe: str) -> None:
    name = "model.layers.2.mlp.experts.5.gate.weight"
    code, _, err = _plan(capsys, "--model", moe, "--train", "tp=1", "--gen", "tp=1", "--explain", name)
    assert code == 2
    assert f"no weight '{name}'; did you mean" in err
    assert "model.layers.2.mlp.experts.5.gate_proj.weight" in err


def test_a_weight_is_explained(capsys: pytest.CaptureFixture[str], moe: str) -> None:
    layouts = ("--train", "tp=2,dp=2,ep=4", "--gen", "tp=4")
    code, out, _ = _plan(
        capsys, "--model", moe, *layouts, "--explain", "model.layers.1.mlp.experts.6.up_proj.weight"
    )
    assert code == 0
    assert "bfloat16[32, 64]" in out
    assert "route: bulk" in out
    assert "[8:16, 0:64]" in out
    code, out, _ = _plan(capsys, "--model", moe, *layouts, "--explain", "model.layers.1.mlp.gate.weight")
    assert "goes over the misc path: trainer: MoE router" in out
    assert "held by" not in out
    assert "sent" not in out


def test_codes_and_scales_are_half_the_bytes_also_where_ranks_cut_blocks(
    capsys: pytest.CaptureFixture[str], blocks: str
) -> None:
    def plan(ranks: int, quantize: str) -> dict[str, Any]:
        layouts = ("--train", f"fsdp={ranks}", "--gen", "tp=2", "--quantize", quantize)
        code, out, _ = _plan(capsys, "--model", blocks, *layouts, "--json")
        found: dict[str, Any] = json.loads(out)
        assert (code, found["quantize"]) == (0, quantize)
        return found

    # Of four ranks each has 64 of the 256 rows that keys, values and the output projection have; two ranks cut none.
    for ranks in (2, 4):
        plain, quantized = plan(ranks, "off"), plan(ranks, "fp8")
        assert plain["bytes"]["misc"] == quantized["bytes"]["misc"] == 0
        embeddings = 2 * 300 * 256 * 2
        linear = plain["bytes"]["bulk"] - embeddings
        assert quantized["bytes"]["bulk"] == pytest.approx(embeddings + linear / 2, rel=0.01)
        assert 0.5 < quantized["bound_seconds"] / plain["bound_seconds"] < 0.6
        assert quantized["predicted_seconds"] < plain["predicted_seconds"]


@pytest.mark.parametrize(
    ("quantize", "needs"), [("off", "ipc needs none"), ("fp8", "ipc needs 16.8 MB at most")]
)
def test_the_memory_that_checks_of_quantized_weights_take_is_told(
    capsys: pytest.CaptureFixture[str], blocks: str, quantize: str, needs: str
) -> None:
    layouts = ("--train", "fsdp=4", "--gen", "tp=2", "--quantize", quantize)
    code, out, _ = _plan(capsys, "--model", blocks, *layouts)
    assert code == 0
    assert needs in " ".join(out.split())


def test_codes_and_scales_are_explained(capsys: pytest.CaptureFixture[str], blocks: str) -> None:
    layouts = ("--model", blocks, "--train", "fsdp=4", "--gen", "tp=2", "--quantize", "fp8", "--explain")
    gate = "model.layers.1.mlp.experts.6.gate_proj.weight"
    code, out, _ = _plan(capsys, *layouts, gate)
    assert code == 0
    assert "float8_e4m3fn[256, 256]" in out
    assert "[128:256, 0:256]" in out
    code, out, _ = _plan(capsys, *layouts, f"{gate}_scale_inv")
    assert "float32[2, 2], 16 B" in out
    assert "[1:2, 0:2]" in out
    code, out, _ = _plan(capsys, *layouts, "model.layers.1.self_attn.k_proj.weight_scale_inv")
    # Two ranks hold halves of each block, and both know its scale.
    assert "route: bulk" in out
    assert "[0:1, 0:2]" in out
    layouts = (*layouts[:3], "tp=4", *layouts[4:])
    code, out, _ = _plan(capsys, *layouts, "model.layers.1.self_attn.k_proj.weight_scale_inv")
    assert "Megatron-Bridge's export gathers its weight on the trainers, which quantize it" in out


def test_blocks_that_an_engine_would_cut_and_what_cannot_be_quantized_are_violations(
    capsys: pytest.CaptureFixture[str], blocks: str
) -> None:
    layouts = ("--model", blocks, "--train", "ep=4", "--gen", "tp=4", "--quantize", "fp8")
    code, _, err = _plan(capsys, *layouts, "--dtype", "fp32", "--enumerate-with-bridge")
    assert code == 2
    for text in (
        "gate_proj.weight it would have 64; give another tp (or, for experts, ep = tp)",
        "quantize: fp8 is made of bf16 or fp16",
        "Bridge exports what is not quantized yet",
    ):
        assert text in err
    code, _, err = _plan(capsys, *layouts[:3], "fsdp=2", *layouts[4:6], "--enumerate-with-bridge")
    assert (code, "Bridge exports Megatron's models, not FSDP2's" in err) == (2, True)
    code, _, err = _plan(capsys, "--model", "gpt-oss-20b", *layouts[2:4], "--gen", "tp=1", *layouts[6:])
    assert (code, "gpt_oss model in blocks of FP8 is not in the catalogue" in err) == (2, True)


def test_a_recipe_says_whether_its_trainer_quantizes_and_shards_by_fsdp(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = ("--recipe", "grpo_qwen3_30b_a3b", "--compile-ranks", "1", "--json", "trainer=fsdp")
    code, out, _ = _plan(
        capsys, *recipe, "policy.refit.trainer_quantize_fp8=true", "generation.weight_dtype=fp8"
    )
    found = json.loads(out)
    assert (code, found["quantize"]) == (0, "fp8")
    assert found["train"].startswith("fsdp=")


def test_a_topology_is_read_from_a_file(capsys: pytest.CaptureFixture[str], moe: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts.yaml"
    file.write_text("gpus_per_host: 2\nnic: 25\nhost: 30\ncolocated: true\n")
    code, out, _ = _plan(capsys, "--model", moe, "--train", "tp=4", "--gen", "tp=4", "--topology", str(file))
    assert code == 0
    assert "2 GPUs a host, NIC 25 GB/s" in out
    assert "host 0 uplink out" in out
    file.write_text("- 1\n")
    code, _, err = _plan(capsys, "--model", moe, "--train", "", "--gen", "", "--topology", str(file))
    assert code == 2
    assert "no mapping" in err


def test_a_heat_map_page_holds_the_bytes_and_needs_nothing_else(
    capsys: pytest.CaptureFixture[str], moe: str, tmp_path: Path
) -> None:
    page = tmp_path / "map.html"
    code, out, _ = _plan(
        capsys, *("--model", moe, "--train", "tp=2", "--gen", "tp=4", "--heat-map", str(page), "--json")
    )
    assert code == 0
    text = page.read_text()
    assert "http" not in text
    payload = re.search(r"const d=(\{.*?\});\n", text)
    assert payload is not None
    data: dict[str, Any] = json.loads(payload.group(1))
    assert (data["rows"], data["columns"]) == (2, 4)
    assert len(base64.b64decode(data["levels"])) == 8
    moved = sum(map(sum, data["megabytes"])) * 1e6
    assert moved >= json.loads(out)["bytes"]["bulk"] * 0.99


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("layouts", [("tp=2", "tp=4"), ("tp=1", "tp=1"), ("tp=2,pp=2", "tp=2,dp=2")])
def test_a_heat_map_picture_is_written(
    capsys: pytest.CaptureFixture[str], moe: str, tmp_path: Path, layouts: tuple[str, str]
) -> None:
    train, gen = layouts
    picture = tmp_path / "map.png"
    code, _, _ = _plan(capsys, "--model", moe, "--train", train, "--gen", gen, "--heat-map", str(picture))
    assert code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("count", ["1", "3", "all"])
def test_as_many_ranks_are_measured_as_asked(
    capsys: pytest.CaptureFixture[str], moe: str, count: str
) -> None:
    code, out, _ = _plan(capsys, "--model", moe, "--train", "tp=2", "--gen", "tp=2", "--compile-ranks", count)
    assert code == 0
    assert f"{'4' if count == 'all' else count} of 4" in " ".join(out.split())
