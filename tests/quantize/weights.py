"""Weights that quantizers find hard, and cuts of them."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import strategies as st

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@st.composite
def weights(
    draw: st.DrawFn,
    rows: st.SearchStrategy[int],
    columns: st.SearchStrategy[int],
    special: bool = True,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> torch.Tensor:
    """A matrix whose blocks differ in size by many powers of two, with zeros, equal blocks and denormals in it."""
    dtype = draw(st.sampled_from(dtypes))
    n, k = draw(rows), draw(columns)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    w = torch.randn(n, k, generator=generator)
    deepest = -12 if dtype is torch.float16 else draw(st.sampled_from((-3, -12, -40)))
    w *= torch.exp2(torch.randint(deepest, 3, (n, 1), generator=generator).float())
    w *= torch.exp2(torch.randint(deepest, 3, (1, k), generator=generator).float())
    w = w.to(dtype)
    tiniest = torch.finfo(dtype).smallest_normal / 4
    for value in draw(st.lists(st.sampled_from((0.0, -0.0, 1.75, -448.0, tiniest, 3.0)), max_size=4)):
        top, left = draw(st.integers(0, n - 1)), draw(st.integers(0, k - 1))
        w[top : top + draw(st.integers(1, n)), left : left + draw(st.integers(1, k))] = value
    if special:
        for value in draw(st.lists(st.sampled_from((float("nan"), float("inf"), float("-inf"))), max_size=2)):
            w[draw(st.integers(0, n - 1)), draw(st.integers(0, k - 1))] = value
    if draw(st.booleans()):
        w = w.t().contiguous().t()
    return w


def cuts(draw: st.DrawFn, size: int, unit: int = 1) -> list[tuple[int, int]]:
    """``size`` elements cut at up to three places that are multiples of ``unit``."""
    places = draw(st.lists(st.integers(0, size // unit), max_size=3, unique=True))
    edges = sorted({0, size, *(p * unit for p in places)})
    return list(pairwise(edges))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, but for what bits a NaN has."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.is_floating_point:
        nan = torch.isnan(a.float())
        if not torch.equal(nan, torch.isnan(b.float())):
            return False
        a, b = (t.clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in (a, b))
        nan = nan.repeat_interleave(a.shape[-1] // nan.shape[-1], -1) if nan.dim() and nan.shape[-1] else nan
        return bool(((a == b) | nan).all())
    return torch.equal(a, b)
