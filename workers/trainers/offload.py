"""Finds the bytes of Megatron parameters that were offloaded to host memory.

Trainers offload in two ways. Some move each parameter (``param.data = param.data.to("cpu")``). Its storage is on the host then,
and it only has to be copied to the GPU for Bridge's export. Others copy the buffers of Megatron's ``DistributedDataParallel``
to the host and free the storage of all parameters. Megatron-core's ``offload_to_cpu`` keeps the copy as
``buffer.param_data_cpu``, verl as ``buffer.param_data.cpu_data``. Such a parameter is read from its place in the copy.

The copy stays when the parameters come back. If a storage is freed later in another way, without a copy, the old copy would be
read. torch's version counters show that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...integration.errors import RefitError
from ...integration.weights.endpoints import storage_key

_SHARDING = ("tensor_model_parallel", "partition_dim", "partition_stride")


class Residence:
    """Where the parameters of a model are now.

    It looks when it is made and at each call. So it knows which host copies are older than the parameters.

    Args:
        model: Megatron model chunks.
        device: on which Bridge's export works.
    """

    def __init__(self, model: list[Any], device: torch.device):
        self._model = model
        self._device = device
        self._copies: WeakKeyDictionary[Any, _HostCopies] = WeakKeyDictionary()
        self._look()

    def key(self) -> Hashable:
        """Where the host copies of freed buffers lie; None for a buffer without one, or with an old one alone."""
        self._look()
        copies = (self._copies[buffer].current for buffer in self._freed_buffers())
        return tuple(None if copy is None else storage_key([copy]) for copy in copies)

    def tasks(self, tasks: list[Any]) -> list[Any]:
        """Bridge's conversion tasks. A parameter whose storage was freed is replaced by its host copy.

        Raises:
            RefitError: a parameter's storage was freed and no host copy of it is known, or only one that was not written
                since the parameter was last in use.
        """
        self._look()
        buffers = {_storage(buffer.param_data): buffer for buffer in self._freed_buffers()}
        return [
            task
            if task.param_weight is None or not _is_freed(task.param_weight)
            else _with_weight(task, self._in_copy(task, buffers.get(_storage(task.param_weight))))
            for task in tasks
        ]

    def on_device(self, tasks: list[Any]) -> list[Any]:
        """As :meth:`tasks`. Each parameter is copied to the device for its own task alone."""
        return _OnDevice(self.tasks(tasks), self._device)

    def finish_gathers(self) -> None:
        """Gather what the optimizer leaves to the next forward pass: until then the parameters hold old values.

        With ``overlap_param_gather`` these are the shards of other data-parallel ranks. What has been gathered since the last step is left
        alone: Megatron may gather through the gradients' memory, and a refit may come while gradients are added up.

        Raises:
            RefitError: as of :meth:`require_gathered`; or Megatron gathers through the gradients' memory what the optimizer has not put there.
        """
        for chunk in filter(_delays_gathers, self._model):
            if not hasattr(chunk, "bucket_groups"):  # Megatron-FSDP
                self.require_gathered(chunk)
                chunk.start_param_sync(force_sync=True)
                continue
            groups = [group for group in _bucket_groups(chunk) if not _is_gathered(group)]
            if groups:
                self.require_gathered(chunk)
                _require_staged(chunk, groups)
            for group in groups:
                # Not by a forced gather, which would leave what a layer-wise optimizer's gather under way has brought where it came.
                group.finish_param_sync(skip_next_bucket_dispatch=True)

    @property
    def delays_gathers(self) -> bool:
        """Whether :meth:`finish_gathers` is a collective of the data-parallel ranks."""
        return any(map(_delays_gathers, self._model))

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

    def _look(self) -> None:
        for chunk in self._model:
            for buffer in _buffers(chunk):
                if buffer.param_data is not None:
                    self._copies.setdefault(buffer, _HostCopies()).look(buffer)

    def _freed_buffers(self) -> list[Any]:
        return [
            buffer
            for chunk in self._model
            for buffer in _buffers(chunk)
            if buffer.param_data is not None and _is_freed(buffer.param_data)
        ]

    def _in_copy(self, task: Any, buffer: Any) -> torch.Tensor:
        weight = task.param_weight
        copies = _HostCopies() if buffer is None else self._copies[buffer]
        copy = copies.current
        if copy is None or copy.numel() != buffer.param_data.numel() or copy.dtype != weight.dtype:
            if copy is None and copies.outdated:
                raise RefitError(
                    f"{task.global_param_name} was offloaded with its storage freed, and the host copy of its Megatron "
                    f"buffer ({' and '.join(copies.outdated)}) was not written since the parameters were last in use, says "
                    "its version counter: the engine would get old weights. Nothing was sent. Copy the parameters to the "
                    "host whenever their storage is freed (copy.copy_(param_data), not through .data, or a new tensor), or "
                    "bring them back before the refit",
                    stage="bind",
                    parameter=task.global_param_name,
                )
            raise RefitError(
                f"{task.global_param_name} was offloaded with its storage freed, and no single host copy of its Megatron "
                "buffer is known (param_data_cpu of the buffer, or cpu_data of its param_data). Nothing was sent. Bring "
                "the parameters back before the refit, or hand over the copy under one of these names",
                stage="bind",
                parameter=task.global_param_name,
            )
        offset = copy.storage_offset() + weight.storage_offset() - buffer.param_data.storage_offset()
        return copy.as_strided(weight.shape, weight.stride(), offset)


class _HostCopies:
    """The host copies of one buffer's parameters.

    Attributes:
        current: the one copy that may hold the values of the freed parameters; None if there is none, or several.
        outdated: names of the copies that were not written since the parameters were last in use.
    """

    def __init__(self) -> None:
        self.current: torch.Tensor | None = None
        self.outdated: list[str] = []
        # By the storage of a copy: the version at which it was old; the version at which it was read, and the versions of the
        # buffer's tensors then. Every write raises a version.
        self._old: dict[StorageWeakRef, int | None] = {}
        self._read: dict[StorageWeakRef, tuple[int | None, list[int | None]]] = {}

    def look(self, buffer: Any) -> None:
        """Look at the copies, and at whether the buffer's storage is freed."""
        found = {
            "param_data_cpu": getattr(buffer, "param_data_cpu", None),
            "cpu_data": getattr(buffer.param_data, "cpu_data", None),
        }
        copies = [
            (name, copy, StorageWeakRef(copy.untyped_storage()), _version(copy))
            for name, copy in found.items()
            if copy is not None
        ]
        left: list[torch.Tensor] = []
        self.outdated = []
        if _is_freed(buffer.param_data):
            # If the storage came back and was freed again since the last look, something was written: the parameters, or the
            # gradients, which Megatron sets to zero before each step.
            writes = [_version(tensor) for tensor in _written_in_use(buffer)]
            for name, copy, storage, version in copies:
                at, then = self._read.get(storage, (version, writes))
                if at == version and then != writes:
                    self._old[storage] = version
                if storage in self._old and self._old[storage] == version:
                    self.outdated.append(name)
                else:
                    self._read[storage] = version, writes
                    left.append(copy)
        else:
            # A copy at these versions lacks what is written to the parameters from here on.
            self._old |= {storage: version for storage, (version, _) in self._read.items()}
            self._old |= {storage: version for _, _, storage, version in copies}
            self._old = {storage: at for storage, at in self._old.items() if not storage.expired()}
            self._read = {}
        # Of two copies one is older, and nothing tells which.
        self.current = left[0] if len(left) == 1 else None


class _OnDevice(list[Any]):
    """Tasks whose parameters are on the device while they are iterated over."""

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


def _delays_gathers(chunk: Any) -> bool:
    return bool(getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False))


def _bucket_groups(chunk: Any) -> list[Any]:
    """What the parameters of Megatron's DDP are gathered by."""
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


def _is_gathered(group: Any) -> bool:
    """Whether nothing is left to gather, or under way, since the gradients of the last step were summed up."""
    return group.param_gather_dispatched and group.param_gather_handle is None


def _require_staged(chunk: Any, groups: list[Any]) -> None:
    """Check that a gather that has not begun would find parameters, not gradients, in the memory that both share."""
    begun = all(group.param_gather_handle is not None for group in groups)
    if chunk.ddp_config.reuse_grad_buf_for_mxfp8_param_ag and not begun:
        raise RefitError(
            "Megatron keeps parameters in MXFP8 and gathers them through the gradients' memory (reuse_grad_buf_for_mxfp8_param_ag), "
            "where the optimizer puts them at the beginning of the next step: a gather now would make weights of gradients. Nothing "
            "was sent. Before the refit call optimizer.prepare_model_params_for_param_sync(), and start_param_sync(force_sync=True) "
            "of all model chunks; or set overlap_param_gather to false",
            stage="export",
        )


def _buffers(chunk: Any) -> list[Any]:
    """The gradient and parameter buffers of Megatron's DDP. A module without DDP has none; its ``buffers`` is a method."""
    lists = (getattr(chunk, "buffers", None), getattr(chunk, "expert_parallel_buffers", None))
    return [buffer for found in lists if isinstance(found, list) for buffer in found]


def _is_freed(tensor: torch.Tensor) -> bool:
    # Parameters of Transformer Engine's types keep their bytes elsewhere. They have no shard rule.
    plain = type(tensor) in (torch.nn.Parameter, torch.Tensor)
    return plain and tensor.numel() > 0 and not tensor.untyped_storage().nbytes()


def _storage(tensor: torch.Tensor) -> int:
    """Identity of the storage, whatever its size."""
    return int(tensor.untyped_storage()._cdata)


def _version(tensor: torch.Tensor) -> int | None:
    # Tensors of inference mode have no version counter.
    return None if tensor.is_inference() else tensor._version


def _written_in_use(buffer: Any) -> list[torch.Tensor]:
    """Tensors of which at least one is written when the parameters are brought back or trained."""
    gradients = getattr(buffer, "grad_data", None)
    return [
        buffer.param_data,
        *([] if gradients is None else [gradients]),
        *getattr(buffer, "params", ()),
    ]


def _with_weight(task: Any, data: torch.Tensor) -> Any:
    weight = torch.nn.Parameter(data, requires_grad=False)
    for attribute in _SHARDING:
        if hasattr(task.param_weight, attribute):
            setattr(weight, attribute, getattr(task.param_weight, attribute))
    return dataclasses.replace(task, param_weight=weight)
