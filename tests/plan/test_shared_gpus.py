"""Plans of worlds in which trainers and engines share GPUs: what stays on a GPU is copied there and crosses no link."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlrefit.integration.plan import Topology, analyse
from rlrefit.integration.weights.manifest import TensorSpec
from tests.refit.synthetic import whole

from .worlds import Layouts, both_ends_agree, layouts, plans_of, run_plans

RATES = {"nvlink_gb_per_s": 300.0, "copy_gb_per_s": 1500.0}


# A single byte, which siblings can't share.
ONE_BYTE = Layouts([TensorSpec("w", (), torch.uint8)], [{"w": [()]}], [{}, {"w": [()]}, {"w": [()]}])


@example(world=ONE_BYTE, bucket=1300, fan_out=None)
@given(world=layouts(), bucket=st.integers(1300, 6000), fan_out=st.sampled_from([None, True]))
@settings(max_examples=60, deadline=None)
def test_what_a_neighbour_on_the_gpu_holds_comes_from_it_alone_and_every_byte_comes_once(
    world: Layouts, bucket: int, fan_out: bool | None
) -> None:
    sources, destinations = world.holdings()
    gpus = [f"GPU {i}" for side in (sources, destinations) for i in range(len(side))]
    topology = Topology.of_hosts([0] * len(gpus), gpus)
    analysis = analyse(
        world.specs, sources, destinations, bucket_bytes=bucket, topology=topology, fan_out=fan_out
    )
    plans = plans_of(analysis)
    results = run_plans(plans, world)
    for wanted, got in zip(world.destinations, results, strict=True):
        for name, boxes in wanted.items():
            asked = sum(int(np.prod([stop - start for start, stop in box])) for box in boxes)
            assert (got[name] >= 0).sum() == asked
    assert both_ends_agree(plans)
    assert len({plan.digest for plan in plans}) == 1
    assert analysis.bound_seconds <= analysis.predicted_seconds * (1 + 1e-9)
    for plan in plans[len(sources) :]:
        neighbour = plan.rank - len(sources)
        held = world.sources[neighbour] if neighbour < len(sources) else {}
        for message in (m for messages in plan.receives for m in messages if m.source != neighbour):
            for segment in message.segments:
                assert not any(
                    all(a <= x and y <= b for (x, y), (a, b) in zip(segment.box, box, strict=True))
                    for box in held.get(segment.name, [])
                )


SPECS = [TensorSpec(f"w{i}", (1024, 1024), torch.bfloat16) for i in range(64)]
HALVES = [{s.name: [((512 * i, 512 * (i + 1)), (0, 1024))] for s in SPECS} for i in range(2)]


def test_bytes_that_stay_take_the_time_of_a_copy_and_load_no_link() -> None:
    specs, world = SPECS, Layouts(SPECS, [whole(SPECS)] * 2, HALVES)
    kept = sum(s.nbytes for s in specs) // 2
    shared = Topology((0,) * 4, gpu_of=(0, 1, 0, 1), **RATES)
    analysis = analyse(specs, *world.holdings(), bucket_bytes=64 << 20, topology=shared)
    assert [(link.name, link.nbytes) for link in analysis.links] == [
        ("GPU 0 copy", kept),
        ("GPU 1 copy", kept),
    ]
    # Each of two rounds costs 30 us beside its bytes.
    assert analysis.predicted_seconds == pytest.approx(kept / 1500e9 + 2 * 30e-6)
    assert analysis.bound_seconds == pytest.approx(kept / 1500e9)
    apart = analyse(specs, *world.holdings(), bucket_bytes=64 << 20, topology=Topology((0,) * 4, **RATES))
    assert {link.name.split()[2] for link in apart.links} == {"NVLink"}
    assert apart.links[0].seconds == pytest.approx(kept / 300e9, rel=0.01)


def test_what_only_the_other_gpu_holds_crosses_nvlink_beside_what_stays() -> None:
    # Expert parallelism to tensor parallelism: each trainer holds half of the weights, each engine wants half of each.
    world = Layouts(SPECS, [whole(SPECS[i::2]) for i in range(2)], HALVES)
    topology = Topology((0,) * 4, gpu_of=(0, 1, 0, 1), **RATES)
    analysis = analyse(SPECS, *world.holdings(), bucket_bytes=64 << 20, topology=topology)
    quarter = sum(s.nbytes for s in SPECS) // 4
    assert {link.name: link.nbytes for link in analysis.links} == {
        **{f"rank {r} NVLink out": quarter for r in (0, 1)},
        **{f"rank {r} NVLink in": quarter for r in (2, 3)},
        **{f"GPU {g} copy": quarter for g in (0, 1)},
    }
    assert analysis.bound_seconds == pytest.approx(quarter / 300e9)
    assert analysis.busiest_link_ratio == pytest.approx(1.0)


def test_gpus_are_numbered_over_hosts_and_ranks_that_told_of_none_have_one_to_themselves() -> None:
    assert Topology.of_hosts(["a", "a", "b", "b"], ["x", "y", "x", "y"]).gpu_of == ()
    assert Topology.of_hosts(["a"] * 4, [""] * 4).gpu_of == ()
    shared = Topology.of_hosts(["a", "a", "a", "a"], ["x", "", "x", ""])
    assert shared.gpu_of == (0, 1, 0, 2)
    assert [int(shared.ways(np.int64(0), np.int64(rank))) for rank in range(4)] == [2, 1, 2, 1]


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"host_of": (0, 0), "gpu_of": (0,)}, "the GPUs of 1 ranks"),
        ({"host_of": (0, 1), "gpu_of": (0, 0)}, "different hosts on one GPU"),
        ({"host_of": (0, 0), "copy_gb_per_s": 0.0}, "copy_gb_per_s"),
    ],
)
def test_a_topology_that_cannot_be_is_refused_with_what_is_wrong(
    values: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        Topology(**values)  # type: ignore[arg-type]
