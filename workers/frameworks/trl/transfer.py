"""One trainer rank's part in the updates of a vLLM server: its own shards, and on the main process the server's calls."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import torch
from accelerate.utils import DistributedType, broadcast_object_list, gather_object

from ....integration.config import RefitConfig, records_no_steps
from ....integration.control.world import host_identity
from ....integration.errors import RefitError, end_all
from ....integration.weights.source_thread import left_behind
from ...engines.common.http_calls import STAGE, HttpCalls
from ...engines.http_client import RefitClient
from ...trainers.fsdp.mixin import FSDPRefitMixin

logger = logging.getLogger(__name__)

# Under which a rank's modules have its weights, whole or as DTensors. FSDP is of either version.
_SERVED = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.FSDP,
)
# Seconds for what the server answers at once.
_ASK_S = 60.0


@dataclass(frozen=True)
class ShardOptions:
    """The same on all ranks.

    Attributes:
        refit: as ``policy.refit`` of a recipe.
        dtype: of the server's weights, in which they travel; None asks the server at each meeting.
        host: address of the main process's host as the other ranks and the server's workers reach it; None takes that of its
            connection to the server.
    """

    refit: RefitConfig = field(default_factory=RefitConfig)
    dtype: torch.dtype | None = None
    host: str | None = None


@dataclass(frozen=True)
class _Order:
    """What the main process has all ranks do: refit ``version``, and join ``rendezvous`` before it, unless that is None."""

    version: int
    rendezvous: dict[str, Any] | None = field(default=None, repr=False)  # it holds the token
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class _Failure:
    """What went wrong in an update: on a rank itself, or with the server, which concerns all."""

    error: BaseException
    of_server: bool = False

    @property
    def blamed(self) -> int:
        """The refit rank that the error names as the one to blame, or -1."""
        return self.error.blamed if isinstance(self.error, RefitError) else -1

    def told(self, rank: int) -> RefitError:
        """What the other ranks raise, which may not know the type of an error of ``rank``."""
        if self.of_server and isinstance(self.error, RefitError):
            return self.error
        return RefitError(
            f"trainer rank {rank} failed in this update, and this rank did not: {_words(self.error)}. The server may serve the new "
            "weights, or those before, or be paused. Mend that rank's error and train anew, which meets the server anew",
            stage=getattr(self.error, "stage", ""),
            rank=rank,
            blamed=self.blamed if self.blamed >= 0 else rank,
        )


class ShardTransfer(FSDPRefitMixin):
    """What TRL knows as the ``weight_transfer`` of the main process; here each rank has one.

    Args:
        trainer: TRL's, of this rank. It may come to be built after this.
        options: of all.
    """

    def __init__(self, trainer: Any, options: ShardOptions) -> None:
        self.refit_config = options.refit
        self._trainer, self._dtype, self._host = trainer, options.dtype, options.host
        # Of the main process, from the first meeting on, until an update fails.
        self._client: RefitClient | None = None
        self._epochs = 0
        # Names of those that the ranks are on.
        self._hosts: set[str] = set()

    @property
    def model(self) -> torch.nn.Module:
        """The policy, without DDP around it."""
        policy: torch.nn.Module = self._trainer.accelerator.unwrap_model(self._trainer.model)
        return policy

    def require_served(self) -> None:
        """Check the trainer, once it is built; a collective of all ranks.

        Raises:
            RefitError: lists all that is wrong.
        """
        config, accelerator = self.refit_config, self._trainer.accelerator
        wrong = [*config.violations(), *records_no_steps(config, "refit", "TRL's trainer")]
        if config.lora == "adapter":
            wrong.append(
                "refit.lora: adapter needs requests that name the adapter, and TRL's name the base model; give merge"
            )
        if config.kv_scales:
            wrong.append(
                "refit.kv_scales needs calibrate_kv_scales before a refit, which TRL does not call; give false"
            )
        kind = accelerator.distributed_type
        if kind not in _SERVED or (kind is DistributedType.FSDP and not accelerator.is_fsdp2):
            name = "FSDP1" if kind is DistributedType.FSDP else kind.value
            wrong.append(
                f"accelerate runs this training as {name}, which keeps weights elsewhere than in the modules' own parameters; take "
                "FSDP2 (fsdp_config version 2), DDP or one process"
            )
        if wrong:
            raise RefitError("; ".join(wrong), stage="settings")
        self._hosts = set(gather_object([host_identity()]))

    def update(self, met: Callable[[], None]) -> tuple[int, dict[str, Any]]:
        """Bring the server to the next version; a collective of all ranks.

        Args:
            met: called once all ranks are here.

        Returns:
            The version, and this rank's record.

        Raises:
            RefitError: and its kinds, on all ranks, but for one that was interrupted or failed in another way itself. The server
                goes on with the version before, or with this one if all had committed, or stays paused.
        """
        order = self._from_main(self._order)
        met()
        rank, ranks = self._trainer.accelerator.process_index, self._trainer.accelerator.num_processes
        if order.rendezvous is not None:
            self.refit_dtype = order.dtype
            self._with_server(
                partial(self.join_refit, order.rendezvous, rank),
                lambda client: client.join_refit(order.rendezvous, ranks, self.refit_config),
            )
        record = self._with_server(
            partial(self.refit, order.version), lambda client: client.refit(order.version)
        )
        return order.version, record

    def close(self) -> None:
        """End the epoch on this rank, and on the main process on the server's workers too, if no update has failed."""
        client, self._client = self._client, None
        if client is not None:
            try:
                client.close_refit()
            except RefitError as error:  # whatever it was, the server has served all updates before it
                logger.warning("the server was not told that the training has ended: %s", error)
        self.close_refit()

    def init_weight_transfer(self) -> None:
        """Nothing: TRL asks the main process alone, and all ranks meet the server in the first update."""

    def destroy(self) -> None:
        """Nothing, for the same reason; :meth:`close` is for all."""

    def _order(self) -> _Order:
        version = self._trainer.model_version + 1
        if self._client is not None and self.refit_healthy():
            return _Order(version)
        self._trainer.vllm_client.wait_for_server_ready()
        url = self._trainer.vllm_client.server_url
        client = RefitClient(url, timeout_s=self.refit_config.call_limit_s)
        workers = _asked(url, "/get_world_size")["world_size"]
        dtype = self._dtype
        if dtype is None:
            info = _asked(url, "/server_info?config_format=json")
            dtype = getattr(torch, info["vllm_config"]["model_config"]["dtype"].removeprefix("torch."))
        ranks = self._trainer.accelerator.num_processes
        rendezvous = self.open_refit_rendezvous(self._address(url), ranks, workers, self._epochs)
        self._client, self._epochs = client, self._epochs + 1
        return _Order(version, rendezvous, dtype)

    def _address(self, url: str) -> str:
        if self._host is not None:
            return self._host
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname, port), _ASK_S) as way:
            address = str(way.getsockname()[0])
        if len(self._hosts) > 1 and ip_address(address).is_loopback:
            raise RefitError(
                f"the main process reaches the server at {url} from {address}, where ranks on other hosts can't reach it. Nothing was "
                "sent; give ShardOptions the host",
                stage="settings",
            )
        return address

    def _with_server(
        self, ours: Callable[[], dict[str, Any]], theirs: Callable[[RefitClient], Any]
    ) -> dict[str, Any]:
        """Do this rank's part, and on the main process have the server do its own meanwhile; a collective of all ranks.

        Raises:
            BaseException: what has failed here; on the main process the first in time, with the other one as its note. A server of
                which a worker was lost may stop answering before this rank hears who is lost, which is then raised.
            RefitError: where nothing has failed: the server's, or else one that names the first rank that failed.
        """
        client, failed = self._client, list[_Failure]()

        def both(client: RefitClient) -> dict[str, Any] | None:
            with ThreadPoolExecutor(1, thread_name_prefix="rlrefit") as pool:
                pool.submit(self._serve, client, theirs, failed)
                return _attempt(ours, failed)

        found = _attempt(ours if client is None else partial(both, client), failed)
        if failed:
            self._client = None
            failed[:] = sorted(failed, key=lambda failure: _follows(failure, failed))
        for other in failed[1:]:
            failed[0].error.add_note(f"Beside it: {_words(other.error)}")
        # Whatever this rank has met, the others wait for its word, unless its word would meet a gather that it has left.
        if not left_behind():
            end_all([partial(self._require_done, failed)], failed[0].error if failed else None)
        if failed:
            raise failed[0].error
        assert found is not None, "nothing has failed"
        return found

    def _serve(
        self, client: RefitClient, theirs: Callable[[RefitClient], Any], failed: list[_Failure]
    ) -> None:
        try:
            theirs(client)
        except Exception as error:
            failed.append(_Failure(error, of_server=True))
            # The trainer's ranks would wait for the server's workers for their whole limit.
            if self._refit_server is not None:
                self._refit_server.close()

    def _require_done(self, failed: list[_Failure]) -> None:
        """Tell the other ranks what has failed on this one, the cause first, and hear what has on them; a collective.

        Raises:
            RefitError: what the first of the others tells, if nothing has failed here.
        """
        accelerator = self._trainer.accelerator
        number = torch.tensor(len(failed), device=accelerator.device)
        if not accelerator.reduce(number, "sum").item():
            return  # as in nearly all updates, without words
        of_server = (one for one in failed if one.of_server and not _follows(one, failed))
        said = next(of_server, failed[0] if failed else None)
        told = None if said is None else said.told(accelerator.process_index)
        heard: list[RefitError | None] = gather_object([told])
        if not failed:
            raise next(error for error in heard if error is not None)

    def _from_main[T](self, make: Callable[[], T]) -> T:
        """What ``make`` gives on the main process, on all ranks; if it fails, all raise."""
        failed = list[_Failure]()
        made = _attempt(make, failed, of_server=True) if self._trainer.accelerator.is_main_process else None
        answer: Any = broadcast_object_list([failed[0].told(0) if failed else made])[0]
        if failed:
            raise failed[0].error
        if isinstance(answer, RefitError):
            raise answer
        return answer


def _attempt[T](act: Callable[[], T], failed: list[_Failure], of_server: bool = False) -> T | None:
    """What ``act`` gives; None if it fails, or is interrupted: then too the other ranks have to be told."""
    try:
        return act()
    except BaseException as error:
        failed.append(_Failure(error, of_server))
        return None


def _follows(failure: _Failure, failed: list[_Failure]) -> bool:
    """Whether it only shows that the server did not do its part, while another one of this rank names who was lost.

    That is never rank 0: its rendezvous ends because the server has failed.
    """
    unexplained = failure.of_server and getattr(failure.error, "stage", "") == STAGE
    return unexplained and any(other.blamed > 0 for other in failed)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _asked(url: str, path: str) -> dict[str, Any]:
    answer = HttpCalls(url, timeout_s=_ASK_S).ask("GET", path)
    if answer.status != 200:
        raise RefitError(
            f"the server at {url} answered GET {path} with {answer.status}: {answer.words}", stage=STAGE
        )
    return answer.content
