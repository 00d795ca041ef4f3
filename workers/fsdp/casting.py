"""Shards in the dtype of the export, beside the shards that the optimizer keeps in another."""

from __future__ import annotations

from collections.abc import Callable

import torch


class CastShards:
    """Copies of local shards in other dtypes, made anew for every refit.

    They take a shard's elements in the new dtype for as long as the source lives: with FP32 weights, gradients and
    Adam moments and a BF16 export, an eighth more. The shards themselves are not kept, so that offloading frees them.
    """

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}

    def of(self, name: str, local: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The copy of ``local``, whose values it has after the next :meth:`refresh`; ``local`` itself if it needs none."""
        if local.dtype == dtype:
            return local
        copy = self._copies.get(name)
        if copy is None or (copy.shape, copy.dtype, copy.device) != (local.shape, dtype, local.device):
            pinned = local.numel() > 0 and local.is_pinned()
            copy = torch.empty(local.shape, dtype=dtype, device=local.device, pin_memory=pinned)
            self._copies[name] = copy
        return copy

    def refresh(self, local: Callable[[str], torch.Tensor]) -> None:
        """Cast what the shards, told by their names, hold now."""
        if self._copies:
            with torch.no_grad():
                torch._foreach_copy_(list(self._copies.values()), list(map(local, self._copies)))
