"""What Megatron-Bridge would export, and what each rank would hold of it, for any layout, from a configuration alone.

Real Megatron-core models on the meta device, over a fake process group, go through real Bridge: no GPU, no
weights, no other rank, and no memory beyond that of the imports. It happens in a process of its own, since
``torch.distributed``, Megatron's parallel state and the CPU stand-ins for Transformer Engine are global to a
process and can't all be taken back; the caller's are left alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...integration.layout import Axes, Box
from ...integration.weights.manifest import TensorSpec, dtype_name, dtype_of
from .catalog import TrainLayout
from .offline_bridge import config_file

# Of the child's output in an error, the last characters: the exception is at the end.
_TOLD = 1500


class OfflineError(RuntimeError):
    """Bridge could not be asked, or has no answer for this model and layout."""


@dataclass(frozen=True)
class OfflineQuestion:
    """What to enumerate.

    Attributes:
        config: a Hugging Face ``config.json`` or its folder. An index of safetensors in the folder is looked at for
            names; weights are not.
        layout: of the trainer.
        ranks: trainer ranks whose fragments are wanted.
        dtype: of the parameters.
    """

    config: str | Path
    layout: TrainLayout
    ranks: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class _HeldBox:
    """A fragment without its storage.

    Attributes:
        name: Hugging Face name.
        full_shape: of the whole weight.
        box: the part that the rank holds.
        dtype: in which it holds it.
        axes: by which the box sees the weight, if not as it is.
    """

    name: str
    full_shape: tuple[int, ...]
    box: Box
    dtype: torch.dtype
    axes: Axes | None


@dataclass(frozen=True)
class _OfflineRank:
    """What one rank holds.

    Attributes:
        held: its fragments, as :class:`~...workers.trainers.megatron.source.MegatronSource` gives them.
        refused: its weights that no shard rule places, with the reasons. Rules are not tried out on values here, so a
            rule that disagrees with the installed Bridge shows only on the trainer.
    """

    held: tuple[_HeldBox, ...]
    refused: dict[str, str]


@dataclass(frozen=True)
class OfflineExport:
    """The answer to a question.

    Attributes:
        specs: names, shapes and dtypes of the whole export, in its order; the vocabulary without padding.
        ranks: by trainer rank.
        cpu_seconds: that it took after the imports.
        peak_rss_bytes: of the process, with its imports and all that it was asked before.
    """

    specs: list[TensorSpec]
    ranks: dict[int, _OfflineRank]
    cpu_seconds: float
    peak_rss_bytes: int


def enumerate_offline(
    config: str | Path,
    layout: TrainLayout,
    ranks: Sequence[int] = (),
    dtype: torch.dtype = torch.bfloat16,
) -> OfflineExport:
    """The export of one model in one layout; see :class:`OfflineQuestion`, and :func:`ask_bridge` for its errors."""
    return ask_bridge([OfflineQuestion(config, layout, tuple(ranks), dtype)])[0]


def ask_bridge(questions: Sequence[OfflineQuestion], timeout_s: float = 600.0) -> list[OfflineExport]:
    """Answer all questions, in order, in one process of its own: most of the time goes into its imports.

    Raises:
        OfflineError: a layout that is not possible or has no such rank, a configuration that is not there (all that is
            wrong is listed) or that Bridge can't read, Megatron is not installed, or it took longer than ``timeout_s``.
    """
    problems = [problem for question in questions for problem in _problems(question)]
    if problems:
        raise OfflineError("; ".join(problems))
    asked = [
        {
            "config": str(question.config),
            "layout": asdict(question.layout),
            "ranks": question.ranks,
            "dtype": dtype_name(question.dtype),
        }
        for question in questions
    ]
    with tempfile.TemporaryDirectory() as scratch:
        answers = Path(scratch) / "answers.json"
        try:
            done = subprocess.run(
                [sys.executable, "-m", f"{__package__}.offline_child", str(answers)],
                input=json.dumps(asked),
                env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise OfflineError(
                f"Megatron-Bridge did not answer within {timeout_s:.0f} s; the machine is busy, or the model has far more "
                "parameters than any that was tried. Give a larger timeout_s"
            ) from error
        if done.returncode:
            raise OfflineError(
                f"Megatron-Bridge can't say what it would export; its process ended with exit code {done.returncode} "
                f"and said: {done.stderr.strip()[-_TOLD:]}"
            )
        found = json.loads(answers.read_text())
    return [_export(question, answer) for question, answer in zip(questions, found, strict=True)]


def _problems(question: OfflineQuestion) -> list[str]:
    missing = (
        []
        if config_file(question.config).is_file()
        else [f"{config_file(question.config)} is no file; give a config.json or the folder that has one"]
    )
    found = question.layout.violations()
    if found:
        return [*missing, *found]
    world = question.layout.world_size
    return missing + [
        f"rank {rank} is not among the {world} trainer ranks of {question.layout}"
        for rank in question.ranks
        if not 0 <= rank < world
    ]


def _export(question: OfflineQuestion, answer: dict[str, Any]) -> OfflineExport:
    return OfflineExport(
        [TensorSpec.from_json(spec) for spec in answer["specs"]],
        {rank: _rank(told) for rank, told in zip(question.ranks, answer["ranks"], strict=True)},
        answer["cpu_seconds"],
        answer["peak_rss_bytes"],
    )


def _rank(told: dict[str, Any]) -> _OfflineRank:
    held = (
        _HeldBox(
            name,
            tuple(shape),
            tuple((a, b) for a, b in box),
            dtype_of(dtype),
            axes and Axes(tuple(map(tuple, axes[0])), tuple(axes[1])),
        )
        for name, shape, box, dtype, axes in told["held"]
    )
    return _OfflineRank(tuple(held), told["refused"])
