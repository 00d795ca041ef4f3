"""Sparse refits by what recorded steps have changed, without a base; threads over gloo."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.delta.path import SAMPLED_WITHIN
from rlrefit.integration.delta.recording import Recording
from rlrefit.integration.layout import Fragment
from rlrefit.integration.packing import Cast
from rlrefit.integration.session import RefitSession
from rlrefit.integration.weights.endpoints import Writes, writes_of
from rlrefit.workers.trainers.fsdp.mixin import FSDPRefitMixin
from tests.faults.weights import small_sections
from tests.refit.synthetic import FP32, held_by, move, run_world

from .scene import BULK, SPECS, Destination, Source, layout, refit, refits, world
from .scene import CONFIG as WITH_BASE

CONFIG = replace(WITH_BASE, delta_base="optimizer")
REFUSED = {"router": "MoE router"}
Write = Callable[[RefitSession, Any], None]


class Counting(Source):
    """One that tells torch's counts of writes."""

    def writes(self) -> Writes:
        return writes_of((name, storage) for (name, _), storage in self._held.items())


class Still(Source):
    """One whose weights never move."""

    def storage_key(self) -> None:
        return None


class Casting(Source):
    """One that keeps FP32 of what travels in fewer bits, as a mixed-precision optimizer does."""

    def __init__(self, rank: int, trainers: int):
        super().__init__(SPECS, layout(rank, trainers), REFUSED)
        held = self._held.items()
        self._held = {k: torch.zeros(s.shape, dtype=FP32) if s.itemsize == 2 else s for k, s in held}

    def fragments(self) -> tuple[list[Fragment], dict[str, str]]:
        held, refused = super().fragments()
        dtypes = {spec.name: spec.dtype for spec in SPECS}
        return [
            f if f.view.dtype == dtypes[f.name] else replace(f, encoding=Cast(dtypes[f.name])) for f in held
        ], refused


class Delaying(Source):
    """One that completes its weights late, as Megatron does with overlap_param_gather."""

    prepares_alone = False
    late: tuple[int, ...] = ()

    def set_version(self, version: int) -> None:
        self.version = version
        self.late = (version,)

    def prepare(self) -> None:
        super().prepare()
        for version in self.late:
            super().set_version(version)
        self.late = ()


def trained(kind: Any = Source) -> tuple[list[Any], list[Any]]:
    """Two trainers of a kind, and three engines."""
    if kind is Casting:
        return [Casting(rank, 2) for rank in range(2)], world()[1]
    return [kind(SPECS, layout(rank, 2), REFUSED) for rank in range(2)], world()[1]


def dense_refits(body: Any, config: RefitConfig = CONFIG, kind: Any = Source) -> list[int]:
    """Which of the refits that a body returns were dense, from 1 on; all of them have to be right, on all ranks."""
    found = []
    for result in run_world(*trained(kind), body, config):
        if isinstance(result, BaseException):
            raise result
        assert [wrong for _, wrong in result] == [[]] * len(result)
        found.append([number for number, (record, _) in enumerate(result, 1) if record.changed_share is None])
    assert all(one == found[0] for one in found)
    return found[0]


def between(write: Write) -> Callable[[int, RefitSession, Any], Any]:
    """Two refits, a trainer's ``write`` of version 3, its refit, and a last one."""

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        first = refits(1, 2)(rank, session, endpoint)
        if session.world.is_source:
            write(session, endpoint)
        third = session.refit(3), [] if session.world.is_source else endpoint.wrong(3)
        return [*first, third, refit(session, endpoint, 4)]

    return body


def step(session: RefitSession, endpoint: Any, version: int) -> None:
    with session.recording_changes():
        endpoint.set_version(version)


@pytest.mark.parametrize("kind", [Counting, Casting, Delaying])
def test_what_a_step_changed_lands_bit_for_bit(kind: Any) -> None:
    assert dense_refits(refits(1, 2, 3, 4), kind=kind) == [1]


def test_changes_of_several_steps_travel_together() -> None:
    def steps(session: RefitSession, endpoint: Any) -> None:
        for version in (7, 5, 3):
            step(session, endpoint, version)

    assert dense_refits(between(steps)) == [1]


def test_a_step_within_another_one_is_a_part_of_it() -> None:
    def nested(session: RefitSession, endpoint: Any) -> None:
        prepared: list[int] = []
        with pytest.MonkeyPatch.context() as patch, session.recording_changes():
            patch.setattr(endpoint, "prepare", lambda: prepared.append(endpoint.version))
            # As two optimizers, of which the outer one has written before the inner one does.
            for norm in norms(endpoint):
                norm.add_(1.0)
            with pytest.raises(ZeroDivisionError), session.recording_changes():
                raise ZeroDivisionError
            step(session, endpoint, 5)
            endpoint.set_version(3)
            assert not prepared
            patch.undo()

    assert dense_refits(between(nested), replace(CONFIG, verify="off"), Counting) == [1]


def test_a_mask_takes_a_small_share_of_the_bytes_that_are_sent() -> None:
    def body(rank: int, session: RefitSession, endpoint: Any) -> int:
        refits(1, 2)(rank, session, endpoint)
        return session.engine.base_bytes

    kept = run_world(*trained(), body, CONFIG)
    assert all(0 < bytes_of_rank < BULK / 10 for bytes_of_rank in kept[:2])
    assert kept[2:] == [0, 0, 0]


def test_blocks_that_find_no_room_travel_in_a_further_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Source, "share", 0.4)
    monkeypatch.setattr(Destination, "share", 0.4)
    with small_sections():
        assert dense_refits(refits(1, 2, 3)) == [1]


@pytest.mark.parametrize("verify", ["sampled", "full"])
def test_a_write_that_was_not_recorded_is_found_and_all_weights_are_sent_before_the_refit_commits(
    verify: str,
) -> None:
    def unrecorded(session: RefitSession, endpoint: Any) -> None:
        endpoint.set_version(3)

    assert dense_refits(between(unrecorded), replace(CONFIG, verify=verify)) == [1, 3]


def norms(endpoint: Any) -> list[torch.Tensor]:
    return [storage for (name, _), storage in held_by(endpoint).items() if name == "norm"]


@pytest.mark.parametrize("verify", ["sampled", "full"])
def test_a_write_beside_recorded_ones_is_found_once_its_section_is_read(
    verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        refits(1, 2)(rank, session, endpoint)
        if session.world.is_source:
            for norm in norms(endpoint):
                norm.add_(1.0)
        dense = []
        # All sections are read by each refit, or some in turns.
        for version in range(3, 3 + (2 if verify == "full" else SAMPLED_WITHIN)):
            if session.world.is_source:
                # It changes nothing.
                with session.recording_changes():
                    pass
            dense.append(session.refit(version).changed_share is None)
        return dense, [norm.tolist() for norm in norms(endpoint)]

    # Many sections of each stream.
    monkeypatch.setattr(RefitConfig, "bucket_bytes", 24 << 10)
    with small_sections():
        found = run_world(*trained(), body, replace(CONFIG, verify=verify))
    assert not any(isinstance(one, BaseException) for one in found), found
    held = [norm for _, norms_of_rank in found for norm in norms_of_rank]
    assert held[1:] == held[:-1]
    for dense, _ in found:
        assert sum(dense) == 1
        # It is in the last section, and others come before it in turns.
        assert dense[0] == (verify == "full")


def test_who_always_writes_outside_of_recorded_steps_is_found_by_the_first_sparse_refit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def body(rank: int, session: RefitSession, endpoint: Any) -> list[bool]:
        dense = []
        for version in (1, 2, 3):
            if session.world.is_source:
                with session.recording_changes():
                    pass
                for norm in norms(endpoint):
                    norm.add_(1.0)
            dense.append(session.refit(version).changed_share is None)
        return dense

    monkeypatch.setattr(RefitConfig, "bucket_bytes", 24 << 10)
    with small_sections():
        assert run_world(*trained(), body, CONFIG) == [[True, True, True]] * 5


def test_a_write_to_what_a_later_step_records_is_found_at_once() -> None:
    def written(session: RefitSession, endpoint: Any) -> None:
        for norm in norms(endpoint):
            norm.add_(1.0)
        step(session, endpoint, 3)

    with small_sections():
        assert dense_refits(between(written)) == [1, 3]


def test_a_counted_write_makes_the_refit_dense_from_the_start_and_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def loaded(session: RefitSession, endpoint: Any) -> None:
        step(session, endpoint, 3)
        if session.world.rank == 1:
            next(s for (name, _), s in held_by(endpoint).items() if name == "norm").mul_(1.0)

    moves: list[int] = []

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        result = between(loaded)(rank, session, endpoint)
        moves.append(session._moves)
        return result

    with caplog.at_level(logging.WARNING):
        assert dense_refits(body, kind=Counting) == [1, 3]
    assert {*moves} == {4}
    assert sum("norm was written" in record.getMessage() for record in caplog.records) == 1


def test_a_write_between_two_recorded_steps_is_counted_too() -> None:
    def loaded(session: RefitSession, endpoint: Any) -> None:
        step(session, endpoint, 5)
        endpoint.set_version(3)
        with session.recording_changes():
            pass

    off = replace(CONFIG, verify="off")
    assert dense_refits(between(loaded), off, Counting) == [1, 3]


def test_without_sums_a_refit_needs_a_recorded_step_to_be_sparse() -> None:
    off = replace(CONFIG, verify="off")
    assert dense_refits(between(lambda session, endpoint: endpoint.set_version(3)), off) == [1, 3]
    assert dense_refits(between(lambda session, endpoint: step(session, endpoint, 3)), off) == [1]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_step_without_room_for_a_copy_goes_on_and_the_refit_after_it_is_dense(
    lost: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def memory(self: Recording, nbytes: int) -> torch.Tensor:
        # As an allocator does: the bytes of the third version are not there.
        if self._source.version == 2 and self._source is sources[lost]:  # type: ignore[attr-defined]
            return original(self, 1 << 60)
        return original(self, nbytes)

    original = Recording._memory
    monkeypatch.setattr(Recording, "_memory", memory)
    sources, engines = trained()
    with caplog.at_level(logging.WARNING):
        for of_rank in run_world(sources, engines, refits(1, 2, 3, 4), CONFIG):
            assert [wrong for _, wrong in of_rank] == [[]] * 4
            assert [record.changed_share is None for record, _ in of_rank] == [True, False, True, False]
    assert sum("a step could not be recorded" in record.getMessage() for record in caplog.records) == 1


def test_a_step_that_ends_with_an_error_leaves_it_and_the_refit_after_it_is_dense() -> None:
    def broken(session: RefitSession, endpoint: Any) -> None:
        def write() -> None:
            with session.recording_changes():
                endpoint.set_version(3)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            write()

    assert dense_refits(between(broken), replace(CONFIG, verify="off")) == [1, 3]


@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_weights_that_move_are_followed(when: str) -> None:
    def moving(session: RefitSession, endpoint: Any) -> None:
        if when == "before":
            move(endpoint)
        with session.recording_changes():
            endpoint.set_version(3)
            if when == "within":
                move(endpoint)
        if when == "after":
            move(endpoint)

    assert dense_refits(between(moving), kind=Counting) == [1]


def test_an_engine_whose_weights_were_written_by_others_gets_all_of_them() -> None:
    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        found = refits(1, 2)(rank, session, endpoint)
        if session.world.rank == 4:
            endpoint.poison()
        return [*found, refit(session, endpoint, 3), refit(session, endpoint, 4)]

    assert dense_refits(body) == [1, 3]


def test_a_base_needs_no_recorded_step() -> None:
    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        if session.world.is_source:
            with session.recording_changes():
                pass
        return refits(1, 2)(rank, session, endpoint)

    assert dense_refits(body, WITH_BASE) == [1]


def test_a_worker_that_has_met_nobody_records_nothing() -> None:
    worker = FSDPRefitMixin()
    worker.refit_config = CONFIG
    with worker.recording_changes():
        pass


def test_weights_of_a_source_whose_key_is_none_are_recorded() -> None:
    assert dense_refits(refits(1, 2, 3), replace(CONFIG, verify="off"), Still) == [1]


def test_a_step_after_which_the_weights_could_not_be_read_counts_for_nothing() -> None:
    def unreadable(session: RefitSession, endpoint: Any) -> None:
        step(session, endpoint, 5)
        with pytest.MonkeyPatch.context() as patch:

            def write() -> None:
                with session.recording_changes():
                    endpoint.set_version(3)
                    patch.setattr(endpoint, "storage_key", lambda: 1 // 0)

            with pytest.raises(ZeroDivisionError):
                write()

    assert dense_refits(between(unreadable), replace(CONFIG, verify="off")) == [1, 3]


def test_without_sums_weights_that_moved_outside_of_a_step_may_have_been_written_there() -> None:
    def moving(session: RefitSession, endpoint: Any) -> None:
        step(session, endpoint, 5)
        endpoint.set_version(4)
        move(endpoint)
        step(session, endpoint, 3)

    def moving_within(session: RefitSession, endpoint: Any) -> None:
        with session.recording_changes():
            endpoint.set_version(3)
            move(endpoint)

    off = replace(CONFIG, verify="off")
    assert dense_refits(between(moving), off, Counting) == [1, 3]
    assert dense_refits(between(moving_within), off, Counting) == [1]


def test_weights_that_moved_in_inference_mode_are_followed() -> None:
    def moving(session: RefitSession, endpoint: Any) -> None:
        step(session, endpoint, 5)
        with torch.inference_mode():
            move(endpoint)
            step(session, endpoint, 3)
        move(endpoint)

    assert dense_refits(between(moving), kind=Counting) == [1]


@pytest.mark.parametrize("written", [False, True])
def test_a_refit_within_a_step_is_dense_and_so_is_the_one_after_it(written: bool) -> None:
    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        found = refits(1, 2)(rank, session, endpoint)
        if not session.world.is_source:
            return [*found, *((session.refit(version), endpoint.wrong(version)) for version in (3, 4, 5))]
        if written:  # what is known to be lost as the step begins
            endpoint.set_version(5)
        else:
            step(session, endpoint, 5)
        with session.recording_changes():
            endpoint.set_version(3)
            found.append((session.refit(3), []))
            endpoint.set_version(4)
        found.append((session.refit(4), []))
        return [*found, refit(session, endpoint, 5)]

    assert dense_refits(body, replace(CONFIG, verify="off"), Counting) == [1, 3, 4]


class Overtaken(Source):
    """One that is written by a recorded step of another thread while a refit is under way, once."""

    beside: Callable[[], None] | None = None

    def export(self, names: Any) -> Any:
        yield from super().export(names)
        beside, self.beside = self.beside, None
        if beside is not None:
            thread = threading.Thread(target=beside)
            thread.start()
            thread.join()


def test_a_step_in_another_thread_that_a_refit_does_not_wait_for_makes_the_next_one_dense() -> None:
    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        first = refits(1, 2)(rank, session, endpoint)
        if session.world.is_source:
            step(session, endpoint, 3)
            endpoint.beside = partial(step, session, endpoint, 5)
            session.refit(3)
            step(session, endpoint, 5)
            return [*first, (session.refit(5), [])]
        session.refit(3)
        return [*first, (session.refit(5), endpoint.wrong(5))]

    assert dense_refits(body, replace(CONFIG, verify="off"), Overtaken) == [1, 3]


def test_codes_that_the_trainer_makes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="delta_base"):
        replace(CONFIG, trainer_quantize_fp8=True)
    assert RefitConfig(delta_base="optimizer", trainer_quantize_fp8=True).delta == "off"
