"""The workers of one TensorRT-LLM engine, as they settle among themselves whether a refit may be served.

A caller who knows TensorRT-LLM's contract alone ends a refit with one call to all workers, ``update_weights(None)``. A
worker that served after it while another one refused would compute a step whose collectives the other never joins.
TensorRT-LLM's Ray workers make their engine's process group before the worker (``RayWorkerWrapper``), with gloo for host
memory; a group of their own keeps this out of the executor's way, and gives it its own time limit.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from ....integration.errors import PeerLost, RefitError


class Peers:
    """The other workers of this one's engine, if it has any.

    Args:
        timeout_s: how long to wait for them.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._group: dist.ProcessGroup | None = None

    def settle(self, finish: Callable[[], int]) -> int:
        """``finish`` on all workers: the version, once all of them have it ready. To be called by all workers.

        Each worker counts versions by itself, and one that failed before it heard of the last version counts behind the
        others. The largest count is the version, by which such a worker is healed.

        Raises:
            RefitError: what ``finish`` raised here, as it is; or that it did on another worker.
            PeerLost: a worker did not come.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return finish()
        met: Exception | None = None
        version, failure = -1, ""
        try:
            version = finish()
        # Of any kind: the loader raises what it likes, and the other workers have to hear of it.
        except Exception as error:
            met, failure = error, f"{type(error).__name__}: {error}"
        everyone = self._gathered((version, failure), met)
        if met is not None:
            raise met
        failed = [f"worker {rank}: {text}" for rank, (_, text) in enumerate(everyone) if text]
        if failed:
            raise RefitError(
                f"refit {version} is finished on this worker, and no worker serves it, since others failed: "
                f"{'; '.join(failed)}. The engine refuses to generate; refit again with all weights",
                stage="commit",
            )
        return max(found for found, _ in everyone)

    def _gathered(self, own: tuple[int, str], met: Exception | None) -> list[tuple[int, str]]:
        everyone: list[tuple[int, str]] = [own] * dist.get_world_size()
        try:
            if self._group is None:
                limit = timedelta(seconds=self._timeout_s)
                self._group = dist.new_group(backend="gloo", timeout=limit)
            dist.all_gather_object(everyone, own, group=self._group)
        except RuntimeError as error:
            here = f"finished refit {own[0]}" if met is None else f"failed ({own[1]})"
            raise PeerLost(
                f"this worker {here}, and not all workers of its engine said within {self._timeout_s:.0f} s how they "
                f"fared: {error}. Those that did refuse to generate; call update_weights(None) on all workers, and start "
                "the engine anew",
                stage="commit",
            ) from met or error
        return everyone
