"""Tensors that leave a GPU and come back into the same storages.

The storages stay, without memory: who keeps views of them (a refit that is bound to them, FSDP2 to its shards) keeps no
memory, and finds them filled again. A tensor that got new memory for each stay would leave the old one to such views.
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
    """A tensor that shows ``view``, of its copy, and lives in ``home``; its name begins with its module's number."""

    name: str
    tensor: torch.Tensor
    home: torch.Tensor
    view: torch.Tensor


class HostCopies:
    """Of modules' parameters and buffers; always of the same modules.

    The copies of a GPU's are page-locked, and kept: to take such memory takes longer than to copy.

    Args:
        device: where the modules live.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # By the identity of a storage: the storage, and what it holds.
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        # Of those that are away; in the order that they left in, and come back in.
        self._away: dict[int, None] = {}
        # Tensors that show their copies meanwhile.
        self._shown: list[_Shown] = []

    def free(self, modules: Sequence[nn.Module]) -> None:
        """Copy what lies on the device to the host, and free it there.

        Parameters and buffers show the copies until :meth:`restore`, but for those of a module under FSDP2, whose shards
        stay what they are, without memory.

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
        # Without those of tensors that have got other storages since.
        self._copies = {key: self._copies[key] for key in self._away}
        for storage, _ in self._copies.values():
            storage.resize_(0)

    def restore(self) -> None:
        """Bring back all that is away; may be called again if it has failed, until which nothing may be read.

        Raises:
            RefitError: a parameter's or buffer's ``data`` was assigned meanwhile, so that the values are in memory that
                nobody else views. All has come back, as it was before the assignment.
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
    """Check that modules can leave their device and be read meanwhile, or refuse to be.

    Raises:
        RefitError: a module has DTensors and is not under FSDP2. A DTensor can't show a copy elsewhere, so that who reads
            it while it is away would read freed memory.
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
    """Free what FSDP2 has gathered of modules, and keeps: it is nobody's state."""
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
    """The place of ``like`` in a copy of its storage."""
    shown = torch.empty(0, dtype=like.dtype)
    return shown.set_(copy.untyped_storage(), like.storage_offset(), like.shape, like.stride())
