"""Checksums that are prepared refit by refit: what is gone is noticed before a refit begins, and no half is taken for whole."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from rlrefit.integration.errors import RefitError
from rlrefit.integration.packing import Cast, EncodedView, Strided
from rlrefit.integration.plan import Message, Segment
from rlrefit.integration.transport.ipc import checksums as module
from rlrefit.integration.transport.ipc.checksums import BoundMessage, MessageChecksums

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each table that was made, how many views it adds up; kernels need a GPU."""
    made: list[int] = []

    class Table:
        @staticmethod
        def build(views: list[object], device: torch.device, slots: list[int]) -> Table:
            made.append(len(views))
            return Table()

        def add_to(self, sums: torch.Tensor) -> None:
            pass

    monkeypatch.setattr(module, "ChecksumTable", Table)
    monkeypatch.setattr(module, "make_encoders", lambda pairs, device: [])
    return made


def bound(weights: list[torch.Tensor]) -> dict[int, list[BoundMessage]]:
    """A message for each weight, which is kept in FP32 and travels in BF16."""
    found = []
    for place, weight in enumerate(weights):
        box = tuple((0, n) for n in weight.shape)
        segment = Segment(f"w{place}", box, 0, weight.numel() * 2)
        message = Message(0, 1, place, (segment,), weight.numel() * 2 + 16, 0)
        found.append((message, [EncodedView(weight, Cast(torch.bfloat16), box)]))
    return {1: found}


def test_each_refit_prepares_what_it_checks_and_the_first_binding_everything(tables: list[int]) -> None:
    weights = [torch.ones(4, 4) for _ in range(3)]
    MessageChecksums(bound(weights), "sampled", CPU, ahead=True)
    assert len(tables) == 6  # of each message what is computed, and what is not
    tables.clear()
    later = MessageChecksums(bound(weights), "sampled", CPU, ahead=False)
    assert tables == []
    assert [later.compute(refit) for refit in (4, 4, 5)] == [32, 32, 32]
    assert len(tables) == 4


def test_a_weight_that_was_freed_before_its_sum_was_prepared_asks_for_a_new_binding() -> None:
    weights = [torch.ones(4, 4) for _ in range(3)]
    one = MessageChecksums(bound(weights), "sampled", CPU, ahead=False)
    one.prepare(0)
    weights[0] = torch.ones(4, 4)
    assert not one.expired(), "its sum is prepared, from addresses"
    weights[2] = torch.ones(4, 4)
    assert one.expired()
    with pytest.raises(RefitError, match="freed"):
        one.prepare(2)
    assert not MessageChecksums(bound(weights), "sampled", CPU, ahead=True).expired()


def test_what_broke_off_while_it_was_prepared_is_not_taken_for_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [torch.ones(4, 4)]
    one = MessageChecksums(bound(weights), "full", CPU, ahead=False)

    def fail(pairs: object, device: torch.device) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(module, "make_encoders", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory"):
            one.prepare(0)


def test_many_small_weights_are_computed_at_once_each_in_a_place_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[list[tuple[EncodedView, Strided]]] = []
    monkeypatch.setattr(module, "make_encoders", lambda pairs, device: calls.append(list(pairs)) or [])
    weights = [torch.ones(3 + place % 5, 7) for place in range(50)]
    one = MessageChecksums(bound(weights), "full", CPU, ahead=True)
    [together] = calls
    places = sorted((place.address, place.address + place.nbytes) for _, place in together)
    assert len(places) == 50
    assert all(end <= start for (_, end), (start, _) in pairwise(places))
    assert places[-1][1] - places[0][0] <= one.scratch_bytes
    # What does not fit together takes several steps: 40 bytes each, 48 with what aligns the next.
    calls.clear()
    monkeypatch.setattr(module, "CHECKED_AT_ONCE", 100)
    MessageChecksums(bound([torch.ones(4, 5) for _ in range(6)]), "full", CPU, ahead=True)
    assert [len(pairs) for pairs in calls] == [2, 2, 2]
