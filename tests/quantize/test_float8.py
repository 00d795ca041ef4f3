"""Float8 as bytes."""

from __future__ import annotations

import pytest
import torch

from rlrefit.integration.quantize import as_bytes, from_bytes, is_float8


@pytest.mark.parametrize("name", [name for name in vars(torch) if name.startswith("float8_")])
def test_every_byte_of_every_kind_survives_as_a_view_with_its_strides(name: str) -> None:
    raw = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    typed = from_bytes(raw, name).t()[:, 3:9]
    assert typed.dtype is getattr(torch, name)
    assert is_float8(typed.dtype)
    seen, told = as_bytes(typed)
    assert told == name
    assert (seen.data_ptr(), seen.stride()) == (typed.data_ptr(), typed.stride())
    assert torch.equal(seen, raw.t()[:, 3:9])
    for shape in ((), (0, 3)):
        assert from_bytes(*as_bytes(torch.empty(shape, dtype=typed.dtype))).shape == shape


def test_what_is_not_float8_is_refused() -> None:
    assert not is_float8(torch.bfloat16)
    with pytest.raises(ValueError, match="bfloat16"):
        as_bytes(torch.ones(2, dtype=torch.bfloat16))
    for dtype, name in ((torch.uint8, "bfloat16"), (torch.int8, "float8_e5m2")):
        with pytest.raises(ValueError, match=name if dtype is torch.uint8 else "int8"):
            from_bytes(torch.ones(2, dtype=dtype), name)
