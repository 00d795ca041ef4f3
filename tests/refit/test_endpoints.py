"""Whether an endpoint's storage has moved."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rlrefit.integration.weights.endpoints import StorageLook, storage_key


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


Ask = Callable[[Sequence[torch.Tensor]], Hashable]


def look_without_guards() -> Ask:
    """As with a torch that lacks the class."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(torch._C._dynamo.guards, "TensorGuards")
        return StorageLook().key


def look_with_other_guards() -> Ask:
    """As with a torch whose class compares no strides."""

    class Others:
        def __init__(self, *held: torch.Tensor, dynamic_dims_sizes: Any, dynamic_dims_strides: Any):
            free = [[None] * len(strides) for strides in dynamic_dims_strides]
            self.check = guards(*held, dynamic_dims_sizes=dynamic_dims_sizes, dynamic_dims_strides=free).check

    guards: Any = torch._C._dynamo.guards.TensorGuards
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._C._dynamo.guards, "TensorGuards", Others)
        return StorageLook().key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_look_needs_no_default_dtype_of_the_process(dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        look, parameters = StorageLook(), views_of_one_storage()
        key = look.key(parameters)
        assert look.key(parameters) is key
        parameters[1].data = parameters[1].data.clone()
        assert look.key(parameters) != key
    finally:
        torch.set_default_dtype(before)


# Made for each test: a look remembers what it was shown.
ways = pytest.mark.parametrize(
    "way",
    [lambda: storage_key, lambda: StorageLook().key, look_without_guards, look_with_other_guards],
    ids=["all", "look", "look without guards", "look with other guards"],
)
kinds = pytest.mark.parametrize("make", [views_of_one_storage, loud_parameters])


@ways
@kinds
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
    seen: Callable[[torch.Tensor], torch.Tensor],
    which: int,
    make: Callable[[], list[torch.nn.Parameter]],
    way: Callable[[], Ask],
) -> None:
    parameters, ask = make(), way()
    kept = parameters[which].data  # or a new storage may get the old one's address
    for before in (kept, kept.view(2, 2)):
        parameters[which].data = before
        key = ask(parameters)
        for _ in range(2):
            parameters[which].add_(1)
            assert ask(parameters) == key
        parameters[which].data = seen(kept)
        for _ in range(2):
            assert ask(parameters) != key
        parameters[which].data = before
        assert ask(parameters) == key


@ways
def test_a_key_changes_when_two_parameters_swap_their_storages(way: Callable[[], Ask]) -> None:
    first, second, _ = parameters = views_of_one_storage()
    ask = way()
    before = ask(parameters)
    first.data, second.data = second.data, first.data
    assert ask(parameters) != before


@ways
def test_a_key_changes_when_tensors_come_or_go_and_holds_for_a_tensor_that_stands_twice(
    way: Callable[[], Ask],
) -> None:
    parameters, ask = views_of_one_storage(), way()
    parameters.append(parameters[0])
    for some in (parameters, parameters[:3], parameters[:2], [*parameters[:2], parameters[0]], []):
        key = ask(some)
        assert ask(some) == key
        assert ask([*some, parameters[2]]) != key
        assert ask(some) == key
    key = ask(parameters)
    parameters[0].data = torch.zeros(4)
    assert ask(parameters) != key


@ways
def test_a_key_does_not_depend_on_the_mode_in_which_it_is_asked_for(way: Callable[[], Ask]) -> None:
    parameters, ask = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)], way()
    with torch.inference_mode():
        parameters.append(torch.zeros(3))  # type: ignore[arg-type]
    key = ask(parameters)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            for _ in range(2):
                assert ask(parameters) == key
    parameters[3] = torch.nn.Parameter(torch.zeros(3))
    assert ask(parameters) != key


@ways
def test_a_key_asks_no_subclass_of_parameter(way: Callable[[], Ask]) -> None:
    parameters, ask = loud_parameters(), way()
    Loud.calls = 0
    for _ in range(3):
        ask(parameters)
    assert Loud.calls == 0
    assert parameters[0].dim() == 1
    assert Loud.calls


@pytest.mark.parametrize("which", [0, 511, 512, 1100, 1999])
def test_a_look_at_thousands_of_tensors_sees_each(which: int) -> None:
    parameters, look = [torch.nn.Parameter(torch.zeros(6)) for _ in range(2000)], StorageLook()
    key = look.key(parameters)
    assert look.key(parameters) == key
    kept = parameters[which].data
    for other in (kept.clone(), kept.view(2, 3)):
        parameters[which].data = other
        assert look.key(parameters) != key
    assert look.key(parameters[:-1]) != key
    parameters[which].data = kept
    assert look.key(parameters) == key


def test_a_look_keeps_no_tensor_and_no_objects_that_call_the_garbage_collector_up() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1 + i % 7, 2)) for i in range(2000)]
    storages = [StorageWeakRef(p.untyped_storage()) for p in parameters]
    look = StorageLook()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(3):
        look.key(parameters)
    assert len(gc.get_objects()) - before < 50
    parameters.clear()
    gc.collect()
    assert all(storage.expired() for storage in storages)
