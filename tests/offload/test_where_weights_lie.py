"""What the transports do with weights that lie in host memory, or nowhere; without a GPU."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.delta import blocks
from rlrefit.integration.errors import PeerLost, RefitError
from rlrefit.integration.layout import Fragment
from rlrefit.integration.packing import make_checksums, make_copy
from rlrefit.integration.packing.copies import CpuCopies, JoinedCopies
from rlrefit.integration.packing.host import CopiesByHost, kernels_read
from rlrefit.integration.plan import Message, Plan, Segment
from rlrefit.integration.transport import bound_plan, checksums
from rlrefit.integration.transport.messages import LocalMessages
from rlrefit.integration.transport.storage import HostMemory, LiveViews
from rlrefit.integration.weights.manifest import TensorSpec
from tests.refit.synthetic import SyntheticDestination, SyntheticSource, refit_changed, run_world

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ROWS = 36 * 1024


def large(storage: torch.Tensor | None = None) -> tuple[Fragment, Plan]:
    """A weight that may travel without staging, and the plan of the trainer rank that sends it."""
    view = torch.zeros(ROWS, 512, dtype=torch.bfloat16) if storage is None else storage
    segment = Segment("w", ((0, ROWS), (0, 512)), 0, view.nbytes)
    plan = Plan(0, ((Message(0, 1, 0, (segment,), view.nbytes, 0),),), ((),), "", {})
    return Fragment("w", (ROWS, 512), ((0, ROWS), (0, 512)), view), plan


def test_host_memory_beside_a_gpu_is_watched_and_not_kept() -> None:
    for device in (CPU, GPU):
        held = torch.zeros(1024)
        memory = HostMemory([held[3:9]], device)
        assert not memory.moved()
        del held
        assert memory.moved() is (device is GPU)


def test_a_gpu_does_not_read_or_write_pageable_memory_by_itself() -> None:
    assert not kernels_read(torch.zeros(3))
    assert kernels_read(torch.zeros(3, 0))
    with pytest.raises(ValueError, match="pageable host memory"):
        make_checksums([(torch.zeros(2), 0)], GPU)
    with pytest.raises(ValueError, match="can't be written by cuda:0"):
        make_copy([(torch.zeros(2), torch.zeros(2))], GPU)


def test_what_the_host_copies_is_what_the_others_copy() -> None:
    views = [
        torch.randn(7, 9)[:, 2:5],
        torch.randn(64),
        torch.tensor(3.0),
        torch.randn(4, 6, 5).permute(2, 0, 1)[1:],
    ]
    targets = [torch.full(view.shape, float("nan")) for view in views]
    pairs = list(zip(views, targets, strict=True))
    copies = JoinedCopies([CopiesByHost([*pairs[:2], pairs[3]]), CpuCopies([pairs[2]])])
    for _ in range(2):
        copies.launch()
        assert all(torch.equal(a, b) for a, b in pairs)
        for view in views:
            view.mul_(-2)
    assert copies.nbytes == sum(view.nbytes for view in views)


def test_what_the_host_copies_is_not_kept_and_an_error_once_it_is_freed() -> None:
    source = torch.randn(5, 7)
    by_host = CopiesByHost([(source[1:3], torch.zeros(2, 7))])
    watched = weakref.ref(source)
    del source
    assert watched() is None
    with pytest.raises(RefitError, match=r"weight was freed after the refit had begun"):
        by_host.launch()


def test_a_storage_that_was_summed_can_be_freed_and_taken_back_as_before() -> None:
    held = torch.randn(64)
    make_checksums([(held[8:24], 0)], CPU).compute(torch.zeros(2, dtype=torch.int64))
    blocks.bits(held[8:24])
    held.untyped_storage().resize_(0)
    held.untyped_storage().resize_(256)


@pytest.mark.parametrize("verify", ["sampled", "full"])
def test_what_the_host_copies_is_added_up_in_its_bucket_and_verified(
    monkeypatch: pytest.MonkeyPatch, verify: str
) -> None:
    specs = [TensorSpec(f"w{i}", (33, 7), torch.bfloat16) for i in range(9)]
    whole = {spec.name: [((0, 33), (0, 7))] for spec in specs}
    source, destination = SyntheticSource(specs, whole), SyntheticDestination(specs, whole)
    pageable = [storage.data_ptr() for storage in source._held.values()][::2]
    # As if a GPU sent: every second weight is out of its kernels' reach.
    monkeypatch.setattr(bound_plan, "copied_by_host", lambda _, view: view.data_ptr() in pageable)
    added: list[torch.Tensor] = []

    def making(views: list[tuple[torch.Tensor, int]], *rest: object) -> object:
        added.extend(view for view, _ in views)
        return make_checksums(views, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(checksums, "make_checksums", making)

    def body(rank: int, session: object, endpoint: object) -> object:
        found = [refit_changed(session, endpoint, version) for version in (1, 2)]  # type: ignore[arg-type]
        if rank == 0:  # loaded and offloaded anew
            for key in list(source._held)[::2]:
                old = StorageWeakRef(source._held[key].untyped_storage())
                source._held[key] = source._held[key].clone()
                assert old.expired(), "two copies would be on the host"
            pageable.extend(storage.data_ptr() for storage in list(source._held.values())[::2])
        return [*found, refit_changed(session, endpoint, 3)]  # type: ignore[arg-type]

    config = RefitConfig(bucket_mb=1, timeout_s=20.0, verify=verify, transport="p2p")
    trainer, engine = run_world([source], [destination], body, config)
    assert isinstance(trainer, list), trainer
    assert isinstance(engine, list), engine
    assert [wrong for _, wrong in engine] == [[], [], []]
    assert sum(record.bytes_verified for record, _ in engine) >= 9 * 33 * 7 * 2
    assert not {view.data_ptr() for view in added} & set(pageable)


def test_a_large_weight_in_host_memory_is_staged_on_its_way_between_gpus() -> None:
    fragment, plan = large()
    messages = LocalMessages(plan)
    assert messages.direct(LiveViews([fragment], CPU)) == {*messages.sends[0]}
    assert messages.direct(LiveViews([fragment], GPU)) == set()


def test_an_engine_in_host_memory_beside_a_gpu_and_freed_storage_are_refused_by_name() -> None:
    fragment, _ = large()
    LiveViews([fragment], CPU).require_on_device()
    with pytest.raises(RefitError, match=r"lies on cpu.*parameter w"):
        LiveViews([fragment], GPU).require_on_device()
    fragment.view.untyped_storage().resize_(0)  # found before anything reads it
    with pytest.raises(RefitError, match=r"storage freed.*parameter w"):
        LiveViews([fragment], GPU)


@pytest.mark.parametrize("transport", ["p2p", "golden"])
def test_a_trainer_whose_storage_was_freed_ends_the_refit_on_all_ranks_and_names_the_weight(
    transport: str,
) -> None:
    specs = [TensorSpec(f"w{i}", (8, 6), torch.float32) for i in range(3)]
    whole = {spec.name: [((0, 8), (0, 6))] for spec in specs}
    source, destination = SyntheticSource(specs, whole), SyntheticDestination(specs, whole)

    def body(rank: int, session: object, endpoint: object) -> object:
        refit_changed(session, endpoint, 1)  # type: ignore[arg-type]
        if rank == 0:
            list(source._held.values())[1].untyped_storage().resize_(0)
        return session.refit(2)  # type: ignore[attr-defined]

    config = RefitConfig(bucket_mb=1, timeout_s=20.0, verify="full", transport=transport)
    trainer, engine = run_world([source], [destination], body, config)
    assert isinstance(trainer, RefitError)
    assert trainer.parameter == "w1"
    assert isinstance(engine, PeerLost)
    assert "w1" in str(engine)
    assert destination.wrong(1) == []
