"""The loader trace on hand-made loaders: what is followed, what is refused, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrefit.integration.errors import RefitMismatch
from rlrefit.workers.engines.common.loader_trace.trace import LoaderTrace, trace_loader, view_box

BF16 = torch.bfloat16


def _loader(
    place: Callable[[str, torch.Tensor], None],
) -> Callable[[Iterable[tuple[str, torch.Tensor]]], None]:
    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            place(name, tensor)

    return load_weights


def _trace(
    place: Callable[[str, torch.Tensor], None],
    params: dict[str, torch.Tensor],
    **shapes: tuple[int, ...],
) -> LoaderTrace:
    return trace_loader(_loader(place), params, [(name, shape, BF16) for name, shape in shapes.items()])


def _replay(trace: LoaderTrace, params: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    for name, landings in trace.landings.items():
        for landing in landings:
            landing.write(values[name], params[landing.parameter])


def _values(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape).to(BF16) for name, shape in shapes.items()}


def _assert_replay_equals_loading(
    place_in: Callable[[dict[str, torch.Tensor]], Callable[[str, torch.Tensor], None]],
    param_shapes: dict[str, tuple[int, ...]],
    **shapes: tuple[int, ...],
) -> LoaderTrace:
    """Trace on meta parameters, replay into NaN, and compare with the loader itself run on the values."""
    meta = {name: torch.empty(shape, dtype=BF16, device="meta") for name, shape in param_shapes.items()}
    trace = _trace(place_in(meta), meta, **shapes)
    values = _values(**shapes)
    loaded = {name: torch.full(shape, torch.nan, dtype=BF16) for name, shape in param_shapes.items()}
    _loader(place_in(loaded))(values.items())
    replayed = {name: torch.full(shape, torch.nan, dtype=BF16) for name, shape in param_shapes.items()}
    _replay(trace, replayed, values)
    for name in param_shapes:
        assert torch.equal(loaded[name].view(torch.int16), replayed[name].view(torch.int16)), name
    return trace


def test_a_plain_copy_becomes_one_fragment_of_the_whole_tensor():
    trace = _assert_replay_equals_loading(lambda p: lambda n, t: p["w"].copy_(t), {"w": (4, 6)}, a=(4, 6))
    assert [landing.box for landing in trace.landings["a"]] == [((0, 4), (0, 6))]
    assert trace.unwritten == {"w": 0}


def test_fused_rows_and_a_tensor_parallel_slice_are_followed():
    def place_in(params):
        def place(name, tensor):
            row = {"q": 0, "k": 4, "v": 6}[name]
            half = tensor.shape[0] // 2
            params["qkv"].data.narrow(0, row, half).copy_(tensor.narrow(0, half, half))

        return place

    trace = _assert_replay_equals_loading(place_in, {"qkv": (8, 5)}, q=(8, 5), k=(4, 5), v=(4, 5))
    assert trace.landings["k"][0].box == ((2, 4), (0, 5))
    assert trace.unwritten == {"qkv": 0}


def test_chains_of_views_on_both_sides_are_followed():
    def place_in(params):
        def place(name, tensor):
            part = tensor.unsqueeze(0).chunk(2, dim=1)[1].squeeze(0).permute(1, 0).t()
            params["w"][1].view(2, 2, 6)[0:1].reshape(2, 6).copy_(part)

        return place

    trace = _assert_replay_equals_loading(place_in, {"w": (2, 4, 6)}, a=(4, 6))
    assert trace.landings["a"][0].box == ((2, 4), (0, 6))
    assert trace.unwritten == {"w": 36}


def test_a_transposed_parameter_gives_a_permuted_destination_view():
    trace = _assert_replay_equals_loading(lambda p: lambda n, t: p["w"].copy_(t.t()), {"w": (6, 4)}, a=(4, 6))
    assert trace.landings["a"][0].stride == (1, 4)


def test_stacked_experts_land_in_their_own_slices():
    def place_in(params):
        def place(name, tensor):
            expert, part = int(name[1]), name[0]
            rows = params["w13"][expert].narrow(0, 0 if part == "g" else 3, 3)
            rows.copy_(tensor)

        return place

    shapes = {f"{part}{e}": (3, 5) for e in range(4) for part in "gu"}
    trace = _assert_replay_equals_loading(place_in, {"w13": (4, 6, 5)}, **shapes)
    assert trace.unwritten == {"w13": 0}


def test_a_replicated_head_is_two_fragments_of_one_box():
    def place_in(params):
        def place(name, tensor):
            params["kv"][:2].copy_(tensor)
            params["kv"][2:].copy_(tensor)

        return place

    trace = _assert_replay_equals_loading(place_in, {"kv": (4, 3)}, k=(2, 3))
    assert [landing.offset for landing in trace.landings["k"]] == [0, 6]


def test_assignment_by_index_is_followed_like_a_copy():
    def place_in(params):
        def place(name, tensor):
            params["scales"][2] = tensor

        return place

    _assert_replay_equals_loading(place_in, {"scales": (4, 3)}, a=(3,))


def test_unpacking_with_unbind_and_split_is_followed():
    def place_in(params):
        def place(name, tensor):
            first, second = tensor.unbind(0)
            left, right = second.split([2, 4], dim=-1)
            params["a"].copy_(first)
            params["b"][:, 1:3].copy_(left)
            params["b"][:, 3:7].copy_(right)

        return place

    _assert_replay_equals_loading(place_in, {"a": (3, 6), "b": (3, 8)}, w=(2, 3, 6))


@pytest.mark.parametrize(
    ("transform", "word"),
    [
        (lambda t: t + 1, "add"),
        (lambda t: t * 2, "mul"),
        (lambda t: -torch.exp(t), "exp"),
        (lambda t: t.float(), "_to_copy"),
        (lambda t: t.t().contiguous().t(), "clone"),
        (lambda t: torch.cat([t[2:], t[:2]]), "cat"),
        (lambda t: t.flip(0), "flip"),
        (lambda t: t[[3, 2, 1, 0]], "index"),
        (lambda t: t.view(torch.float16), "view.dtype"),
        (lambda t: t.expand(4, 6), "expand"),
    ],
)
def test_what_is_no_pure_view_sends_the_tensor_to_misc_with_the_operation(transform, word):
    params = {"w": torch.empty(4, 6, dtype=BF16, device="meta")}
    trace = _trace(lambda n, t: params["w"].copy_(transform(t)), params, a=(4, 6))
    assert trace.landings["a"] == ()
    assert word in trace.misc_reasons["a"]
    assert trace.touched["a"] == {"w"}


def test_a_changed_dtype_is_named_in_the_reason():
    params = {"w": torch.empty(4, dtype=torch.float32, device="meta")}
    trace = _trace(lambda n, t: params["w"].copy_(t), params, a=(4,))
    assert "float32" in trace.misc_reasons["a"]
    assert "bfloat16" in trace.misc_reasons["a"]


def test_a_noop_cast_and_a_noop_contiguous_are_views():
    params = {"w": torch.empty(4, 6, dtype=BF16, device="meta")}
    trace = _trace(lambda n, t: params["w"].copy_(t.to(BF16).contiguous().reshape(4, 6)), params, a=(4, 6))
    assert trace.misc_reasons == {}


def test_merged_dimensions_are_no_box_and_go_to_misc():
    params = {"w": torch.empty(24, dtype=BF16, device="meta")}
    trace = _trace(lambda n, t: params["w"].copy_(t.view(24)), params, a=(4, 6))
    assert "no box" in trace.misc_reasons["a"]


def test_a_step_in_the_parameter_is_no_box_and_goes_to_misc():
    params = {"w": torch.empty(8, 6, dtype=BF16, device="meta")}
    trace = _trace(lambda n, t: params["w"][::2].copy_(t), params, a=(4, 6))
    assert "no box" in trace.misc_reasons["a"]


def test_a_broadcast_goes_to_misc():
    params = {"w": torch.empty(4, 6, dtype=BF16, device="meta")}
    trace = _trace(lambda n, t: params["w"].copy_(t), params, a=(6,))
    assert "broadcast" in trace.misc_reasons["a"]


def test_one_bad_tensor_does_not_spoil_its_neighbours():
    params = {name: torch.empty(4, dtype=BF16, device="meta") for name in "abc"}
    trace = _trace(lambda n, t: params[n].copy_(t * 2 if n == "b" else t), params, a=(4,), b=(4,), c=(4,))
    assert set(trace.misc_reasons) == {"b"}
    assert len(trace.landings["a"]) == len(trace.landings["c"]) == 1


@pytest.mark.parametrize(
    "read", [lambda t: t.sum().item(), lambda t: t.tolist(), lambda t: bool(t[0] > 0), lambda t: t.numpy()]
)
def test_a_loader_that_reads_values_condemns_that_tensor_only(read):
    params = {name: torch.empty(4, dtype=BF16, device="meta") for name in "abc"}

    def place(name, tensor):
        if name == "b":
            read(tensor)
        params[name].copy_(tensor)

    trace = _trace(place, params, a=(4,), b=(4,), c=(4,))
    assert set(trace.misc_reasons) == {"b"}
    assert trace.unknown == {"b"}
    assert len(trace.landings["c"]) == 1


def test_a_copy_into_a_temporary_leaves_the_destination_unknown():
    params = {"w": torch.empty(4, dtype=BF16, device="meta")}

    def place(name, tensor):
        temporary = torch.empty(4, dtype=BF16, device="meta")
        temporary.copy_(tensor)
        params["w"].copy_(temporary)

    trace = _trace(place, params, a=(4,))
    assert "temporary" in trace.misc_reasons["a"]
    assert trace.unknown == {"a"}
    assert trace.unwritten == {"w": 0}


def test_two_tensors_that_write_the_same_elements_both_go_to_misc():
    params = {"w": torch.empty(4, 6, dtype=BF16, device="meta")}
    trace = _trace(lambda n, t: params["w"][0 if n == "a" else 1 :][:3].copy_(t), params, a=(3, 6), b=(3, 6))
    assert set(trace.misc_reasons) == {"a", "b"}
    assert "both write" in trace.misc_reasons["a"]
    assert trace.unwritten == {"w": 0}


def test_what_is_computed_or_cast_counts_as_written_and_what_never_came_does_not():
    params = {"w": torch.empty(6, 4, dtype=torch.float32, device="meta")}

    def place(name, tensor):
        params["w"]["abc".index(name) * 2 :][:2].copy_(tensor * 2 if name == "a" else tensor)

    trace = _trace(place, params, a=(2, 4), b=(2, 4))
    assert set(trace.misc_reasons) == {"a", "b"}
    assert trace.unwritten == {"w": 8}


def test_arithmetic_on_a_parameter_brings_it_no_values():
    params = {name: torch.zeros(4, dtype=BF16) for name in "vw"}

    def place(name, tensor):
        params["v"].copy_(tensor)
        params["w"].add_(1)

    assert _trace(place, params, a=(4,)).unwritten == {"v": 0, "w": 4}


def test_arithmetic_on_the_parameter_condemns_what_was_copied_into_it():
    params = {"w": torch.zeros(4, dtype=BF16)}

    def place(name, tensor):
        params["w"].copy_(tensor)
        params["w"].add_(1)

    trace = _trace(place, params, a=(4,))
    assert "add_" in trace.misc_reasons["a"]


def test_padding_that_the_loader_fills_with_zero_counts_as_written():
    params = {"w": torch.empty(8, 6, dtype=BF16, device="meta")}

    def place(name, tensor):
        params["w"][: len(tensor)].data.copy_(tensor)
        params["w"][len(tensor) :].data.fill_(0)

    trace = _trace(place, params, a=(5, 6))
    assert trace.unwritten == {"w": 0}
    assert trace.misc_reasons == {}


def test_a_constant_over_copied_elements_condemns_the_tensor():
    params = {"w": torch.empty(8, 6, dtype=BF16, device="meta")}

    def place(name, tensor):
        params["w"].copy_(tensor)
        params["w"][4:].zero_()

    assert "constant" in _trace(place, params, a=(8, 6)).misc_reasons["a"]


def test_zeroing_before_the_copies_is_harmless():
    params = {"w": torch.empty(8, 6, dtype=BF16, device="meta")}

    def place(name, tensor):
        params["w"].zero_()
        params["w"][2:5].copy_(tensor)

    trace = _trace(place, params, a=(3, 6))
    assert trace.misc_reasons == {}
    assert trace.unwritten == {"w": 0}


def test_a_tensor_that_the_loader_ignores_has_no_fragments_and_no_reason():
    params = {"w": torch.empty(4, dtype=BF16, device="meta")}

    def place(name, tensor):
        if name == "a":
            params["w"].copy_(tensor)

    trace = _trace(place, params, a=(4,), remote=(4,))
    assert trace.landings["remote"] == ()
    assert trace.touched["remote"] == frozenset()
    assert trace.misc_reasons == {}


def test_a_name_that_the_loader_rejects_is_a_mismatch_by_name():
    params = {"w": torch.empty(4, dtype=BF16, device="meta")}

    def place(name, tensor):
        params[name].copy_(tensor)

    with pytest.raises(RefitMismatch, match=r"KeyError.*parameter stranger") as caught:
        _trace(place, params, w=(4,), stranger=(4,))
    assert caught.value.parameter == "stranger"


def test_a_shape_that_does_not_fit_is_a_mismatch_by_name():
    params = {"w": torch.empty(4, 6, dtype=BF16, device="meta")}
    with pytest.raises(RefitMismatch, match=r"\(4, 5\) cannot be copied into w"):
        _trace(lambda n, t: params["w"].copy_(t), params, a=(4, 5))


def test_live_parameters_are_not_written_by_a_trace():
    params = {"w": torch.randn(4, 6).to(BF16)}
    before = params["w"].clone()
    _trace(lambda n, t: params["w"].copy_(t), params, a=(4, 6))
    assert torch.equal(params["w"], before)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_view_box_holds_exactly_the_elements_of_the_view(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    base = torch.arange(torch.Size(shape).numel()).reshape(shape)
    view = base
    for d in range(view.dim()):
        start = data.draw(st.integers(0, view.shape[d] - 1))
        view = view.narrow(d, start, data.draw(st.integers(1, view.shape[d] - start)))
    view = view.permute(data.draw(st.permutations(range(view.dim()))))
    found = view_box(base.shape, base.stride(), view.storage_offset(), view.shape, view.stride())
    assert found is not None
    part = base[tuple(slice(a, b) for a, b in found.box)]
    assert sorted(part.flatten().tolist()) == sorted(view.flatten().tolist())
    stride = [1 if axis is None else view.stride(axis) for axis in found.axes]
    assert torch.equal(base.as_strided(part.shape, stride, view.storage_offset()), part)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_strided_view_is_either_no_box_or_the_right_one(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    base = torch.arange(torch.Size(shape).numel()).reshape(shape)
    size = data.draw(st.lists(st.integers(1, 4), min_size=0, max_size=3))
    stride = [data.draw(st.integers(0, 6)) for _ in size]
    reach = sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if reach >= base.numel():
        return
    view = base.as_strided(size, stride, data.draw(st.integers(0, base.numel() - 1 - reach)))
    found = view_box(base.shape, base.stride(), view.storage_offset(), view.shape, view.stride())
    if found is not None:
        part = base[tuple(slice(a, b) for a, b in found.box)]
        assert sorted(part.flatten().tolist()) == sorted(view.flatten().tolist())
