"""The double of SGLang's package and of an engine, for the tests that ask for them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from .engine_double import EngineDouble, modules
from .ways import WAYS, Driven, driven_in

Drive = Callable[..., Driven]


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    _play(monkeypatch)


def _play(monkeypatch: pytest.MonkeyPatch, sessions: bool = False) -> None:
    """Put the doubles in the place of SGLang, of which an engine in this process may have brought the real modules."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in modules(sessions).items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture(params=WAYS)
def drive_in_sessions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drive]:
    """As :func:`drive`, an SGLang that takes updates in sessions alone."""
    _play(monkeypatch, sessions=True)
    yield from _driving(request.param, sessions=True)


@pytest.fixture(params=WAYS)
def drive(request: pytest.FixtureRequest, sglang: None) -> Iterator[Drive]:
    """Starts an engine with other settings, to be driven in each of the ways."""
    yield from _driving(request.param)


@pytest.fixture
def drive_alone(sglang: None) -> Iterator[Drive]:
    """The same by blocking calls, for what does not depend on the way."""
    yield from _driving("blocking")


@pytest.fixture
def driven(drive: Drive) -> Driven:
    return _opened(drive)


@pytest.fixture
def alone(drive_alone: Drive) -> Driven:
    return _opened(drive_alone)


def _opened(drive: Drive) -> Driven:
    """While nothing runs, for which a driver that is opened would wait."""
    found = drive()
    found.refit = found.open()
    return found


def _driving(way: str, sessions: bool = False) -> Iterator[Drive]:
    with ExitStack() as stack:

        def drive(**settings: Any) -> Driven:
            return stack.enter_context(driven_in(way, EngineDouble(sessions, **settings)))

        yield drive
