"""The p2p transport over NCCL: overlapped rounds in lanes, relays, no staging; a silent rank does not hang it."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.spawn import free_port

from .needs import needs

pytestmark = needs(gpus=2)

ROWS, COLUMNS = 768, 512


def rank_main(rank: int, size: int, port: int, case: str, lanes: int, results: Any) -> None:
    """Report (rank, version, what is wrong, bytes verified or seconds) of each refit."""
    try:
        refit(rank, size, port, case, lanes, results)
    except Exception:
        results.put((rank, 0, traceback.format_exc(), 0))
        raise


def refit(rank: int, size: int, port: int, case: str, lanes: int, results: Any) -> None:
    import torch.distributed as dist

    from rlrefit.integration.errors import RefitError
    from rlrefit.integration.weights.manifest import TensorSpec
    from tests.p2p.worlds import Setting, contiguous, open_rank
    from tests.refit.synthetic import SyntheticDestination, SyntheticSource

    torch.cuda.set_device(rank)
    device = f"cuda:{rank}"
    half = size // 2
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=60))
    specs = [TensorSpec(f"w{i}", (ROWS, COLUMNS), torch.bfloat16) for i in range(40)]
    specs.append(TensorSpec("large", (36 * 1024, 512), torch.bfloat16))
    specs.append(TensorSpec("odd", (257, 31), torch.float32))

    def cut(shape: tuple[int, ...], dim: int, index: int) -> Any:
        step = -(-shape[dim] // half)
        box = [(0, n) for n in shape]
        box[dim] = (index * step, min((index + 1) * step, shape[dim]))
        return tuple(box)

    whole = {s.name: [tuple((0, n) for n in s.shape)] for s in specs}
    if rank < half:  # every weight on one trainer, whole
        held = {s.name: whole[s.name] for i, s in enumerate(specs) if i % half == rank}
        endpoint: Any = SyntheticSource(specs, held, device=device)
    else:  # columns of every other weight, or all of all
        wanted = {s.name: [cut(s.shape, i % 2, rank - half)] for i, s in enumerate(specs)}
        endpoint = SyntheticDestination(specs, whole if case == "relays" else wanted, device)
    if case != "gaps":
        contiguous(endpoint)
    setting = Setting(
        bucket_bytes=40 << 20 if case == "large" else 1 << 20,
        lanes=lanes,
        fan_out=case == "relays",
        timeout_s=4.0 if case == "silent" else 60.0,
    )
    opened = open_rank(rank, specs, endpoint, (half, size - half), store, setting)
    failed = False
    for version in (1, 2, 3):
        if case == "silent" and version == 2 and rank == size - 1:
            time.sleep(7)
            break
        start = time.monotonic()
        try:
            result, wrong = opened.refit(version)
        except RefitError as error:
            results.put((rank, version, f"{type(error).__name__}: {error}", time.monotonic() - start))
            failed = True
            break
        results.put((rank, version, wrong, result.verified_bytes))
    opened.transport.close(failed=failed or case == "silent")


def world_size() -> int:
    return min(4, torch.cuda.device_count()) // 2 * 2


def run_ranks(case: str, lanes: int, rows: int) -> list[Any]:
    """The ranks' first ``rows`` reports."""
    size = world_size()
    spawn = multiprocessing.get_context("spawn")
    results, port = spawn.Queue(), free_port()
    ranks = [spawn.Process(target=rank_main, args=(r, size, port, case, lanes, results)) for r in range(size)]
    for rank in ranks:
        rank.start()
    found: list[Any] = []
    try:
        while len(found) < rows:
            found.append(results.get(timeout=100))
            assert found[-1][1], f"rank {found[-1][0]}: {found[-1][2]}"
        return found
    finally:
        for rank in ranks:
            rank.join(8 if len(found) == rows else 0)
        hung = [r for r, process in enumerate(ranks) if process.is_alive()]
        for rank in ranks:
            rank.kill()
        assert not hung or len(found) < rows, f"ranks {hung} did not exit"


@pytest.mark.parametrize(("case", "lanes"), [("gaps", 1), ("gaps", 3), ("large", 2), ("relays", 2)])
def test_changed_refits_land_bit_for_bit(case: str, lanes: int) -> None:
    rows = run_ranks(case, lanes, 3 * world_size())
    assert [row for row in rows if row[2]] == []
    engines = [row for row in rows if row[0] >= world_size() // 2]
    assert all(verified > 0 for _, _, _, verified in engines)


def test_a_silent_rank_ends_in_a_timeout_on_the_others() -> None:
    rows = run_ranks("silent", 1, 2 * world_size() - 1)
    late = [row for row in rows if row[1] == 2]
    assert len(late) == world_size() - 1
    assert all(
        message.startswith(("RefitTimeout", "PeerLost")) and seconds < 10 for _, _, message, seconds in late
    )
