"""The loader trace on hand-made loaders: what is followed, what is refused, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrefit.integration.errors import RefitMismatch
from rlrefit.workers.engines.common.loader_trace.trace import LoaderTrace, trace_loader, view_box

BF16 = torch.bfloat16
Tensors = dict[str, torch.Tensor]
# Puts a tensor of this name into parameters.
Place = Callable[[Tensors, str, torch.Tensor], Any]


def _loader(place: Place, params: Tensors) -> Callable[[Iterable[tuple[str, torch.Tensor]]], None]:
    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            place(params, name, tensor)

    return load_weights


def _trace(place: Place, params: Tensors, **shapes: tuple[int, ...]) -> LoaderTrace:
    return trace_loader(
        _loader(place, params), params, [(name, shape, BF16) for name, shape in shapes.items()]
    )


def _meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _whole(params: Tensors, name: str, tensor: torch.Tensor) -> None:
    params["w"].copy_(tensor)


def _fused_halves(params: Tensors, name: str, tensor: torch.Tensor) -> None:
    half = tensor.shape[0] // 2
    params["w"].data.narrow(0, {"q": 0, "k": 4, "v": 6}[name], half).copy_(tensor.narrow(0, half, half))


def _chains_of_views(params: Tensors, name: str, tensor: torch.Tensor) -> None:
    part = tensor.unsqueeze(0).chunk(2, dim=1)[1].squeeze(0).permute(1, 0).t()
    params["w"][1].view(2, 2, 6)[0:1].reshape(2, 6).copy_(part)


def _stacked_experts(params: Tensors, name: str, tensor: torch.Tensor) -> None:
    params["w"][int(name[1])].narrow(0, 0 if name[0] == "g" else 3, 3).copy_(tensor)


def _replicated_head(params: Tensors, name: str, tensor: torch.Tensor) -> None:
    params["w"][:2].copy_(tensor)
    params["w"][2:].copy_(tensor)


def _assigned(params: Tensors, name: str, tensor: torch.Tensor) -> None:
    params["w"][2] = tensor


def _unpacked(params: Tensors, name: str, tensor: torch.Tensor) -> None:
    first, second = tensor.unbind(0)
    left, right = second.split([2, 4], dim=-1)
    params["v"].copy_(first)
    params["w"][:, 1:3].copy_(left)
    params["w"][:, 3:7].copy_(right)


def _padded(params: Tensors, name: str, tensor: torch.Tensor) -> None:
    params["w"][: len(tensor)].data.copy_(tensor)
    params["w"][len(tensor) :].data.fill_(0)


def _turned_round(params: Tensors, name: str, tensor: torch.Tensor) -> None:
    copied = tensor[:, :, 2:6].permute(0, 2, 1).contiguous()
    params["w"].copy_(copied[1:].clone())


def _copied_before_it_was_zeroed(params: Tensors, name: str, tensor: torch.Tensor) -> None:
    copied = tensor.clone()
    tensor.zero_()
    params["w"].copy_(copied)
    params["v"].copy_(tensor)


def _zeroed_before(params: Tensors, name: str, tensor: torch.Tensor) -> None:
    params["w"].zero_()
    params["w"][2:5].copy_(tensor)


def _joined(params: Tensors, name: str, tensor: torch.Tensor) -> None:
    """As latent attention's projections, which wait for each other."""
    waiting: Tensors = vars(params["w"]).setdefault("waiting", {})
    waiting[name] = tensor
    if waiting.keys() == {"a", "b"}:
        params["w"].copy_(torch.cat([waiting["a"].t(), waiting["b"]], dim=1).detach())


_EXPERTS = {f"{part}{expert}": (3, 5) for expert in range(4) for part in "gu"}
# The loader, shapes of parameters and of the checkpoint's tensors, and elements that no tensor brings.
FOLLOWED: dict[str, tuple[Place, dict[str, Any], dict[str, Any], int]] = {
    "a plain copy": (_whole, {"w": (4, 6)}, {"a": (4, 6)}, 0),
    "casts and copies that do nothing": (
        lambda p, _, t: p["w"].copy_(t.to(BF16).contiguous().reshape(4, 6)),
        {"w": (4, 6)},
        {"a": (4, 6)},
        0,
    ),
    "halves of fused rows": (_fused_halves, {"w": (8, 5)}, {"q": (8, 5), "k": (4, 5), "v": (4, 5)}, 0),
    "chains of views on both sides": (_chains_of_views, {"w": (2, 4, 6)}, {"a": (4, 6)}, 36),
    "a transposed parameter": (lambda p, _, t: p["w"].copy_(t.t()), {"w": (6, 4)}, {"a": (4, 6)}, 0),
    "stacked experts": (_stacked_experts, {"w": (4, 6, 5)}, _EXPERTS, 0),
    "a replicated head": (_replicated_head, {"w": (4, 3)}, {"k": (2, 3)}, 0),
    "assignment by index": (_assigned, {"w": (4, 3)}, {"a": (3,)}, 9),
    "unbind and split": (_unpacked, {"v": (3, 6), "w": (3, 8)}, {"a": (2, 3, 6)}, 6),
    "padding filled with zero": (_padded, {"w": (8, 6)}, {"a": (5, 6)}, 0),
    "copies in another order, and views of these": (_turned_round, {"w": (2, 4, 5)}, {"a": (3, 5, 8)}, 0),
    "two joined": (_joined, {"w": (4, 9)}, {"a": (6, 4), "b": (4, 3)}, 0),
    "parts of one joined the other way round": (
        lambda p, _, t: p["w"].copy_(torch.cat([t[2:], t[:2]])),
        {"w": (4, 6)},
        {"a": (4, 6)},
        0,
    ),
    "zeros made of what was copied": (
        _copied_before_it_was_zeroed,
        {"v": (4, 3), "w": (4, 3)},
        {"a": (4, 3)},
        0,
    ),
    "zeroing before the copies": (_zeroed_before, {"w": (8, 6)}, {"a": (3, 6)}, 0),
}


@pytest.mark.parametrize("case", FOLLOWED)
def test_what_a_loader_does_by_views_and_copies_is_replayed_bit_for_bit(case: str):
    """Traced on meta parameters, replayed into NaN, and compared with the loader itself run on the values."""
    place, parameters, shapes, unwritten = FOLLOWED[case]
    trace = _trace(place, {name: _meta(*shape) for name, shape in parameters.items()}, **shapes)
    assert trace.misc_reasons == {}
    assert trace.unwritten["w"] == unwritten
    values = {name: torch.randn(shape).to(BF16) for name, shape in shapes.items()}
    loaded, replayed = (
        {name: torch.full(shape, torch.nan, dtype=BF16) for name, shape in parameters.items()}
        for _ in range(2)
    )
    whole = {name: value.clone() for name, value in values.items()}
    _loader(place, loaded)(values.items())
    for name, landings in trace.landings.items():
        for landing in landings:
            landing.write(whole[name], replayed[landing.parameter])
    for name, expected in loaded.items():
        # What the loader fills by itself, such as padding, no tensor brings.
        come = ~expected.isnan() & (expected != 0)
        assert torch.equal(expected[come], replayed[name][come]), name
        assert torch.isnan(replayed[name][~come & (expected != 0)]).all()


@pytest.mark.parametrize(
    ("transform", "word"),
    [
        (lambda t: t + 1, "add"),
        (lambda t: t * 2, "mul"),
        (lambda t: -torch.exp(t), "exp"),
        (lambda t: t.float(), "_to_copy"),
        (lambda t: t.t().contiguous().view(24).view(4, 6), "view"),
        (lambda t: t[:2].zero_().unsqueeze(0).expand(2, 2, 6).reshape(4, 6), "zero_"),
        (lambda t: torch.cat([t[2:], torch.empty_like(t[:2].inner)]), "cat"),
        (lambda t: torch.cat([t, t])[2:6], "slice"),
        (lambda t: torch.cat([t[:2], torch.cat([t[2:3], t[3:]])]), "another kind"),
        (lambda t: t.flip(0), "flip"),
        (lambda t: t[[3, 2, 1, 0]], "index"),
        (lambda t: t.view(torch.float16), "view.dtype"),
        (lambda t: t.expand(4, 6), "expand"),
    ],
)
def test_what_is_no_pure_view_sends_the_tensor_to_misc_with_the_operation(transform, word):
    trace = _trace(lambda p, _, t: p["w"].copy_(transform(t)), {"w": _meta(4, 6)}, a=(4, 6))
    assert trace.landings["a"] == ()
    assert word in trace.misc_reasons["a"]
    assert trace.touched["a"] == {"w"}


def _changed_after(change: Callable[[torch.Tensor], Any]) -> Place:
    def place(params: Tensors, name: str, tensor: torch.Tensor) -> None:
        params["w"].copy_(tensor)
        change(params["w"])

    return place


@pytest.mark.parametrize(
    ("place", "parameter", "shape", "word"),
    [
        (_whole, _meta(4, 6, dtype=torch.float32), (4, 6), "float32"),
        (lambda p, _, t: p["w"].copy_(t.view(24)[3:21]), _meta(18), (4, 6), "no box"),
        (lambda p, _, t: p["w"][::2].copy_(t), _meta(8, 6), (4, 6), "no box"),
        (_whole, _meta(4, 6), (6,), "broadcast"),
        (_changed_after(lambda w: w[4:].zero_()), _meta(8, 6), (8, 6), "constant"),
        (_changed_after(lambda w: w.add_(1)), torch.zeros(4, dtype=BF16), (4,), "add_"),
    ],
    ids=[
        "another dtype",
        "a part of merged dimensions",
        "a step",
        "a broadcast",
        "a constant after",
        "arithmetic after",
    ],
)
def test_a_copy_that_is_no_box_of_what_came_goes_to_misc(place, parameter, shape, word):
    assert word in _trace(place, {"w": parameter}, a=shape).misc_reasons["a"]


def test_dimensions_that_the_loader_merges_are_followed() -> None:
    """As GPT-OSS's blocks of codes are rows of them in vLLM, of which a rank has some and pads the rest."""

    def place(params: Tensors, name: str, tensor: torch.Tensor) -> None:
        rows = tensor.view(2, 5, -1).contiguous()
        params["w"].data[:, :3, :8].copy_(rows[:, 1:4, 4:12])

    found = _trace(place, {"w": _meta(2, 4, 16)}, a=(2, 5, 3, 4))
    assert found.misc_reasons == {}
    [landing] = found.landings["a"]
    assert landing.box == ((0, 2), (1, 4), (1, 3), (0, 4))
    tensor, held = torch.arange(120.0).view(2, 5, 3, 4), torch.full((2, 4, 16), torch.nan)
    landing.write(tensor, held)
    assert torch.equal(held[:, :3, :8], tensor.view(2, 5, 12)[:, 1:4, 4:12])
    assert held.isnan().sum() == held.numel() - 2 * 3 * 8
    assert landing.box_in(held) == ((0, 2), (0, 3), (0, 8))


@pytest.mark.parametrize(
    ("read", "unknown"),
    [
        (lambda t: t.sum().item(), {"b"}),
        (lambda t: t.tolist(), {"b"}),
        (lambda t: bool(t[0] > 0), {"b"}),
        (lambda t: t.numpy(), {"b"}),
        (lambda t: t.mul_(2), set()),
    ],
)
def test_one_tensor_that_can_not_be_followed_does_not_spoil_its_neighbours(read, unknown):
    def place(params: Tensors, name: str, tensor: torch.Tensor) -> None:
        if name == "b":
            read(tensor)
        params[name].copy_(tensor)

    trace = _trace(place, {name: _meta(4) for name in "abc"}, a=(4,), b=(4,), c=(4,))
    assert set(trace.misc_reasons) == {"b"}
    assert trace.unknown == unknown
    assert len(trace.landings["a"]) == len(trace.landings["c"]) == 1


def test_a_copy_into_a_temporary_leaves_the_destination_unknown():
    def place(params: Tensors, name: str, tensor: torch.Tensor) -> None:
        temporary = _meta(4)
        temporary.copy_(tensor)
        params["w"].copy_(temporary)

    trace = _trace(place, {"w": _meta(4)}, a=(4,))
    assert "temporary" in trace.misc_reasons["a"]
    assert trace.unknown == {"a"}


@pytest.mark.parametrize(("held", "cast"), [(BF16, set()), (torch.float32, {"b"})])
def test_zeros_are_told_apart_from_a_tensor_that_does_not_come(held, cast):
    def place(params: Tensors, name: str, tensor: torch.Tensor) -> None:
        if name == "a":
            tensor.zero_()
        params["w"][0 if name == "a" else 3 :][:3].copy_(tensor)

    trace = _trace(place, {"w": _meta(6, 4, dtype=held)}, a=(3, 4), b=(3, 4))
    assert (trace.landings["a"], set(trace.misc_reasons), trace.unwritten) == ((), cast, {"w": 0})
    live = torch.full((6, 4), torch.nan)
    [zeros] = trace.zeros["a"]
    zeros.fill(live)
    assert not live[:3].any()
    assert live[3:].isnan().all()


def test_what_a_loader_makes_of_a_parameter_sends_all_that_fills_it_to_misc():
    derived = {}

    def place(params: Tensors, name: str, tensor: torch.Tensor) -> None:
        params[name].copy_(tensor)
        if name == "b":
            derived["b"] = params["b"].data[1:].exp()

    trace = _trace(place, {name: _meta(4) for name in "abc"}, a=(4,), b=(4,), c=(4,))
    assert set(trace.misc_reasons) == {"b"}
    assert "exp" in trace.misc_reasons["b"]
    placed = trace.placing(trace.again)
    assert (placed.misc_reasons, placed.landings["b"][0].parameter) == ({}, "b")


@pytest.mark.parametrize(
    "place",
    [
        lambda p, _, t: (p["w"][:4].copy_(t), p["w"].exp()),
        lambda p, _, t: (p["w"][:4].copy_(t), p["v"].copy_(p["w"][4:].exp())),
        lambda p, _, t: (p["v"].copy_(t.t()), p["v"].exp()),
    ],
    ids=["a part of a parameter", "into another parameter", "turned"],
)
def test_only_what_fills_a_parameter_as_it_is_can_be_loaded_again_from_there(place: Place):
    trace = _trace(place, {"w": _meta(8, 4), "v": _meta(4, 4)}, a=(4, 4))
    assert set(trace.misc_reasons) == {"a"}
    assert trace.again == {}


@pytest.mark.parametrize(
    ("held", "comes", "lands"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.float32, torch.float16, True),
        (torch.bfloat16, torch.float32, False),
        (torch.float16, torch.bfloat16, False),
        (torch.bfloat16, torch.float8_e4m3fn, False),
    ],
)
def test_what_comes_in_another_dtype_can_land_where_no_number_is_changed(held, comes, lands):
    parameters = {"w": _meta(6, 4, dtype=held)}
    trace = trace_loader(
        lambda weights: [parameters["w"][2:].copy_(t) for _, t in weights], parameters, [("a", (4, 4), comes)]
    )
    assert set(trace.misc_reasons) == {"a"}
    assert trace.landings["a"] == ()
    assert [(at.dtype, at.offset) for at in trace.wider.get("a", ())] == ([(comes, 8)] if lands else [])


def test_what_lands_in_a_buffer_goes_to_misc():
    held = {"a": _meta(4), "b": _meta(4), "c": _meta(4, dtype=torch.float32)}
    trace = _trace(lambda p, n, t: p[n].copy_(t), held, a=(4,), b=(4,), c=(4,)).leaving_buffers({"a"})
    assert set(trace.misc_reasons) == {"b", "c"}
    assert "buffer" in trace.misc_reasons["b"]
    assert len(trace.landings["a"]) == 1
    assert trace.landings["b"] == trace.landings["c"] == ()
    assert trace.wider == {}


def test_two_tensors_that_write_the_same_elements_both_go_to_misc():
    trace = _trace(
        lambda p, n, t: p["w"][0 if n == "a" else 1 :][:3].copy_(t), {"w": _meta(4, 6)}, a=(3, 6), b=(3, 6)
    )
    assert set(trace.misc_reasons) == {"a", "b"}
    assert "both write" in trace.misc_reasons["a"]


def test_what_is_computed_or_cast_counts_as_written_and_what_never_came_does_not():
    def place(params: Tensors, name: str, tensor: torch.Tensor) -> None:
        params["v"].add_(1)  # which brings it no values
        params["w"]["abc".index(name) * 2 :][:2].copy_(tensor * 2 if name == "a" else tensor)

    params = {"v": torch.zeros(4), "w": _meta(6, 4, dtype=torch.float32)}
    trace = _trace(place, params, a=(2, 4), b=(2, 4))
    assert set(trace.misc_reasons) == {"a", "b"}
    assert trace.unwritten == {"v": 4, "w": 8}


def test_a_tensor_that_the_loader_ignores_has_no_fragments_and_no_reason():
    trace = _trace(lambda p, n, t: n == "w" and p[n].copy_(t), {"w": _meta(4)}, w=(4,), remote=(4,))
    assert trace.landings["remote"] == ()
    assert trace.touched["remote"] == frozenset()
    assert trace.misc_reasons == {}


@pytest.mark.parametrize("shapes", [{"w": (4,), "bad": (4,)}, {"bad": (5,)}], ids=["name", "shape"])
def test_a_name_or_shape_that_the_loader_rejects_is_a_mismatch_by_name(shapes):
    with pytest.raises(RefitMismatch) as caught:
        _trace(lambda p, n, t: p[n if len(shapes) > 1 else "w"].copy_(t), {"w": _meta(4)}, **shapes)
    assert caught.value.parameter == "bad"


def test_live_parameters_are_not_written_by_a_trace():
    live = torch.full((4, 6), torch.nan, dtype=BF16)
    _trace(_whole, {"w": live}, a=(4, 6))
    assert live.isnan().all()


@settings(max_examples=150, deadline=None)
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


@settings(max_examples=150, deadline=None)
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
