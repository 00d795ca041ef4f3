"""The pages of ``docs/`` beside the code that they speak of: tables, keys, scripts and error texts."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from rlrefit.integration.config import REFIT_KEYS, RefitConfig, read_settings
from rlrefit.recipes.cli import main
from rlrefit.recipes.config.load import ConfigError, TrainConfig, load_config
from rlrefit.recipes.configs import bundled_recipes
from rlrefit.recipes.plan.explain import explain
from rlrefit.recipes.plan.recipe_table import Row, plan_recipe, real_recipes, replaced, table
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
    assert len(rows) == 12
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


@pytest.mark.parametrize("page", [*PAGES, "../README.md"])
def test_every_key_that_a_page_names_is_in_the_schema(page: str) -> None:
    sections = "|".join(name for name, value in vars(TrainConfig()).items() if hasattr(value, "__dict__"))
    named = set(
        re.findall(rf"\b((?:{sections})(?:\.[a-z][a-z_0-9]*)+)\b(?![./(])", (DOCS / page).read_text())
    ) - {"policy.generation.refit_transport"}  # NeMo-RL's
    # "model.norm.weight" is a weight's name, and no key of the schema's section "model".
    for key in sorted(name for name in named if not name.endswith(".weight")):
        value: object = TrainConfig()
        for part in key.split("."):
            if isinstance(value, dict):
                break  # of the user's own keys
            assert hasattr(value, part), f"{page}: {key}"
            value = getattr(value, part)


def test_every_block_of_a_recipes_keys_fits_the_schema() -> None:
    schema, fitted = OmegaConf.structured(TrainConfig), 0
    for page in PAGES:
        for block in re.findall(r"```yaml\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
            keys = OmegaConf.create(block)
            # NeMo-RL's policy has a part that ours has not; others are of other programs.
            if set(keys) <= set(schema) and OmegaConf.select(keys, "policy.generation") is None:
                OmegaConf.merge(schema, keys)
                fitted += 1
    assert fitted > 5


@pytest.mark.parametrize("command", ["train", "plan", "bench"])
def test_every_option_of_a_command_that_a_page_shows_is_one(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    shown = set()
    for page in LINKED:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(rf"rlrefit {command} [^`\n#|]*", text):
            shown |= set(re.findall(r"(?<!\S)--[a-z-]+", line))
    assert shown - known == set()


@pytest.mark.parametrize(
    ("page", "section", "keys"),
    [
        ("concepts.md", "policy.refit", {*REFIT_KEYS}),
        # The bucket is verl's own key.
        (
            "verl.md",
            "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.nccl_xfer_shards",
            {*REFIT_KEYS, "records_dir"} - {"bucket_mb", "lora", "kv_scales"},
        ),
    ],
)
def test_a_page_lists_all_keys_of_a_refit_with_their_defaults(
    page: str, section: str, keys: set[str]
) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    sections = (OmegaConf.select(OmegaConf.create(block), section) for block in blocks)
    listed = next(found for found in sections if found is not None and "streams" in found)
    read = read_settings(dict(listed), section, own={"records_dir": str | None})
    assert (read.refit, read.wrong) == (RefitConfig(), ())
    assert set(listed) == keys


def test_every_recipe_takes_the_overrides_that_a_page_shows_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {}
    for page in LINKED:
        text = page.read_text().replace("\\\n", " ")
        for name, overrides in re.findall(r"rlrefit train recipe=(\w+)([^`\n#|…]*)", text):
            if name in bundled_recipes():
                shown[name, overrides] = page.name
    (few,) = re.findall(r"Start with a few steps \(`(.*?)`\)", (DOCS / "recipes.md").read_text())
    shown |= {(name, few): "recipes.md" for name in real_recipes()}
    for (name, overrides), page in shown.items():
        refused = []
        for gpus in (0, 1024):  # some are for one or the other
            monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
            try:
                load_config(name, shlex.split(overrides))
                break
            except ConfigError as error:
                refused.append(error)
        assert len(refused) < 2, (page, refused)
    assert len(shown) > 15


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
    for file in re.findall(r"(?<![\w/-])tests/[\w/-]*\w(?:\.py)?", text):
        assert (ROOT / file).exists() or file == "tests/NAME", file
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets()
    commands = set(re.findall(r'add_parser\(\s*"([a-z-]+)"', (ROOT / "recipes" / "cli.py").read_text()))
    assert set(re.findall(r"`rlrefit ([a-z-]+)", text)) <= commands


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_make_help_lists_every_target_and_the_readmes_two_commands_are_targets() -> None:
    told = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True)
    assert set(re.findall(r"^make ([a-z-]+) +\S", told.stdout, re.MULTILINE)) == targets()
    section = (ROOT / "README.md").read_text().partition("## Two commands")[2].partition("\n## ")[0]
    commands = re.findall(r"^make ([a-z-]+)", section, re.MULTILINE)
    assert len(commands) == 2
    assert set(commands) < targets()


def test_gpu_tests_tell_what_their_python_lacks() -> None:
    bare = ["make", "test-gpu", f"PYTHON={sys.executable} -S -I"]
    done = subprocess.run(bare, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    for name in ("rlrefit", "pytest", "pytest_timeout"):
        assert f"has no {name}" in done.stderr


def test_every_folder_and_file_of_tests_that_a_table_of_evidence_names_exists() -> None:
    parts = (DOCS / "support.md").read_text().partition("## Frameworks")[0]
    folders = {
        folder
        for listed in re.findall(r"\((`[a-z_]+`(?:, `[a-z_]+`)*)\)", parts)
        for folder in re.findall(r"[a-z_]+", listed)
    }
    assert len(folders) > 15
    for folder in folders:
        assert [*(ROOT / "tests" / folder).glob("test_*.py")], folder
    on_gpus = (ROOT / "BENCHMARKS.md").read_text().partition("## GPU tests")[2].partition("\n## ")[0]
    files = set(re.findall(r"`(test_\w+)`", on_gpus))
    assert len(files) > 15
    for file in files:
        assert (ROOT / "tests" / "gpu" / f"{file}.py").exists(), file


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
