"""Megatron parameters that were offloaded to host memory, as a weight source reads them.

Trainers offload in two ways. Some move each parameter (``param.data = param.data.to("cpu")``); its own storage then
lies on the host, and nothing is needed here but the way to the GPU for Bridge's export. Others copy the buffers of
Megatron's ``DistributedDataParallel`` to the host and free the storage under all parameters: Megatron-core's own
``offload_to_cpu`` keeps the copy as ``buffer.param_data_cpu``, verl as ``buffer.param_data.cpu_data``. Such a
parameter's place in the copy is read instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator
from typing import Any

import torch

from ..integration.errors import RefitError

_SHARDING = ("tensor_model_parallel", "partition_dim", "partition_stride")


class Residence:
    """Where the parameters of a model are now.

    Args:
        model: Megatron model chunks.
        device: on which Bridge's export works.
    """

    def __init__(self, model: list[Any], device: torch.device):
        self._model = model
        self._device = device

    def key(self) -> Hashable:
        """Addresses of the host copies that stand in for freed buffers."""
        return tuple(
            0 if copy is None else copy.data_ptr() for copy in map(_host_copy, self._freed_buffers())
        )

    def tasks(self, tasks: list[Any]) -> list[Any]:
        """Bridge's conversion tasks, with parameters that have memory.

        Raises:
            RefitError: a parameter's storage was freed and no host copy of it is known.
        """
        copies = {_storage(buffer.param_data): buffer for buffer in self._freed_buffers()}
        return [
            task
            if task.param_weight is None or not _is_freed(task.param_weight)
            else _with_weight(task, _in_copy(task, copies.get(_storage(task.param_weight))))
            for task in tasks
        ]

    def on_device(self, tasks: list[Any]) -> list[Any]:
        """As :meth:`tasks`, each parameter brought to the device when its task's turn comes, and let go after it."""
        return _BroughtOneByOne(self.tasks(tasks), self._device)

    def require_gathered(self, chunk: Any) -> None:
        """Check that a delayed gather of parameters can still be done.

        Raises:
            RefitError: the chunk is offloaded, and its host copies may be older than the optimizer's last step.
        """
        away = any(parameter.device.type != self._device.type for parameter in chunk.parameters())
        if away or any(buffer in self._freed_buffers() for buffer in _buffers(chunk)):
            raise RefitError(
                "the trainer's parameters were offloaded under overlap_param_gather, which leaves the last step's update "
                "of other data-parallel ranks' shards to the next forward pass: the offloaded weights may be old. Nothing "
                "was sent. Refit before offloading, or set overlap_param_gather to false",
                stage="export",
            )

    def _freed_buffers(self) -> list[Any]:
        return [
            buffer
            for chunk in self._model
            for buffer in _buffers(chunk)
            if buffer.param_data is not None and _is_freed(buffer.param_data)
        ]


class _BroughtOneByOne(list[Any]):
    """Tasks whose parameters are on the device while they are looked at."""

    def __init__(self, tasks: list[Any], device: torch.device):
        super().__init__(tasks)
        self._device = device

    def __iter__(self) -> Iterator[Any]:
        for task in super().__iter__():
            weight = task.param_weight
            if weight is None or weight.device.type == self._device.type:
                yield task
            else:
                yield _with_weight(task, weight.detach().to(self._device))


def _buffers(chunk: Any) -> list[Any]:
    """The gradient and parameter buffers of Megatron's DDP; none of a bare module, whose ``buffers`` is a method."""
    lists = (getattr(chunk, "buffers", None), getattr(chunk, "expert_parallel_buffers", None))
    return [buffer for found in lists if isinstance(found, list) for buffer in found]


def _is_freed(tensor: torch.Tensor) -> bool:
    # Parameters of Transformer Engine's own types keep their bytes elsewhere, and have no rule anyway.
    plain = type(tensor) in (torch.nn.Parameter, torch.Tensor)
    return plain and tensor.numel() > 0 and not tensor.untyped_storage().nbytes()


def _storage(tensor: torch.Tensor) -> int:
    """Identity of the storage, whatever its size."""
    return int(tensor.untyped_storage()._cdata)


def _host_copy(buffer: Any) -> torch.Tensor | None:
    megatrons = getattr(buffer, "param_data_cpu", None)
    verls = getattr(buffer.param_data, "cpu_data", None)
    # With both, one of them is older, and nothing tells which.
    return (verls if megatrons is None else megatrons) if megatrons is None or verls is None else None


def _in_copy(task: Any, buffer: Any) -> torch.Tensor:
    weight = task.param_weight
    copy = None if buffer is None else _host_copy(buffer)
    if copy is None or copy.numel() != buffer.param_data.numel() or copy.dtype != weight.dtype:
        raise RefitError(
            f"{task.global_param_name} was offloaded with its storage freed, and no single host copy of its Megatron "
            "buffer is known (param_data_cpu of the buffer, or cpu_data of its param_data). Nothing was sent. Bring the "
            "parameters back before the refit, or hand over the copy under one of these names",
            stage="bind",
            parameter=task.global_param_name,
        )
    offset = copy.storage_offset() + weight.storage_offset() - buffer.param_data.storage_offset()
    return copy.as_strided(weight.shape, weight.stride(), offset)


def _with_weight(task: Any, data: torch.Tensor) -> Any:
    weight = torch.nn.Parameter(data, requires_grad=False)
    for attribute in _SHARDING:
        if hasattr(task.param_weight, attribute):
            setattr(weight, attribute, getattr(task.param_weight, attribute))
    return dataclasses.replace(task, param_weight=weight)
