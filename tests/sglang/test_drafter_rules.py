"""What a scheduler of SGLang does for a drafter beside its own code, with doubles of scheduler and requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from rlrefit.workers.engines.sglang.drafters import SESSION, _Buffers, _Session

SLEEP = SimpleNamespace(tags=["weights"])


class Drafter(torch.nn.Module):
    def __init__(self, shared: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("own", torch.arange(4.0))
        self.register_buffer("shared", shared)


def test_a_drafter_that_fell_asleep_before_it_was_known_wakes_up_without_its_buffers() -> None:
    served = Drafter(torch.zeros(1))
    drafter = Drafter(served.shared)
    buffers = _Buffers(drafter, served)
    with buffers.restored(SLEEP):
        drafter.own.zero_()
    assert not drafter.own.any()
    for _ in range(2):
        drafter.own.copy_(torch.arange(4.0))
        with buffers.kept(SLEEP):
            drafter.own.fill_(torch.nan)
        with buffers.restored(SLEEP):
            pass
        assert drafter.own.tolist() == [0, 1, 2, 3]


def test_a_session_stays_without_the_drafter_though_another_one_is_refused_meanwhile() -> None:
    updater: Any = SimpleNamespace(_session=None, draft_worker="drafter")
    session = _Session(updater)
    begin, end = SimpleNamespace(rid=SESSION), SimpleNamespace(rid=None)
    with session.begun(begin):
        assert updater.draft_worker is None
        updater._session = "open"
    with session.begun(begin):
        assert updater.draft_worker is None  # SGLang refuses it: one is open
    with session.ended(end):
        assert updater.draft_worker is None
        updater._session = None
    with session.begun(SimpleNamespace(rid="another's")):
        assert updater.draft_worker == "drafter"
