"""What all trainer mixins share: the methods that a training loop calls, once to join and once for each refit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import is_
from typing import Any

import torch
import torch.distributed as dist

from ...integration.config import RefitConfig
from ...integration.control import Rendezvous, RendezvousServer, open_rendezvous
from ...integration.control.channel import refusals_told
from ...integration.errors import RefitError, RefitMismatch, end_all
from ...integration.quantize.formats import Format
from ...integration.session import RefitSession
from ...integration.weights.endpoints import WeightSource, sent_formats, trained_formats
from ..kv_scales.calibration import AmaxRecorder, Record
from ..kv_scales.endpoints import KvScaleSource
from .drafted import DraftedSource
from .qat.config import require_as_trained


class SourceRefitMixin:
    """Trainer side of a refit.

    Trainer rank 0 opens the meeting point with ``open_refit_rendezvous(…)`` and hands the result to all ranks of both
    sides. Then every trainer rank calls

    1. once: ``join_refit(rendezvous, rank)``, at the same time as the engine's ranks
    2. each step: ``refit(version)``; with ``refit_config.delta_base`` ``optimizer`` the step is within ``recording_changes()``

    and ``close_refit()`` at the end. With ``refit_config.kv_scales``, ``calibrate_kv_scales(forward)`` before a refit gives it
    the scales of the engine's FP8 KV cache.

    With ``refit_drafter`` each refit brings the weights of a drafter that is trained beside the policy (an EAGLE head), too: a
    module by whose names the engine's drafter loads them, sharded by ``fully_shard`` or whole on each rank, or a
    :class:`WeightSource` of one. All trainer ranks have it.

    NeMo-RL's names do the same: ``init_per_pp_refit_comm_group`` joins; ``nccl_xfer_refit`` and
    ``broadcast_weights_for_collective`` refit. ``prepare_nccl_xfer_refit_info`` and ``prepare_refit_info`` tell ahead what
    ``join_refit`` would find.
    """

    refit_config: RefitConfig
    refit_drafter: torch.nn.Module | WeightSource | None = None
    _refit_source: WeightSource | None = None
    _refit_source_of: tuple[object, ...] = ()
    _refit_session_of: tuple[object, ...] | None = None
    _refit_session: RefitSession | None = None
    _refit_server: RendezvousServer | None = None

    def _make_refit_source(self) -> WeightSource:
        raise TypeError(
            f"{type(self).__name__} inherits SourceRefitMixin itself; inherit the mixin of your trainer, "
            "e.g. MegatronRefitMixin"
        )

    def _drafter_dtype(self) -> torch.dtype | None:
        """That a drafter's floating-point weights are exported in; None for their own."""
        return None

    def _watched_attention(self, record: Record) -> AbstractContextManager[None]:
        raise TypeError(
            f"{type(self).__name__} does not say how its attention is watched; inherit the mixin of your trainer, e.g. "
            "MegatronRefitMixin"
        )

    def prepare_refit_info(self) -> dict[str, list[Any]]:
        """Learn names, shapes and dtypes of all weights. A collective of all trainer ranks.

        Returns:
            Hugging Face name to ``[shape, dtype name]``, in the order of the export.
        """
        specs = (spec.to_json() for spec in self._prepared_source().specs())
        return {name: [shape, dtype] for name, shape, dtype in specs}

    def prepare_nccl_xfer_refit_info(self) -> dict[str, Any]:
        """Learn names and shapes, and derive this rank's fragments. A collective of all trainer ranks.

        Returns:
            ``{"weights": number of weights, "fragments": number of local fragments,
            "refused": {name: reason}}``. Trainer and engine choose the route of each weight when they meet.
        """
        source = self._prepared_source()
        fragments, refused = source.fragments()
        return {"weights": len(source.specs()), "fragments": len(fragments), "refused": refused}

    def open_refit_rendezvous(
        self, host: str, train_ranks: int, gen_ranks: int, epoch: int = 0
    ) -> dict[str, Any]:
        """Start the meeting point of an epoch on this rank; trainer rank 0 only.

        Args:
            host: address of this host as the other ranks reach it.
            train_ranks: number of trainer ranks.
            gen_ranks: number of generation ranks over all replicas.
            epoch: number of the membership.

        Returns:
            What the other ranks need, as plain data. It holds the secret that admits them: hand it over by a way
            that others can't read, and keep it out of logs.

        Raises:
            RefitError: the configured port is still taken after some seconds, or ``host`` is not this host's address.
        """
        self._close_epoch()
        self._refit_server = open_rendezvous(
            host, train_ranks, gen_ranks, epoch=epoch, port=self.refit_config.port
        )
        return self._refit_server.rendezvous.to_json()

    def join_refit(self, rendezvous: dict[str, Any], rank: int, engine: str = "nccl_xfer") -> dict[str, Any]:
        """Meet the other ranks, agree on weights and plan, and make communicators. A collective of all ranks of both sides.

        One group serves all pipeline stages: the plan names a peer for every segment, so a stage
        talks to the engine ranks that want its layers and to nobody else.

        Args:
            rendezvous: what ``open_refit_rendezvous`` returned on trainer rank 0.
            rank: this rank in the refit world, trainers first.
            engine: ``nccl_xfer``; ``colocated_ipc``, the same through memory of the one host that all ranks are on; or
                ``packed_broadcast`` for the conventional path.

        Returns:
            ``{"bulk": …, "misc": …, "unused": …}`` numbers of weights, and ``"misc_reasons"``.

        Raises:
            RefitMismatch, PlanError, RefitTimeout, PeerLost: nothing has been written then. The first also where the model is trained
                quantized (:mod:`.qat`), and engines would get other layers so, in other groups, or scales by another rule.
        """
        self._close_session()
        self._refit_session = RefitSession.open(
            Rendezvous.from_json(rendezvous),
            rank,
            self._prepared_source,
            self.refit_config,
            engine=engine,
        )
        self._refit_session_of = self._refit_source_of
        try:
            self._require_as_trained(self._refit_session, rank)
        except RefitMismatch:
            self._close_session()
            raise
        return describe_manifest(self._refit_session)

    def _trained_formats(self) -> Mapping[str, Format]:
        """Weights that training computes with in a format, each with the format."""
        return trained_formats(self._refit_source)

    def _require_as_trained(self, session: RefitSession, rank: int) -> None:
        if not (trained := self._trained_formats()):
            return
        held = {**session.engine.planned.formats, **sent_formats(self._refit_source)}
        if any(format.has_global_scale for format in trained.values()):
            # Refits make no such codes. Other weights they may quantize, as those of a model that is not trained quantized.
            held = {name: format for name, format in held.items() if name in trained}
        require_as_trained(held, trained, rank)

    def init_per_pp_refit_comm_group(
        self, rendezvous: dict[str, Any], rank: int, engine: str = "nccl_xfer"
    ) -> dict[str, Any]:
        """NeMo-RL's name of :meth:`join_refit`."""
        return self.join_refit(rendezvous, rank, engine)

    def calibrate_kv_scales(
        self,
        forward: Callable[[], object],
        *,
        margin: float = 1.05,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, float]:
        """Run ``forward`` and return scales for what goes through the attention of each layer meanwhile.

        A scale is the largest magnitude, over all ranks, times ``margin`` / 448, the largest value of float8_e4m3fn: the
        rule of NeMo-RL's calibration, whose margin is 1.05 too. vLLM clips what exceeds it later; SGLang with torch 2.11 stores
        NaN, so give 2 for it. All that is computed counts, the padding of a batch too. A collective of all trainer ranks, and one of ``group``.

        Args:
            forward: forward passes over calibration batches, with or without gradients: those that compute
                log-probabilities, say. On every rank with its own part.
            margin: at least 1.
            group: all trainer ranks; None for the default group.

        Returns:
            ``model.layers.N.self_attn.k_scale``, ``v_scale`` and ``q_scale`` of each layer that ran, the same on all
            ranks, for ``kv_scales`` of :meth:`refit`.

        Raises:
            RefitError: ``refit_config.kv_scales`` is false; the attention can't be watched; activations are not finite.
        """
        source = self._scaled_source()
        recorder = AmaxRecorder(source.layers, source.device)
        with self._watched_attention(recorder.record):
            forward()
        return recorder.scales(margin, group)

    def refit(self, version: int, kv_scales: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Send all weights once, and commit ``version`` with the engine. A collective of all ranks that joined.

        Args:
            version: number of these weights.
            kv_scales: scales of the engine's FP8 KV cache, by name; the same on all trainer ranks, of which rank 0's
                travel. None leaves the previous ones.

        Returns:
            This rank's :class:`RefitRecord` as plain data.

        Raises:
            RefitError: and its kinds: ``join_refit`` was not called; or the refit failed, and the engine is dirty if it was being written. Unknown or missing scales, or
                scales without ``refit_config.kv_scales``, are found before anything is.
        """
        server = self._refit_server
        # Of an epoch that this rank has opened and not joined the others are told.
        with nullcontext() if server is None else refusals_told(server.rendezvous, 0):
            session = require_joined(self._refit_session)
        return session.refit(version, before=partial(self._before, session, kv_scales)).to_json()

    @contextmanager
    def recording_changes(self) -> Iterator[None]:
        """A context for the optimizer's step, and whatever else writes the weights between two refits::

            with self.recording_changes():
                optimizer.step()

        With ``refit_config.delta_base`` ``optimizer`` a sparse refit sends what changed within it; all trainer ranks enter it
        together. A copy of all that this rank sends is on its device meanwhile. One within another is a part of it. With another
        ``delta_base``, with ``delta`` off, and before ``join_refit``, it does nothing.
        """
        if self._refit_session is None:
            yield
            return
        with self._refit_session.recording_changes():
            yield

    def nccl_xfer_refit(self, version: int, kv_scales: Mapping[str, float] | None = None) -> dict[str, Any]:
        """NeMo-RL's name of :meth:`refit`."""
        return self.refit(version, kv_scales)

    def broadcast_weights_for_collective(
        self, version: int, kv_scales: Mapping[str, float] | None = None
    ) -> dict[str, Any]:
        """NeMo-RL's name of :meth:`refit` where ``join_refit`` was given ``packed_broadcast``."""
        return self.refit(version, kv_scales)

    def refit_healthy(self) -> bool:
        """Whether an epoch is open and can go on: nothing has failed, and no other rank has gone."""
        return self._refit_session is not None and self._refit_session.healthy()

    def close_refit(self) -> None:
        """End the epoch on this rank, free its communicators and buffers, and let go of the model.

        To be called on every trainer rank: what was learned of the model is learned anew for the next epoch, by all.
        """
        self._close_epoch()
        self._refit_source, self._refit_source_of = None, ()

    def _close_epoch(self) -> None:
        server, self._refit_server = self._refit_server, None
        end_all([self._close_session, *([] if server is None else [server.close])])

    def _close_session(self) -> None:
        session, self._refit_session, self._refit_session_of = self._refit_session, None, None
        if session is not None:
            session.close()

    def _prepared_source(self) -> WeightSource:
        if self._refit_source is None or not self._is_still(self._refit_source_of):
            self._refit_source = None
            parts = self._refit_model_parts()
            source = self._make_refit_source()
            if not self._is_still(parts):
                raise RefitError(
                    f"self.model, self.bridge or self.refit_drafter of {type(self).__name__} is another object at each access, so that nobody can "
                    "tell whether the model was built anew. Nothing has moved; keep one, and hand out that",
                    stage="settings",
                )
            # Scales are of the policy's attention alone.
            policy = KvScaleSource(source) if self.refit_config.kv_scales else source
            joined = policy if self.refit_drafter is None else DraftedSource(policy, self._drafter_source())
            self._refit_source_of = parts
            self._refit_source = joined
        return self._refit_source

    def _drafter_source(self) -> WeightSource:
        if self.refit_config.lora == "adapter":
            raise RefitError(
                f"self.refit_drafter of {type(self).__name__} is to be sent, but policy.refit.lora is adapter: refits bring the adapter "
                "alone then, and the drafter would keep its weights. Nothing has moved; set lora to merge on all ranks of both sides, or "
                "refit_drafter to None",
                stage="settings",
            )
        if not isinstance(self.refit_drafter, torch.nn.Module):
            return self.refit_drafter
        from .fsdp.source import FSDPSource  # this module is an engine's too, which has no trainer's packages

        return FSDPSource(self.refit_drafter, self._drafter_dtype())

    def _is_still(self, parts: tuple[object, ...]) -> bool:
        """Whether the source would be made of these objects; of a model that was built anew (resumed, grown) it isn't."""
        now = self._refit_model_parts()
        return len(parts) == len(now) and all(map(is_, parts, now))

    def _refit_model_parts(self) -> tuple[object, ...]:
        model = getattr(self, "model", None)
        chunks = model if isinstance(model, list | tuple) else [model]
        return (*chunks, getattr(self, "bridge", None), self.refit_drafter)

    def _scaled_source(self) -> KvScaleSource:
        source = self._prepared_source()
        if isinstance(source, DraftedSource):
            source = source.policy
        if not isinstance(source, KvScaleSource):
            raise RefitError(
                "scales of the KV cache were asked for or given, but they do not travel: this trainer was prepared with "
                "policy.refit.kv_scales=false. Nothing was written; set it to true on all ranks of both sides",
                stage="kv_scales",
            )
        return source

    def _before(self, session: RefitSession, kv_scales: Mapping[str, float] | None) -> None:
        if self._refit_session_of is not None and not self._is_still(self._refit_session_of):
            raise RefitError(
                f"self.model, self.bridge, self.refit_drafter or self.refit_dtype of {type(self).__name__} is not the one that the ranks met with, and "
                "the old weights would be sent. Nothing was written. Open a new epoch (open_refit_rendezvous, "
                "join_refit) after it was changed or the model was built anew",
                stage="export",
                rank=session.world.rank,
            )
        if kv_scales is not None:
            self._give(session, kv_scales)

    def _give(self, session: RefitSession, kv_scales: Mapping[str, float]) -> None:
        wanted = {spec.name for spec in session.manifest.specs("misc")}
        self._scaled_source().give(kv_scales, wanted)


def require_joined(session: RefitSession | None) -> RefitSession:
    """The session.

    Raises:
        RefitError: there is none; says which call is missing.
    """
    if session is None:
        raise RefitError(
            "a refit was asked for, but this rank has met nobody; call join_refit on all ranks of both sides first. Nothing was "
            "written",
            stage="handshake",
        )
    return session


def describe_manifest(session: RefitSession) -> dict[str, Any]:
    """Routes of a session as plain data."""
    manifest = session.manifest
    return {
        **{route: len(manifest.specs(route)) for route in ("bulk", "misc", "unused")},
        "misc_reasons": {e.spec.name: e.reason for e in manifest if e.route == "misc"},
    }
