"""What can't be moved as the bytes that lie in memory."""

from __future__ import annotations

import pytest
import torch

from rlrefit.integration.packing import CopyTable, Strided


@pytest.mark.parametrize(
    "lazy",
    [
        torch.ones(2, 3, dtype=torch.complex64).conj(),
        torch.ones(2, 3, dtype=torch.complex64).conj().imag,
    ],
)
def test_a_view_that_has_other_values_than_its_memory_is_refused(lazy: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="lazy conjugate or negative"):
        Strided.of(lazy)
    assert Strided.of(lazy.resolve_conj().resolve_neg()).nbytes == lazy.nbytes


def test_an_expanded_destination_is_refused_and_an_expanded_source_is_not_its_concern() -> None:
    expanded, whole = Strided.of(torch.zeros(1, 4).expand(3, 4)), Strided.of(torch.zeros(3, 4))
    with pytest.raises(ValueError, match="several elements share one place"):
        CopyTable.build([(whole, expanded)], torch.device("cpu"))
    assert expanded.repeats
    assert not whole.repeats
    assert not Strided.of(torch.zeros(1, 4).expand(1, 4)).repeats
