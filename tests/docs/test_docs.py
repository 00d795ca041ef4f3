"""The pages of ``docs/`` beside the code that they speak of: tables, keys, scripts and error texts."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import yaml

from rlrefit.recipes.config.load import TrainConfig, load_config
from rlrefit.recipes.plan.arguments import add_arguments
from rlrefit.recipes.plan.explain import explain
from rlrefit.recipes.plan.options import read_options
from rlrefit.recipes.plan.recipe_table import Row, plan_recipe, real_recipes, replaced, table
from rlrefit.recipes.plan.study import study
from rlrefit.workers.frameworks.nemo_rl import contract as nemo_rl_contract
from rlrefit.workers.frameworks.verl import contract as verl_contract
from tests.ahead import FoundAhead

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
CLUSTER = (DOCS / "cluster.md").read_text()
LINKED = (
    *(DOCS / page for page in PAGES),
    *(ROOT / page for page in ("README.md", "CONTRIBUTING.md", "BENCHMARKS.md")),
)


def plan_all(folder: Path) -> dict[str, Row]:
    return {name: plan_recipe(name) for name in real_recipes()}


AHEAD = (plan_all,)


@pytest.fixture(scope="module")
def rows(found_ahead: FoundAhead) -> dict[str, Row]:
    return found_ahead.by(plan_all)


def test_every_recipe_for_a_real_model_can_be_planned_and_goes_shard_to_shard(rows: dict[str, Row]) -> None:
    assert len(rows) == 9
    for name, row in rows.items():
        assert row.planned.bulk_share >= 0.99, name
        assert row.planned.analysis.busiest_link_ratio <= 1.1, name


def test_the_table_of_recipes_is_up_to_date(rows: dict[str, Row]) -> None:
    page = (DOCS / "recipes.md").read_text()
    remedy = "run python -m rlrefit.recipes.plan.recipe_table docs/recipes.md"
    assert page == replaced(page, table(rows.values())), remedy


def test_every_misc_weight_of_the_recipes_is_explained(rows: dict[str, Row]) -> None:
    explained = set()
    for row in rows.values():
        for entry in row.planned.analysis.manifest:
            kind = (row.recipe, entry.reason, entry.spec.name.rpartition("layers.")[2].partition(".")[2])
            if entry.route != "misc" or kind in explained:
                continue
            explained.add(kind)
            found = explain(row.planned, entry.spec.name)
            assert entry.reason, entry.spec.name
            assert f"broadcasts all {entry.spec.nbytes:,} bytes to engine ranks" in found.way
            assert not found.sendings
    assert {recipe for recipe, *_ in explained} >= {"grpo_qwen3_30b_a3b", "grpo_deepseek_v3"}


@pytest.mark.parametrize("page", PAGES)
def test_every_key_that_a_page_names_is_in_the_schema(page: str) -> None:
    sections = "|".join(name for name, value in vars(TrainConfig()).items() if hasattr(value, "__dict__"))
    named = set(
        re.findall(rf"\b((?:{sections})(?:\.[a-z][a-z_0-9]*)+)\b(?![./(])", (DOCS / page).read_text())
    )
    for key in sorted(named):
        value: object = TrainConfig()
        for part in key.split("."):
            if isinstance(value, dict):
                break  # of the user's own keys
            assert hasattr(value, part), f"{page}: {key}"
            value = getattr(value, part)


def test_every_row_of_what_is_supported_names_folders_of_tests_and_dates_of_gpu_runs() -> None:
    (rows,) = re.findall(
        r"\| H200s of one host, last run \|.*?\n\| ---.*?\n(.*?)\n\n",
        (DOCS / "support.md").read_text(),
        re.DOTALL,
    )
    for row in rows.splitlines():
        what, on_cpus, on_gpus, _ = (cell.strip() for cell in row.strip("|").split("|"))
        folders = re.findall(r"`(\w+)`", "".join(re.findall(r"\((`\w+`(?:, `\w+`)*)\)", on_cpus)))
        assert folders, what
        for folder in folders:
            assert list((ROOT / "tests" / folder).glob("test_*.py")), f"{what}: {folder}"
        assert not on_gpus or re.search(r"\d Nov\)$", on_gpus), what


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


def bound(module: str) -> set[str]:
    """Names at a module's top level, without importing what it imports."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    found: set[str] = set()
    if spec.origin is None:
        return found  # a folder without code of its own
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        targets = getattr(node, "targets", None) or [node]
        found |= {getattr(target, "name", getattr(target, "id", "")) for target in targets}
    return found


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_modules_names_and_commands_of_a_page_exist(page: Path) -> None:
    text = page.read_text()
    for module, names in re.findall(r"^from (rlrefit[\w.]*) import ([\w, ]+)$", text, re.MULTILINE):
        for name in names.split(", "):
            assert name in bound(module) or importlib.util.find_spec(f"{module}.{name}"), f"{module}.{name}"
    for path in re.findall(r"\brlrefit\.(?:integration|workers|recipes)\b(?:\.\w+)*", text):
        module, _, name = path.rpartition(".")
        assert importlib.util.find_spec(module), path
        assert name in bound(module) or importlib.util.find_spec(path), path
    for file in re.findall(r"\btests/[a-z_/]+\.py", text):
        assert (ROOT / file).exists(), file
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets
    commands = set(re.findall(r'add_parser\(\s*"([a-z-]+)"', (ROOT / "recipes" / "cli.py").read_text()))
    assert set(re.findall(r"`rlrefit ([a-z-]+)", text)) <= commands


@pytest.mark.parametrize(
    ("page", "version"),
    [("verl.md", verl_contract.TESTED), ("nemo_rl.md", nemo_rl_contract.READ_AT[:9])],
)
def test_pages_name_the_version_of_a_framework_that_its_adapter_checks(page: str, version: str) -> None:
    assert version in (DOCS / page).read_text()
    assert version in (DOCS / "support.md").read_text()


def test_shell_scripts_parse() -> None:
    scripts = re.findall(r"```bash\n(.*?)```", CLUSTER, re.DOTALL)
    assert len(scripts) == 6
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=10)
        assert (done.returncode, done.stderr) == (0, ""), script


def _script(beginning: str) -> str:
    (found,) = re.findall(rf"```bash\n({re.escape(beginning)}.*?)```", CLUSTER, re.DOTALL)
    return found


def test_a_head_that_never_answers_ends_the_slurm_job_with_what_it_said(tmp_path: Path) -> None:
    for name, text in {
        "scontrol": "echo host1",
        "srun": 'case "$*" in *ip-address) echo 127.0.0.1;; *) echo no route to host1 >&2; exit 1;; esac',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = _script("#!/bin/bash").replace("SECONDS + 300", "SECONDS + 0")
    done = subprocess.run(
        ["bash", "-s", "grpo_tiny"],
        input=script,
        capture_output=True,
        text=True,
        timeout=30,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "host1", "SLURM_CPUS_PER_TASK": "1"},
    )
    assert done.returncode == 1
    assert "Ray on host1 did not answer in time; it said last: no route to host1" in done.stderr


def test_a_limit_of_locked_memory_that_cannot_be_lifted_is_told_and_ray_starts(tmp_path: Path) -> None:
    activate, environment = _script("source /opt/rlrefit/.venv").split("\n", 1)
    assert activate.startswith("source ")
    (tmp_path / "env.sh").write_text('ulimit() { [ "$1" = -H ] && echo 64; }\n' + environment)
    done = subprocess.run(
        ["bash", "-c", "source env.sh && echo started"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout == "started\n"
    assert "is limited to 64 KiB" in done.stderr


def test_every_recipe_has_time_to_save_before_slurm_ends_its_job(rows: dict[str, Row]) -> None:
    told = re.findall(r"^\| (`.*`.*) \| (\d+) \|$", CLUSTER, re.MULTILINE)
    recipes = {name: int(seconds) for row, seconds in told for name in re.findall(r"`(\w+_\w+)`", row)}
    assert recipes.keys() == rows.keys()
    assert f"--signal=B:TERM@{recipes['grpo_qwen3_30b_a3b']}\n" in _script("#!/bin/bash")


def test_the_kubernetes_job_is_yaml_with_a_gpu_for_each_rank_of_its_recipe(rows: dict[str, Row]) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", CLUSTER, re.DOTALL)
    job = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    analysis = rows["grpo_qwen3_30b_a3b"].planned.analysis
    assert workers["replicas"] * int(workers["rayStartParams"]["num-gpus"]) == (
        analysis.train_ranks + analysis.gen_ranks
    )
    assert "recipe=grpo_qwen3_30b_a3b" in job["spec"]["entrypoint"]


def test_every_error_that_the_page_quotes_is_one_of_the_code() -> None:
    code = "\n".join(
        path.read_text()
        for top in ("integration", "workers", "recipes")
        for path in (ROOT / top).rglob("*.py")
    )
    # Texts go over several lines of code, and values stand in them.
    code = re.sub(r'"\s*\n\s*f?"', "", code)
    page = (
        (DOCS / "troubleshooting.md")
        .read_text()
        .partition("## A run or a refit fails")[2]
        .partition("\n## ")[0]
    )
    quoted = [
        text
        for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
        for text in re.findall(r"`([^`]+)`", row)
    ]
    assert len(quoted) >= 12
    for text in quoted:
        for piece in re.split(r"…|HOST:PORT", text):
            assert piece.strip() in code, text


def test_variables_for_one_side_are_set_by_the_overrides_that_the_page_gives() -> None:
    overrides = re.findall(r"'(\+ray\.[^']+)'", CLUSTER)
    config = load_config("grpo_qwen3_30b_a3b", overrides)
    assert config.ray.trainer_env == config.ray.generation_env == {"NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize(
    ("model", "train", "gen"), [("Qwen3-0.6B", "tp=1", "tp=1"), ("Qwen3-30B-A3B", "ep=2", "tp=2")]
)
def test_pairs_have_as_many_messages_as_the_page_on_verify_says(model: str, train: str, gen: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    planned = study(
        read_options(
            parser.parse_args(
                ["--model", model.lower(), "--train", train, "--gen", gen, "--compile-ranks", "1"]
            )
        )
    )
    ranks = range(planned.analysis.train_ranks, len(planned.analysis.topology.host_of))
    pairs = Counter(
        (message.source, rank)
        for rank in ranks
        for messages in planned.analysis.compile(rank).receives
        for message in messages
    )
    layouts = " → ".join(layout.replace("=", "").upper() for layout in (train, gen))
    counts = sorted({*pairs.values()})
    escaping = " and ".join(f"{100 * (1 - 1 / n):.1f}" for n in counts)
    row = f"| {model} {layouts} | {' and '.join(map(str, counts))} | {escaping}% |"
    assert row in (DOCS / "verify.md").read_text()
