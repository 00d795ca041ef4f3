"""Where a model's modules hold the parameters of Bridge's tasks, which remember the parameters themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ...integration.errors import RefitError


class Places:
    """Follows parameters that are replaced by others (``module.weight = Parameter(…)``) after the tasks were made.

    Args:
        model: Megatron model chunks of this rank.
        tasks: Bridge's conversion tasks of the model.
    """

    def __init__(self, model: Sequence[Any], tasks: Sequence[Any]):
        of = {
            id(parameter): (module._parameters, leaf)
            for chunk in model
            for module in chunk.modules()
            for leaf, parameter in module._parameters.items()
            if parameter is not None
        }
        self._places = [
            (index, *of[id(task.param_weight)])
            for index, task in enumerate(tasks)
            if id(task.param_weight) in of
        ]

    def follow(self, tasks: list[Any]) -> bool:
        """Put the parameters that modules hold now into ``tasks``, in place; whether any was another one.

        Raises:
            RefitError: a module holds no parameter any more where it did, or one of another shape.
        """
        moved = [p for p in self._places if p[1].get(p[2]) is not tasks[p[0]].param_weight]
        for index, held, leaf in moved:
            task, now = tasks[index], held.get(leaf)
            if now is None or now.shape != task.param_weight.shape:
                found = "none" if now is None else f"one of shape {list(now.shape)}"
                raise RefitError(
                    f"the module that held it has {found} now, and had one of shape {list(task.param_weight.shape)} when the "
                    "refit was prepared. Nothing was sent. Prepare it again with the new model (assign self.model anew)",
                    stage="bind",
                    parameter=task.global_param_name,
                )
            tasks[index] = dataclasses.replace(task, param_weight=now)
        return bool(moved)
