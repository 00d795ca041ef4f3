"""When a sender writes, and that it always knows when its writes have ended. The GPU is played here."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlrefit.integration.clock import StageClock
from rlrefit.integration.plan import Message, Plan, Segment
from rlrefit.integration.transport.ipc import transport as module
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
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(module, "ring", lambda address, number, stream: gpu.step(f"ring {number}"))
    return gpu


def sender(gpu: Gpu, timeout_s: float = 10.0) -> IpcTransport:
    one = IpcTransport(0, PLAN, "full", torch.device("cuda", 0), timeout_s, lambda stage: None, str)
    parts: dict[str, Any] = {
        "_ended": gpu.event("writes"),
        "_copies": SimpleNamespace(launch=lambda: gpu.step("copy")),
        "_sent_proofs": SimpleNamespace(compute=lambda refit: gpu.step("prove")),
        "_tell": SimpleNamespace(launch=lambda: gpu.step("tell")),
        "_bells": [0],
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
