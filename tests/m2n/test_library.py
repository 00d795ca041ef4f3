"""Opening and closing ``nccl.m2n`` in a process, with a library whose calls may block or raise. The library itself runs on GPUs alone."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlrefit.integration.errors import RefitError, RefitTimeout
from rlrefit.integration.transport.m2n import Communicators, library

CPU = torch.device("cpu")
# Of a call that is to end: far above what it takes on a busy machine. One that is to block ends with the test.
LONG_S = 60.0


class Library:
    """Plays ``nccl.m2n`` and ``nccl.core``.

    Attributes:
        calls: as they were made.
        instead: what a call does in place of returning, by its name.
        pack_buffers: what the environment asked for as a handle was made.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.instead: dict[str, Callable[[], object]] = {}
        self.pack_buffers: list[str] = []
        self.m2n = SimpleNamespace(Handle=SimpleNamespace(create=self._handle))
        self.core = SimpleNamespace(
            UniqueId=SimpleNamespace(from_bytes=bytes),
            Communicator=SimpleNamespace(init=self._communicator),
            get_version=lambda: SimpleNamespace(
                libnccl=SimpleNamespace(version=SimpleNamespace(release=(2, 30, 7)))
            ),
        )

    def _call(self, name: str) -> None:
        self.calls.append(name)
        self.instead.get(name, lambda: None)()

    def _handle(self) -> Any:
        self.pack_buffers.append(os.environ[library._PACK_BUFFERS])
        self._call("create")
        return SimpleNamespace(destroy=lambda: self._call("destroy handle"))

    def _communicator(self, size: int, rank: int, unique: bytes) -> Any:
        self._call("init")
        return SimpleNamespace(
            abort=lambda: self._call("abort"), destroy=lambda: self._call("destroy communicator")
        )


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    monkeypatch.setitem(sys.modules, "nccl.m2n", found.m2n)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "nccl.core", found.core)  # type: ignore[arg-type]
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    monkeypatch.setattr(library, "_process", library._Process())
    monkeypatch.setattr(library, "_lock", threading.Lock())
    monkeypatch.setattr(library, "_RETURN_WITHIN", 0.1)
    monkeypatch.setattr(library, "_CLOSE_WITHIN", 0.1)
    return found


@pytest.fixture
def never(played: Library) -> Iterator[Callable[[], object]]:
    """A call that does not return before the test ends."""
    over = threading.Event()
    held: list[threading.Thread] = []

    def wait() -> None:
        held.append(threading.current_thread())
        over.wait()

    yield wait
    over.set()
    # What they go on with is this test's library: the next test has another, under the same name.
    for thread in held:
        thread.join(LONG_S)


def opened(timeout_s: float = LONG_S, lanes: int = 2, pack_bytes: int = 4096) -> Communicators:
    ids = [bytes(128)] * lanes
    return Communicators(ids, 0, 2, False, CPU, pack_bytes, timeout_s, lambda stage: None)


@pytest.mark.parametrize("call", ["create", "init"])
def test_opening_ends_in_time_where_a_call_of_the_library_never_returns(
    played: Library, never: Callable[[], object], call: str
) -> None:
    played.instead[call] = never
    start = time.monotonic()
    with pytest.raises(RefitTimeout) as raised:
        opened(timeout_s=0.1)
    assert time.monotonic() - start < LONG_S
    assert raised.value.stage == "connect"
    assert library._process.lost
    # Nor does what comes later wait for that call.
    assert played.calls.count(call) == 1
    assert "abort" not in played.calls


@pytest.mark.parametrize("call", ["destroy handle", "destroy communicator"])
def test_closing_ends_in_time_where_a_call_of_the_library_never_returns(
    played: Library, never: Callable[[], object], call: str
) -> None:
    communicators, others = opened(), opened()
    played.instead[call] = never
    communicators.close(failed=False)
    assert not library._process.lost, "what the others use is not given up"
    others.close(failed=False)
    assert library._process.lost
    others.close(failed=False)
    assert played.calls.count(call) == 1


@pytest.mark.parametrize("failed", [False, True])
def test_the_last_to_close_ends_the_handle_and_then_all_communicators(played: Library, failed: bool) -> None:
    first, second = opened(), opened()
    assert played.calls == ["init", "init", "create", "init", "init"]
    first.close(failed=failed)
    first.close(failed=failed)
    assert len(played.calls) == 5
    second.close(failed=False)
    ended = ["abort"] * 2 if failed else ["destroy communicator"] * 2
    assert played.calls[5:] == ["destroy handle", *ended, "destroy communicator", "destroy communicator"]
    opened().close(failed=False)
    assert played.calls.count("create") == 2
    assert library._PACK_BUFFERS not in os.environ


@pytest.mark.parametrize("call", ["destroy handle", "destroy communicator", "abort"])
def test_a_call_that_raises_as_the_library_is_closed_loses_nothing(played: Library, call: str) -> None:
    def refuse() -> None:
        raise RuntimeError("invalid usage")

    played.instead[call] = refuse
    opened().close(failed=call == "abort")
    assert len(played.calls) == 6, "all else is closed"
    assert not library._process.lost
    opened().close(failed=True)
    assert played.calls.count("create") == 2


def test_a_library_that_refuses_is_closed_and_can_be_opened_again(played: Library) -> None:
    def refuse() -> None:
        raise RuntimeError("invalid usage")

    played.instead["init"] = refuse
    with pytest.raises(RefitError) as raised:
        opened()
    assert raised.value.stage == "connect"
    assert played.calls == ["init"]
    del played.instead["init"]
    opened().close(failed=False)
    assert not library._process.lost


def lacks(pack_bytes: int, lanes: int) -> str:
    return library.unavailable(torch.device("cuda"), pack_bytes, lanes)


def test_what_the_first_has_opened_bounds_what_others_can_have_until_all_have_closed(played: Library) -> None:
    assert not lacks(8192, 64)
    first = opened(pack_bytes=4096, lanes=2)
    assert not lacks(4096, 2)
    assert "4096 bytes" in lacks(4097, 0)
    # Communicators that share memory would wait for each other: each has its own.
    assert not lacks(1024, 62)
    assert "64 communicators" in lacks(1024, 63)
    second = opened(pack_bytes=1024, lanes=3)
    assert (first.pack_bytes, second.pack_bytes) == (2 * 4096, 3 * 4096)
    first.close(failed=False)
    assert lacks(4097, 0)
    assert lacks(1024, 60), "a closed communicator's memory is freed with the handle"
    second.close(failed=False)
    assert not lacks(8192, 64)
    opened(pack_bytes=8192).close(failed=False)
    assert played.pack_buffers == ["4096:64", "8192:64"]
