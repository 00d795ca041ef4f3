"""A process that is any rank of any trial, one after another, and the victim if it is told so."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch

from rlrefit.integration.control import Rendezvous, RendezvousServer, open_rendezvous
from rlrefit.integration.control.channel import Channel
from rlrefit.integration.delta.path import DeltaPath
from rlrefit.integration.engine.refit import RefitEngine
from rlrefit.integration.errors import EngineDirty, RefitError
from rlrefit.integration.session import RefitSession, ServingState
from tests.refit.synthetic import move, value_of

from .deltas import Bases, OnTheWire
from .flips import Flipped, Flips
from .moments import Moments, Place
from .network import Network
from .trials import BASES, CHANGES, FLIPS, NETWORK, ON_THE_WIRE, Kind, Trial
from .weights import MISC, Engine, SmallBuckets, Trainer, changed, drifting, small_sections

_ERRORS: dict[str, type[BaseException]] = {
    "ValueError": ValueError,
    "RuntimeError": RuntimeError,
    "OutOfMemoryError": torch.OutOfMemoryError,
    "MemoryError": MemoryError,
    "SystemExit": SystemExit,
    "CancelledError": asyncio.CancelledError,
}
INJECTED = "injected by the trial"
_SLOW_S = 0.4
# Beyond the limit: what a rank waits for a rendezvous that does not answer (half the limit, from 1 to 5 s), its
# farewell to it, and a busy machine.
GRACE_S = 8.0
# As many as a rank passes from an interrupt to the end of its session.
_POINTS_OF_CLEARING_UP = 200


@dataclass(frozen=True)
class Order:
    """An epoch that a rank is to take part in."""

    rendezvous: Rendezvous
    world: tuple[int, int]  # trainer and generation ranks
    rank: int
    versions: tuple[int, ...]
    timeout_s: float
    verify: str
    trial: Trial | None = None  # the fault, for its victim
    at: int = 0  # number of the point that is hit, for faults that hit one
    slow_part: int = -1  # part of the session in which this rank is slow
    counts: bool = False  # points
    delta: bool = False
    sleeps: bool = False  # engines
    masks: bool = False  # in place of bases
    claims: int | None = None  # the version that a fresh engine says it holds
    fresh: bool = (
        True  # it begins with an endpoint of its own making, and not with what an earlier epoch left
    )


@dataclass(frozen=True)
class Struck:
    """The fault has been injected."""

    at: float  # seconds of the monotonic clock, which all processes of a host share
    how: str  # for a person: what was done, and where in the library's code
    flipped: Flipped | None = None
    weight: str = ""  # that was changed


@dataclass(frozen=True)
class Raised:
    """An error as plain data."""

    kind: str
    text: str
    is_refit_error: bool
    injected: bool
    stage: str = ""
    rank: int = -1
    parameter: str = ""
    blamed: int = -1


@dataclass
class Ended:
    """What became of a rank in an epoch."""

    rank: int
    error: Raised | None = None
    at: float = 0.0  # by the monotonic clock
    committed: list[int] = field(default_factory=list)
    wrong: dict[int, list[str]] = field(default_factory=dict)  # by committed version
    clean: bool | None = None  # whether the engine serves; None for trainers
    version: int = -1  # that the engine claims
    left_wrong: list[str] = field(
        default_factory=list
    )  # in the end, of the version that a clean engine claims
    sent: list[int] = field(default_factory=list)  # versions whose bytes this trainer began to send
    sparse: dict[int, bool] = field(default_factory=dict)  # by committed version, whether its refit was
    seen: dict[Place, int] = field(default_factory=dict)  # points that were passed, if they were counted


@dataclass(frozen=True)
class Part:
    """A rank's session has come to the next part."""

    part: int


@dataclass
class Observed:
    """All that a trial has shown."""

    trial: (
        Trial  # as it was run in the end: with a longer limit if the machine was too slow for the first one
    )
    struck: Struck | None = None  # None if the fault never came to be
    ended: dict[int, Ended] = field(default_factory=dict)  # by themselves, the victim among them if it lived
    hung: dict[int, str] = field(default_factory=dict)  # with their stacks
    killed: bool = False  # the victim's process, by the fault
    healed: dict[int, Ended] = field(default_factory=dict)  # the ranks in the next epoch
    heal_hung: list[int] = field(default_factory=list)
    seconds: float = 0.0  # from the fault to the end of the slowest rank but the victim
    victim_seconds: float = 0.0  # the same for the victim, from when it could go on

    @property
    def limit_s(self) -> float:
        """What is taken as a hang."""
        return self.trial.timeout_s + GRACE_S

    @property
    def told(self) -> str:
        """For a person."""
        return f"{self.trial}; {self.struck.how if self.struck is not None else 'never struck'}"


def work(pipe: Any, stacks: str) -> None:
    """Take orders until the pipe ends."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # of faults that are meant
    with Path(stacks).open("w") as file, Hand(pipe) as hand:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
        while True:
            try:
                asked = pipe.recv()
            except EOFError:
                return
            pipe.send(hand.host(*asked) if isinstance(asked, tuple) else hand.epoch(asked))


class Hand:
    """Everything of one process: its rendezvous, its endpoint, and what of the library is patched to tell where it is."""

    def __init__(self, pipe: Any):
        self.tell = pipe.send  # to the one that runs the trial
        self.moments = Moments()
        self._server: RendezvousServer | None = None
        self.endpoint: Any = None
        self.state = ServingState()
        self._in_library = False
        self._patches = ExitStack()
        self.hooks: dict[str, Callable[[], None]] = {}
        self._sent: list[int] = []
        self.session: RefitSession | None = None

    def __enter__(self) -> Hand:
        signal.signal(signal.SIGINT, self._on_sigint)
        windows = {"prepare": "prepare", "init_process_group": "connect", "rebind": "rebind"}
        windows |= dict.fromkeys(("send_weights", "receive_weights"), "transfer")
        for method, window in windows.items():
            self._patch(RefitEngine, method, window)
        for method in ("barrier", "vote"):
            self._patch(Channel, method)
        windows = {"take": "base", "_pack_next": "pack", "_exchange_headers": "header", "_step": "blocks"}
        windows |= {"_apply_arrived": "apply", "_end": "sums", "intact": "sums"}
        for method, window in windows.items():
            self._patch(DeltaPath, method, window)
        self._patches.enter_context(small_sections())
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()
        if self._server is not None:
            self._server.close()

    def host(self, train_ranks: int, gen_ranks: int, epoch: int) -> Rendezvous:
        """Open the rendezvous of an epoch here, in place of the last one."""
        if self._server is not None:
            self._server.close()
        self._server = open_rendezvous("127.0.0.1", train_ranks, gen_ranks, epoch=epoch)
        return self._server.rendezvous

    def epoch(self, order: Order) -> Ended:
        """Take part in an epoch, to its end or to an error."""
        ended = Ended(order.rank)
        train, gen = order.world
        is_source = order.rank < train
        if order.fresh:
            self.hooks.clear()
            self.state = ServingState()
            value = drifting if order.delta else value_of
            self.endpoint = (
                Trainer(order.rank, train, self._hook, value)
                if is_source
                else Engine(order.rank - train, gen, self._hook, value)
            )
            if order.claims is not None and not is_source:
                self.state.commit(order.claims)
        endpoint, state, moments = self.endpoint, self.state, self.moments
        if not is_source:
            endpoint.gives_memory_back = order.sleeps
        self._sent = []
        config = SmallBuckets(
            transport="p2p",
            bucket_mb=1,
            timeout_s=order.timeout_s,
            verify=order.verify,
            delta="always" if order.delta else "off",
            delta_base="optimizer" if order.masks else "gpu",
        )
        with ExitStack() as stack:
            fault = _Fault(self, order, stack) if order.trial is not None else None
            rendezvous = fault.rendezvous if fault is not None else order.rendezvous
            moments.seen.clear()
            if order.counts:
                moments.watch()
            session: RefitSession | None = None
            try:
                self._enter_part(0, "open", order, fault)
                with self._interruptible():
                    session = RefitSession.open(rendezvous, order.rank, self._made, config, state=state)
                self.session = session
                for part, version in enumerate(order.versions, 1):
                    if is_source:
                        unrecorded = fault is not None and fault.is_unrecorded(part)
                        with nullcontext() if unrecorded else session.recording_changes():
                            endpoint.set_version(version)
                    self._enter_part(part, "refit", order, fault)
                    with self._interruptible():
                        record = session.refit(version, before=lambda: self._hook("before"))
                    ended.committed.append(version)
                    ended.sparse[version] = record.changed_share is not None
                    if not is_source and (wrong := endpoint.wrong(version)):
                        ended.wrong[version] = wrong
            except BaseException as error:
                ended.error = _as_data(error)
            finally:
                self.hooks.clear()
                if session is not None:
                    try:
                        session.close()
                    except BaseException as error:
                        ended.error = ended.error or _as_data(error)
                moments.rest()
            ended.at = time.monotonic()
            self.session = None
            del session
        ended.seen = dict(moments.seen)
        ended.sent = self._sent
        if not is_source:
            ended.version = state.version
            try:
                state.require_clean()
                ended.clean = True
                ended.left_wrong = endpoint.wrong(state.version)
            except EngineDirty:
                ended.clean = False
        return ended

    def _enter_part(self, part: int, window: str, order: Order, fault: _Fault | None) -> None:
        self.moments.begin(part, window)
        self.hooks.pop("slow", None)
        if order.slow_part == part:
            self.hooks["slow"] = lambda: time.sleep(_SLOW_S)
        if order.trial is not None and order.trial.kind is Kind.SIGNALLED:
            self.tell(Part(part))
        if fault is not None:
            fault.enter(part)

    def _made(self) -> Any:
        self._hook("make")
        return self.endpoint

    def _hook(self, method: str) -> None:
        act = self.hooks.get(method)
        if act is not None:
            act()
        slow = self.hooks.get("slow")
        if slow is not None and method in ("make", "prepare", "load_weights", "finish"):
            del self.hooks["slow"]
            slow()

    def _patch(self, owner: type, method: str, fixed: str = "") -> None:
        """Tell the moments of the window in which a method runs; that of a meeting is its topic."""
        original = getattr(owner, method)

        def told(called: Any, *args: Any, **kwargs: Any) -> Any:
            if method == "send_weights":
                self._sent.append(args[0])
            if method == "receive_weights":
                # Only now: until a refit writes, an engine holds what it had. A sparse one needs that.
                bulk = called._bulk
                sparse = bulk._deltas is not None and bulk._kind.sparse
                (self.endpoint.poison_misc if sparse else self.endpoint.poison)()
            window = fixed or args[0].split("/")[0]
            if not fixed and window not in ("begin", "follow", "commit", "ready", "settings"):
                return original(called, *args, **kwargs)
            with self.moments.within(window):
                return original(called, *args, **kwargs)

        self._patches.enter_context(mock.patch.object(owner, method, told))

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        self._in_library = True
        try:
            yield
        finally:
            self._in_library = False

    def _on_sigint(self, *_: object) -> None:
        if self._in_library:  # or it comes too late
            self._in_library = False  # once
            raise KeyboardInterrupt(INJECTED)


class _Fault:
    """What the victim does to itself."""

    def __init__(self, hand: Hand, order: Order, stack: ExitStack):
        assert order.trial is not None
        self._hand, self._order, self._trial = hand, order, order.trial
        self._rng = Random(self._trial.seed)
        self.rendezvous = order.rendezvous
        kind = self._trial.kind
        if kind in NETWORK:
            self._network = Network(order.rendezvous, order.timeout_s / 4)
            stack.callback(self._network.close)
            self.rendezvous = self._network.rendezvous
        if kind in ON_THE_WIRE:
            self._damage = stack.enter_context(OnTheWire(kind, order.rank, self._rng, self._flipped))
        if kind in BASES:
            self._bases = Bases(self._rng)
        if kind in FLIPS:
            is_source = order.rank < order.world[0]
            flips = Flips(order.rank, is_source=is_source, rng=self._rng, told=self._flipped)
            self._flips = stack.enter_context(flips)

    def is_unrecorded(self, part: int) -> bool:
        """Whether the step before a part is taken outside of a recording."""
        return self._trial.kind is Kind.UNRECORDED and part == self._trial.place[0]

    def enter(self, part: int) -> None:
        """A part of the session begins."""
        trial, hand = self._trial, self._hand
        hit, window = trial.place
        if trial.kind in BASES and part > 1:
            self._bases.look(hand.session)
        if part != hit:
            if part == hit + 1:
                for method in (trial.method, "prepare", "load_weights"):
                    hand.hooks.pop(method, None)
            return
        match trial.kind:
            case Kind.KILLED | Kind.FROZEN | Kind.PAUSED | Kind.INTERRUPTED | Kind.TWICE | Kind.BROKEN:
                hand.moments.watch((part, window), self._order.at, self._strike)
            case kind if kind in NETWORK:
                hand.moments.watch((part, window), self._order.at, self._spoil)
            case Kind.RAISED:
                if trial.method == "fragments" and part > 0:
                    move(hand.endpoint)  # which is what has the session ask for them
                calls = 1 + int(trial.fraction * 3) if trial.method in ("export", "load_weights") else 1
                self._left = calls
                hand.hooks[trial.method] = self._raise
            case kind if kind in CHANGES:
                weight, how = changed(hand.endpoint, CHANGES[kind], self._rng)
                if isinstance(hand.endpoint, Engine):
                    hand.endpoint.fence()
                hand.tell(Struck(time.monotonic(), f"{weight}: {how}", weight=weight))
            case kind if kind in FLIPS:
                self._flips.arm()
            case kind if kind in ON_THE_WIRE:
                self._damage.arm()
            case Kind.BASE | Kind.AHEAD:
                how = self._bases.spoil(hand.session, ahead=trial.kind is Kind.AHEAD)
                self._flipped(Flipped(how, trial.kind is Kind.BASE, (self._order.rank,), ("",)))
            case Kind.WRITTEN | Kind.UNSEEN:
                # Some of it always where no block lands, or what came would mend it.
                seen = trial.kind is Kind.WRITTEN
                version = self._order.versions[part - 1]
                how = [hand.endpoint.spoil(version, self._rng, seen=of) for of in sorted({seen, False})]
                # Before the refit that follows a dense one, and each of one that sleeps, an engine adds up its weights.
                due = seen or part == 2 or trial.sleeps
                self._flipped(Flipped(" and ".join(how), due, (self._order.rank,), ("",)))
            case Kind.UNRECORDED:
                hand.tell(Struck(time.monotonic(), f"before refit {part}"))
            case Kind.DIRTY | Kind.MOVED:
                hand.endpoint.poison()
                if trial.kind is Kind.DIRTY:
                    hand.state.mark_dirty(99)
                else:
                    move(hand.endpoint)
                    hand.endpoint.fence()
                hand.tell(Struck(time.monotonic(), f"before refit {part}"))

    def _strike(self, place: str) -> None:
        self._struck_at, self._struck_in = time.monotonic(), place
        self._hand.tell(Struck(self._struck_at, f"at {place}"))
        kind = self._trial.kind
        if kind is Kind.TWICE:
            # Somewhere in what the library does about the first one.
            self._hand.moments.watch(None, int(self._trial.way * _POINTS_OF_CLEARING_UP), self._strike_again)
        if kind in (Kind.INTERRUPTED, Kind.TWICE):
            raise KeyboardInterrupt(INJECTED)
        if kind is Kind.BROKEN:
            raise _ERRORS[self._trial.error](INJECTED)
        os.kill(os.getpid(), signal.SIGKILL if kind is Kind.KILLED else signal.SIGSTOP)

    def _strike_again(self, place: str) -> None:
        self._hand.tell(Struck(self._struck_at, f"at {self._struck_in}, and at {place}"))
        raise KeyboardInterrupt(INJECTED)

    def _spoil(self, place: str) -> None:
        self._hand.tell(Struck(time.monotonic(), f"at {place}"))
        self._network.go_bad(self._trial.kind, self._trial.way * self._order.timeout_s)

    def _raise(self) -> None:
        self._left -= 1
        if self._left:
            return
        del self._hand.hooks[self._trial.method]
        self._hand.tell(Struck(time.monotonic(), f"in {self._trial.method}"))
        raise _ERRORS[self._trial.error](INJECTED)

    def _flipped(self, flipped: Flipped) -> None:
        if self._trial.delta and not {*flipped.weights} <= {spec.name for spec in MISC}:
            # Once a dense refit leaves a base, sums over all bulk weights are compared, which name no weight.
            flipped = replace(flipped, due=flipped.due or self._trial.kind in FLIPS, weights=("",))
        due = "checked" if flipped.due else "not checked"
        self._hand.tell(Struck(time.monotonic(), f"{flipped.how}, {due}", flipped))


def _as_data(error: BaseException) -> Raised:
    told = type(error).__name__, str(error)
    if not isinstance(error, RefitError):
        return Raised(*told, False, str(error) == INJECTED)
    return Raised(*told, True, False, error.stage, error.rank, error.parameter, error.blamed)
