"""The bulk path of one epoch: a transport, how it comes up, and what serves if it does not."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch

from ..comm.opening import GroupChoice, open_group
from ..config import RefitConfig
from ..control.channel import Channel
from ..control.world import RefitWorld
from ..delta.choice import DENSE, Choice
from ..delta.path import DeltaPath
from ..delta.recording import Recording
from ..errors import TransportUnavailable, closed_on_error, end_all
from ..layout import Box, Fragment, coverage_gap
from ..plan import BroadcastPlan, Plan
from ..records.clock import StageClock
from ..transport import FALLBACK, TransferResult, make_transport
from ..weights.endpoints import WeightSource

logger = logging.getLogger(__name__)


class BulkPath:
    """Makes a transport and connects it; all ranks do every step at the same time.

    Attributes:
        name: of the transport that serves.
    """

    def __init__(
        self,
        channel: Channel,
        choice: GroupChoice,
        delta_choices: Sequence[GroupChoice],
        config: RefitConfig,
        device: torch.device,
        plan: Plan | BroadcastPlan,
        chosen: tuple[str, str],
        fragments: Sequence[Fragment],
        *,
        sleeps: bool | None = None,
        rewritten: Mapping[str, str] = MappingProxyType({}),
        source: WeightSource | None = None,
        landed: Callable[[int], None] | None = None,
        as_planned: Callable[[Sequence[Fragment]], list[Fragment]] = list,
    ):
        """Open the chosen transport.

        Args:
            channel: of the epoch.
            choice: of the transport's communicators.
            delta_choices: of what sparse refits go over: the first that can be opened on all ranks.
            config: the same on all ranks.
            device: of the parameters.
            plan: this rank's.
            chosen: name of the transport, and why.
            fragments: this rank's.
            sleeps: whether this rank frees their memory between refits, as engines with a sleep mode do; None if it does not say.
            rewritten: weights that this rank may change itself between two refits, with reasons
                (:func:`..weights.endpoints.rewritten`).
            source: a trainer rank's weights.
            landed: what an engine rank does with each portion that has landed, while others are on their way
                (:class:`~..weights.endpoints.WorksOnPortions`); None if it waits for all.
            as_planned: its fragments as the plan's boxes see the weights.

        Raises:
            TransportUnavailable: on every rank, if any can't; under ``auto`` only if the fallback can't either.
        """
        self._channel = channel
        self._bindings = 0
        self.name, self._reason = chosen
        self._falls_back = config.transport == "auto" and self.name != FALLBACK
        self._make = partial(
            make_transport,
            channel=channel,
            choice=choice,
            device=device,
            plan=plan,
            config=config,
            sleeps=sleeps,
            landed=landed,
        )
        # Shards keep their boxes: however often they are bound anew, this stays so.
        self._wholly = _wholly_sent(fragments, plan) if isinstance(plan, Plan) else frozenset()
        self._transport = self._make(self.name)
        self._choice = Choice(config.delta)
        self._deltas: DeltaPath | None = None
        self._recording: Recording | None = None
        self._must_be_sparse = config.delta == "always"
        self._sleeps = bool(sleeps) and not channel.world.is_source
        # Whether an engine's weights have to be read before a sparse refit builds on them.
        self._unseen = False
        try:
            if config.delta != "off" and isinstance(plan, Plan) and self._may_be_sparse(rewritten):
                self._deltas = self._open_deltas(delta_choices, config, device, plan)
                if self._deltas is not None and config.delta_base == "optimizer" and source is not None:
                    self._recording = Recording(
                        source, self._deltas, as_planned, compares_sums=config.verify != "off"
                    )
            self.bind(fragments)
            # The first refit may be far: an engine sleeps and a trainer trains before it.
            self._transport.release()
        except BaseException as error:
            failed = not isinstance(error, TransportUnavailable)
            end_all([partial(self.close, failed=failed)], error)
            raise

    def _may_be_sparse(self, rewritten: Mapping[str, str]) -> bool:
        """Whether all engines leave alone what a refit has written; a vote."""
        reasons = self._channel.vote("delta/able", next(iter(rewritten.items()), None))
        found = next(((rank, told) for rank, told in enumerate(reasons) if told), None)
        if found is not None and self._channel.world.rank == 0:
            rank, (name, why) = found
            logger.warning(
                "policy.refit.delta has no effect, and refits are dense: %s may change %s after a refit: %s",
                self._channel.world.describe(rank),
                name,
                why,
            )
        return found is None

    def _open_deltas(
        self, choices: Sequence[GroupChoice], config: RefitConfig, device: torch.device, plan: Plan
    ) -> DeltaPath | None:
        """What carries sparse refits; None if all have to be dense.

        Raises:
            TransportUnavailable: on every rank, if nothing can under ``always``.
        """
        reasons: list[str] = []
        for number, choice in enumerate(choices):
            made, reasons = self._open_deltas_over(choice, config, device, plan)
            if not any(reasons):
                return made
            end_all([made.close])
            if self._channel.world.rank == 0 and number + 1 < len(choices):
                logger.warning(
                    "sparse refits go over %s and not over %s: %s says %s",
                    choices[number + 1].how or "the network",
                    choice.how,
                    *self._first(reasons),
                )
        if self._must_be_sparse:
            self._require_none(reasons, "policy.refit.delta=always", "Set policy.refit.delta to auto or off")
        if self._channel.world.rank == 0:
            logger.warning(
                "policy.refit.delta has no effect, and refits are dense: %s says %s", *self._first(reasons)
            )
        return None

    def _open_deltas_over(
        self, choice: GroupChoice, config: RefitConfig, device: torch.device, plan: Plan
    ) -> tuple[DeltaPath, list[str]]:
        """A path over a group, and why each rank can't use it: empty where it can. A path that some rank can't use is closed by the
        caller."""
        world, name = self._channel.world, f"delta/{choice.kind}"
        group = open_group(
            self._channel, choice, name, (world.rank, world.size), device, 1, config.bucket_bytes
        )
        with closed_on_error(group):
            made = DeltaPath(
                group, world.rank, plan, config.delta_base, config.bucket_bytes, config.verify, world.describe
            )
        reason = ""
        with closed_on_error(made):
            _, wanted = self._channel.exchange(name, [None], made.describe())
            try:
                made.connect(wanted)
            except TransportUnavailable as error:
                reason = str(error)
            return made, self._channel.vote(f"{name}/connected", reason)

    def bind(self, fragments: Sequence[Fragment]) -> None:
        """Bind the transport to this rank's storage and tell all peers of it; again whenever some rank's has moved.

        Raises:
            TransportUnavailable: names the first rank that can't, and its reason; under ``auto`` only if the
                fallback can't either, which serves from then on.
        """
        self._bind_transport(fragments)
        if self._deltas is not None:
            self._bind_deltas(self._deltas, fragments)

    def _bind_deltas(self, deltas: DeltaPath, fragments: Sequence[Fragment]) -> None:
        reason = ""
        try:
            deltas.bind(fragments)
        except TransportUnavailable as error:
            reason = str(error)
        reasons = self._channel.vote(f"delta/{self._bindings}", reason)
        if not any(reasons):
            return
        if self._must_be_sparse:
            self._require_none(reasons, "policy.refit.delta=always", "Set policy.refit.delta to auto or off")
        end_all([deltas.close])
        self._deltas = self._recording = None
        if self._channel.world.rank == 0:
            logger.warning("refits are dense from now on: %s", next(filter(None, reasons)))

    def _bind_transport(self, fragments: Sequence[Fragment]) -> None:
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
            self._reason = f"auto: {self.name} can't serve: {error}"
            if self._channel.world.rank == 0:
                logger.warning("%s; %s serves instead, by the plan that was made", self._reason, FALLBACK)
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
        described = self._describe(fragments)
        while self._transport.asks_again(described):
            described = self._describe(fragments)
        self.name = self._transport.name
        reason = ""
        try:
            self._transport.connect(described)
        except TransportUnavailable as error:
            reason = str(error)
        self._require_none(self._channel.vote(f"connected/{self._bindings}", reason))

    def _describe(self, fragments: Sequence[Fragment]) -> list[object]:
        """Bind the transport, and hear what all ranks' transports describe, as far as it concerns this one."""
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
        return _delivered([common for common, _ in told], own, self._channel.world.rank)

    @property
    def reason(self) -> str:
        """Why this transport, and how it serves."""
        return "; ".join(filter(None, (self._reason, self._transport.remark)))

    @property
    def portions(self) -> Mapping[str, int]:
        """As :attr:`~..transport.Transport.portions`."""
        return self._transport.portions

    @property
    def encodes_wholly(self) -> frozenset[str]:
        """Names of what this trainer rank encodes in each refit of its fragments with an encoding, if that is all that it holds of them.
        Nothing where receivers encode, and where some refits are sparse."""
        return self._wholly if self._deltas is None and self._transport.name != "pull" else frozenset()

    def moved(self) -> bool:
        """As :meth:`~..transport.Transport.moved`."""
        return self._transport.moved()

    def check_during_run(self, have_moved: Callable[[], bool]) -> bool:
        """As :meth:`~..transport.Transport.check_during_run`."""
        # What compares weights reads them twice, and must find them where they lie.
        return self._deltas is None and self._transport.check_during_run(have_moved)

    def confirm_unmoved(self) -> None:
        """As :meth:`~..transport.Transport.confirm_unmoved`."""
        self._transport.confirm_unmoved()

    def synchronize(self) -> None:
        """Before any rank runs a refit; as :meth:`~..transport.Transport.synchronize`."""
        self._transport.synchronize()

    def wishes(self, held: int | None, *, bound: bool) -> int:
        """Flags of this rank for the meeting before a refit (:mod:`..delta.choice`).

        Args:
            held: the version that an engine rank has committed, unless a refit has begun to write another one since.
            bound: whether weights lie where they were bound. If they don't, :meth:`lost` has to be asked once they do.
        """
        if self._deltas is None:
            return 0
        if self._channel.world.is_source:
            wishes = self._choice.trainer_wishes()
            if self._recording is not None:
                self._recording.refit_begins()
                if not wishes & DENSE and self._recording.unsure():
                    wishes |= DENSE
            return wishes
        return self._choice.engine_wishes(held) or (self.lost() if bound else 0)

    def lost(self) -> int:
        """Flags of an engine rank whose weights are not what the last refit left; 0 if they are.

        That can't be known without reading them: a sleep may have discarded them, whoever called for it, and an engine may break
        its word not to rewrite them. So they are read after each refit of an engine that sleeps, and of any engine after a dense
        refit; once, and where they are bound.
        """
        unseen, self._unseen = self._unseen, False
        if self._deltas is None or not unseen or self._deltas.intact():
            return 0
        world = self._channel.world
        logger.log(
            logging.INFO if self._sleeps else logging.WARNING,
            "%s does not hold what the last refit left: it slept without keeping its weights, or something else wrote them. This "
            "refit is dense",
            world.describe(world.rank),
        )
        return self._choice.wishes_of_lost()

    def recording_step(self) -> AbstractContextManager[None]:
        """A context in which a trainer rank's weights are written; what it changes is found out, if the next refit may be sparse."""
        if self._recording is None:
            return nullcontext()
        return self._recording.step(records=self._choice.may_be_sparse)

    def decide(self, flags: int) -> None:
        """Choose between a dense and a sparse refit, from what all ranks wish."""
        if self._deltas is not None:
            self._kind = self._choice.decide(flags)
            self._unseen &= self._kind.sparse

    def again(self, flags: int = 0) -> None:
        """The next run has to be dense, since it repeats one that counts for nothing, or as the ``flags`` of all ranks say."""
        if self._deltas is not None:
            if self._recording is not None and self._kind.sparse and not flags:
                logger.warning(
                    "an engine rank does not hold what %s holds, as its log says, or quantized weights were written after their last "
                    "refresh(). If the weights were written outside "
                    "recording_changes(), put that writer inside. All weights are sent once more, before this refit commits",
                    self._channel.world.describe(self._channel.world.rank),
                )
            self._kind = self._choice.again(flags)
            self._unseen = False

    def commit(self, version: int) -> None:
        """All ranks hold ``version``."""
        if self._deltas is not None:
            self._choice.commit(version)
            self._unseen = self._kind.takes_base or (self._kind.sparse and self._sleeps)
            if self._recording is not None:
                self._recording.restart(sparse=self._kind.sparse)

    def run(self, clock: StageClock, aside: Callable[[], None]) -> TransferResult:
        """Move all bulk bytes of one refit, or what differs; as :meth:`~..transport.Transport.run`."""
        if self._deltas is None:
            return self._transport.run(clock, aside)
        start = time.perf_counter()
        if self._kind.sparse:
            doubted = self._recording is not None and self._recording.doubtful()
            result = self._deltas.run(clock, aside, weighs_all=doubted)
            # Bound anew for this refit where memory sleeps, and to be given back all the same.
            with clock.stage("commit"):
                self._transport.release()
                if self._sleeps:
                    self._deltas.release()
            self._choice.took(time.perf_counter() - start)
            return result
        result = self._transport.run(clock, aside)
        self._choice.took(time.perf_counter() - start)
        if self._kind.takes_base:
            # Even if the run is void, since the other ranks may not know that yet, and take theirs.
            verified = self._deltas.take(clock, void=result.void)
            result = replace(result, verified_bytes=max(verified, result.verified_bytes))
        return result

    def handles_opened(self) -> int:
        """As :meth:`~..transport.Transport.handles_opened`."""
        return self._transport.handles_opened()

    def close(self, *, failed: bool = False) -> None:
        """End the epoch of the transport; safe to call twice."""
        deltas, self._deltas, self._recording = self._deltas, None, None
        closing = [partial(deltas.close, failed=failed)] if deltas is not None else []
        end_all([*closing, partial(self._transport.close, failed=failed)])

    @property
    def staging_bytes(self) -> int:
        """Bytes of buffers on this rank."""
        return self._transport.staging_bytes + (self._deltas.staging_bytes if self._deltas else 0)

    @property
    def base_bytes(self) -> int:
        """Bytes of what this rank keeps on the device to compare its weights with."""
        return self._deltas.base_bytes if self._deltas else 0

    def _require_none(
        self,
        reasons: Sequence[str],
        what: str = "",
        remedy: str = "Set policy.refit.transport to p2p, or to auto",
    ) -> None:
        if any(reasons):
            raise TransportUnavailable(
                "{} can't be used, says {}: {}. {}".format(what or self.name, *self._first(reasons), remedy),
                stage="connect",
                rank=self._channel.world.rank,
            )

    def _first(self, reasons: Sequence[str]) -> tuple[str, str]:
        """The first rank that has a reason, and the reason."""
        world: RefitWorld = self._channel.world
        return next((world.describe(rank), reason) for rank, reason in enumerate(reasons) if reason)


def _wholly_sent(fragments: Sequence[Fragment], plan: Plan) -> frozenset[str]:
    """Names of what is encoded of a rank's fragments, if it sends all that it holds of it."""
    boxes: dict[str, list[Box]] = defaultdict(list)
    for fragment in fragments:
        if fragment.encoding is not None:
            boxes[fragment.name].append(fragment.box)
    sent: dict[str, set[Box]] = {name: set() for name in boxes}
    for message in chain.from_iterable(plan.sends if boxes else ()):
        for segment in message.segments:
            if segment.name in sent:
                sent[segment.name].add(segment.box)
    return frozenset(
        name for name, held in boxes.items() if all(coverage_gap(box, sent[name]) is None for box in held)
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
