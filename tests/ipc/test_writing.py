"""When a sender writes, and that it always knows when its writes have ended. The GPU is played here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlrefit.integration.comm import waiting
from rlrefit.integration.errors import RefitTimeout
from rlrefit.integration.gpu_memory.description import Allocation, Description, Place, Shared, View
from rlrefit.integration.packing import Strided
from rlrefit.integration.plan import Message, Plan, Segment
from rlrefit.integration.records.clock import StageClock
from rlrefit.integration.transport.ipc import transport as module
from rlrefit.integration.transport.ipc import waits
from rlrefit.integration.transport.ipc.signals import checksums_landed, data_landed, void
from rlrefit.integration.transport.ipc.transport import IpcTransport
from rlrefit.integration.transport.ipc.waits import Lease

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
    monkeypatch.setattr(module, "on_device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(module, "signal", lambda address, number, stream: gpu.step(f"signal {number}"))
    return gpu


def sender(gpu: Gpu, timeout_s: float = 10.0) -> IpcTransport:
    one = IpcTransport(0, PLAN, "full", torch.device("cuda", 0), timeout_s, lambda stage: None, str)
    parts: dict[str, Any] = {
        "_stream": SimpleNamespace(wait_stream=lambda caller: gpu.step("follow the caller")),
        "_ended": gpu.event("writes"),
        "_launches": [[SimpleNamespace(launch=lambda: gpu.step("copy"))]],
        "_sent_checksums": SimpleNamespace(
            prepare=lambda refit: gpu.step("prepare"),
            compute=lambda refit: gpu.step("sum"),
            expired=lambda: False,
        ),
        "_checksum_copies": SimpleNamespace(launch=lambda: gpu.step("tell")),
        "_signal_addresses": [0],
    }
    for name, part in parts.items():
        setattr(one, name, part)
    return one


LANDED, SUMS_LANDED, VOID = (f"signal {number(1)}" for number in (data_landed, checksums_landed, void))


@pytest.mark.parametrize("fails_at", ["copy", LANDED, "prepare", "sum", "tell", SUMS_LANDED, "misc"])
@pytest.mark.parametrize("error", [RuntimeError("no launch"), KeyboardInterrupt()])
def test_writes_that_break_off_are_still_waited_for_before_memory_is_unmapped(
    gpu: Gpu, fails_at: str, error: BaseException
) -> None:
    one = sender(gpu)
    one.synchronize()
    gpu.fails_at, gpu.error = fails_at, error
    gpu.looks = 3
    with pytest.raises(type(error)):
        one.run(CLOCK, lambda: gpu.step("misc"))
    assert {*gpu.log[-2:]} == {fails_at, "record writes"}
    gpu.log.clear()
    gpu.looks = 3
    peer: Any = SimpleNamespace(close=lambda: gpu.step("unmap"))
    one._imported[1] = peer
    one.close(failed=True)
    assert gpu.log == ["writes ended", "unmap"]


@pytest.mark.parametrize("ends", [True, False])
def test_what_a_sender_adds_up_for_those_that_read_it_is_waited_for_before_its_memory_becomes_anothers(
    gpu: Gpu, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[object] = []
    monkeypatch.setattr(waiting, "_left_running", kept)
    monkeypatch.setattr(module, "_DRAIN_WITHIN", 0.1)
    one = sender(gpu)
    # Nobody's memory is mapped here.
    one._signal_addresses, one._lent_addresses = [], [0]
    sums = one._sent_checksums
    one.synchronize()
    gpu.fails_at = "misc"
    with pytest.raises(RuntimeError, match="no launch"):
        one.run(CLOCK, lambda: gpu.step("misc"))
    assert "sum" in gpu.log
    gpu.log.clear()
    gpu.looks = 3 if ends else 1 << 30
    one.close(failed=True)
    assert gpu.log == ["writes ended"] * ends
    assert any(sums in left for left in kept) is not ends  # type: ignore[operator]


def test_a_sender_writes_once_its_gpu_has_done_what_was_enqueued_since_it_settled(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = sender(gpu)
    monkeypatch.setattr(one._lease, "use", lambda rank: gpu.step("lease"))
    one.synchronize()
    gpu.log.clear()
    gpu.looks = 3
    one.run(CLOCK, lambda: gpu.step("misc"))
    assert gpu.log[:5] == ["record earlier work", "earlier work ended", "lease", "follow the caller", "copy"]
    # The misc path runs while the writes are under way.
    assert gpu.log[-3:] == ["record writes", "misc", "writes ended"]


def test_a_sender_that_finds_its_weights_elsewhere_while_it_writes_says_that_it_wrote_nothing_of_worth(
    gpu: Gpu,
) -> None:
    one = sender(gpu)
    one._memory = SimpleNamespace(still_mapped=lambda: True)  # type: ignore[assignment]
    looks = iter([False, True])
    for is_void, signals in ((False, [LANDED, SUMS_LANDED]), (True, [f"signal {void(2)}"])):
        assert one.check_during_run(lambda: gpu.step("look") or next(looks))
        one.synchronize()
        gpu.log.clear()
        assert one.run(CLOCK, lambda: gpu.step("misc")).void is is_void
        # Bytes are on their way meanwhile, and the misc path sends the weights where they are now.
        assert gpu.log.index("copy") < gpu.log.index("look") < gpu.log.index("misc")
        assert [step for step in gpu.log if step.startswith("signal")] == signals
        assert ("sum" in gpu.log) is not is_void
    # Where the memory may be gone, it has to look before it writes.
    one._memory = SimpleNamespace(still_mapped=lambda: False)  # type: ignore[assignment]
    assert not one.check_during_run(lambda: gpu.step("look") or True)
    one.synchronize()
    gpu.log.clear()
    assert not one.run(CLOCK).void
    assert "look" not in gpu.log


def test_a_sender_whose_gpu_is_busy_until_its_peers_give_up_writes_nothing(gpu: Gpu) -> None:
    one = sender(gpu, timeout_s=0.1)
    one.synchronize()
    gpu.looks = 1 << 40
    with pytest.raises(RefitTimeout, match="earlier work on its GPU"):
        one.run(CLOCK)
    assert "copy" not in gpu.log


def receiver(timeout_s: float, *, sleeps: bool = False, handle: str = "") -> Any:
    view = View(Place(0, 0), (2,), 2)
    shared = Shared((view,), Place(1, 1024), Place(1, 2048))
    memory = (
        Allocation(1 << 40, 4096, handle, () if handle else (4096,), sleeps, () if sleeps else (7,)),
        Allocation(2 << 40, 4096, "ab" * 64, (), False, (8,)),
    )
    return Description("another", "GPU-0", timeout_s, memory, shared={0: shared}).to_json()


def test_a_lease_serves_one_refit_within_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: now))
    lease = Lease(10.0)
    for _ in range(2):
        lease.renew()
        now += 8
        lease.renew()
        now += 9.9
        lease.use(0)
    with pytest.raises(RefitTimeout):
        lease.use(0)
    lease.renew()
    now += 10.1
    with pytest.raises(RefitTimeout) as caught:
        lease.use(3)
    assert caught.value.rank == 3


class Mapped:
    """A peer's memory."""

    def __init__(self, gpu: Gpu, description: Description):
        self.gpu, self.bases = gpu, [0, 1 << 20]
        self.opened = len(description.allocations)
        gpu.step("map")

    def release(self) -> None:
        self.gpu.step("release")

    def close(self) -> None:
        self.gpu.step("unmap")


Connect = Callable[[IpcTransport, object], None]


@pytest.fixture
def connect(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Connect:
    monkeypatch.setattr(module, "ImportedMemory", lambda peer, *_: Mapped(gpu, peer))
    copies = SimpleNamespace(launch=lambda: gpu.step("copy"))
    table = SimpleNamespace(build=lambda pairs, device: copies, of=lambda rows, device: copies)
    monkeypatch.setattr(module, "CopyTable", table)
    held = {1: [(PLAN.sends[0][0], [Strided.packed(0, (4,), 2)])]}
    monkeypatch.setattr(module, "bind_messages", lambda sends, views: gpu.step("bound") or held)
    checksums = SimpleNamespace(
        sums=torch.zeros(1, 2, dtype=torch.int64),
        prepare=lambda refit: None,
        compute=lambda refit: None,
        expired=lambda: False,
    )
    monkeypatch.setattr(module, "MessageChecksums", lambda *_, ahead: checksums)
    return lambda one, described: one.connect([None, described])


@pytest.mark.parametrize(("ours", "theirs", "allowed"), [(600.0, 60.0, 60.0), (60.0, 600.0, 60.0)])
def test_a_sender_writes_no_later_than_the_receiver_waits(
    gpu: Gpu,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    ours: float,
    theirs: float,
    allowed: float,
) -> None:
    one = sender(gpu, ours)
    connect(one, receiver(theirs))
    now = 1000.0
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: now))
    one.synchronize()
    now += allowed - 1
    one.run(CLOCK)
    assert gpu.log.count("copy") == 2  # the checksums are told by a copy as well
    one.synchronize()
    now += allowed + 1
    with pytest.raises(RefitTimeout, match="late writes"):
        one.run(CLOCK)
    assert gpu.log.count("copy") == 2


@pytest.mark.parametrize("handle", ["", "cd" * 64])
@pytest.mark.parametrize("sleeps", [False, True])
def test_memory_that_its_owner_gives_back_is_let_go_of_once_the_writes_have_ended(
    gpu: Gpu, connect: Connect, sleeps: bool, handle: str
) -> None:
    one = sender(gpu)
    for _ in range(2):
        connect(one, receiver(60.0, sleeps=sleeps, handle=handle))
        assert not one.moved()
        one.synchronize()
        gpu.log.clear()
        gpu.looks = 3
        one.run(CLOCK)
        assert one.moved() is sleeps
        one.release()
        assert gpu.log[-2:] == (["writes ended", "release"] if sleeps else ["record writes", "writes ended"])
        # As a new binding begins.
        one._some_sleep = one._released = False


@pytest.mark.parametrize("changed", ["a peer's addresses", "a peer's signals", "this rank's weights"])
def test_what_comes_back_elsewhere_is_bound_anew(gpu: Gpu, connect: Connect, changed: str) -> None:
    one = sender(gpu)
    connect(one, receiver(60.0, sleeps=True))
    one.synchronize()
    one.run(CLOCK)
    one._released, one._unmoved = False, changed != "this rank's weights"
    after = receiver(60.0, sleeps=True)
    if changed == "a peer's addresses":
        after["allocations"][0]["base"] += 4096
    if changed == "a peer's signals":
        after["allocations"][1]["identity"] = [9]
    gpu.log.clear()
    connect(one, after)
    assert gpu.log[:3] == ["unmap", "bound", "map"]
