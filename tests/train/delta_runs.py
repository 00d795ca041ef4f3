"""Pairs of runs of one recipe, with dense refits and with sparse ones: nothing but what travels may differ."""

from __future__ import annotations

import hashlib
import io
import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch
from rich.console import Console

from rlrefit.recipes.config.load import load_config
from rlrefit.recipes.refits import Refits
from rlrefit.recipes.run.files import append_json_lines, keep_json_lines, read_json_lines
from rlrefit.recipes.train import train
from tests.vllm_processes import vllm_processes
from tests.warm_python import ENGINE, warm_python

from .command import metrics, numbers
from .shared_cluster import on_shared_cluster

# By what users call them: the recipe, and what is changed in it.
RECIPES: dict[str, tuple[str, ...]] = {
    "Megatron TP2": ("grpo_tiny",),
    "Megatron MoE TP2 x EP2": ("grpo_tiny_moe",),
    "FSDP2": ("grpo_tiny", "trainer=fsdp"),
    # Or vLLM draws from one generator, in the order in which requests happen to come.
    "Megatron TP2 to vLLM": ("grpo_tiny_vllm", "generation.vllm.seed_per_request=true"),
    "FSDP2, FP8": (
        "grpo_tiny",
        "trainer=fsdp",
        "generation.weight_dtype=fp8",
        "policy.refit.trainer_quantize_fp8=true",
    ),
    # So that few elements change, as in a large model.
    "Megatron TP2, BF16, small steps": (
        "grpo_tiny",
        "model.dtype=bfloat16",
        "trainer.optimizer.lr=2e-6",
    ),
}
RESUMED = "resumed in the middle"
# In the folder of a run with :class:`DigestedRefits`.
DIGESTS = "digests.jsonl"


@dataclass(frozen=True)
class Ran:
    """A run that went to its end.

    Attributes:
        rows: the lines of its metrics.
        digests: of all weights of the engine's processes, by the version that they had just got.
        seconds: of the run.
    """

    rows: list[dict[str, Any]]
    digests: dict[int, list[Any]]
    seconds: float


@dataclass(frozen=True)
class Compared:
    """A run with dense refits and one with sparse ones.

    Attributes:
        differs: lines and digests of the two that are not the same, for a person.
        shares: of elements that changed, by sparse refit.
        wire: bytes that travelled in each sparse refit, by those of a dense one.
    """

    recipe: str
    dense: Ran
    sparse: Ran
    differs: list[str]
    shares: list[float]
    wire: list[float]

    @property
    def row(self) -> list[str]:
        """For a table; as :data:`COLUMNS`."""
        refits = [median(row["refit/seconds"] for row in ran.rows) for ran in (self.dense, self.sparse)]
        told = [f"{share:.4f}" for share in (self.shares[0], self.shares[-1], median(self.shares))]
        return [
            self.recipe,
            str(len(self.sparse.rows)),
            "no" if self.differs else "bit for bit",
            str(len(self.shares)),
            *told,
            f"{median(self.wire):.3f}",
            *(f"{seconds:.3f}" for seconds in refits),
            *(f"{ran.seconds:.0f}" for ran in (self.dense, self.sparse)),
        ]


COLUMNS = (
    "recipe", "steps", "equal", "sparse refits", "changed: first", "last", "median", "wire / dense",
    "refit s, dense", "sparse", "run s, dense", "sparse",
)  # fmt: skip


class DigestedRefits(Refits):
    """Notes after each refit what all processes of the engines hold."""

    def run(self, version: int) -> Any:
        summary = super().run(version)
        held = ray.get([actor.__ray_call__.remote(_digests) for actor in self._engines._group.actors])
        append_json_lines(self._records.with_name(DIGESTS), [{"version": version, "held": held}])
        return summary


def digests(folder: Path) -> dict[int, list[Any]]:
    """Of a run with :class:`DigestedRefits`, by version; of a version that came twice, the last ones."""
    return {row["version"]: row["held"] for row in read_json_lines(folder / DIGESTS)}


def _digests(actor: Any) -> list[str]:
    """In the process of an engine's actor; of vLLM each worker's."""
    if hasattr(actor, "_llm"):
        found: list[str] = actor._llm.apply_model(_digest)
        return found
    return [_digest(actor._engine.model)]


def _digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for name, held in sorted(model.state_dict().items()):
        found.update(name.encode())
        local = held.to_local() if hasattr(held, "to_local") else held
        found.update(local.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def run(recipe: str, delta: str, folder: Path, steps: int, *overrides: str) -> Ran:
    """Run one of :data:`RECIPES` to its end, or to the end of what a run has left in the folder."""
    return on_shared_cluster(_run, folder, RECIPES[recipe], delta, steps, overrides, timeout_s=3000.0)


def _run(
    folder: Path, ray_address: str, recipe: tuple[str, ...], delta: str, steps: int, more: tuple[str, ...]
) -> Ran:
    arguments = [
        *recipe[1:],
        f"run_root={folder}",
        "name=run",
        f"ray.address={ray_address}",
        f"algorithm.steps={steps}",
        f"policy.refit.delta={delta}",
        "checkpoint.keep=100",
        *more,
    ]
    start = time.monotonic()
    with ExitStack() as stack:
        if "vllm" in recipe[0]:
            python = stack.enter_context(warm_python(vllm_processes, ENGINE))
            arguments += [
                f"ray.generation_env.WARM_PYTHON={python.with_name('socket')}",
                # Or it would take no function to its workers.
                "ray.generation_env.VLLM_ALLOW_INSECURE_SERIALIZATION='1'",
            ]
        train(load_config(recipe[0], arguments), Console(file=io.StringIO()), DigestedRefits)
    return Ran(metrics(folder / "run"), digests(folder / "run"), time.monotonic() - start)


def compare(recipe: str, folder: Path, steps: int, *overrides: str) -> list[Compared]:
    """Run a recipe with dense refits, with sparse ones, and with sparse ones that go on from a checkpoint in the middle."""
    ran = {delta: run(recipe, delta, folder / delta, steps, *overrides) for delta in ("off", "always")}
    half, resumed = steps // 2, folder / "resumed"
    shutil.copytree(folder / "always", resumed)
    keep_json_lines(resumed / "run" / DIGESTS, lambda row: row["version"] < half)
    for checkpoint in (resumed / "run" / "checkpoints").glob("step_*"):
        if int(checkpoint.name.removeprefix("step_")) > half:
            shutil.rmtree(checkpoint)
    again = run(recipe, "always", resumed, steps, *overrides, "resume=true")
    return [
        held_against(recipe, ran["off"], ran["always"]),
        held_against(f"{recipe}, {RESUMED}", ran["off"], again),
    ]


def held_against(recipe: str, dense: Ran, sparse: Ran) -> Compared:
    """What of the second run is not as in the first."""
    ours, theirs = numbers(dense.rows), numbers(sparse.rows)
    differs = [f"{len(ours)} lines and {len(theirs)}"] if len(ours) != len(theirs) else []
    for mine, other in zip(ours, theirs, strict=False):
        differs += [
            f"step {mine['step']}, {key}: {mine.get(key)} and {other.get(key)}"
            for key in mine.keys() | other.keys()
            if mine.get(key) != other.get(key)
        ]
    differs += [
        f"weights of version {version}: {dense.digests.get(version)} and {sparse.digests.get(version)}"
        for version in sorted(dense.digests.keys() | sparse.digests.keys())
        if dense.digests.get(version) != sparse.digests.get(version)
    ]
    if len({str(held) for held in sparse.digests.values()}) < len(sparse.rows):
        differs.append("two versions of the engine's weights are the same, or one has none")
    found = [row for row in sparse.rows if "refit/changed_share" in row]
    whole = dense.rows[0]["refit/bytes_wire"]
    return Compared(
        recipe,
        dense,
        sparse,
        differs,
        [row["refit/changed_share"] for row in found],
        [row["refit/bytes_wire"] / whole for row in found],
    )
