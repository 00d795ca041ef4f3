"""File descriptors between processes, and who does not get them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlrefit.integration.gpu_memory import descriptors as module
from rlrefit.integration.gpu_memory.descriptors import TOKEN_BYTES, DescriptorServer, fetch
from tests.ipc.test_memory import open_descriptors


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / str(i) for i in range(70)]
    for i, path in enumerate(paths):
        path.write_text(f"content {i}")
    return paths


def serve(files: list[Path], readers: int = 1, timeout_s: float = 5.0) -> DescriptorServer:
    return DescriptorServer(lambda i: os.open(files[i], os.O_RDONLY), len(files), readers, timeout_s)


def read_all(server: DescriptorServer, count: int) -> list[str]:
    found = []
    for descriptor in fetch(server.address, server.token, [(0, count)], 5.0):
        found.append(os.read(descriptor, 100).decode())
        os.close(descriptor)
    return found


def connect(server: DescriptorServer) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.settimeout(20.0)
    stranger.connect("\0" + server.address)
    return stranger


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    before = open_descriptors()
    yield
    assert open_descriptors() <= before


def test_every_reader_gets_all_descriptors_in_order_and_the_server_ends_after_the_last(
    files: list[Path],
) -> None:
    server = serve(files, readers=2)
    for _ in range(2):
        assert read_all(server, 70) == [f"content {i}" for i in range(70)]
    server._thread.join(20)
    assert not server._thread.is_alive()
    server.close()


def test_a_server_that_nobody_came_to_can_be_closed_twice(files: list[Path]) -> None:
    server = serve(files)
    server.close()
    server.close()
    assert not server._thread.is_alive()
    with pytest.raises(OSError):
        next(fetch(server.address, server.token, [(0, 1)], 1.0))


def ask_without_the_token(server: DescriptorServer) -> None:
    with pytest.raises(OSError):
        list(fetch(server.address, "00" * TOKEN_BYTES, [(0, 1)], 5.0))


def ask_for_too_much(server: DescriptorServer) -> None:
    with pytest.raises(OSError):
        [os.close(descriptor) for descriptor in fetch(server.address, server.token, [(0, 71)], 5.0)]


def break_off(server: DescriptorServer) -> None:
    with connect(server) as half:
        half.sendall(bytes.fromhex(server.token)[:5])


@pytest.mark.parametrize("do", [ask_without_the_token, ask_for_too_much, break_off])
def test_who_asks_for_what_it_must_not_have_or_breaks_off_gets_nothing_and_does_no_harm(
    files: list[Path], do: Callable[[DescriptorServer], None]
) -> None:
    server = serve(files)
    do(server)
    assert len(read_all(server, 70)) == 70
    server.close()


def test_silent_strangers_keep_no_reader_waiting_and_are_dropped_soon(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TOKEN_WITHIN", 2.0)
    server = serve(files, timeout_s=60.0)
    with connect(server) as silent, connect(server) as half:
        half.sendall(bytes.fromhex(server.token)[:5])
        start = time.monotonic()
        assert len(read_all(server, 70)) == 70
        assert time.monotonic() - start < 2.0
        assert silent.recv(1) == b""
    server.close()


def test_another_users_process_is_dropped_before_anything_is_read(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(files, timeout_s=60.0)
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "getuid", lambda: os.geteuid() + 1)
        start = time.monotonic()
        with connect(server) as other:
            assert other.recv(1) == b""
        assert time.monotonic() - start < 30.0
    assert len(read_all(server, 70)) == 70
    server.close()


def test_closing_breaks_off_whoever_is_being_served(files: list[Path]) -> None:
    server = serve(files, readers=2, timeout_s=60.0)
    descriptors = fetch(server.address, server.token, [(0, 70)], 5.0)
    os.close(next(descriptors))
    with connect(server) as silent:
        start = time.monotonic()
        server.close()
        assert time.monotonic() - start < 30.0
        assert silent.recv(1) == b""
        with pytest.raises(OSError):
            [os.close(descriptor) for descriptor in descriptors]
    assert not server._attended


def test_an_exporter_that_can_not_open_a_descriptor_is_an_error_for_its_reader(files: list[Path]) -> None:
    files[40].unlink()
    server = serve(files)
    with pytest.raises(OSError):
        read_all(server, 70)
    server.close()


def test_a_reader_that_stops_early_leaves_no_descriptor_open(files: list[Path]) -> None:
    server = serve(files)
    descriptors = fetch(server.address, server.token, [(0, 70)], 5.0)
    os.close(next(descriptors))
    descriptors.close()  # type: ignore[attr-defined]
    server.close()
