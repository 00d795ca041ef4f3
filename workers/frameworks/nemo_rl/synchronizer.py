"""NeMo-RL's ``WeightSynchronizer``, shard to shard.

It stands in ``policy_generation.weight_synchronizer``, which NeMo-RL's trainers ask for each refit. Nothing of NeMo-RL is
imported here; :mod:`.install` puts it in place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ....integration.errors import RefitError
from ....integration.records.files import append_records, require_records_dir
from ....integration.records.record import RefitRecord, summarize
from . import policy_worker
from .calls import Answer, Workers, within
from .engine_calls import CLOSE, JOIN, REFIT
from .settings import PREFIX, NemoRlRefit

logger = logging.getLogger(__name__)

TIMER = "prepare_for_generation/transfer_and_update_weights"
# To leave an epoch takes a worker no time, unless it is stuck.
_LONGEST_CLOSE_S = 30.0


class ShardSynchronizer:
    """Refits all engines of a run; made in NeMo-RL's driver process.

    Args:
        policy: NeMo-RL's ``Policy``, its workers Megatron's or DTensor's.
        generation: NeMo-RL's ``VllmGeneration``, its workers :class:`.vllm_worker.RefitWorker`.
        settings: of the run.
    """

    def __init__(self, policy: Any, generation: Any, settings: NemoRlRefit) -> None:
        self._policy, self._generation, self._settings = policy, generation, settings
        self._limit_s = settings.config.call_limit_s
        self._close_s = min(settings.config.timeout_s, _LONGEST_CLOSE_S)
        self._workers = Workers(policy, generation, self._limit_s)
        self._stale = True
        self._open = False
        self._epoch = 0
        self.version = 0

    @property
    def is_stale(self) -> bool:
        """Whether the engines have yet to get the policy's weights, at first or after a failed refit."""
        return self._stale

    def mark_stale(self) -> None:
        """The policy has changed: NeMo-RL 0.7 says so here, later ones keep that to themselves."""
        self._stale = True

    def init_communicator(self) -> None:
        """Learn the policy's weights, and meet the engines' workers unless they share the policy's GPUs.

        Those sleep at this moment, and their parameters have no memory; they are met in the first refit.

        Raises:
            RefitError: and its kinds. Nothing has been written.
        """
        require_records_dir(self._settings.records_dir, f"{PREFIX}.records_dir")
        prepared = self._workers.policy(policy_worker.prepare, config=asdict(self._settings.config))
        self._workers.answers(prepared, "handshake")
        if not self._settings.colocated:
            self._ensure_open()

    def sync_weights(
        self, *, timer: Any = None, kv_scales: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Refit all engines once; on shared GPUs with NeMo-RL's own turns around it.

        Args:
            timer: NeMo-RL's.
            kv_scales: scales of an FP8 KV cache, under the names that NeMo-RL's calibration gives them.

        Returns:
            Metrics for the trainer's log, where NeMo-RL puts ``refit/`` before them.

        Raises:
            RefitError: and its kinds. The engines refuse to generate if they were being written; the next call meets
                all workers anew.
        """
        self._stale = True
        self._workers.missing.clear()
        with self._turn(), timer.time(TIMER) if timer is not None else nullcontext():
            try:
                self._ensure_open()
                records = self._refit(self.version + 1, _own_names(kv_scales))
            except Exception:
                self._close()
                raise
        self.version += 1
        self._stale = False
        self._write(records)
        return _metrics(records)

    def shutdown(self) -> None:
        """End the epoch on all workers that are still there."""
        if self._open:
            self._close()

    def __reduce__(self) -> tuple[type[SynchronizerElsewhere], tuple[bool]]:
        # NeMo-RL's asynchronous trainer sends its generation to the actor that collects trajectories, this along with it.
        return SynchronizerElsewhere, (self._stale,)

    def _turn(self) -> AbstractContextManager[None]:
        return self._shared_gpus() if self._settings.colocated else nullcontext()

    @contextmanager
    def _shared_gpus(self) -> Iterator[None]:
        """As NeMo-RL's own IPC synchronizer does: both sides get back what they had, refitted or not.

        After a failed refit only from workers that are there and answer; what fails then is a note of the refit's error.
        """
        self._nemo_rl(self._policy, "offload_before_refit")
        self._wake("weights")
        try:
            yield
        except Exception as error:
            self._give_back_after(error)
            raise
        self._nemo_rl(self._policy, "offload_after_refit")
        self._wake("kv_cache")

    def _give_back_after(self, error: Exception) -> None:
        missing, train_ranks = self._workers.missing, self._workers.train_ranks
        turns: tuple[tuple[str, bool, Callable[[], None]], ...] = (
            (
                "the policy was not offloaded",
                any(rank < train_ranks for rank in missing),
                lambda: self._nemo_rl(self._policy, "offload_after_refit"),
            ),
            (
                "vLLM's kv_cache was not woken",
                any(rank >= train_ranks for rank in missing),
                lambda: self._wake("kv_cache"),
            ),
        )
        for undone, somebody_is_missing, turn in turns:
            if somebody_is_missing:
                error.add_note(f"{undone}: not all of its workers are there and answer")
                continue
            try:
                turn()
            # Of any kind, NeMo-RL's or Ray's: the refit's own is the one that says what happened first.
            except Exception as second:
                error.add_note(f"{undone}: {type(second).__name__}: {second}")

    def _wake(self, tag: str) -> None:
        # NeMo-RL prints an exception of its workers and answers False; those that wake answer nothing.
        if self._nemo_rl(self._generation, "prepare_for_generation", tags=[tag]) is False:
            raise RefitError(
                f"vLLM could not wake its {tag}; NeMo-RL has printed why. Its engines do not generate",
                stage="handshake",
            )

    def _nemo_rl(self, side: Any, method: str, **arguments: Any) -> Any:
        turn = getattr(side, method)
        return within(self._limit_s, lambda: turn(**arguments), f"NeMo-RL's {method}", "handshake")

    def _ensure_open(self) -> None:
        if self._open:
            return
        workers, config = self._workers, asdict(self._settings.config)
        self._epoch += 1
        [rendezvous] = workers.answers(
            workers.first_policy(
                policy_worker.open_rendezvous,
                train_ranks=workers.train_ranks,
                gen_ranks=workers.gen_ranks,
                epoch=self._epoch,
            ),
            "rendezvous",
        )
        engine = self._settings.engine
        policy = workers.policy(policy_worker.join, rendezvous=rendezvous, engine=engine)
        engines = workers.engines(
            JOIN, [(rendezvous, first, config, engine) for first in workers.first_ranks]
        )
        routes = workers.answers([*policy, *engines], "handshake")[0]
        self._open = True
        logger.info(
            "refit epoch %d: %d policy workers, %d workers of vLLM, %s; %d weights shard to shard, %d misc, %d unused",
            self._epoch,
            workers.train_ranks,
            workers.gen_ranks,
            engine,
            routes["bulk"],
            routes["misc"],
            routes["unused"],
        )

    def _refit(self, version: int, kv_scales: Mapping[str, float] | None) -> list[Answer]:
        workers = self._workers
        policy = workers.policy(policy_worker.refit, version=version, kv_scales=kv_scales)
        engines = workers.engines(REFIT, [(version,)] * len(workers.first_ranks))
        return workers.answers([*policy, *engines], "transfer")

    def _close(self) -> None:
        """After a failure too, when some workers may be gone: the others leave the epoch, and the log says the rest.

        All are told, so that one that was late leaves once it goes on; none that is known to be missing is waited for.
        """
        workers, self._open = self._workers, False
        pending = [
            *workers.policy(policy_worker.close),
            *workers.engines(CLOSE, [()] * len(workers.first_ranks)),
        ]
        present = workers.present(pending)
        try:
            if present:
                workers.answers(present, "close", self._close_s)
        except RefitError as error:
            logger.warning("not all workers left refit epoch %d: %s", self._epoch, error)

    def _write(self, records: list[Answer]) -> None:
        if self._settings.records_dir is not None:
            append_records(Path(self._settings.records_dir) / "refits.jsonl", records)


class SynchronizerElsewhere:
    """What another process gets in place of a synchronizer: it refits nothing, and ends nobody's epoch with its own end."""

    def __init__(self, stale: bool) -> None:
        self.is_stale = stale

    def mark_stale(self) -> None:
        """The trainer's process alone keeps account."""

    def init_communicator(self) -> None:
        """Refused, as :meth:`sync_weights`."""
        self.sync_weights()

    def sync_weights(self, *, timer: Any = None, kv_scales: Any = None) -> dict[str, float]:
        """Refused.

        Raises:
            RefitError: always.
        """
        raise RefitError(
            "this is the copy of a synchronizer in another process than the one that installed it, and a second epoch would end "
            "the first. Nothing was sent; refit from NeMo-RL's driver",
            stage="handshake",
        )

    def shutdown(self) -> None:
        """The epoch is the driver's."""


def _own_names(kv_scales: Mapping[str, float] | None) -> dict[str, float] | None:
    """NeMo-RL writes q_scale one module deeper than k_scale and v_scale, as vLLM's loader renames it."""
    if kv_scales is None:
        return None
    return {name.replace(".self_attn.attn.q_scale", ".self_attn.q_scale"): s for name, s in kv_scales.items()}


def _metrics(records: list[Answer]) -> dict[str, float]:
    summary = summarize([RefitRecord(**record) for record in records])
    share = summary.changed_share
    sparse = {} if share is None else {"changed_share": share, "wire_mbytes": summary.bytes_wire / (1 << 20)}
    return {
        "version": float(summary.version),
        "seconds": summary.seconds,
        "bulk_mbytes": summary.bytes_bulk / (1 << 20),
        "misc_mbytes": summary.bytes_misc / (1 << 20),
        "kept_gb_per_s": summary.kept_gb_per_s,
        **sparse,
    }
