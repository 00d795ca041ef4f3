"""Moves tensors to host memory and back into the same storages.

The storages stay, without memory. So views of them (a refit's, or FSDP2's of its shards) keep no GPU memory, and are valid
again afterwards. If the tensors got new storages instead, such views would keep the old memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...integration.errors import RefitError


class _Shown(NamedTuple):
    """A tensor whose data is ``view``, a part of its host copy, and is ``home`` otherwise. Its name begins with its module's number."""

    name: str
    tensor: torch.Tensor
    home: torch.Tensor
    view: torch.Tensor


class HostCopies:
    """Host copies of the parameters and buffers of modules, always the same modules.

    Copies from a GPU are page-locked. They are kept, since allocating such memory takes longer than copying.

    Args:
        device: of the modules.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # By the identity of a storage: the storage and its copy.
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        # Storages that are on the host, in the order in which they left and will come back.
        self._away: dict[int, None] = {}
        # Tensors whose data is in the copies meanwhile.
        self._shown: list[_Shown] = []

    def free(self, modules: Sequence[nn.Module]) -> None:
        """Copy all tensors on the device to the host, and free their device memory.

        Until :meth:`restore` parameters and buffers are views of the copies. Those of a module under FSDP2 are not: its shards
        stay as they are, without memory.

        Raises:
            RefitError: as of :func:`require_movable`; nothing has moved.
        """
        require_movable(modules)
        reshard(modules)
        for number, module in enumerate(modules):
            sharded = _is_sharded(module)
            for name, tensor in _tensors(module):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                if local.device.type != self._device.type or not local.numel():
                    continue
                copy = self._copy(local.untyped_storage())
                if not sharded:
                    shown = _Shown(f"{number}.{name}", tensor, tensor.data, _view(copy, local))
                    self._shown.append(shown)
                    tensor.data = shown.view
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        # Copies of storages that no tensor has any more are dropped.
        self._copies = {key: self._copies[key] for key in self._away}
        for storage, _ in self._copies.values():
            storage.resize_(0)

    def restore(self) -> None:
        """Bring all storages back. If it fails, it may be called again; until then nothing may be read.

        Raises:
            RefitError: a parameter's or buffer's ``data`` was assigned meanwhile, so that its new values are in other memory.
                All tensors have come back as they were before the assignment.
        """
        for key in self._away:
            storage, copy = self._copies[key]
            storage.resize_(copy.numel())
            _bytes(storage).copy_(copy, non_blocking=True)
        self._away.clear()
        assigned = [shown.name for shown in self._shown if not _is_same(shown.tensor.data, shown.view)]
        for shown in self._shown:
            shown.tensor.data = shown.home
        self._shown.clear()
        if assigned:
            raise RefitError(
                f"{len(assigned)} tensors of modules had their .data assigned while they were away from the GPU, which does "
                f"not reach the memory that optimizers and refits view: {assigned[0]} holds what it held before. All is back "
                "on the GPU; load the values again now, or write them in place while the modules are away "
                "(load_state_dict, parameter.data.copy_)",
                stage="onload",
                parameter=assigned[0],
            )

    def _copy(self, storage: torch.UntypedStorage) -> torch.Tensor:
        key = storage._cdata
        if key not in self._copies:
            pinned = self._device.type == "cuda"
            made = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
            self._copies[key] = storage, made
        copy = self._copies[key][1]
        if key not in self._away:
            copy.copy_(_bytes(storage), non_blocking=True)
            self._away[key] = None
        return copy


def require_movable(modules: Sequence[nn.Module]) -> None:
    """Check that modules can leave their device, and that a read meanwhile finds a copy or an error.

    Raises:
        RefitError: a module has DTensors and is not under FSDP2. A DTensor can't be a view of a host copy, so a read while it
            is away would read freed memory.
    """
    found = [
        name
        for module in modules
        if not _is_sharded(module)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if isinstance(tensor, DTensor)
    ]
    if found:
        raise RefitError(
            f"these modules can't leave their GPU: {found[0]} is a DTensor ({len(found)} are) in a module that is not under "
            "FSDP2, of tensor parallelism alone, say. Nothing has moved. Wrap the module with fully_shard, over a mesh of "
            "one rank too, or give the engine GPUs of its own",
            stage="settings",
            parameter=found[0],
        )


def reshard(modules: Sequence[nn.Module]) -> None:
    """Free the gathered weights that FSDP2 keeps. They are no state."""
    for module in modules:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def _is_sharded(module: nn.Module) -> bool:
    return any(isinstance(part, FSDPModule) for part in module.modules())


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _is_same(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    places = ((t.data_ptr(), t.dtype, t.shape, t.stride()) for t in (tensor, view))
    return next(places) == next(places)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _view(copy: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The view of a copy of a storage that ``like`` is of the storage."""
    shown = torch.empty(0, dtype=like.dtype)
    return shown.set_(copy.untyped_storage(), like.storage_offset(), like.shape, like.stride())
