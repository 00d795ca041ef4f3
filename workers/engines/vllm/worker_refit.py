"""One vLLM worker's part in refits, whichever way the driver reaches it."""

from __future__ import annotations

from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch.nn import Module
from vllm.distributed import get_pp_group

from ....integration.colocated.memory import MemoryWatch, empty_cache
from ....integration.errors import RefitError
from ..common.destination_mixin import DestinationRefitMixin
from ..common.drafted import STAYS, DraftedDestination
from .compat import ADAPTERS, KV_SCALES, SPECULATIVE, require_supported_runner, require_supported_vllm
from .destination import VllmDestination
from .drafted import drafted_destination
from .drafters import check_drafter, live_drafter, may_be_trained, may_follow
from .guard import guard_worker

if TYPE_CHECKING:
    from .kv_scales import VllmScaledCache
    from .lora import VllmAdapterDestination

_ATTRIBUTE = "_rlrefit_worker_refit"


class WorkerRefit(DestinationRefitMixin):
    """The refit of one worker: its live model as destination, its guard, its session.

    Args:
        worker: vLLM's worker, with its model loaded.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._scaled_cache: VllmScaledCache | None = None
        self.guard = guard_worker(worker, self.refit_state)

    @staticmethod
    def of(worker: Any) -> WorkerRefit:
        """The one of ``worker``, made on first use.

        Raises:
            RefitError: its model runner lacks what refits use.
        """
        found = getattr(worker, _ATTRIBUTE, None)
        if found is None:
            require_supported_runner(worker.model_runner)
            found = WorkerRefit(worker)
            setattr(worker, _ATTRIBUTE, found)
        return found

    @cached_property
    def destination(self) -> VllmDestination | DraftedDestination:
        """This worker's live model as the destination of refits; it keeps its trace over epochs."""
        if self._worker.vllm_config.speculative_config is not None:
            require_supported_vllm(SPECULATIVE)
            check_drafter(self._worker.vllm_config)
        return self.new_destination()

    def new_destination(self) -> VllmDestination | DraftedDestination:
        """Another destination of the same model, with a drafter that refits may reach.

        Raises:
            RefitError: the engine moves or wraps weights behind its loader's back, or its drafter can't be found.
        """
        runner, config = self._worker.model_runner, self._worker.vllm_config
        served = VllmDestination(
            runner.get_model(),
            config,
            runner.device,  # the CPU worker leaves its own device unset
            reset_caches=(runner.reset_encoder_cache,),
            stays_awake=lambda: self.stays_awake,
        )
        if not (may_follow(config) or may_be_trained(config)):
            return served
        if not get_pp_group().is_last_rank:
            return served  # vLLM drafts on the last stage alone

        def found() -> Module:
            drafter = live_drafter(runner)
            if drafter is None:
                raise RefitError(
                    f"the engine decodes speculatively ({config.speculative_config.method}), but {type(runner).__name__} has no drafter "
                    f"where rlrefit looks for it, so {STAYS}. Start vLLM without speculative_config, or install a newer rlrefit",
                    stage="trace",
                )
            return drafter

        return drafted_destination(served, found, runner.get_model(), config)

    def join(
        self, rendezvous: dict[str, Any], first_rank: int, refit_config: dict[str, Any], engine: str
    ) -> dict[str, Any]:
        """Meet the trainer, as the rank that this worker is in the refit world.

        Args:
            rendezvous: what trainer rank 0 opened.
            first_rank: refit rank of this deployment's first worker; its data-parallel replicas, and within each its
                pipeline and tensor ranks, follow each other.
            refit_config: fields of ``RefitConfig``.
            engine: name of the checkpoint engine.
        """
        parallel = self._worker.vllm_config.parallel_config
        rank = first_rank + parallel.data_parallel_index * parallel.world_size + self._worker.rank
        return self.join_refit(rendezvous, rank, refit_config, engine)

    def serving_version(self) -> int:
        """Version of the weights that may be served.

        Raises:
            EngineDirty: none may.
        """
        self.guard.require_whole()
        return self.refit_state.version

    def kv_scales(self) -> dict[str, list[float]]:
        """The scales of this worker's KV cache: ``[on the device, on the host]`` by name.

        Raises:
            RefitError: no refit has been prepared that brings any.
        """
        if self._scaled_cache is None:
            raise RefitError(
                "no trainer has been met with policy.refit.kv_scales=true, so this engine's scales are what its checkpoint "
                "or vLLM made them",
                stage="kv_scales",
            )
        return self._scaled_cache.live()

    @cached_property
    def _watch(self) -> MemoryWatch:
        return MemoryWatch(self._worker.model_runner.device)

    def memory(self, restart: bool) -> dict[str, Any]:
        """Fields of a ``ProcessMemory``; with ``restart`` the peaks count anew from here."""
        found = asdict(self._watch.read(f"engine rank {self._worker.rank}"))
        if restart:
            self._watch.restart()
        return found

    def empty_cache(self) -> dict[str, Any]:
        """Have this process's allocator give back what it caches."""
        empty_cache(self._worker.model_runner.device)
        return {}

    def _make_refit_destination(self) -> VllmDestination | DraftedDestination:
        self.guard.require_awake()
        self.destination.new_epoch()
        return self.destination

    def _make_adapter_destination(self) -> VllmAdapterDestination:
        require_supported_vllm(ADAPTERS)
        from .lora import VllmAdapterDestination

        self.guard.require_awake()
        return VllmAdapterDestination(self._worker, self.guard.require_defined)

    def _make_scaled_cache(self) -> VllmScaledCache:
        require_supported_vllm(KV_SCALES)
        from .kv_scales import VllmScaledCache

        worker = self._worker
        self._scaled_cache = VllmScaledCache(worker.model_runner.get_model(), worker.vllm_config)
        return self._scaled_cache
