"""The bulk path of one epoch: a transport, how it comes up, and what serves if it does not."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..comm.opening import GroupChoice
from ..config import RefitConfig
from ..control.channel import Channel
from ..control.world import RefitWorld
from ..errors import TransportUnavailable, end_all
from ..layout import Fragment
from ..plan import BroadcastPlan, Plan
from ..records.clock import StageClock
from ..transport import FALLBACK, TransferResult, make_transport

logger = logging.getLogger(__name__)


class BulkPath:
    """Makes a transport and connects it; all ranks do every step at the same time.

    Attributes:
        name: of the transport that serves.
        reason: why this one.
    """

    def __init__(
        self,
        channel: Channel,
        choice: GroupChoice,
        config: RefitConfig,
        device: torch.device,
        plan: Plan | BroadcastPlan,
        chosen: tuple[str, str],
        fragments: Sequence[Fragment],
        *,
        sleeps: bool = False,
    ):
        """Open the chosen transport.

        Args:
            channel: of the epoch.
            choice: of the transport's communicators.
            config: the same on all ranks.
            device: of the parameters.
            plan: this rank's.
            chosen: name of the transport, and why.
            fragments: this rank's.
            sleeps: whether this rank frees their memory between refits, as engines with a sleep mode do.

        Raises:
            TransportUnavailable: on every rank, if any can't; under ``auto`` only if the fallback can't either.
        """
        self._channel = channel
        self._bindings = 0
        self.name, self.reason = chosen
        self._falls_back = config.transport == "auto" and self.name != FALLBACK
        self._make = partial(
            make_transport,
            channel=channel,
            choice=choice,
            device=device,
            plan=plan,
            config=config,
            sleeps=sleeps,
        )
        self._transport = self._make(self.name)
        try:
            self.bind(fragments)
            # The first refit may be far: an engine sleeps and a trainer trains before it.
            self._transport.release()
        except BaseException as error:
            failed = not isinstance(error, TransportUnavailable)
            end_all([partial(self._transport.close, failed=failed)], error)
            raise

    def bind(self, fragments: Sequence[Fragment]) -> None:
        """Bind the transport to this rank's storage and tell all peers of it; again whenever some rank's has moved.

        Raises:
            TransportUnavailable: names the first rank that can't, and its reason; under ``auto`` only if the
                fallback can't either, which serves from then on.
        """
        try:
            if self._bindings:
                self._bind_again(fragments)
            else:
                self._bind(fragments)
        except TransportUnavailable as error:
            # Raised on all ranks, whichever could not.
            if not self._falls_back:
                raise
            self._falls_back = False
            end_all([self._transport.close], error)
            self.reason = f"auto: {self.name} can't serve: {error}"
            if self._channel.world.rank == 0:
                logger.warning("%s; %s serves instead, by the plan that was made", self.reason, FALLBACK)
            self.name = FALLBACK
            self._transport = self._make(FALLBACK)
            self._bind(fragments)

    def _bind_again(self, fragments: Sequence[Fragment]) -> None:
        """What has worked once may fail for a moment (a peer out of descriptors), and is tried twice."""
        try:
            self._bind(fragments)
        except TransportUnavailable as error:
            # Raised on all ranks, and told once.
            if self._channel.world.rank == 0:
                logger.warning("%s could not be bound anew, and is tried once more: %s", self.name, error)
            self._bind(fragments)

    def _bind(self, fragments: Sequence[Fragment]) -> None:
        self._bindings += 1
        described, reason = None, ""
        try:
            self._transport.bind(fragments)
            described = self._transport.describe()
        except TransportUnavailable as error:
            reason = str(error)
        common, direct = _addressed(described)
        told, own = self._channel.exchange(f"bound/{self._bindings}", [common, reason], direct)
        self._require_none([reason for _, reason in told])
        try:
            self._transport.connect(_delivered([common for common, _ in told], own, self._channel.world.rank))
        except TransportUnavailable as error:
            reason = str(error)
        self._require_none(self._channel.vote(f"connected/{self._bindings}", reason))

    def moved(self) -> bool:
        """As :meth:`~..transport.Transport.moved`."""
        return self._transport.moved()

    def check_during_run(self, have_moved: Callable[[], bool]) -> bool:
        """As :meth:`~..transport.Transport.check_during_run`."""
        return self._transport.check_during_run(have_moved)

    def confirm_unmoved(self) -> None:
        """As :meth:`~..transport.Transport.confirm_unmoved`."""
        self._transport.confirm_unmoved()

    def synchronize(self) -> None:
        """Before any rank runs a refit; as :meth:`~..transport.Transport.synchronize`."""
        self._transport.synchronize()

    def run(self, clock: StageClock, aside: Callable[[], None]) -> TransferResult:
        """Move all bulk bytes of one refit; as :meth:`~..transport.Transport.run`."""
        return self._transport.run(clock, aside)

    def close(self, *, failed: bool = False) -> None:
        """End the epoch of the transport; safe to call twice."""
        self._transport.close(failed=failed)

    @property
    def staging_bytes(self) -> int:
        """Bytes of buffers on this rank."""
        return self._transport.staging_bytes

    def _require_none(self, reasons: Sequence[str]) -> None:
        world: RefitWorld = self._channel.world
        for rank, reason in enumerate(reasons):
            if reason:
                raise TransportUnavailable(
                    f"{self.name} can't be used, says {world.describe(rank)}: {reason}. Set policy.refit.transport to "
                    "p2p, or to auto",
                    stage="connect",
                    rank=world.rank,
                )


def _addressed(described: object) -> tuple[object, dict[int, dict[str, Any]]]:
    """What a transport describes, apart: what all ranks need, and what stands under one rank's number, for that rank.

    In a large world this is most of it: a rank's descriptions for all of its hundreds of peers are no other rank's matter.
    """
    if not isinstance(described, dict):
        return described, {}
    direct: dict[int, dict[str, Any]] = defaultdict(dict)
    for key, by_rank in described.items():
        for rank, part in by_rank.items() if isinstance(by_rank, dict) else ():
            direct[int(rank)][key] = part
    return {key: {} if isinstance(part, dict) else part for key, part in described.items()}, dict(direct)


def _delivered(common: Sequence[Any], direct: Mapping[int, Any], rank: int) -> list[Any]:
    """Inverse of :func:`_addressed` for what all ranks described, as far as it concerns ``rank``."""
    whole = list(common)
    for sender, own in direct.items():
        if isinstance(own, dict) and isinstance(whole[sender], dict):
            whole[sender] = {**whole[sender], **{key: {str(rank): part} for key, part in own.items()}}
    return whole
