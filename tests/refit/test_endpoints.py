"""Whether an endpoint's storage has moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlrefit.integration.weights.endpoints import storage_key


class Loud(torch.nn.Parameter):
    """A parameter that overrides every torch function, as vLLM's parameters do."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Loud.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def views_of_one_storage() -> list[torch.nn.Parameter]:
    storage = torch.zeros(12)
    return [torch.nn.Parameter(storage[4 * i : 4 * i + 4], requires_grad=False) for i in range(3)]


def loud_parameters() -> list[torch.nn.Parameter]:
    return [Loud(torch.zeros(4), requires_grad=False) for _ in range(3)]


@pytest.mark.parametrize("make", [views_of_one_storage, loud_parameters])
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize(
    "seen",
    [
        torch.clone,
        lambda t: t.as_strided((2, 2), (1, 2)),
        lambda t: t.view(torch.int32),
        lambda t: t.view(1, 4),
        lambda t: t[:3],
        lambda t: t.as_strided((4,), (0,)),
    ],
    ids=[
        "another storage",
        "other strides",
        "another dtype",
        "another shape",
        "a part",
        "one element for all",
    ],
)
def test_a_key_changes_when_any_one_parameter_lies_elsewhere_or_its_memory_is_seen_otherwise(
    seen: Callable[[torch.Tensor], torch.Tensor], which: int, make: Callable[[], list[torch.nn.Parameter]]
) -> None:
    parameters = make()
    kept = parameters[which].data  # or a new storage may get the old one's address
    for before in (kept, kept.view(2, 2)):
        parameters[which].data = before
        key = storage_key(parameters)
        parameters[which].add_(1)
        assert storage_key(parameters) == key
        parameters[which].data = seen(kept)
        assert storage_key(parameters) != key
        parameters[which].data = before
        assert storage_key(parameters) == key


def test_a_key_changes_when_two_parameters_swap_their_storages() -> None:
    first, second, _ = parameters = views_of_one_storage()
    before = storage_key(parameters)
    first.data, second.data = second.data, first.data
    assert storage_key(parameters) != before


def test_a_key_asks_no_subclass_of_parameter() -> None:
    parameters = loud_parameters()
    Loud.calls = 0
    storage_key(parameters)
    assert Loud.calls == 0
    assert parameters[0].dim() == 1
    assert Loud.calls
