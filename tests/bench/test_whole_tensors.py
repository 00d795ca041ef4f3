"""Whole tensors of the peers: which weights stack, which regions ranks hold of them, and how they are stored."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrefit.integration.layout import Fragment, box_of, intersect, volume
from rlrefit.integration.transport.m2n import MeshSide, mesh_transfer
from rlrefit.integration.transport.whole_tensors import RegionStorage, by_weight, merged, whole_tensors
from rlrefit.integration.weights.manifest import TensorSpec

EXPERTS, ROWS, COLUMNS = 4, 6, 10


def experts(layers=1):
    return [
        TensorSpec(f"layers.{i}.mlp.experts.{e}.{p}.weight", (ROWS, COLUMNS), torch.bfloat16)
        for i in range(layers)
        for e in range(EXPERTS)
        for p in ("gate_proj", "down_proj")
    ]


def expert_parallel(specs, ranks, first=0):
    per_rank = EXPERTS // ranks
    return {
        first + r: {
            s.name: [box_of(s.shape)]
            for s in specs
            if r * per_rank <= int(s.name.split(".")[4]) < (r + 1) * per_rank
        }
        for r in range(ranks)
    }


def column_parallel(specs, ranks, first=0):
    step = ROWS // ranks
    return {
        first + r: {s.name: [((r * step, (r + 1) * step), (0, COLUMNS))] for s in specs} for r in range(ranks)
    }


def tensors_of(specs, held, wanted):
    return whole_tensors(specs, by_weight(held), by_weight(wanted))


def test_experts_of_a_layer_stack_and_other_weights_stand_alone():
    specs = [TensorSpec("norm", (COLUMNS,), torch.bfloat16), *experts(2)]
    held = {0: {s.name: [box_of(s.shape)] for s in specs}}
    tensors = tensors_of(specs, held, {1: held[0]})
    assert [t.label for t in tensors] == [
        "norm",
        *(f"layers.{i}.mlp.experts.*.{p}.weight" for i in (0, 1) for p in ("gate_proj", "down_proj")),
    ]
    assert tensors[0].shape == (COLUMNS,)
    assert tensors[1].shape == (EXPERTS, ROWS, COLUMNS)
    assert tensors[1].sources == {0: (((0, EXPERTS), (0, ROWS), (0, COLUMNS)),)}
    assert sum(t.nbytes for t in tensors) == sum(s.nbytes for s in specs)
    wanted = {1: {"norm": held[0]["norm"]}}  # and no other
    assert [t.label for t in tensors_of(specs, held, wanted)] == ["norm"]


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_merged_boxes_cover_the_same_elements_once(counts, data):
    cells = [tuple((i, i + 1) for i in place) for place in product(*(range(n) for n in counts))]
    chosen = data.draw(st.lists(st.sampled_from(cells), unique=True))
    boxes = merged(chosen)
    assert sum(volume(b) for b in boxes) == len(chosen)
    assert all(any(intersect(cell, b) == cell for b in boxes) for cell in chosen)
    if len(chosen) == len(cells):
        assert boxes == (box_of(counts),)


def fragments_of(boxes, make):
    found = {}
    for name, held in boxes.items():
        found[name] = [Fragment(name, (ROWS, COLUMNS), box, make(name, box)) for box in held]
    return found


def test_separate_experts_are_stacked_and_a_fused_parameter_is_one_strided_view():
    specs = [s for s in experts() if "gate" in s.name]
    held = expert_parallel(specs, 2)
    wanted = column_parallel(specs, 2, 2)
    (tensor,) = tensors_of(specs, held, wanted)
    values = torch.arange(EXPERTS * ROWS * COLUMNS).view(EXPERTS, ROWS, COLUMNS).to(torch.int32)
    separate = fragments_of(held[1], lambda name, box: values[int(name.split(".")[4])].clone())
    source = RegionStorage(tensor, tensor.sources[1][0], separate)
    assert source.view is None
    assert torch.equal(source.gather(), values[2:4])

    w13 = torch.zeros(EXPERTS, ROWS, COLUMNS, dtype=torch.int32)
    half = ROWS // 2
    fused = fragments_of(wanted[3], lambda name, box: w13[int(name.split(".")[4]), half:])
    destination = RegionStorage(tensor, tensor.destinations[3][0], fused)
    assert destination.view is not None
    landing = destination.receiving()
    assert landing.is_contiguous()
    landing.copy_(values[:, half:])
    destination.scatter(landing)
    assert torch.equal(w13[:, half:], values[:, half:])
    assert (w13[:, :half] == 0).all()


def test_a_weight_in_interleaved_pieces_is_gathered_and_scattered():
    spec = TensorSpec("q", (8, 3), torch.int32)
    boxes = [((0, 2), (0, 3)), ((2, 4), (0, 3))]
    (tensor,) = tensors_of([spec], {0: {"q": boxes}}, {1: {"q": boxes}})
    assert tensor.sources == {0: (((0, 4), (0, 3)),)}
    fused = torch.arange(24, dtype=torch.int32).view(8, 3)
    pieces = {"q": [Fragment("q", (8, 3), boxes[0], fused[0:2]), Fragment("q", (8, 3), boxes[1], fused[4:6])]}
    storage = RegionStorage(tensor, tensor.sources[0][0], pieces)
    assert torch.equal(storage.gather(), torch.cat([fused[0:2], fused[4:6]]))
    storage.scatter(torch.full((4, 3), -1, dtype=torch.int32))
    assert (fused[[0, 1, 4, 5]] == -1).all()
    assert (fused[[2, 3, 6, 7]] >= 0).all()


def transfer_of(shape, sources, destinations):
    spec = TensorSpec("w", shape, torch.bfloat16)
    (tensor,) = tensors_of(
        [spec],
        {r: {"w": boxes} for r, boxes in sources.items()},
        {r: {"w": boxes} for r, boxes in destinations.items()},
    )
    return mesh_transfer(tensor)


def test_even_shards_and_replicas_on_ranks_in_a_row_are_a_mesh():
    halves = [((0, 4), (0, 6))], [((4, 8), (0, 6))]
    sides = transfer_of(
        (8, 6), dict(enumerate(halves)), {2: halves[0], 3: halves[1], 4: halves[0], 5: halves[1]}
    )
    assert sides.source == MeshSide(0, (1, 2), 1, 0, (4, 6))
    assert sides.destination == MeshSide(2, (2, 2), 1, 0, (4, 6))
    grouped = transfer_of(
        (8, 6), dict(enumerate(halves)), {2: halves[0], 3: halves[0], 4: halves[1], 5: halves[1]}
    )
    assert grouped.destination == MeshSide(2, (2, 2), 0, 0, (4, 6))
    columns = [((0, 8), (0, 3))], [((0, 8), (3, 6))]
    assert transfer_of(
        (8, 6), {0: [((0, 8), (0, 6))]}, {1: columns[0], 2: columns[1]}
    ).destination == MeshSide(1, (1, 2), 1, 1, (8, 3))


def test_replicas_alone_are_a_sharding_axis_of_size_one():
    whole = [((0, 8), (0, 6))]
    sides = transfer_of((8, 6), {0: whole, 1: whole}, {2: whole})
    assert sides.source == MeshSide(0, (2, 1), 1, 0, (8, 6))


def test_what_no_mesh_expresses_has_a_reason():
    whole = [((0, 8), (0, 6))]
    assert "uneven" in (
        reason := transfer_of((8, 6), {0: [((0, 5), (0, 6))], 1: [((5, 8), (0, 6))]}, {2: whole})
    ) or ("no mesh" in reason)
    assert "do not follow" in transfer_of((8, 6), {0: whole}, {1: [((0, 4), (0, 6))], 3: [((4, 8), (0, 6))]})
    assert "several regions" in transfer_of((8, 6), {0: whole}, {1: [((0, 2), (0, 6)), ((4, 6), (0, 6))]})
    box = [((0, 2),) * 4]
    assert "4 dimensions" in transfer_of((2, 2, 2, 2), {0: box}, {1: box})
