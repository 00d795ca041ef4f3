"""Which kind of group joins the ranks of an epoch, from what they tell of their GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlrefit.integration.comm.opening import choose_delta_groups, choose_group, require_one_cumem
from rlrefit.integration.errors import RefitError, RefitMismatch
from rlrefit.integration.gpu_memory.availability import GpuFacts
from rlrefit.integration.transport import choose


def gpu(device: str, host: str = "h", lacks: str = "", reaches: tuple[str, ...] = ("A", "B")) -> GpuFacts:
    return GpuFacts(host, lacks, device, visible=("A", "B"), reaches=reaches)


CPU = GpuFacts("h", "its parameters are not on a GPU")


def of_process(fact: GpuFacts, name: str) -> GpuFacts:
    return replace(fact, process=name)


def of_nccl(release: str, device: str, host: str = "h") -> GpuFacts:
    return replace(gpu(device, host), nccl=release)


TRAINER, ENGINE = of_process(gpu("A"), "trainer"), of_process(gpu("A"), "engine")


@pytest.mark.parametrize(
    ("told", "asked", "kind", "why"),
    [
        ([gpu("A"), gpu("B")], False, "network", ""),
        ([CPU, CPU], False, "network", ""),
        ([gpu("A"), gpu("B", "other")], False, "network", ""),
        ([gpu("A"), gpu("B"), gpu("B")], False, "device", "refit ranks 1 and 2 share a GPU"),
        # Ranks of one process never wait for each other on the GPU.
        ([TRAINER, ENGINE, ENGINE], False, "host", ""),
        ([TRAINER, ENGINE], False, "device", ""),
        # Without CUDA IPC the buckets lie in host memory.
        ([gpu("A"), gpu("A", lacks="no cuda-bindings")], True, "host", "no cuda-bindings"),
        (
            [gpu("A"), gpu("A"), gpu("B", reaches=("B",))],
            True,
            "host",
            "refit rank 2 can't map GPU memory of refit rank 0",
        ),
        ([CPU, CPU], True, "host", "not on a GPU"),
        # NCCL would refuse them, and the memory of a host joins them.
        ([of_nccl("2.28.9", "A"), of_nccl("2.30.7", "B")], False, "device", "2.30.7 on refit rank 1"),
    ],
)
def test_the_group_goes_the_way_that_all_ranks_have(
    told: list[GpuFacts], asked: bool, kind: str, why: str
) -> None:
    choice = choose_group(told, asked=asked)
    assert choice.kind == kind
    assert why in choice.reason


def test_ranks_that_share_a_gpu_have_larger_buckets() -> None:
    """Each costs a change of turns between processes of one GPU."""
    shared, apart = [gpu("A"), gpu("B"), gpu("B")], [gpu("A"), gpu("B")]
    assert (
        choose_group(shared, asked=False).most_bucket_bytes
        > choose_group(apart, asked=True).most_bucket_bytes
    )


def test_two_ranks_of_a_gpu_beside_another_host_are_an_error_with_the_remedy() -> None:
    with pytest.raises(RefitError, match=r"share a GPU.*on 2 hosts.*a refit world for each host"):
        choose_group([gpu("A"), gpu("A"), gpu("B", "other")], asked=False)


def test_two_releases_of_nccl_on_two_hosts_are_an_error_with_the_remedy() -> None:
    with pytest.raises(RefitError, match=r"2\.28\.9 on refit rank 0 and 2\.30\.7.*on 2 hosts.*nvidia-nccl"):
        choose_group([of_nccl("2.28.9", "A"), of_nccl("2.30.7", "B", "other")], asked=False)


def test_the_reason_of_the_transport_tells_of_the_shared_gpu() -> None:
    shared = [gpu("A", lacks="no cuda-bindings"), gpu("A")]
    for asked in ("auto", "p2p", "golden"):
        name, reason = choose(asked, shared, 1)
        assert name == ("golden" if asked == "golden" else "p2p")
        assert reason.endswith("refit ranks 0 and 1 share a GPU, and NCCL takes no two ranks of one")
    assert "share" not in choose("auto", [gpu("A"), gpu("B")], 1)[1]


@pytest.mark.parametrize(("other", "refused"), [("0", False), ("", True), ("1", True)])
def test_ranks_of_one_host_need_one_nccl_cumem_enable(other: str, refused: bool) -> None:
    engine = replace(gpu("A"), nccl_cumem="0")
    trainer = replace(gpu("B"), nccl_cumem=other)
    require_one_cumem([engine, replace(trainer, host="another"), replace(trainer, lacks="no VMM"), CPU])
    if not refused:
        require_one_cumem([engine, trainer])
        return
    with pytest.raises(RefitMismatch, match="NCCL_CUMEM_ENABLE"):
        require_one_cumem([engine, trainer])


@pytest.mark.parametrize(
    ("told", "kinds"),
    [
        ([gpu("A"), gpu("B")], ["device", "network"]),
        # One kind is tried once.
        ([gpu("A"), gpu("A")], ["device"]),
        # NCCL could not join them.
        ([gpu("A"), replace(gpu("B"), nccl_cumem="0")], ["device"]),
        # Ranks of one process would wait for each other on the GPU.
        ([of_process(gpu("A"), "both"), of_process(gpu("B"), "both")], ["network"]),
    ],
)
def test_blocks_go_over_copy_engines_and_else_over_what_can_join_the_ranks(
    told: list[GpuFacts], kinds: list[str]
) -> None:
    found = choose_delta_groups(told, choose_group(told, asked=False))
    assert [choice.kind for choice in found] == kinds
