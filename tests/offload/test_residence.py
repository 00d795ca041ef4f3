"""Where the parameters of an offloaded Megatron model are found."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from rlrefit.integration.errors import RefitError
from rlrefit.workers.trainers.offload import Residence

CPU, META = torch.device("cpu"), torch.device("meta")


@dataclass(frozen=True)
class Task:
    """What is used of Bridge's conversion tasks."""

    global_param_name: str
    param_weight: Any


@dataclass(eq=False)
class Buffer:
    """What is used of Megatron's buffers of parameters."""

    param_data: torch.Tensor | None
    param_data_cpu: torch.Tensor | None = None
    grad_data: torch.Tensor = field(default_factory=lambda: torch.zeros(40))
    params: list[torch.nn.Parameter] = field(default_factory=list)


@dataclass
class Chunk:
    """What is used of Megatron's DDP: two weights in one buffer, after a gap as alignment makes them."""

    buffers: list[Buffer] = field(init=False)
    expert_parallel_buffers: list[Buffer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.buffers = [Buffer(torch.arange(40.0))]
        data = self.buffers[0].param_data
        self.weights = [torch.nn.Parameter(data[4:16].view(3, 4)), torch.nn.Parameter(data[32:37])]
        self.weights[0].partition_dim = 1  # type: ignore[attr-defined]
        self.buffers[0].params = self.weights
        self._nbytes = data.untyped_storage().nbytes()

    def parameters(self) -> list[torch.nn.Parameter]:
        return self.weights

    def values(self) -> list[torch.Tensor]:
        return [weight.detach().clone() for weight in self.weights]

    @property
    def tasks(self) -> list[Task]:
        return [Task("a.weight", self.weights[0]), Task("b.weight", self.weights[1]), Task("remote", None)]

    def offload(self, way: str) -> None:
        buffer = self.buffers[0]
        if way in ("megatron", "both"):
            if buffer.param_data_cpu is None:
                buffer.param_data_cpu = buffer.param_data.clone()
            else:
                buffer.param_data_cpu.copy_(buffer.param_data)
        if way in ("verl", "both"):
            buffer.param_data.cpu_data = buffer.param_data.clone()  # type: ignore[attr-defined]
        self.free()

    def load(self) -> None:
        buffer = self.buffers[0]
        copy = buffer.param_data_cpu if buffer.param_data_cpu is not None else buffer.param_data.cpu_data  # type: ignore[attr-defined]
        buffer.param_data.untyped_storage().resize_(self._nbytes)
        buffer.param_data.copy_(copy)

    def wake(self, values: torch.Tensor) -> None:
        """Back from elsewhere, by a write that torch does not count."""
        self.buffers[0].param_data.untyped_storage().resize_(self._nbytes)
        self.buffers[0].param_data.data.copy_(values)

    def train(self) -> None:
        """A step, whose writes of parameters torch does not count, as Megatron's optimizers do."""
        self.buffers[0].grad_data.zero_()
        for weight in self.weights:
            weight.data.add_(1000)

    def free(self) -> None:
        self.buffers[0].param_data.untyped_storage().resize_(0)


def read(residence: Residence, chunk: Chunk) -> list[torch.Tensor]:
    """The weights that a refit would find."""
    return [task.param_weight for task in residence.tasks(chunk.tasks)[:2]]


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("way", ["megatron", "verl"])
def test_freed_parameters_are_read_from_their_buffers_host_copy(way: str) -> None:
    chunk = Chunk()
    values = chunk.values()
    residence = Residence([chunk], CPU)
    assert residence.key() == ()
    assert [id(weight) for weight in read(residence, chunk)] == [id(weight) for weight in chunk.weights]
    chunk.offload(way)
    assert residence.key() != ()
    found = residence.tasks(chunk.tasks)
    assert equal([task.param_weight for task in found[:2]], values)
    assert type(found[0].param_weight) is torch.nn.Parameter
    assert found[0].param_weight.partition_dim == 1
    assert found[2].param_weight is None
    # A view, not a copy: a new offload into the same memory is seen.
    copy = chunk.buffers[0].param_data_cpu if way == "megatron" else chunk.buffers[0].param_data.cpu_data  # type: ignore[attr-defined]
    assert copy is not None
    copy.mul_(2)
    assert torch.equal(found[0].param_weight, values[0] * 2)


@pytest.mark.parametrize("way", ["nowhere", "both", "megatron"])
def test_freed_parameters_without_one_known_copy_of_their_size_are_an_error_that_names_them(way: str) -> None:
    chunk = Chunk()
    chunk.offload(way)
    if way == "megatron":
        chunk.buffers[0].param_data_cpu = torch.zeros(20)
    with pytest.raises(RefitError, match=r"a\.weight was offloaded with its storage freed") as told:
        Residence([chunk], CPU).tasks(chunk.tasks)
    assert told.value.parameter == "a.weight"


@pytest.mark.parametrize("way", ["megatron", "verl"])
def test_a_copy_that_was_written_anew_at_each_offload_is_read_each_time(way: str) -> None:
    chunk = Chunk()
    residence = Residence([chunk], CPU)
    for seen_in_use in (True, False, True):
        chunk.train()
        values = chunk.values()
        chunk.offload(way)
        for _ in range(2):  # two refits of the same weights
            assert residence.key() != (None,)
            assert equal(read(residence, chunk), values)
        chunk.load()
        if seen_in_use:
            assert residence.key() == ()


@pytest.mark.parametrize("seen_in_use", [True, False])
@pytest.mark.parametrize("back", ["load", "wake"])
@pytest.mark.parametrize("way", ["megatron", "verl"])
def test_the_copy_of_an_earlier_offload_is_not_served_for_storage_that_was_freed_later(
    way: str, back: str, seen_in_use: bool
) -> None:
    chunk = Chunk()
    values = chunk.buffers[0].param_data.clone()
    residence = Residence([chunk], CPU)
    chunk.offload(way)
    bound = residence.key()
    if back == "load":
        chunk.load()
    else:
        chunk.wake(values)
    if seen_in_use:
        assert residence.key() == ()
    chunk.train()
    chunk.free()
    for _ in range(2):
        assert residence.key() not in (bound, ()), "the refit would not look again"
        with pytest.raises(RefitError, match="was not written since the parameters were last in use") as told:
            residence.tasks(chunk.tasks)
        assert told.value.parameter == "a.weight"
    with pytest.raises(RefitError, match="would get old weights"):
        residence.on_device(chunk.tasks)
    # The remedy that it names.
    chunk.wake(values)
    chunk.offload(way)
    assert torch.equal(residence.tasks(chunk.tasks)[1].param_weight, values[32:37])


def test_a_copy_from_before_the_first_look_is_old_while_the_parameters_are_in_use() -> None:
    chunk = Chunk()
    chunk.offload("megatron")
    chunk.load()
    residence = Residence([chunk], CPU)
    chunk.free()
    with pytest.raises(RefitError, match="param_data_cpu"):
        residence.tasks(chunk.tasks)


def test_of_two_copies_the_one_that_was_written_since_is_read() -> None:
    chunk = Chunk()
    chunk.offload("megatron")
    chunk.load()
    residence = Residence([chunk], CPU)
    chunk.train()
    values = chunk.values()
    chunk.offload("verl")
    assert equal(read(residence, chunk), values)


def test_a_copy_made_in_inference_mode_is_read_once_and_not_after_the_parameters_were_in_use() -> None:
    chunk = Chunk()
    residence = Residence([chunk], CPU)
    with torch.inference_mode():
        chunk.offload("verl")
    assert torch.equal(residence.tasks(chunk.tasks)[1].param_weight, torch.arange(32.0, 37.0))
    chunk.load()
    residence.key()
    chunk.free()
    with pytest.raises(RefitError, match="cpu_data"):
        residence.tasks(chunk.tasks)


def test_old_copies_are_not_kept() -> None:
    chunk = Chunk()
    residence = Residence([chunk], CPU)
    for _ in range(3):
        chunk.offload("verl")
        residence.tasks(chunk.tasks)
        old = StorageWeakRef(chunk.buffers[0].param_data.cpu_data.untyped_storage())  # type: ignore[attr-defined]
        chunk.load()
        residence.key()
        del chunk.buffers[0].param_data.cpu_data  # type: ignore[attr-defined]
        residence.key()
        assert old.expired()


class Brought(TorchDispatchMode):
    """Counts copies from device to device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def test_the_export_sees_one_parameter_after_another_on_its_device_and_each_is_let_go() -> None:
    chunk = Chunk()
    chunk.offload("verl")
    tasks = Residence([chunk], META).on_device(chunk.tasks * 3)
    assert len(tasks) == 9
    with Brought() as brought:
        assert brought.count == 0
        seen: list[weakref.ref[Any]] = []
        for task in tasks:
            if task.param_weight is None:
                continue
            assert task.param_weight.device.type == "meta"
            seen.append(weakref.ref(task.param_weight))
            assert brought.count == len(seen), "brought before its turn"
            del task
            assert all(reference() is None for reference in seen), "kept after its turn"
    assert len(seen) == 6


def test_a_delayed_gather_is_not_made_up_for_after_offloading() -> None:
    chunk = Chunk()
    Residence([chunk], CPU).require_gathered(chunk)
    with pytest.raises(RefitError, match="overlap_param_gather"):
        Residence([chunk], META).require_gathered(chunk)
    chunk.offload("megatron")
    with pytest.raises(RefitError, match="Refit before offloading"):
        Residence([chunk], CPU).require_gathered(chunk)


@pytest.mark.parametrize("wrapped", [True, False], ids=["buffers of gradients alone", "no buffers"])
def test_a_module_without_buffers_of_parameters_is_read_where_its_parameters_are(wrapped: bool) -> None:
    module = torch.nn.Linear(4, 3)
    if wrapped:
        module.buffers = [Buffer(None)]  # type: ignore[method-assign,assignment]
    residence, task = Residence([module], CPU), Task("w", module.weight)
    residence.require_gathered(module)
    with pytest.raises(RefitError, match="overlap_param_gather"):
        Residence([module], META).require_gathered(module)
    for _ in range(2):
        assert residence.key() == ()
        assert residence.tasks([task]) == [task]
        module.weight.data = module.weight.data.clone()  # offloaded by itself
    module.weight.untyped_storage().resize_(0)
    with pytest.raises(RefitError) as told:
        residence.tasks([task])
    assert (told.value.stage, told.value.parameter) == ("bind", "w")
