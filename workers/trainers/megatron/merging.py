"""Weights with their LoRA adapters merged in, beside those that training keeps frozen.

Bridge's export gathers a layer's weight and both factors, and adds ``alpha / r * B @ A`` to each Hugging Face weight, in FP32.
A rank does that for its shard alone, from the whole factors, with the bits of Bridge's export (:mod:`..low_rank`). The trained
parameters are read only.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ....integration.weights.endpoints import StorageLook
from ..alike import require_alike
from ..low_rank import Delta, Part, merge
from .adapters import Adapters, Pair, Rows, is_adapted
from .rules import Refused, fragments_of_task, parameter_like

# Elements of whole factors that are gathered at a time: 256 MiB in FP32.
_GATHERED = 1 << 26


class MergedWeights:
    """Copies of this rank's parameters with their adapters merged in, made anew for every refit.

    They take as much memory as the parameters under adapters, for as long as the source lives. The factors are gathered
    in batches, and the widest product comes on top for a moment.

    Args:
        adapters: of the model.
        tasks: Bridge's conversion tasks.
        device: that computes.

    Building it is a collective of all trainer ranks.
    """

    def __init__(self, adapters: Adapters, tasks: Sequence[Any], device: torch.device):
        self._adapters = adapters
        self._device = device
        self._pairs: dict[int, list[Pair]] = {}
        self._reasons: dict[int, str] = {}
        for index, task in enumerate(tasks):
            if is_adapted(task) and task.param_weight is not None:
                try:
                    self._pairs[index] = adapters.pairs(task)
                except Refused as reason:
                    self._reasons[index] = str(reason)
        self._rows = self._agree(tasks)
        self._copies: dict[int, torch.nn.Parameter] = {}
        self._parts: dict[int, dict[str, list[Part]]] = {}
        self._look = StorageLook()
        self._seen: Hashable = None

    @property
    def copies(self) -> Collection[torch.Tensor]:
        """All that :meth:`of` has given and :meth:`refresh` writes."""
        return self._copies.values()

    def of(self, index: int, task: Any) -> Any:
        """A task with the copy in the place of its parameter, which is merged after the next :meth:`refresh`; ``task`` itself, if no
        adapter adds to it.

        Raises:
            Refused: Bridge alone can merge it.
        """
        if index in self._reasons:
            raise Refused(self._reasons[index])
        if index not in self._pairs:
            return task
        weight = task.param_weight
        if type(weight.data) is not torch.Tensor:
            raise Refused(
                f"LoRA: {type(weight.data).__name__} is no plain tensor that an adapter could be added to"
            )
        copy = self._copies.get(index)
        if copy is None or (copy.shape, copy.dtype, copy.device) != (
            weight.shape,
            weight.dtype,
            weight.device,
        ):
            copy = self._copies[index] = parameter_like(weight, torch.empty_like(weight.data))
        return dataclasses.replace(task, param_weight=copy)

    def refresh(self, ready: Callable[[], Sequence[Any]]) -> None:
        """Merge what parameters and factors hold now; a collective of each group of tensor parallelism.

        Args:
            ready: gives the tasks as the source was built with, their parameters where they are now, or raises if this rank can't send its weights.

        Raises:
            RefitError: on all ranks of the group: what ``ready`` raised on one, or on one the model does not compute with its
                adapters, has others, or has none of their values.
        """
        from megatron.core import parallel_state

        tasks: Sequence[Any] = ()

        def same() -> str:
            nonlocal tasks
            tasks = ready()
            self._adapters.require_same()
            self._adapters.resident()
            return ""  # ranks of the group may hold other experts' adapters

        tensor_parallel = parallel_state.get_tensor_model_parallel_group()
        require_alike(same, "adapters", [tensor_parallel], self._device)
        if not self._copies:
            return  # on no rank of the group: nobody sends them
        places = (t for i in self._copies for t in (tasks[i].param_weight, self._copies[i]))
        if (seen := self._look.key(places)) != self._seen:
            self._parts = {i: self._parts_of(i, tasks[i]) for i in self._copies}
            self._seen = seen
        with torch.no_grad():
            for batch in self._batches():
                factors = self._adapters.whole(list(batch))
                for number, indices in batch.items():
                    for index in indices:
                        self._merge(index, number, *factors[number])

    def _merge(self, index: int, number: int, a: torch.Tensor, b: torch.Tensor) -> None:
        for pair in self._pairs[index]:
            if pair.number != number:
                continue
            own_a, own_b = (a, b) if pair.expert is None else (a[pair.expert], b[pair.expert])
            rows = self._rows.get((index, pair.weight))
            delta = Delta(own_a, own_b if rows is None else own_b[rows], self._adapters.scaling(number))
            merge(self._parts[index][pair.weight], pair.shape, [delta])

    def _parts_of(self, index: int, task: Any) -> dict[str, list[Part]]:
        parts: dict[str, list[Part]] = defaultdict(list)
        merged = dataclasses.replace(task, param_weight=self._copies[index])
        for base, out in zip(fragments_of_task(task), fragments_of_task(merged), strict=True):
            parts[base.name].append(Part(base.view, base.box, out.view))
        return parts

    def _batches(self) -> Iterator[dict[int, list[int]]]:
        """Adapters by number, so many at a time that their factors are bounded, each with the tasks whose parameters it adds to."""
        users: dict[int, list[int]] = defaultdict(list)
        for index, pairs in self._pairs.items():
            for number in dict.fromkeys(pair.number for pair in pairs):
                users[number].append(index)
        batch: dict[int, list[int]] = {}
        held = 0
        for number, indices in users.items():
            held += self._adapters.elements(number)
            if batch and held > _GATHERED:
                yield batch
                batch, held = {}, self._adapters.elements(number)
            batch[number] = [index for index in indices if index in self._copies]
        if batch:
            yield batch

    def _agree(self, tasks: Sequence[Any]) -> dict[tuple[int, str], torch.Tensor]:
        """Where the ranks of tensor parallelism together have the rows of each weight's ``linear_out``, unless these stand in order.

        What one of them refuses, all refuse: they gather the factors together.
        """
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()
        own = {i: {pair.weight: pair.rows for pair in pairs} for i, pairs in self._pairs.items()}
        told: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(told, (own, self._reasons), group=group)
        for _, reasons in told:
            # Experts are not the same on all of them.
            ours = {i: why for i, why in reasons.items() if tasks[i].param_weight is not None}
            self._reasons = ours | self._reasons
        self._pairs = {i: pairs for i, pairs in self._pairs.items() if i not in self._reasons}
        rows: dict[tuple[int, str], torch.Tensor] = {}
        for index, pairs in self._pairs.items():
            # Ranks of the group may hold other experts; an expert's adapter is whole on each of its ranks.
            together = (
                [ranks[index] for ranks, _ in told]
                if self._adapters.is_cut(pairs[0].number)
                else [own[index]]
            )
            for pair in pairs:
                if pair.rows is not None:
                    height = self._adapters.out_rows(pair.number)
                    rows[index, pair.weight] = torch.cat(
                        [
                            torch.arange(r.at, r.at + r.count) + j * height
                            for r, j in _in_order(pair.weight, together)
                        ]
                    ).to(self._device)
        return rows


def _in_order(weight: str, ranks: Sequence[Mapping[str, tuple[Rows, ...]]]) -> list[tuple[Rows, int]]:
    """Rows of a weight that ranks hold, each with its rank, in the order of the weight."""
    # Cut along the inputs or held whole, each rank has them all.
    found = {rows.first: (rows, j) for j, held in reversed(list(enumerate(ranks))) for rows in held[weight]}
    return [found[first] for first in sorted(found)]
