"""One worker's part in updates of full tensors, called as NeMo-RL calls its checkpoint engines.

Nothing of NeMo-RL is imported here; :mod:`.checkpoint_engine` is what its configuration names.
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....integration.broadcast.full_tensors import FullTensorEpoch, FullTensorSettings
from ....integration.config import read_settings
from ....integration.control import Rendezvous, RendezvousServer, listen
from ....integration.errors import RefitError, RefitMismatch
from ....integration.records.files import require_records_dir, write_record
from ....integration.records.record import RefitRecord
from ...ray_host import node_address

logger = logging.getLogger(__name__)

# Of what workers tell each other; raised when that changes.
_PROTOCOL = 2
_PREFIX = "policy.generation.refit_cfg[…]"
# NeMo-RL's own key beside the options, from which it makes the bucket's size.
_BUCKET = "update_weights_bucket_memory_ratio"


@dataclass(frozen=True)
class NemoRlOptions:
    """``policy.generation.refit_cfg["rlrefit.workers.frameworks.nemo_rl.checkpoint_engine:NcclXferCheckpointEngine"]``, without the memory
    ratio, from which NeMo-RL makes the bucket's size.

    Attributes:
        timeout_s: seconds that any wait for another worker may take; the error names the worker.
        verify: checksums of the buckets' bytes: ``off``, ``sampled`` (one bucket of an update, another one each time; all of a
            group's first update) or ``full``. Names and places are checked in every bucket.
        records_dir: folder for ``refits-<role>-<rank>.jsonl``, a line an update; null for none.
        release_after_refit: NeMo-RL's own: whether the group ends with each update.
    """

    timeout_s: float
    verify: str
    records_dir: str | None = None
    release_after_refit: bool = False

    @staticmethod
    def from_kwargs(bucket_size: int, given: Mapping[str, Any]) -> NemoRlOptions:
        """The options, checked.

        Raises:
            RefitError: lists all that is wrong.
        """
        read = read_settings(
            given,
            _PREFIX,
            keys=("timeout_s", "verify"),
            own={"records_dir": str | None, "release_after_refit": bool},
            others=(_BUCKET,),
        )
        wrong = list(read.wrong)
        if bucket_size < 1:
            wrong.append(f"{_PREFIX}.{_BUCKET} leaves no room for a weight; give a larger one")
        if wrong:
            raise RefitError("; ".join(wrong), stage="settings")
        return NemoRlOptions(read.refit.timeout_s, read.refit.verify, **read.own)


class FullTensorEngine:
    """The engine of one policy worker, or of one worker of vLLM, inside its process.

    NeMo-RL asks for ``prepare`` and the process group once, or before each update with ``release_after_refit``. Versions
    are counted here, since NeMo-RL gives none: on from the largest that a worker of the group holds.

    Args:
        bucket_size: bytes of a bucket; two are held on policy rank 0 and on every worker of vLLM during an update.
        options: fields of :class:`NemoRlOptions`.
    """

    # NeMo-RL's own: a policy rank sends whole experts, and vLLM's loader takes its part.
    shard_expert_weights = False

    def __init__(self, bucket_size: int, **options: Any):
        self.options = NemoRlOptions.from_kwargs(bucket_size, options)
        require_records_dir(self.options.records_dir, f"{_PREFIX}.records_dir")
        self.version = 0
        self._bucket_size = bucket_size
        self._settings = FullTensorSettings(bucket_size, self.options.verify, float(self.options.timeout_s))
        self._epoch: FullTensorEpoch | None = None
        self._epochs = 0
        self._listener: socket.socket | None = None

    def get_target_weight_layout(self) -> None:
        """All workers of vLLM get all weights."""

    def prepare(self) -> dict[str, Any]:
        """Listen for the others, since a worker does not know yet whether it is policy rank 0.

        Returns:
            What they need to meet here. It holds the secret that admits them, and travels through Ray alone.
        """
        self.finalize()
        host = node_address()
        self._listener = listen(host, 0)
        self._epochs += 1
        port = self._listener.getsockname()[1]
        return {"protocol": _PROTOCOL, "address": [host, port, self._epochs], "token": secrets.token_hex(32)}

    def init_policy_process_group(
        self,
        *,
        worker_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[Mapping[str, Any]],
    ) -> None:
        """Meet all other workers, at the same time as they.

        Raises:
            RefitMismatch, RefitTimeout, PeerLost: nothing has moved then.
        """
        self._meet(worker_rank, train_world_size, rollout_world_size, metadata)

    def init_rollout_process_group(
        self,
        *,
        rollout_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[Mapping[str, Any]],
    ) -> None:
        """As :meth:`init_policy_process_group`."""
        self._meet(train_world_size + rollout_rank, train_world_size, rollout_world_size, metadata)

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]]
    ) -> None:
        """Policy workers: export all weights, on rank 0 send them, and wait until every worker of vLLM has them.

        Raises:
            RefitError: and its kinds. The export has been drawn to its end even so.
        """
        self._arrived(await self._open_epoch.send(weights, self.version + 1))

    async def receive_weight_batches(self) -> AsyncIterator[list[tuple[str, torch.Tensor]]]:
        """Workers of vLLM: all weights as they arrive, about a bucket of them at a time.

        Raises:
            RefitError: and its kinds; the engine must not generate then.
        """
        batch: list[tuple[str, torch.Tensor]] = []
        nbytes = 0
        async for weight in self._open_epoch.receive(self.version + 1, self._arrived):
            if batch and nbytes + weight[1].nbytes > self._bucket_size:
                yield batch
                batch, nbytes = [], 0
            batch.append(weight)
            nbytes += weight[1].nbytes
            if nbytes >= self._bucket_size:
                yield batch
                batch, nbytes = [], 0
        if batch:
            yield batch

    def finalize(self) -> None:
        """End the group on this worker; NeMo-RL calls it on all of them."""
        self._close_listener()
        if self._epoch is None:
            return
        self._epoch.close()
        self._epoch = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the buckets' memory is the trainer's or vLLM's again

    def _meet(self, rank: int, train: int, rollout: int, metadata: Sequence[Mapping[str, Any]]) -> None:
        strangers = [who for who, report in enumerate(metadata) if report.get("protocol") != _PROTOCOL]
        if strangers or len(metadata) != train + rollout or train < 1 or rollout < 1:
            raise RefitMismatch(
                f"{len(metadata)} workers reported, of {train} policy workers and {rollout} workers of vLLM; those of "
                f"another rlrefit than this one's: {strangers or 'none'}. Nothing has moved; install the same rlrefit in "
                "the environments of policy and vLLM, and have at least one worker of each",
                stage="rendezvous",
                rank=rank,
            )
        host, port, epoch = metadata[0]["address"]
        meeting = Rendezvous(host, port, train, rollout, epoch, metadata[0]["token"])
        server = None
        if rank == 0:
            if self._listener is None:
                raise RefitError("prepare() comes before the process group", stage="rendezvous", rank=rank)
            server, self._listener = RendezvousServer(self._listener, meeting), None
        self._close_listener()
        self._epoch = FullTensorEpoch(meeting, rank, self._settings, server, self.version)
        self.version = self._epoch.version
        if rank == 0:
            logger.info(
                "refit epoch %d: %d policy workers, %d workers of vLLM, full tensors by packed broadcast on %s",
                epoch,
                train,
                rollout,
                self._epoch.device.type,
            )

    @property
    def _open_epoch(self) -> FullTensorEpoch:
        if self._epoch is None:
            raise RefitError(
                "no group is open: NeMo-RL's synchronizer calls prepare and the process group before an update",
                stage="handshake",
            )
        return self._epoch

    def _arrived(self, record: RefitRecord) -> None:
        self.version = record.version
        if self.options.records_dir is not None:
            write_record(self.options.records_dir, record, self._open_epoch.world.train_ranks)

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._listener = None
