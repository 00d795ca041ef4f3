"""Which kind of group joins the ranks of an epoch, from what they tell of their GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlrefit.integration.comm.opening import choose_group
from rlrefit.integration.errors import RefitError
from rlrefit.integration.gpu_memory.availability import GpuFacts
from rlrefit.integration.transport import choose


def gpu(device: str, host: str = "h", lacks: str = "", reaches: tuple[str, ...] = ("A", "B")) -> GpuFacts:
    return GpuFacts(host, lacks, device, visible=("A", "B"), reaches=reaches)


CPU = GpuFacts("h", "its parameters are not on a GPU")


@pytest.mark.parametrize("told", [[gpu("A"), gpu("B")], [CPU, CPU], [gpu("A"), gpu("B", "other")]])
def test_ranks_with_a_gpu_each_or_none_go_over_the_network(told: list[GpuFacts]) -> None:
    assert choose_group(told, asked=False).kind == "network"


def test_two_ranks_of_a_gpu_go_through_its_memory() -> None:
    choice = choose_group([gpu("A"), gpu("B"), gpu("B")], asked=False)
    assert choice.kind == "device"
    assert choice.reason.startswith("refit ranks 1 and 2 share a GPU, and NCCL takes no two ranks of one")
    # Each bucket costs a change of turns between processes of one GPU.
    assert choice.most_bucket_bytes > choose_group([gpu("A"), gpu("B")], asked=True).most_bucket_bytes


def test_ranks_of_one_process_never_wait_for_each_other_on_the_gpu() -> None:
    told = [replace(gpu("A"), process=name) for name in ("trainer", "engine", "engine")]
    assert choose_group(told, asked=False).kind == "host"
    assert choose_group(told[:2], asked=False).kind == "device"


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ([gpu("A"), gpu("A", lacks="no cuda-bindings")], "no cuda-bindings"),
        ([gpu("A"), gpu("A"), gpu("B", reaches=("B",))], "refit rank 2 can't map GPU memory of refit rank 0"),
        ([CPU, CPU], "not on a GPU"),
    ],
)
def test_without_cuda_ipc_the_buckets_lie_in_host_memory(told: list[GpuFacts], why: str) -> None:
    choice = choose_group(told, asked=True)
    assert choice.kind == "host"
    assert why in choice.reason


def test_two_ranks_of_a_gpu_beside_another_host_are_an_error_with_the_remedy() -> None:
    with pytest.raises(RefitError, match=r"share a GPU.*on 2 hosts.*a refit world for each host"):
        choose_group([gpu("A"), gpu("A"), gpu("B", "other")], asked=False)


def test_the_reason_of_the_transport_tells_of_the_shared_gpu() -> None:
    shared = [gpu("A", lacks="no cuda-bindings"), gpu("A")]
    for asked in ("auto", "p2p", "golden"):
        name, reason = choose(asked, shared, 1)
        assert name == ("golden" if asked == "golden" else "p2p")
        assert reason.endswith("refit ranks 0 and 1 share a GPU, and NCCL takes no two ranks of one")
    assert "share" not in choose("auto", [gpu("A"), gpu("B")], 1)[1]
