"""One SGLang worker's part in refits: the commands that :mod:`.loader` serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ....integration.colocated.memory import MemoryWatch, empty_cache
from ....integration.errors import RefitError
from ....integration.quantize.formats import to_json
from ....integration.weights.manifest import TensorSpec
from ...drafter_names import of_drafter
from ...kv_scales.endpoints import is_scale
from ..common.answers import answer
from ..common.destination_mixin import DestinationRefitMixin
from ..common.guard import WeightsGuard, call_before
from ..common.seeding import seed_process
from .destination import SglangDestination
from .drafted import SglangDraftedDestination, destination_of
from .drafters import live_drafter
from .kv_scales import SglangScaledCache, forget_random_scales

_ATTRIBUTE = "_rlrefit_worker_refit"
COMMANDS = frozenset(
    {
        "describe",
        "join",
        "refit",
        "close",
        "serving_version",
        "refit_record",
        "kv_scales",
        "formats",
        "begin",
        "load",
        "synchronize",
        "finish",
        "commit",
        "discard",
        "seed",
        "memory",
        "empty_cache",
    }
)
# Of who uses the workers for more than refits.
_ADDED: dict[str, Callable[..., dict[str, Any]]] = {}


def also_serve(commands: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """Make commands known in this worker: each takes its :class:`WorkerRefit` and plain data, and returns plain data.

    To be called by another custom weight loader, which :meth:`~.callers.EngineCalls.extend` has all workers call.
    """
    _ADDED.update(commands)


def serve(updater: Any, method: str, arguments: Sequence[Any]) -> list[dict[str, Any]]:
    """Do a command on this worker, and return the answers of all workers; called on all of them at once.

    Args:
        updater: SGLang's ``WeightUpdater`` of this worker.
        method: one of :data:`COMMANDS`, or of :func:`also_serve`.
        arguments: of it, plain data, or what came in a bucket.
    """
    from sglang.srt.distributed import get_tp_group

    def call() -> dict[str, Any]:
        worker = WorkerRefit.of(updater.get_model_runner())
        if method in _ADDED:
            return _ADDED[method](worker, *arguments)
        if method not in COMMANDS:
            raise ValueError(f"{method!r} is no command of a worker")
        found: dict[str, Any] = getattr(worker, method)(*arguments)
        return found

    own = answer(call)
    group = get_tp_group()
    if group.world_size == 1:
        return [own]
    answers: list[Any] = [None] * group.world_size
    # SGLang answers with what its first worker says, so each worker says what all of them have to.
    dist.all_gather_object(answers, own, group=group.cpu_group)
    return answers


class WorkerRefit(DestinationRefitMixin):
    """The refit of one worker: its live model as destination, its guard, its session.

    Args:
        runner: SGLang's ``ModelRunner``, with its model loaded.
    """

    def __init__(self, runner: Any) -> None:
        from sglang.srt.distributed import get_tp_group

        self._runner = runner
        self._rank = int(get_tp_group().rank_in_group)
        self._scaled_cache: SglangScaledCache | None = None
        dummy = str(runner.server_args.load_format).endswith("dummy")
        if dummy:
            forget_random_scales(runner.model)
        self.guard = WeightsGuard(self.refit_state, dummy)
        # The driver keeps an engine paused that may not generate. A batch that comes all the same, because another caller
        # resumed it, ends the scheduler, as every error there does: tokens of undefined weights would be worse.
        call_before(runner, "forward", lambda *_, **__: self.guard.require_whole())

    @staticmethod
    def of(runner: Any) -> WorkerRefit:
        """The one of ``runner``, made on first use."""
        found = getattr(runner, _ATTRIBUTE, None)
        if found is None:
            found = WorkerRefit(runner)
            setattr(runner, _ATTRIBUTE, found)
        return found

    @property
    def model(self) -> nn.Module:
        """The live model."""
        model: nn.Module = self._runner.model
        return model

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        device = torch.device(self._runner.device)
        return device if device.type == "cpu" else torch.device(device.type, self._runner.gpu_id)

    @cached_property
    def destination(self) -> SglangDestination | SglangDraftedDestination:
        """This worker's live model as the destination of refits; it keeps its trace over epochs."""
        return destination_of(self._runner, self.device)

    def describe(self) -> dict[str, Any]:
        """``{"device": …}``: the UUID of this worker's GPU as a trainer names it, or ``cpu``."""
        if self.device.type == "cpu":
            return {"device": "cpu"}
        return {"device": f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"}

    def join(
        self, rendezvous: dict[str, Any], first_rank: int, refit_config: dict[str, Any], engine: str
    ) -> dict[str, Any]:
        """Meet the trainer; ``first_rank`` is the refit rank of the deployment's first worker."""
        return self.join_refit(rendezvous, first_rank + self._rank, refit_config, engine)

    def close(self) -> dict[str, Any]:
        """End the epoch on this rank."""
        self.close_refit()
        return {}

    def serving_version(self) -> dict[str, Any]:
        """``{"version": …}`` of the weights that may be served; an error if they are not whole."""
        self.guard.require_whole()
        return {"version": self.refit_state.version}

    def kv_scales(self) -> dict[str, Any]:
        """``{"scales": …}`` of this worker's KV cache: ``[on the device, on the host]`` by name.

        Raises:
            RefitError: no refit has been prepared that brings any.
        """
        if self._scaled_cache is None:
            raise RefitError(
                "no trainer has been met with policy.refit.kv_scales=true, so this engine's scales are what its checkpoint or "
                "SGLang made them",
                stage="kv_scales",
            )
        return {"scales": self._scaled_cache.live()}

    @cached_property
    def bucketed(self) -> SglangDestination | SglangDraftedDestination:
        """The same for buckets: what the trainer is asked for in them is no promise to the epoch that may be open."""
        return destination_of(self._runner, self.device)

    def formats(self, specs: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """The weights of a trainer's ``specs`` that this worker holds quantized: ``{"weights": {name: which}, "formats": […]}``."""
        found = self.bucketed.quantized(_read(specs))
        kinds = list(dict.fromkeys(found.values()))
        weights = {name: kinds.index(format) for name, format in found.items()}
        return {"weights": weights, "formats": [to_json(kind) for kind in kinds]}

    def begin(self, version: int, specs: Sequence[Sequence[Any]], as_asked: bool = False) -> dict[str, Any]:
        """Before buckets: see that they fill the model, and refuse to generate from here on.

        Args:
            version: that comes.
            specs: of all that comes.
            as_asked: weights come in the formats that :meth:`formats` told.

        Returns:
            ``{"placing": …}``: whether SGLang's own loader can't write all of it, so that :meth:`load` has to.
        """
        coming = _read(specs)
        scales = [spec.name for spec in coming if is_scale(spec)]
        if scales:
            raise RefitError(
                f"{', '.join(scales[:3])}{', …' * (len(scales) > 3)} would reach no layer: scales of the KV cache don't travel in "
                "buckets. Nothing was written; send from a source without them, or shard to shard (join_refit, with "
                "policy.refit.kv_scales=true)",
                stage="handshake",
                parameter=scales[0],
            )
        drafted = [spec.name for spec in coming if of_drafter(spec.name)]
        if drafted and not self.bucketed.has_trainable_drafter:
            raise RefitError(
                f"{', '.join(drafted[:3])}{', …' * (len(drafted) > 3)} would reach no model: this engine has no drafter that takes the weights of "
                "one that is trained beside the policy. Nothing was written; send from a source without it (refit_drafter of the mixin), or "
                "start SGLang with speculative_algorithm EAGLE3 or EAGLE and a head at speculative_draft_model_path",
                stage="handshake",
                parameter=drafted[0],
            )
        if not as_asked:
            self.bucketed.new_epoch()
        alone = self.bucketed.loads_alone(coming)
        self.refit_state.mark_dirty(version)
        return {"placing": not alone}

    def load(self, bucket: Mapping[str, Any]) -> dict[str, Any]:
        """A flattened bucket, in the place of SGLang's own loading of it."""
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        self.bucketed.load_weights(FlattenedTensorBucket(**bucket).reconstruct_tensors())
        return {}

    def synchronize(self) -> dict[str, Any]:
        """Wait for the copies that SGLang's loader has queued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return {}

    def finish(self, version: int) -> dict[str, Any]:
        """After the last bucket."""
        self.bucketed.finish(version)
        return {}

    def commit(self, version: int) -> dict[str, Any]:
        """Serve ``version``, once all workers have finished."""
        self.refit_state.commit(version)
        self.guard.refitted()
        return {}

    def discard(self, why: str) -> dict[str, Any]:
        """The weights' memory is about to go, and nothing keeps them."""
        self.guard.discarded(why)
        return {}

    def seed(self, seed: int) -> dict[str, Any]:
        """Draw from here on as a worker that was started with ``seed``."""
        return seed_process(seed)

    @cached_property
    def _watch(self) -> MemoryWatch:
        return MemoryWatch(self.device)

    def memory(self, restart: bool) -> dict[str, Any]:
        """Fields of a ``ProcessMemory``; with ``restart`` the peaks count anew from here."""
        found = asdict(self._watch.read(f"engine rank {self._rank}"))
        if restart:
            self._watch.restart()
        return found

    def empty_cache(self) -> dict[str, Any]:
        """Have this process's allocator give back what it caches."""
        empty_cache(self.device)
        return {}

    def _make_refit_destination(self) -> SglangDestination | SglangDraftedDestination:
        self.destination.new_epoch()
        return self.destination

    def _make_scaled_cache(self) -> SglangScaledCache:
        if live_drafter(self._runner) is not None:
            raise RefitError(
                "policy.refit.kv_scales is true, and no scale reaches the attention of the drafter (speculative_algorithm), whose cache "
                "has the same format. Nothing has moved; set it to false on all ranks of both sides, or start SGLang without a "
                "drafter",
                stage="settings",
            )
        self._scaled_cache = SglangScaledCache(self._runner, self.device)
        return self._scaled_cache


def _read(specs: Sequence[Sequence[Any]]) -> list[TensorSpec]:
    return [TensorSpec.from_json(list(spec)) for spec in specs]
