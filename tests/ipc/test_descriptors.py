"""File descriptors between processes, and who does not get them."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from rlrefit.integration.gpu_memory import descriptors as module
from rlrefit.integration.gpu_memory.descriptors import TOKEN_BYTES, DescriptorServer, fetch


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


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_every_reader_gets_all_descriptors_in_order_and_the_server_ends_after_the_last(
    files: list[Path],
) -> None:
    before = open_descriptors()
    server = serve(files, readers=2)
    for _ in range(2):
        assert read_all(server, 70) == [f"content {i}" for i in range(70)]
    server._thread.join(5)
    assert not server._thread.is_alive()
    server.close()
    assert open_descriptors() == before


def test_a_server_that_nobody_came_to_can_be_closed_twice(files: list[Path]) -> None:
    before = open_descriptors()
    server = serve(files)
    server.close()
    server.close()
    assert not server._thread.is_alive()
    assert open_descriptors() == before
    with pytest.raises(OSError):
        next(fetch(server.address, server.token, [(0, 1)], 1.0))


def test_a_stranger_without_the_token_gets_nothing_and_does_no_harm(
    files: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(files)
    with caplog.at_level(logging.WARNING), pytest.raises(OSError):
        list(fetch(server.address, "00" * TOKEN_BYTES, [(0, 1)], 5.0))
    assert "without the token" in caplog.text
    assert len(read_all(server, 70)) == 70
    server.close()


def test_a_reader_that_asks_for_too_much_or_breaks_off_does_not_keep_the_next_one_waiting(
    files: list[Path],
) -> None:
    server = serve(files)
    with pytest.raises(OSError):
        list(fetch(server.address, server.token, [(0, 71)], 5.0))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as half:
        half.connect("\0" + server.address)
        half.sendall(bytes.fromhex(server.token)[:5])
    assert len(read_all(server, 70)) == 70
    server.close()


def connect(server: DescriptorServer) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.settimeout(5.0)
    stranger.connect("\0" + server.address)
    return stranger


def test_silent_strangers_keep_no_reader_waiting(files: list[Path]) -> None:
    server = serve(files, timeout_s=60.0)
    with connect(server), connect(server) as half:
        half.sendall(bytes.fromhex(server.token)[:5])
        start = time.monotonic()
        assert len(read_all(server, 70)) == 70
        assert time.monotonic() - start < 1.0
    server.close()


def test_a_stranger_that_shows_no_token_is_dropped_soon(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TOKEN_WITHIN", 0.2)
    server = serve(files, timeout_s=60.0)
    with connect(server) as silent:
        assert silent.recv(1) == b""
    assert len(read_all(server, 70)) == 70
    server.close()


def test_another_users_process_is_dropped_before_anything_is_read(
    files: list[Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(files, timeout_s=60.0)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(module.os, "getuid", lambda: os.geteuid() + 1)
        start = time.monotonic()
        with connect(server) as other:
            assert other.recv(1) == b""
        assert time.monotonic() - start < 1.0
    assert "another user" in caplog.text
    assert len(read_all(server, 70)) == 70
    server.close()


def test_closing_breaks_off_whoever_is_being_served(files: list[Path]) -> None:
    before = open_descriptors()
    server = serve(files, readers=2, timeout_s=60.0)
    descriptors = fetch(server.address, server.token, [(0, 70)], 5.0)
    os.close(next(descriptors))
    with connect(server) as silent:
        start = time.monotonic()
        server.close()
        assert time.monotonic() - start < 1.0
        assert silent.recv(1) == b""
        with pytest.raises(OSError):
            close_all(descriptors)
    assert not server._attended
    assert open_descriptors() == before


def test_an_exporter_that_can_not_open_a_descriptor_is_an_error_for_its_reader(files: list[Path]) -> None:
    before = open_descriptors()
    files[40].unlink()
    server = serve(files)
    with pytest.raises(OSError):
        read_all(server, 70)
    server.close()
    assert open_descriptors() == before


def test_a_reader_that_stops_early_leaves_no_descriptor_open(files: list[Path]) -> None:
    before = open_descriptors()
    server = serve(files)
    descriptors = fetch(server.address, server.token, [(0, 70)], 5.0)
    os.close(next(descriptors))
    descriptors.close()  # type: ignore[attr-defined]
    server.close()
    assert threading.active_count() >= 1
    assert open_descriptors() == before
