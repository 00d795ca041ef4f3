"""The largest magnitudes of queries, keys and values of each attention layer, kept on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ...integration.errors import RefitError
from .names import AttentionLayer, scale_names

# Of a layer, its queries, its keys and its values.
Record = Callable[[AttentionLayer, torch.Tensor, torch.Tensor, torch.Tensor], None]

# The largest finite value of float8_e4m3fn.
E4M3_MAX = 448.0


class AmaxRecorder:
    """Takes what goes into the attention of each layer, and makes scales of it.

    Nothing waits for the device until :meth:`scales`.

    Args:
        layers: all attention layers of the model, on all ranks alike.
        device: of the model.
    """

    def __init__(self, layers: Sequence[AttentionLayer], device: torch.device) -> None:
        self._layers = tuple(layers)
        self._rows = {layer: row for row, layer in enumerate(layers)}
        # Of k, v and q, and whether the layer ran.
        self._amax = torch.zeros(len(self._layers), 4, dtype=torch.float32, device=device)

    @torch.no_grad()
    def record(
        self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Take a layer's inputs of one forward pass, of any shapes, as they go into the KV cache: after RoPE."""
        if not key.numel():
            return
        found = [_amax(tensor) for tensor in (key, value, query)]
        row = self._amax[self._rows[layer]]
        torch.maximum(row, torch.stack([*found, torch.ones_like(found[0])]), out=row)

    def scales(self, margin: float, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """What was recorded on all ranks, as scales: amax * margin / 448. One collective of ``group``.

        The maximum is taken over all ranks, so that it does not matter which heads, tokens and layers each of them had.

        Args:
            margin: room for values beyond the calibration's.
            group: all ranks of the trainer; None for the default group.

        Returns:
            Name to scale of the layers that ran, equal on all ranks; float32 values.

        Raises:
            RefitError: ``margin`` is below 1, or activations were not finite, with the names of the layers. Raised on
                all ranks.
        """
        if not margin >= 1:
            raise RefitError(
                f"margin: {margin} would have the engine clip the largest keys and values of the calibration itself; give at "
                "least 1",
                stage="calibrate",
            )
        # A reduction may drop NaN; infinity it keeps.
        amax = self._amax.nan_to_num(nan=float("inf"), posinf=float("inf"))
        if dist.is_initialized():
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
        ran = amax[:, 3] > 0
        # A layer of zeros alone fits with any scale.
        scales = torch.where(amax[:, :3] > 0, amax[:, :3] * (margin / E4M3_MAX), 1.0)
        rows = torch.cat([scales, ran[:, None]], dim=1).tolist()
        found = {layer: row[:3] for layer, row in zip(self._layers, rows, strict=True) if row[3]}
        broken = [layer for layer, row in found.items() if float("inf") in row]
        if broken:
            raise RefitError(
                f"calibration: keys, values or queries of {', '.join(broken)} were infinite or not a number, so there is no "
                "scale for them. Nothing was sent; find what makes the policy diverge",
                stage="calibrate",
                parameter=broken[0],
            )
        return {
            name: value
            for layer, row in found.items()
            for name, value in zip(scale_names(layer), row, strict=True)
        }


def _amax(tensor: torch.Tensor) -> torch.Tensor:
    # Not abs().max(), which would take the tensor's memory once more.
    low, high = torch.aminmax(tensor.detach())
    return torch.maximum(-low, high).float()
