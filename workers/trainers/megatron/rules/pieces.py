"""What all rules are made of: shards along one dimension, and rows that go to several tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from .....integration.layout import Fragment, box_of

# What Bridge found for a mapping, which it asks once itself. It looks for modelopt each time, and where that is not installed the rules of
# a model take twice as long by it.
_KINDS: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


class Refused(Exception):
    """A parameter that no rule places safely; the text is the reason that users read."""


class Run(NamedTuple):
    """Consecutive rows of a parameter, and where they stand in a Hugging Face tensor.

    Attributes:
        name: of the tensor; None for rows that Bridge leaves out.
        total: rows of the whole tensor.
        first: first of the rows there.
        count: rows.
    """

    name: str | None
    total: int
    first: int
    count: int


def lay(view: torch.Tensor, runs: Iterable[Run], rank: int = 0, size: int = 1) -> list[Fragment]:
    """Fragments of part ``rank`` of ``size`` equal parts of a matrix (vector, …) whose rows are ``runs``.

    Raises:
        Refused: the runs are not as many rows as the parts are.
    """
    height, tail = view.shape[0], box_of(view.shape[1:])
    row = -rank * height
    fragments: list[Fragment] = []
    total = 0
    for run in runs:
        start, stop = max(row, 0), min(row + run.count, height)
        if run.name is not None and start < stop:
            first = run.first + start - row
            box = ((first, first + stop - start), *tail)
            fragments.append(Fragment(run.name, (run.total, *view.shape[1:]), box, view[start:stop]))
        row += run.count
        total += run.count
    if total != height * size:
        raise Refused(f"{height * size} rows, where the model's configuration makes {total}")
    return fragments


def shard(name: str, view: torch.Tensor, dim: int, rank: int, size: int) -> Fragment:
    """Part ``rank`` of ``size`` equal parts along ``dim``."""
    full = list(view.shape)
    full[dim] *= size
    box = [(0, n) for n in view.shape]
    box[dim] = (rank * view.shape[dim], (rank + 1) * view.shape[dim])
    return Fragment(name, tuple(full), tuple(box), view)


def one_name(task: Any) -> str:
    """The one Hugging Face name of the task's mapping."""
    name = task.mapping.hf_param
    if not isinstance(name, str):
        raise Refused(f"mapping names {sorted(name)} where its rule expects one weight")
    return name


def evenly(length: int, size: int, what: str) -> int:
    """``length / size``.

    Raises:
        Refused: with ``what``, if there is a remainder.
    """
    if length % size:
        raise Refused(f"{length} {what} can't be split over TP {size}")
    return length // size


def kind_of(mapping: Any, module: Any) -> str:
    """How Bridge's ``AutoMapping`` takes a module to be parallel: ``column``, ``row`` or ``replicated``."""
    if mapping not in _KINDS:
        _KINDS[mapping] = mapping._detect_parallelism_type(module)
    return _KINDS[mapping]


def require_rows_split(task: Any) -> None:
    """The mapping joins TP ranks through a mapping of its own; that one must stack their rows.

    Raises:
        Refused: it does not.
    """
    inner = task.mapping._tp_mapping
    name = type(inner).__name__
    if task.mapping.tp_size == 1 or name == "ColumnParallelMapping":
        return
    kind = kind_of(inner, task.megatron_module) if name == "AutoMapping" else name
    if kind != "column":
        raise Refused(f"its module is {kind}-parallel for Bridge, so TP ranks don't hold parts of its rows")


def parameter_like(weight: torch.Tensor, data: torch.Tensor) -> torch.nn.Parameter:
    """``data`` as a parameter that rules and mappings take for ``weight``."""
    parameter = torch.nn.Parameter(data, requires_grad=False)
    for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
        if hasattr(weight, attribute):
            setattr(parameter, attribute, getattr(weight, attribute))
    return parameter
