"""rlrefit as an engine of vLLM's own weight transfer (``weight_transfer_config={"backend": "rlrefit"}``).

vLLM 0.21 hands an engine whole tensors and lets it call ``model.load_weights`` between the start and the end of a
layerwise reload of the whole model. A refit writes shards into live parameters, and knows itself which modules need
the reload. So the worker's four calls go straight to the engine, as they do in vLLM's later releases:

==================================== ==========================================================
``init_weight_transfer_engine``      meets the trainer: rendezvous, weights, plan
``start_weight_update``              makes sure that weights are awake
``update_weights``                   one refit: all weights, committed once all ranks have them
``finish_weight_update``             makes sure that there was one
==================================== ==========================================================

These calls reach workers only. What the scheduler holds of the old weights is dropped in the engine's core, where the
calls are refused while requests run (:func:`~.patches.watch_weight_updates`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.v1.worker.gpu_worker import Worker

from ....integration.config import RefitConfig
from ....integration.errors import RefitError
from .compat import CORE, WEIGHT_TRANSFER, WORKER, require_supported_vllm
from .extension import VllmRefitExtension
from .patches import hand_over_weight_transfer
from .worker_refit import WorkerRefit


@dataclass
class RefitInitInfo(WeightTransferInitInfo):
    """What ``init_weight_transfer_engine`` takes.

    Attributes:
        rendezvous: what trainer rank 0 opened.
        first_rank: refit rank of this deployment's first worker: the number of trainer ranks, where it is the first.
        refit_config: fields of ``RefitConfig``, the same as on the trainer.
        engine: ``nccl_xfer``, ``colocated_ipc`` on one host, or ``packed_broadcast`` for the conventional path.
    """

    rendezvous: dict[str, Any]
    first_rank: int
    refit_config: dict[str, Any] = field(default_factory=lambda: asdict(RefitConfig()))
    engine: str = "nccl_xfer"


@dataclass
class RefitUpdateInfo(WeightTransferUpdateInfo):
    """What ``update_weights`` takes.

    Attributes:
        version: of the weights that arrive, the same as on the trainer.
        alone: needs neither ``start_weight_update`` before it nor ``finish_weight_update`` after it. The latter may follow, where the
            engine's core could not drop what the old weights made.
    """

    version: int
    alone: bool = False


class RlrefitTransferEngine(WeightTransferEngine[RefitInitInfo, RefitUpdateInfo]):
    """One worker's engine. The constructor takes what any vLLM gives: in 0.21 (config, parallel_config), in later
    releases (config, vllm_config, device, model).

    Raises:
        RefitError: this vLLM lacks what refits rely on; all of it is listed.
    """

    init_info_cls = RefitInitInfo
    update_info_cls = RefitUpdateInfo

    def __init__(self, config: Any, *of_vllm: Any, **named_by_vllm: Any) -> None:
        require_supported_vllm((*WORKER, *CORE, *WEIGHT_TRANSFER))
        self.config = config
        self._refit: WorkerRefit | None = None
        self._updating = False
        self._committed = 0
        calls = {
            "init_weight_transfer_engine": RlrefitTransferEngine.open,
            "start_weight_update": RlrefitTransferEngine.start,
            "update_weights": RlrefitTransferEngine.update,
            "finish_weight_update": RlrefitTransferEngine.finish,
        }
        hand_over_weight_transfer(Worker, VllmRefitExtension, RlrefitTransferEngine, calls)

    def open(self, worker: Any, init_info: dict[str, Any]) -> dict[str, Any]:
        """Meet the trainer; returns the numbers of weights by route."""
        info: RefitInitInfo = self.parse_init_info(init_info)
        self._refit, self._updating = WorkerRefit.of(worker), False
        return self._refit.join(info.rendezvous, info.first_rank, info.refit_config, info.engine)

    def start(self, worker: Any, is_checkpoint_format: bool = True) -> dict[str, Any]:
        """Open an update. ``is_checkpoint_format`` has no meaning here: each module takes its own way.

        An open update may be opened again: another replica refused, or the engine's core could not drop what the
        old weights made and needs weights once more.
        """
        refit = self._opened()
        refit.guard.require_awake()
        self._updating, self._committed = True, 0
        return {}

    def update(self, worker: Any, update_info: dict[str, Any]) -> dict[str, Any]:
        """Receive all weights once and commit; returns this rank's record."""
        refit = self._opened()
        info: RefitUpdateInfo = self.parse_update_info(update_info)
        if info.alone:
            self.start(worker)
        if not self._updating:
            raise RefitError("start_weight_update must be called before update_weights", stage="handshake")
        try:
            record = refit.refit(info.version)
        except Exception:
            # Over, so that a new epoch can start; the guard keeps what was written in part from being served.
            self._updating = False
            raise
        self._committed += 1
        return record

    def finish(self, worker: Any) -> dict[str, Any]:
        """Close the update; returns the version that is served."""
        refit = self._opened()
        if not self._updating:
            raise RefitError(
                "start_weight_update must be called before finish_weight_update", stage="handshake"
            )
        self._updating = False
        if not self._committed:
            raise RefitError(
                "finish_weight_update was called without update_weights since start_weight_update; the engine serves "
                f"version {refit.refit_state.version} as before. Call update_weights between the two",
                stage="commit",
            )
        return {"version": refit.serving_version()}

    def _opened(self) -> WorkerRefit:
        if self._refit is None:
            raise RefitError(
                "no trainer has been met: call init_weight_transfer_engine with the rendezvous that trainer rank 0 "
                "opened first",
                stage="handshake",
            )
        return self._refit

    def shutdown(self) -> None:
        """End the epoch on this rank."""
        if self._refit is not None:
            self._refit.close_refit()

    def init_transfer_engine(self, init_info: RefitInitInfo) -> NoReturn:
        """Not used: :meth:`open` takes its place."""
        self._refuse("init_transfer_engine")

    def start_weight_update(self) -> NoReturn:
        """Not used: :meth:`start` takes its place."""
        self._refuse("start_weight_update")

    def receive_weights(self, update_info: RefitUpdateInfo, load_weights: Any = None) -> NoReturn:
        """Not used: :meth:`update` takes its place."""
        self._refuse("receive_weights")

    def finish_weight_update(self) -> NoReturn:
        """Not used: :meth:`finish` takes its place."""
        self._refuse("finish_weight_update")

    def _refuse(self, method: str) -> NoReturn:
        raise RefitError(
            f"{method} was called past the worker, whose four weight-transfer calls rlrefit takes over; reach it through "
            "LLM, AsyncLLM or vLLM's server",
            stage="start",
        )

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: Any) -> NoReturn:
        """Whole tensors are not the contract: the trainer's ranks inherit a refit mixin."""
        raise NotImplementedError(
            "rlrefit sends shards from the trainer's own parameters: inherit MegatronRefitMixin in the trainer's worker and "
            "call refit(version) on all its ranks"
        )
