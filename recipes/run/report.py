"""``report.png``: what a run's metrics show, in four panels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[dict[str, Any]]

_STEP_STAGES = ("refit", "validate", "generate", "hand_over", "logprobs", "train", "calibrate")


def write_report(rows: Rows, path: Path, title: str) -> None:
    """Draw reward, generation KL, step time by stage and refit time by stage over the steps.

    Args:
        rows: lines of ``metrics.jsonl``.
        path: the picture; it appears whole or not at all.
        title: above the panels.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(13, 8), layout="constrained")
    figure.suptitle(title)
    _rewards(axes[0, 0], rows)
    _divergence(axes[0, 1], rows)
    step_stages = [stage for stage in _STEP_STAGES if any(row.get(f"time/{stage}") for row in rows)]
    _stages(axes[1, 0], rows, "time/", step_stages, "Step time by stage")
    refit_stages = sorted(
        {key.removeprefix("refit/time/") for row in rows for key in row if "refit/time/" in key}
    )
    _stages(axes[1, 1], rows, "refit/time/", refit_stages, "Refit time by stage (slowest rank)")
    for axis in axes.flat:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    aside = path.with_name(f".{path.stem}.tmp.png")
    figure.savefig(aside, dpi=110)
    pyplot.close(figure)
    aside.replace(path)


def _rewards(axis: Any, rows: Rows) -> None:
    axis.plot(*_series(rows, "reward/mean"), label="training, sampled", color="tab:blue")
    axis.plot(*_series(rows, "val/reward"), "o-", label="validation, greedy", color="tab:orange")
    axis.set(title="Reward", ylabel="mean reward")
    axis.legend()


def _divergence(axis: Any, rows: Rows) -> None:
    axis.plot(*_series(rows, "generation_kl"), color="tab:red")
    axis.set(title="Generation KL (engine against trainer)", ylabel="KL per token in nats", yscale="log")


def _stages(axis: Any, rows: Rows, prefix: str, stages: Sequence[str], title: str) -> None:
    steps = [row["step"] for row in rows]
    values = [[row.get(prefix + stage) or 0.0 for row in rows] for stage in stages]
    if values:
        axis.stackplot(steps, values, labels=stages)
        axis.legend(loc="upper right", fontsize="small")
    axis.set(title=title, ylabel="seconds")


def _series(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]
