"""The worker extension for verl's vLLM: verl's own, whose hand-over of weights may be an order to refit.

actor_rollout_ref.rollout.engine_kwargs.vllm:
  worker_extension_cls: rlrefit.workers.frameworks.verl.extension.VerlRefitExtension
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from ....integration.config import RefitConfig
from ....integration.errors import RefitMismatch
from ....integration.records.files import write_record
from ....integration.records.record import RefitRecord
from ...engines.vllm.extension import VllmRefitExtension
from .contract import require_supported_rollout
from .orders import ORDER, Order
from .served import refuse, served_violations

require_supported_rollout(vLLMColocateWorkerExtension, bucketed_weight_transfer)

logger = logging.getLogger(__name__)


class VerlRefitExtension(VllmRefitExtension, vLLMColocateWorkerExtension):
    """Mixed into vLLM's ``Worker`` in place of verl's extension, all of whose calls it keeps."""

    def update_weights_from_ipc(
        self,
        peft_config: dict[str, Any] | None = None,
        base_sync_done: bool | None = None,
        use_shm: bool = False,
    ) -> None:
        """Take what the process beside this one hands over.

        verl gives ``base_sync_done`` where trainer and engine share GPUs, and then hands over weights, as ever; its
        checkpoint engines give none, and the one for shards hands over an order.

        Raises:
            RefitMismatch: no order came, but weights.
        """
        if base_sync_done is not None:
            self._load_handed_over(peft_config, base_sync_done, use_shm)
            return
        orders: list[Order] = []
        strange: list[str] = []

        def take(handed: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
            for name, tensor in handed:
                if name == ORDER:
                    orders.append(Order.from_tensor(tensor))
                else:
                    strange.append(name)

        receiver = bucketed_weight_transfer.BucketedWeightReceiver(
            zmq_handle=self._get_zmq_handle(), device=self.model_runner.device, use_shm=use_shm
        )
        receiver.receive_weights(on_bucket_received=take)
        if strange:
            raise RefitMismatch(
                f"{len(strange)} weights were handed over ({', '.join(strange[:3])} …) where an order to refit was due. "
                "None of them was loaded. With a checkpoint engine of full tensors, leave out "
                "rollout.engine_kwargs.vllm.worker_extension_cls",
                stage="handshake",
            )
        # Only now: the process beside this one waits for verl's answer without a limit, and has it by now.
        for order in orders:
            self._refit_as_ordered(order)

    def _load_handed_over(
        self, peft_config: dict[str, Any] | None, base_sync_done: bool, use_shm: bool
    ) -> None:
        """verl's own loading; of a whole model it is a refit to the guard, which else lets nothing generate."""
        if peft_config and base_sync_done:  # the adapter alone
            super().update_weights_from_ipc(
                peft_config=peft_config, base_sync_done=base_sync_done, use_shm=use_shm
            )
            return
        state = self._refit.refit_state
        version = state.version + 1  # verl tells its server alone which one it is
        state.mark_dirty(version)
        super().update_weights_from_ipc(
            peft_config=peft_config, base_sync_done=base_sync_done, use_shm=use_shm
        )
        state.commit(version)
        self._refit.guard.refitted()

    def refit_as_ordered(self, order: dict[str, Any]) -> None:
        """Refit; ``order`` has the refit rank of the engine's first worker, from which the others count on."""
        self._refit_as_ordered(Order(**{**order, "rank": order["rank"] + self.rank}))

    def _refit_as_ordered(self, order: Order) -> None:
        """Refit; a failure is logged and told to all other ranks, of which the actors raise it.

        Not raised here: the process beside this one waits for an answer, and vLLM's executor would read the first
        worker's error alone and meet the others' in its next call.
        """
        try:
            if order.meeting is not None:
                wrong = served_violations(self.vllm_config, RefitConfig(**order.config))
                if wrong:
                    refuse(order, wrong)
                self._refit.stays_awake = order.stays_awake
                self._refit.join_refit(order.meeting, order.rank, order.config)
            record = RefitRecord(**self._refit.refit(order.version))
        except Exception:
            state = self._refit.refit_state
            logger.exception(
                "the refit failed on this worker, which %s",
                "holds no whole weights until the next one"
                if state.dirty
                else f"holds version {state.version} as before",
            )
            return
        if order.records_dir is not None:
            write_record(order.records_dir, record, order.train_ranks)
