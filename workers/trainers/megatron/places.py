"""Where a model's modules hold the parameters and buffers of Bridge's tasks, which remember these themselves."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....integration.errors import RefitError


@dataclass(frozen=True)
class _Place:
    """A parameter's or buffer's place in the tree of a chunk's modules, and the dictionary that held it there at the last look."""

    chunk: Any
    module: str
    leaf: str
    held: dict[str, Any]


class Places:
    """Follows parameters, buffers and modules that are replaced (``module.weight = Parameter(…)``) after the tasks were made.

    Each ``module.to(…)`` to another device replaces the buffers, so those of a router's biases in an offloaded trainer.

    Args:
        model: Megatron model chunks of this rank.
        tasks: Bridge's conversion tasks of the model.
    """

    def __init__(self, model: Sequence[Any], tasks: Sequence[Any]):
        self._model = model
        places: dict[int, list[_Place]] = defaultdict(list)
        for chunk in model:
            for path, module in chunk.named_modules(remove_duplicate=False):
                for held in (module._parameters, module._buffers):
                    for leaf, tensor in held.items():
                        places[id(tensor)].append(_Place(chunk, path, leaf, held))
        self._places = {
            index: places[id(task.param_weight)]
            for index, task in enumerate(tasks)
            if task.param_weight is not None and id(task.param_weight) in places
        }
        self._tree = self._edges()
        self._watched = self._leaves(tasks)

    def follow(self, tasks: list[Any]) -> bool:
        """Put the parameters that modules hold now into ``tasks``, in place; whether any was another one.

        Raises:
            RefitError: a place holds no parameter any more, one of another shape or dtype, or another one than the place
                it was tied to.
        """
        # Asked before every refit, of thousands of parameters: the rest is for when something has changed.
        grown = [1 for children, name, child in self._tree if children.get(name) is not child]
        if not grown and not [1 for held, leaf, weight in self._watched if held.get(leaf) is not weight]:
            return False
        if grown:
            self._places = {index: [*map(_looked_up, places)] for index, places in self._places.items()}
            self._tree = self._edges()
        moved = [
            index
            for index, places in self._places.items()
            if any(place.held.get(place.leaf) is not tasks[index].param_weight for place in places)
        ]
        for index in moved:
            now = [place.held.get(place.leaf) for place in self._places[index]]
            before = tasks[index].param_weight
            if any(one is not now[0] for one in now):
                found = "is tied no more"
            elif now[0] is None:
                found = "is there no more"
            elif (now[0].shape, now[0].dtype) != (before.shape, before.dtype):
                found = f"is {now[0].dtype} of shape {list(now[0].shape)} now, and was {before.dtype} of {list(before.shape)}"
            else:
                tasks[index] = dataclasses.replace(tasks[index], param_weight=now[0])
                continue
            raise RefitError(
                f"this parameter {found} since the refit was prepared. Nothing was sent. Call close_refit on all trainer "
                "ranks and prepare the refit again",
                stage="bind",
                parameter=tasks[index].global_param_name,
            )
        self._watched = self._leaves(tasks)
        return bool(moved)

    def _leaves(self, tasks: Sequence[Any]) -> list[tuple[dict[str, Any], str, Any]]:
        return [
            (place.held, place.leaf, tasks[index].param_weight)
            for index, places in self._places.items()
            for place in places
        ]

    def _edges(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Which module is whose child: a module that is replaced takes its parameters along."""
        return [
            (module._modules, name, child)
            for chunk in self._model
            for module in chunk.modules()
            for name, child in module._modules.items()
        ]


def _looked_up(place: _Place) -> _Place:
    at = place.chunk
    for name in filter(None, place.module.split(".")):
        at = None if at is None else at._modules.get(name)
    holding = ({},) if at is None else (at._parameters, at._buffers)
    return dataclasses.replace(place, held=next((held for held in holding if place.leaf in held), {}))
