"""Where the parameters of an offloaded Megatron model are found."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlrefit.integration.errors import RefitError
from rlrefit.workers.offload import Residence

CPU, META = torch.device("cpu"), torch.device("meta")


@dataclass(frozen=True)
class Task:
    """What is used of Bridge's conversion tasks."""

    global_param_name: str
    param_weight: Any


@dataclass
class Buffer:
    """What is used of Megatron's buffers of parameters."""

    param_data: torch.Tensor
    param_data_cpu: torch.Tensor | None = None


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

    def parameters(self) -> list[torch.nn.Parameter]:
        return self.weights

    @property
    def tasks(self) -> list[Task]:
        return [Task("a.weight", self.weights[0]), Task("b.weight", self.weights[1]), Task("remote", None)]

    def offload(self, way: str) -> None:
        buffer = self.buffers[0]
        copy = buffer.param_data.clone()
        if way in ("megatron", "both"):
            buffer.param_data_cpu = copy
        if way in ("verl", "both"):
            buffer.param_data.cpu_data = copy  # type: ignore[attr-defined]
        buffer.param_data.untyped_storage().resize_(0)


def test_parameters_with_memory_are_left_as_they_are() -> None:
    chunk = Chunk()
    residence = Residence([chunk], CPU)
    tasks = chunk.tasks
    assert all(a is b for a, b in zip(residence.tasks(tasks), tasks, strict=True))
    assert residence.key() == ()


@pytest.mark.parametrize("way", ["megatron", "verl"])
def test_freed_parameters_are_read_from_their_buffers_host_copy(way: str) -> None:
    chunk = Chunk()
    values = [weight.detach().clone() for weight in chunk.weights]
    residence = Residence([chunk], CPU)
    before = residence.key()
    chunk.offload(way)
    assert residence.key() != before
    found = residence.tasks(chunk.tasks)
    assert all(torch.equal(task.param_weight, value) for task, value in zip(found, values, strict=False))
    assert type(found[0].param_weight) is torch.nn.Parameter
    assert found[0].param_weight.partition_dim == 1
    assert found[2].param_weight is None
    # A view, not a copy: a new offload into the same memory is seen.
    copy = chunk.buffers[0].param_data_cpu if way == "megatron" else chunk.buffers[0].param_data.cpu_data  # type: ignore[attr-defined]
    assert copy is not None
    copy.mul_(2)
    assert torch.equal(found[0].param_weight, values[0] * 2)


@pytest.mark.parametrize("way", ["nowhere", "both"])
def test_freed_parameters_without_one_known_copy_are_an_error_that_names_them(way: str) -> None:
    chunk = Chunk()
    chunk.offload(way)
    with pytest.raises(RefitError, match=r"a\.weight was offloaded with its storage freed") as told:
        Residence([chunk], CPU).tasks(chunk.tasks)
    assert told.value.parameter == "a.weight"


def test_a_copy_of_another_size_is_not_read() -> None:
    chunk = Chunk()
    chunk.offload("megatron")
    chunk.buffers[0].param_data_cpu = torch.zeros(20)
    with pytest.raises(RefitError, match=r"a\.weight"):
        Residence([chunk], CPU).tasks(chunk.tasks)


def test_the_export_sees_one_parameter_after_another_on_its_device() -> None:
    chunk = Chunk()
    chunk.offload("verl")
    brought = Residence([chunk], META).on_device(chunk.tasks)
    assert [task.param_weight.device.type for task in brought if task.param_weight is not None] == [
        "meta"
    ] * 2
    assert len(brought) == 3


def test_a_delayed_gather_is_not_made_up_for_after_offloading() -> None:
    chunk = Chunk()
    Residence([chunk], CPU).require_gathered(chunk)
    with pytest.raises(RefitError, match="overlap_param_gather"):
        Residence([chunk], META).require_gathered(chunk)
    chunk.offload("megatron")
    with pytest.raises(RefitError, match="Refit before offloading"):
        Residence([chunk], CPU).require_gathered(chunk)


def test_a_bare_module_has_no_buffers_to_look_at() -> None:
    module = torch.nn.Linear(2, 2)
    task = SimpleNamespace(global_param_name="w", param_weight=module.weight)
    assert Residence([module], CPU).tasks([task]) == [task]
