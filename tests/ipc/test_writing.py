"""When a sender writes, and that it always knows when its writes have ended. The GPU is played here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlrefit.integration.clock import StageClock
from rlrefit.integration.errors import RefitTimeout
from rlrefit.integration.packing import Strided
from rlrefit.integration.plan import Message, Plan, Segment
from rlrefit.integration.transport.ipc import lease, one_sided
from rlrefit.integration.transport.ipc import transport as module
from rlrefit.integration.transport.ipc.description import Allocation, Description, Inbox, Place, View
from rlrefit.integration.transport.ipc.transport import IpcTransport

PLAN = Plan(0, ((Message(0, 1, 0, (Segment("w", ((0, 4),), 0, 8),), 32, 0),),), ((),), "digest", {})
CLOCK = StageClock(torch.device("cpu"))


class Gpu:
    """Notes what a sender does, in order; one step may fail. Its work ends after so many looks."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fails_at = ""
        self.error: BaseException = RuntimeError("no launch")
        self.looks = 0

    def step(self, name: str) -> None:
        self.log.append(name)
        if name == self.fails_at:
            raise self.error

    def event(self, name: str = "earlier work") -> Any:
        def query() -> bool:
            self.looks -= 1
            if self.looks < 0:
                self.step(f"{name} ended")
            return self.looks < 0

        return SimpleNamespace(record=lambda stream: self.step(f"record {name}"), query=query)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(module, "ring", lambda address, number, stream: gpu.step(f"ring {number}"))
    return gpu


def sender(gpu: Gpu, timeout_s: float = 10.0) -> IpcTransport:
    one = IpcTransport(0, PLAN, "full", torch.device("cuda", 0), timeout_s, lambda stage: None, str)
    parts: dict[str, Any] = {
        "_stream": SimpleNamespace(wait_stream=lambda caller: gpu.step("follow the caller")),
        "_ended": gpu.event("writes"),
        "_copies": SimpleNamespace(launch=lambda: gpu.step("copy")),
        "_sent_proofs": SimpleNamespace(compute=lambda refit: gpu.step("prove")),
        "_tell": SimpleNamespace(launch=lambda: gpu.step("tell")),
        "_bells": [0],
        "_encoders": [],
    }
    for name, part in parts.items():
        setattr(one, name, part)
    return one


@pytest.mark.parametrize("fails_at", ["copy", "ring 1", "prove", "tell", "ring 2"])
@pytest.mark.parametrize("error", [RuntimeError("no launch"), KeyboardInterrupt()])
def test_writes_that_break_off_are_still_waited_for_before_memory_is_unmapped(
    gpu: Gpu, fails_at: str, error: BaseException
) -> None:
    one = sender(gpu)
    one.settle()
    gpu.fails_at, gpu.error = fails_at, error
    with pytest.raises(type(error)):
        one.run(CLOCK)
    assert gpu.log[-2:] == [fails_at, "record writes"]
    gpu.looks = 3
    peer: Any = SimpleNamespace(close=lambda: gpu.step("unmap"))
    one._imported.append(peer)
    one.close(failed=True)
    assert gpu.log[-3:] == ["record writes", "writes ended", "unmap"]


def test_a_sender_writes_once_its_gpu_has_done_what_was_enqueued_since_it_settled(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = sender(gpu)
    monkeypatch.setattr(one._lease, "use", lambda rank: gpu.step("lease"))
    one.settle()
    gpu.log.clear()
    gpu.looks = 3
    one.run(CLOCK)
    assert gpu.log[:5] == ["record earlier work", "earlier work ended", "lease", "follow the caller", "copy"]
    assert gpu.log[-2:] == ["record writes", "writes ended"]


def test_what_goes_aside_does_so_while_the_writes_are_under_way(gpu: Gpu) -> None:
    one = sender(gpu)
    one.settle()
    one.run(CLOCK, lambda: gpu.step("aside"))
    assert gpu.log.index("record writes") < gpu.log.index("aside") < gpu.log.index("writes ended")


def test_writes_are_waited_for_before_memory_is_unmapped_if_what_goes_aside_fails(gpu: Gpu) -> None:
    def fail() -> None:
        raise RuntimeError("the export broke")

    one = sender(gpu)
    one.settle()
    gpu.looks = 3
    with pytest.raises(RuntimeError, match="the export broke"):
        one.run(CLOCK, fail)
    peer: Any = SimpleNamespace(close=lambda: gpu.step("unmap"))
    one._imported.append(peer)
    one.close(failed=True)
    assert gpu.log[-3:] == ["record writes", "writes ended", "unmap"]


def test_a_sender_whose_gpu_is_busy_until_its_peers_give_up_writes_nothing(gpu: Gpu) -> None:
    one = sender(gpu, timeout_s=0.1)
    one.settle()
    gpu.looks = 1 << 40
    with pytest.raises(RefitTimeout, match="earlier work on its GPU"):
        one.run(CLOCK)
    assert "copy" not in gpu.log


def receiver(timeout_s: float, *, lent: bool = False) -> object:
    view = View(Place(0, 0), (2,), 2)
    inbox = Inbox((view,), Place(0, 1024), Place(0, 2048))
    memory = (Allocation(1 << 40, 4096, "ab" * 64),)
    return Description("another", "GPU-0", timeout_s, memory, inboxes={0: inbox}, lent=lent).to_json()


@pytest.fixture
def connect(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Callable[[IpcTransport, object], None]:
    memory = SimpleNamespace(bases=[0], close=lambda: gpu.step("unmap"))
    monkeypatch.setattr(one_sided, "ImportedMemory", lambda *_: memory)
    copies = SimpleNamespace(launch=lambda: gpu.step("copy"))
    for user in (module, one_sided):
        monkeypatch.setattr(
            user,
            "CopyTable",
            SimpleNamespace(build=lambda pairs, device: copies, of=lambda rows, device: copies),
        )

    def connect(one: IpcTransport, described: object) -> None:
        source = Strided.packed(0, (4,), 2)
        parts: dict[str, Any] = {
            "_bound_sends": {1: [(PLAN.sends[0][0], [source])]},
            "_sent_proofs": SimpleNamespace(
                sums=torch.zeros(1, 2, dtype=torch.int64), compute=lambda refit: None
            ),
        }
        for name, part in parts.items():
            setattr(one, name, part)
        one.connect([None, described])

    return connect


@pytest.mark.parametrize(("ours", "theirs", "allowed"), [(600.0, 60.0, 60.0), (60.0, 600.0, 60.0)])
def test_a_sender_writes_no_later_than_the_receiver_waits(
    gpu: Gpu,
    connect: Callable[[IpcTransport, object], None],
    monkeypatch: pytest.MonkeyPatch,
    ours: float,
    theirs: float,
    allowed: float,
) -> None:
    one = sender(gpu, ours)
    connect(one, receiver(theirs))
    now = 1000.0
    monkeypatch.setattr(lease, "time", SimpleNamespace(monotonic=lambda: now))
    one.settle()
    now += allowed - 1
    one.run(CLOCK)
    assert gpu.log.count("copy") == 2  # the checksums are told by a copy as well
    one.settle()
    now += allowed + 1
    with pytest.raises(RefitTimeout, match="late writes"):
        one.run(CLOCK)
    assert gpu.log.count("copy") == 2


@pytest.mark.parametrize("lent", [False, True])
def test_memory_that_its_owner_gives_back_is_unmapped_once_the_writes_have_ended(
    gpu: Gpu, connect: Callable[[IpcTransport, object], None], lent: bool
) -> None:
    one = sender(gpu)
    for _ in range(2):
        connect(one, receiver(60.0, lent=lent))
        assert not one.moved()
        one.settle()
        gpu.log.clear()
        gpu.looks = 3
        one.run(CLOCK)
        assert one.moved() is lent
        one.rest()
        assert gpu.log[-2:] == (["writes ended", "unmap"] if lent else ["record writes", "writes ended"])
        # As a new binding begins.
        one._on_loan = one._returned = False


def test_a_refit_that_breaks_off_returns_lent_memory_when_the_epoch_ends(
    gpu: Gpu, connect: Callable[[IpcTransport, object], None]
) -> None:
    one = sender(gpu)
    connect(one, receiver(60.0, lent=True))
    one.settle()
    gpu.fails_at = "copy"
    with pytest.raises(RuntimeError, match="no launch"):
        one.run(CLOCK)
    assert "unmap" not in gpu.log
    one.close(failed=True)
    assert gpu.log[-1] == "unmap"


def test_memory_that_is_lent_goes_back_before_a_first_refit_that_is_far(
    gpu: Gpu, connect: Callable[[IpcTransport, object], None]
) -> None:
    one = sender(gpu)
    connect(one, receiver(60.0, lent=True))
    one.rest()
    assert one.moved()
    assert gpu.log.count("unmap") == 1
    one.rest()
    assert gpu.log.count("unmap") == 1
