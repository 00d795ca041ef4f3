"""Float8 as bytes."""

from __future__ import annotations

import pytest
import torch

from rlrefit.integration.quantize import FLOAT8, as_bytes, from_bytes, is_float8


@pytest.mark.parametrize("name", FLOAT8)
def test_every_byte_of_every_kind_survives_as_a_view_with_its_strides(name: str) -> None:
    raw = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    typed = from_bytes(raw, name).t()[:, 3:9]
    assert str(typed.dtype) == f"torch.{name}"
    assert is_float8(typed.dtype)
    seen, told = as_bytes(typed)
    assert told == name
    assert (seen.data_ptr(), seen.stride()) == (typed.data_ptr(), typed.stride())
    assert torch.equal(seen, raw.t()[:, 3:9])


def test_all_float8_kinds_of_torch_are_known() -> None:
    kinds = {value for name, value in vars(torch).items() if name.startswith("float8_")}
    assert set(FLOAT8.values()) == kinds


def test_a_scalar_and_an_empty_tensor_are_viewed_too() -> None:
    for typed in (torch.ones(()).to(torch.float8_e5m2), torch.empty(0, 3).to(torch.float8_e5m2)):
        seen, name = as_bytes(typed)
        assert seen.shape == typed.shape
        assert from_bytes(seen, name).dtype == torch.float8_e5m2


def test_what_is_not_float8_is_refused() -> None:
    assert not is_float8(torch.bfloat16)
    with pytest.raises(ValueError, match=r"torch.bfloat16 is not a float8 dtype"):
        as_bytes(torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="'bfloat16' is not a float8 dtype; known: float8_e4m3fn"):
        from_bytes(torch.ones(2, dtype=torch.uint8), "bfloat16")
    with pytest.raises(ValueError, match=r"viewed from uint8, not from torch.int8"):
        from_bytes(torch.ones(2, dtype=torch.int8), "float8_e5m2")
