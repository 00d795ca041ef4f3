"""Whether an endpoint's storage has moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlrefit.integration.endpoints import storage_key


class Loud(torch.nn.Parameter):
    """A parameter that overrides every torch function, as vLLM's parameters do."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Loud.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def views_of_one_storage() -> list[torch.nn.Parameter]:
    storage = torch.zeros(12)
    return [torch.nn.Parameter(storage[4 * i : 4 * i + 4]) for i in range(3)]


def loud_parameters() -> list[torch.nn.Parameter]:
    return [Loud(torch.zeros(4)) for _ in range(3)]


@pytest.mark.parametrize("make", [views_of_one_storage, loud_parameters])
@pytest.mark.parametrize("which", range(3))
def test_a_key_changes_when_any_one_parameter_gets_another_storage(
    make: Callable[[], list[torch.nn.Parameter]], which: int
) -> None:
    parameters = make()
    before = storage_key(parameters)
    with torch.no_grad():
        parameters[which].add_(1)
    assert storage_key(parameters) == before
    kept = parameters[which].data  # or the new storage may get the old one's address
    parameters[which].data = kept.clone()
    assert storage_key(parameters) != before
    parameters[which].data = kept
    assert storage_key(parameters) == before


def test_a_key_changes_when_two_parameters_swap_their_storages() -> None:
    first, second, _ = parameters = views_of_one_storage()
    before = storage_key(parameters)
    first.data, second.data = second.data, first.data
    assert storage_key(parameters) != before


def test_a_key_asks_no_subclass_of_parameter_for_its_address() -> None:
    parameters = loud_parameters()
    Loud.calls = 0
    key = storage_key(parameters)
    assert Loud.calls == 0
    assert key == tuple(parameter.data_ptr() for parameter in parameters)
    assert Loud.calls == 3
