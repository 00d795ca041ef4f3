"""The p2p transport on one GPU: a rank that sends to itself, through real buckets, streams and NCCL."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from .needs import needs

pytestmark = needs()


def refit_to_oneself(lanes: int, contiguous: bool, breaks: bool = False) -> None:
    """Send the weights ``a.i`` into the weights ``b.i``, three changed times; a fourth time may break off."""
    import torch.distributed as dist

    from rlrefit.integration.comm.torch_group import TorchGroup
    from rlrefit.integration.layout import Fragment, box_of
    from rlrefit.integration.plan import CHECKSUM_BYTES, LARGE_SEGMENT, Message, Plan, Segment, aligned
    from rlrefit.integration.records.clock import StageClock
    from rlrefit.integration.transport import P2PTransport

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    shapes = [(96, 40), (8192, 2100), (257, 31), (1, 7)] * 10
    sides: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
    for held in sides.values():
        for rows, columns in shapes:
            wide = torch.zeros(rows, columns + (0 if contiguous else 3), dtype=torch.bfloat16, device=device)
            held.append(wide[:, :columns])
    fragments = [
        Fragment(f"{side}.{i}", tuple(t.shape), box_of(t.shape), t)
        for side, held in sides.items()
        for i, t in enumerate(held)
    ]

    def messages(side: str) -> tuple[tuple[Message, ...], ...]:
        rounds = []
        for number, tensor in enumerate(sides[side]):
            segment = Segment(f"{side}.{number}", box_of(tensor.shape), 0, tensor.nbytes)
            bare = tensor.nbytes >= LARGE_SEGMENT
            nbytes = tensor.nbytes if bare else aligned(tensor.nbytes) + CHECKSUM_BYTES
            rounds.append((Message(0, 0, 2 * number, (segment,), nbytes, 0),))
        return tuple(rounds)

    plan = Plan(0, messages("a"), messages("b"), "", {})
    group = TorchGroup.open(dist.HashStore(), "loop", 0, 1, device, 20.0, lambda stage: None, lanes)
    transport = P2PTransport(group, 0, plan, "full")
    transport.bind(fragments)
    transport.connect([transport.describe()])
    clock = StageClock(device)
    for version in range(3):
        for a, b in zip(sides["a"], sides["b"], strict=True):
            a.normal_(version)
            b.fill_(float("nan"))
        clock.restart()
        result = transport.run(clock)
        assert result.verified_bytes == sum(t.nbytes for t in sides["a"])
        assert all(torch.equal(a, b) for a, b in zip(sides["a"], sides["b"], strict=True))
    assert (transport.staging_bytes < LARGE_SEGMENT) == contiguous
    if not breaks:
        transport.close()
        return

    def break_off() -> None:
        raise ZeroDivisionError

    # Some seconds, behind which all that the refit packs has to wait.
    torch.cuda._sleep(4 << 30)
    with pytest.raises(ZeroDivisionError):
        transport.run(clock, break_off)
    packed = torch.cuda.Event()
    packed.record(transport._pack.stream)  # type: ignore[attr-defined]
    assert not packed.query()
    transport.close(failed=True)
    assert packed.query(), "buckets were freed that kernels are about to write"


@pytest.mark.parametrize(("lanes", "contiguous"), [(1, False), (3, False), (2, True)])
def test_a_rank_that_sends_to_itself_gets_what_it_sent_and_exits(lanes: int, contiguous: bool) -> None:
    code = f"from tests.gpu.test_p2p_loopback import refit_to_oneself as r; r({lanes}, {contiguous})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_buckets_of_a_refit_that_breaks_off_are_freed_once_nothing_writes_them() -> None:
    code = "from tests.gpu.test_p2p_loopback import refit_to_oneself as r; r(2, False, breaks=True)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
