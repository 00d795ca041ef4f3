"""What all engine workers share: the destination side of the refit, under the same names as the source side."""

from __future__ import annotations

from typing import Any

from ....integration.config import REFIT_KEYS, RefitConfig
from ....integration.control import Rendezvous
from ....integration.control.channel import refusals_told
from ....integration.errors import RefitError
from ....integration.session import RefitSession, ServingState
from ....integration.weights.endpoints import WeightDestination
from ...kv_scales.endpoints import KvScaleDestination, ScaledCache
from ...trainers.source_mixin import describe_manifest, require_joined
from .answers import REFIT_ERROR, failure
from .guard import WeightsGuard


class DestinationRefitMixin:
    """Engine side of a refit; a rank of the engine inherits it and says how its weights are placed.

    ``join_refit`` meets the trainer once; ``refit(version)`` then receives all weights, each step. NeMo-RL's names do the
    same: ``init_per_pp_refit_comm_group``, and ``nccl_xfer_refit`` or ``update_weights_from_collective``.
    """

    # Of engines whose weights may be asleep or undefined.
    guard: WeightsGuard | None = None
    # Whether the refits of this epoch, or of the last one, bring a LoRA adapter and no other weight.
    brings_adapter = False
    # Whether the driver of this epoch lets the engine keep its memory between refits, though the engine could give it back.
    stays_awake = False
    # The last version that a refit has brought all weights of; -1 before one.
    _refit_whole = -1
    _refit_session: RefitSession | None = None
    _refit_state: ServingState | None = None
    _refit_last: dict[str, Any] | None = None
    _refit_failed: dict[str, Any] | None = None

    def _make_refit_destination(self) -> WeightDestination:
        raise TypeError(
            f"{type(self).__name__} does not say how its weights are placed; inherit an engine's worker"
        )

    def _make_adapter_destination(self) -> WeightDestination:
        raise RefitError(
            f"policy.refit.lora is adapter, but {type(self).__name__} serves no LoRA adapters, so the trainer's would reach "
            "nothing. Nothing has moved; set it to merge on all ranks of both sides, or generate with vLLM and "
            "enable_lora=True",
            stage="settings",
        )

    def _make_scaled_cache(self) -> ScaledCache:
        raise RefitError(
            f"policy.refit.kv_scales is true, but the KV cache of {type(self).__name__} is not quantized, so there is nothing "
            "to scale. Nothing has moved; set it to false on all ranks of both sides, or generate with vLLM and "
            "kv_cache_dtype='fp8'",
            stage="settings",
        )

    @property
    def refit_state(self) -> ServingState:
        """Version and dirtiness of this rank's weights."""
        if self._refit_state is None:
            self._refit_state = ServingState()
        return self._refit_state

    def join_refit(
        self, rendezvous: dict[str, Any], rank: int, refit_config: dict[str, Any], engine: str = "nccl_xfer"
    ) -> dict[str, Any]:
        """Meet the trainer's ranks and agree on weights and plan.

        Args:
            rendezvous: what trainer rank 0 opened.
            rank: this rank in the refit world, trainers first.
            refit_config: fields of :class:`RefitConfig`; the same as on the trainer.
            engine: name of the checkpoint engine, the same as on the trainer.

        Raises:
            RefitMismatch, PlanError, RefitTimeout, PeerLost: nothing has been written then.
            RefitError: ``refit_config`` has an unknown field; an adapter alone is to come to weights that are not whole, or that an earlier refit has brought.
        """
        self.close_refit()
        meeting = Rendezvous.from_json(rendezvous)
        with refusals_told(meeting, rank):
            config = _config_of(refit_config)
            if config.lora == "adapter":
                self._require_base()
        self.brings_adapter = config.lora == "adapter"

        def make_destination() -> WeightDestination:
            destination = (
                self._make_adapter_destination()
                if config.lora == "adapter"
                else self._make_refit_destination()
            )
            return (
                KvScaleDestination(destination, self._make_scaled_cache())
                if config.kv_scales
                else destination
            )

        self._refit_session = RefitSession.open(
            meeting,
            rank,
            make_destination,
            config,
            engine=engine,
            state=self.refit_state,
        )
        return describe_manifest(self._refit_session)

    def init_per_pp_refit_comm_group(
        self, rendezvous: dict[str, Any], rank: int, refit_config: dict[str, Any], engine: str = "nccl_xfer"
    ) -> dict[str, Any]:
        """NeMo-RL's name of :meth:`join_refit`."""
        return self.join_refit(rendezvous, rank, refit_config, engine)

    def refit(self, version: int) -> dict[str, Any]:
        """Receive all weights once and commit ``version``; returns this rank's record.

        Raises:
            RefitError: ``join_refit`` was not called; the refit failed; or the weights are asleep, which ends the epoch on all ranks.
        """
        try:
            self._refit_last = self._refitted(version)
        except BaseException as error:  # an interrupt, too
            self._refit_failed = {"version": version, **failure(error)[REFIT_ERROR]}
            raise
        self._refit_failed = None
        return self._refit_last

    def refit_record(self) -> dict[str, Any]:
        """This rank's record of the last refit that committed, as plain data; empty before it.

        If a refit was asked for since and failed, ``failed_attempt`` beside it has the ``version`` that was asked for, and of the error
        ``type``, ``text``, ``stage``, ``rank``, ``parameter`` and ``blamed``; of an error that is not rlrefit's the first two alone.
        """
        failed = {} if self._refit_failed is None else {"failed_attempt": self._refit_failed}
        return {**(self._refit_last or {}), **failed}

    def _require_base(self) -> None:
        """For an adapter that is to come alone: the weights beside it are whole, and those of a checkpoint."""
        if self.refit_state.dirty and not self.brings_adapter:
            raise RefitError(
                f"policy.refit.lora is adapter, but refit {self.refit_state.dirty_since} may have written this engine's base weights in "
                "part, or they were discarded, and an adapter brings none of them. Nothing has moved; start the engine anew, or set "
                "lora to merge on all ranks of both sides",
                stage="settings",
            )
        if self._refit_whole >= 0:
            raise RefitError(
                f"policy.refit.lora is adapter, but refit {self._refit_whole} has brought all weights of this engine. If their trainer had an "
                "adapter it is merged into them, which they don't tell, and one that comes alone would be added once more. Nothing has "
                "moved; start the engine anew, with the base weights from a checkpoint (load_format is not dummy), or set lora to merge "
                "on all ranks of both sides",
                stage="settings",
            )

    def _before_refit(self) -> None:
        if self.guard is not None:
            self.guard.require_awake()
            if self.brings_adapter:
                self.guard.require_base()

    def _refitted(self, version: int) -> dict[str, Any]:
        session = require_joined(self._refit_session)
        record = session.refit(version, before=self._before_refit).to_json()
        if self.guard is not None:
            self.guard.refitted()
        if not self.brings_adapter:
            self._refit_whole = version
        return record

    def nccl_xfer_refit(self, version: int) -> dict[str, Any]:
        """NeMo-RL's name of :meth:`refit`."""
        return self.refit(version)

    def update_weights_from_collective(self, version: int) -> dict[str, Any]:
        """NeMo-RL's name of :meth:`refit` where ``join_refit`` was given ``packed_broadcast``."""
        return self.refit(version)

    def close_refit(self) -> None:
        """End the epoch on this rank."""
        session, self._refit_session = self._refit_session, None
        if session is not None:
            session.close()


def _config_of(fields: dict[str, Any]) -> RefitConfig:
    if unknown := fields.keys() - set(REFIT_KEYS):
        raise RefitError(
            f"refit_config has {', '.join(sorted(unknown))}, which RefitConfig has not; its keys are {', '.join(REFIT_KEYS)}. This rank "
            "has not joined",
            stage="settings",
        )
    return RefitConfig(**fields)
