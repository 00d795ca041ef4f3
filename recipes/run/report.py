"""``report.png``: a run's metrics in four panels, and two more of sparse refits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[dict[str, Any]]

# A dot a step: a run of one step would show no line.
_MARKED = ".-"
# Beside the panel, where it hides nothing.
_LEGEND: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1), "fontsize": "small"}
_STEP_STAGES = ("refit", "validate", "generate", "hand_over", "logprobs", "train", "calibrate")


def write_report(rows: Rows, path: Path, title: str) -> None:
    """Draw reward, generation KL, step time by stage and refit time by stage over the steps.

    Where a refit was sparse, what share changed and what travelled stand below.

    Args:
        rows: lines of ``metrics.jsonl``.
        path: the picture; it appears whole or not at all.
        title: above the panels.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    sparse = any(row.get("refit/changed_share") is not None for row in rows)
    height = 3 if sparse else 2
    figure, axes = pyplot.subplots(height, 2, figsize=(13, 4 * height), layout="constrained")
    figure.suptitle(title, parse_math=False)  # a name may have a $
    _rewards(axes[0, 0], rows)
    _divergence(axes[0, 1], rows)
    step_stages = [stage for stage in _STEP_STAGES if any(row.get(f"time/{stage}") for row in rows)]
    _stacked(axes[1, 0], rows, step_stages)
    refit_stages = sorted(
        {key.removeprefix("refit/time/") for row in rows for key in row if "refit/time/" in key and row[key]}
    )
    _beside(axes[1, 1], rows, refit_stages)
    if sparse:
        _changed(axes[2, 0], rows)
        _travelled(axes[2, 1], rows)
        axes[2, 0].sharex(axes[2, 1])
    for axis in axes.flat:
        axis.set_xlabel("step")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    aside = path.with_name(f".{path.stem}.tmp.png")
    figure.savefig(aside, dpi=110)
    pyplot.close(figure)
    aside.replace(path)


def _rewards(axis: Any, rows: Rows) -> None:
    axis.plot(*_series(rows, "reward/mean"), _MARKED, label="training, sampled", color="tab:blue")
    axis.plot(*_series(rows, "val/reward"), "o-", label="validation, greedy", color="tab:orange")
    axis.set(title="Reward", ylabel="mean reward")
    axis.legend()


def _divergence(axis: Any, rows: Rows) -> None:
    steps, values = _series(rows, "generation_kl")
    axis.plot(steps, values, _MARKED, color="tab:red")
    # A logarithm has no place for values that are all 0, as where both sides compute alike.
    scale = "log" if max(values, default=0.0) > 0 else "linear"
    axis.set(title="Generation KL (engine against trainer)", ylabel="KL per token in nats", yscale=scale)


def _stacked(axis: Any, rows: Rows, stages: Sequence[str]) -> None:
    """The stages of a step, which come one after another."""
    steps = [row["step"] for row in rows]
    below = [0.0] * len(rows)
    for stage in stages:
        taken = [row.get(f"time/{stage}") or 0.0 for row in rows]
        axis.bar(steps, taken, width=1.0, bottom=below, label=stage)
        below = [low + more for low, more in zip(below, taken, strict=True)]
    axis.set(title="Step time by stage", ylabel="seconds")
    if stages:
        axis.legend(**_LEGEND)


def _beside(axis: Any, rows: Rows, stages: Sequence[str]) -> None:
    """The stages of a refit, which overlap: they don't add up to its time."""
    axis.plot(*_series(rows, "refit/seconds"), _MARKED, color="black", label="refit")
    for stage in stages:
        axis.plot(*_series(rows, f"refit/time/{stage}"), _MARKED, label=stage)
    axis.set(title="Refit time by stage (slowest rank; stages overlap)", ylabel="seconds", ylim=(0, None))
    axis.legend(**_LEGEND)


def _changed(axis: Any, rows: Rows) -> None:
    from matplotlib.ticker import PercentFormatter

    steps, shares = _series(rows, "refit/changed_share")
    axis.plot(steps, shares, _MARKED, color="tab:green")
    axis.set(title="Elements that changed before a sparse refit", ylabel="share", ylim=(0, _above(shares)))
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))


def _travelled(axis: Any, rows: Rows) -> None:
    from matplotlib.ticker import EngFormatter

    steps, dense = _series(rows, "refit/bytes_dense")
    wire = _series(rows, "refit/bytes_wire")
    # Below, so that it is seen where both are the same.
    axis.plot(steps, dense, color="lightgray", linewidth=6, label="if dense")
    axis.plot(*wire, _MARKED, color="tab:purple", label="on the wire")
    axis.set(title="Bytes of a refit", ylim=(0, _above([*dense, *wire[1]])))
    axis.yaxis.set_major_formatter(EngFormatter("B"))
    axis.legend(**_LEGEND)


def _above(values: Sequence[float]) -> float | None:
    """Where an axis from 0 on ends; None if all values are 0."""
    return 1.1 * max(values) or None


def _series(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]
