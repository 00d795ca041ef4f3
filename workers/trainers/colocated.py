"""Trainer ranks that take turns with an engine on their GPU: torch modules, FSDP2, and Megatron under its DDP.

While the engine generates, the weights are in pinned host memory. A refit reads them there, except under FSDP2,
where it refuses. On a CPU nothing moves, but gradients are freed at the same stages.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...integration.colocated.memory import MemoryWatch, ProcessMemory, empty_cache
from ...integration.errors import RefitError
from .host_copies import HostCopies, require_movable, reshard

_HOST = torch.device("cpu")


class ColocatedRank(ABC):
    """The base of all kinds. Each is a :class:`~rlrefit.integration.colocated.stages.ColocatedTrainer` of one rank.

    Args:
        device: GPU of this rank.
        rank: of the trainer.
        frozen: modules that no refit reads, such as a reference policy. They leave the GPU with the optimizer.
    """

    def __init__(self, device: torch.device, rank: int, frozen: Sequence[nn.Module]) -> None:
        self._device = device
        self._rank = rank
        self._frozen = list(frozen)
        require_movable(self._frozen)
        self._watch = MemoryWatch(device)
        self._frozen_copies = HostCopies(device)

    @abstractmethod
    def onload(self) -> None:
        """Bring weights, gradients and optimizer to the GPU."""

    @abstractmethod
    def offload(self) -> None:
        """Take gradients and the optimizer's state off the GPU."""

    @abstractmethod
    def free(self) -> None:
        """Take the weights off the GPU."""

    def empty_cache(self) -> None:
        """Give the allocator's cache back to the device."""
        empty_cache(self._device)

    def memory(self, restart: bool = False) -> list[ProcessMemory]:
        """Memory of this rank; ``restart`` restarts its peaks after this."""
        found = self._watch.read(f"trainer rank {self._rank}")
        if restart:
            self._watch.restart()
        return [found]

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)


class TorchRank(ColocatedRank):
    """Modules with parameters of their own, or under FSDP2.

    Optimizer state that is away lies in page-locked memory that the next :meth:`offload` writes anew: copy what is taken of it meanwhile.

    Args:
        modules: of this rank.
        optimizer: of their parameters. ``offload`` moves all of its state that is on the GPU.
        device: GPU of this rank.
        rank: of the trainer.
        frozen: as of :class:`ColocatedRank`.
        offloaded: modules under FSDP2 whose shards are always in host memory. Their gathered weights are on the GPU.

    Raises:
        RefitError: modules that can't be read while they are away, as of :func:`.host_copies.require_movable`.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        rank: int = 0,
        frozen: Sequence[nn.Module] = (),
        offloaded: Sequence[nn.Module] = (),
    ) -> None:
        super().__init__(device, rank, frozen)
        require_movable(modules)
        self._offloaded = list(offloaded)
        self._modules = list(modules)
        self._optimizer = optimizer
        self._copies = HostCopies(device)
        self._pinned: dict[tuple[int, str], torch.Tensor] = {}
        self._moved: list[tuple[dict[str, Any], str]] = []

    def onload(self) -> None:
        self._copies.restore()
        self._frozen_copies.restore()
        while self._moved:
            values, name = self._moved[-1]
            values[name] = values[name].to(self._device, non_blocking=True)
            self._moved.pop()
        self._synchronize()

    def offload(self) -> None:
        gc.collect()  # tensors of the last step that only reference cycles keep
        self._optimizer.zero_grad(set_to_none=True)
        # With reshard_after_forward=False all weights are still gathered after a forward pass without a backward pass.
        reshard([*self._modules, *self._frozen, *self._offloaded])
        for values in self._optimizer.state.values():
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and value.device.type == self._device.type != "cpu":
                    values[name] = self._to_host(value, (id(values), name))
                    self._moved.append((values, name))
        # A state that was loaded has dictionaries of its own.
        away = {(id(values), name) for values, name in self._moved}
        self._pinned = {place: kept for place, kept in self._pinned.items() if place in away}
        if self._on_gpu:
            self._frozen_copies.free(self._frozen)
        self._synchronize()

    def free(self) -> None:
        if self._on_gpu:
            self._copies.free(self._modules)

    def _to_host(self, tensor: torch.Tensor, place: tuple[int, str]) -> torch.Tensor:
        kept = self._pinned.get(place)
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            kept = torch.empty_like(tensor, device=_HOST, pin_memory=True)
            self._pinned[place] = kept
        return kept.copy_(tensor, non_blocking=True)


class MegatronRank(ColocatedRank):
    """Model chunks under Megatron-core's ``DistributedDataParallel``, moved by Megatron-core's own offloading.

    Args:
        model: chunks of this rank, as the refit's mixin has them in ``self.model``.
        optimizer: Megatron-core's, with master weights of its own.
        device: GPU of this rank.
        rank: of the trainer.
        frozen: as of :class:`ColocatedRank`; chunks under no DDP.

    Raises:
        RefitError: a chunk is not under DDP, whose buffers are freed here; parameters that are not trained (a base model under LoRA),
            which are in none of them; the optimizer updates the model's parameters
            directly, and offloading its state would take them out of their buffers; or there are CUDA graphs, which would
            use freed memory.
    """

    def __init__(
        self,
        model: Sequence[Any],
        optimizer: Any,
        device: torch.device,
        rank: int = 0,
        frozen: Sequence[nn.Module] = (),
    ) -> None:
        super().__init__(device, rank, frozen)
        self._chunks = list(model)
        self._optimizer = optimizer
        self._require_movable()

    def onload(self) -> None:
        self._frozen_copies.restore()
        self._buffers("reload_from_cpu", move_params=self._on_gpu, move_grads=True)
        if self._on_gpu:
            self._optimizer.restore_from_cpu()
        self._synchronize()

    def offload(self) -> None:
        gc.collect()
        self._synchronize()
        self._buffers("offload_to_cpu", move_params=False, move_grads=True)
        self._optimizer.offload_to_cpu()
        if self._on_gpu:
            self._frozen_copies.free(self._frozen)
        self._synchronize()

    def free(self) -> None:
        self._synchronize()
        self._buffers("offload_to_cpu", move_params=self._on_gpu, move_grads=True)
        self._synchronize()

    def _buffers(self, method: str, **what: bool) -> None:
        for chunk in self._chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                getattr(buffer, method)(**what)

    def _require_movable(self) -> None:
        bare = [
            i for i, chunk in enumerate(self._chunks) if not isinstance(getattr(chunk, "buffers", None), list)
        ]
        parts = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        # Compared by storage: if parameters are FP32 already, the optimizer's shards are views of Megatron's buffers.
        stepped = {_storage(p) for part in parts for group in part.param_groups for p in group["params"]}
        shared = [
            name
            for chunk in self._chunks
            for name, parameter in chunk.named_parameters()
            if _storage(parameter) in stepped
        ]
        problems = [
            f"model chunk {i} runs under CUDA graphs ({graphs}), which keep the addresses of memory that is freed here; "
            "train without them"
            for i, chunk in enumerate(self._chunks)
            if (graphs := _cuda_graphs(getattr(chunk, "config", None)))
        ][:1]
        if bare:
            problems.append(f"model chunk {bare[0]} is not under Megatron's DistributedDataParallel")
        elif any(
            buffer.param_data is None
            for c in self._chunks
            for buffer in (*c.buffers, *c.expert_parallel_buffers)
        ):
            problems.append(
                "Megatron's buffers hold gradients alone, so that freeing them leaves the parameters on the GPU; set "
                "use_distributed_optimizer"
            )
        frozen = [
            name for chunk in self._chunks for name, p in chunk.named_parameters() if not p.requires_grad
        ]
        if frozen:
            problems.append(
                f"{frozen[0]} is not trained ({len(frozen)} parameters), and Megatron keeps such out of the buffers that are freed, so "
                "that they would stay on the GPU; train all parameters"
            )
        if shared:
            problems.append(
                f"the optimizer steps {shared[0]} itself ({len(shared)} parameters), without a master of its own; train in "
                "BF16 or FP16"
            )
        if problems:
            raise RefitError(
                f"this trainer can't leave its GPU: {'; '.join(problems)}. Nothing has moved",
                stage="settings",
            )


def _cuda_graphs(config: object) -> str:
    """The setting of Megatron's ``TransformerConfig`` that captures graphs; empty if none does."""
    # The other two are deprecated. A configuration turns them into the first one.
    if (impl := getattr(config, "cuda_graph_impl", None) or "none") != "none":
        return f"cuda_graph_impl={impl}"
    names = ("enable_cuda_graph", "external_cuda_graph")
    return next((f"{name}=True" for name in names if getattr(config, name, False)), "")


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
