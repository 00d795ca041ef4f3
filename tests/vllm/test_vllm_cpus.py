"""Refits of vLLM with each library that its CPU build chooses from, by the CPU: as it is, or played where the machine has another one."""

from __future__ import annotations

import builtins
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_checkpoints import moe_config, write_checkpoint
from vllm_cpu_ranks import RANKS, Found, refit_by_a_loader_of_its_own, refit_experts
from vllm_ranks import Case, Layout

from tests import vllm_cpu
from tests.ahead import FoundAhead, left_to_all, of_all_tests
from tests.families.checkpoints import write_pair
from tests.servers import own_vllm_context
from tests.spawn import run_alone, run_ranks
from tests.vllm_processes import vllm_processes

LIBRARIES = {"avx2": "_C_AVX2", "avx512": "_C_AVX512", "avx512_bf16": "_C", "amx": "_C"}
# Experts that no library packs, and some that all but the one for AVX2 do.
CONFIGS = {"plain": moe_config(), "packable": moe_config(expert_size=32 * RANKS)}
# One CPU that packs experts which the model's own loader writes.
OWN_LOADER = "avx512_bf16"
# Of make test-all: on every machine, test_vllm_packing_code.py compares what two of their libraries pack, and the engines of all other
# modules have the third.
OTHERS = ("avx2", "avx512", "amx")


@dataclass(frozen=True)
class OfCpu:
    """What the ranks saw on one CPU: of each checkpoint, and on OWN_LOADER by that loader."""

    refits: dict[str, list[Found]]
    by_own_loader: list[tuple[str, bool]]

    @property
    def ranks(self) -> list[Found]:
        return [rank for ranks in self.refits.values() for rank in ranks]


def refit_on_each_cpu(folder: Path) -> dict[str, OfCpu]:
    return refit_on_cpus([cpu for cpu in vllm_cpu.CPUS if cpu not in OTHERS], folder)


@of_all_tests
def refit_on_others(folder: Path) -> dict[str, OfCpu]:
    return refit_on_cpus(OTHERS, folder)


def refit_on_cpus(wanted: Sequence[str], folder: Path) -> dict[str, OfCpu]:
    cases = [
        Case(
            *(str(write_checkpoint(folder / f"{name}-{seed}", config, seed)) for seed in (1, 2)),
            Layout(tensor=RANKS),
        )
        for name, config in CONFIGS.items()
    ]
    changes = {"vocab_size": 64, "intermediate_size": 32 * RANKS}
    own_loader = Case(*write_pair("gpt_oss", folder / "gpt_oss", changes), Layout(tensor=RANKS))
    cases.append(own_loader)
    # CPUs that the machine is share a server of processes if they share a library.
    servers: dict[str, list[str]] = {}
    for cpu in wanted:
        servers.setdefault(LIBRARIES[cpu] if vllm_cpu.is_here(cpu) else cpu, []).append(cpu)
    found: dict[str, OfCpu] = {}
    of_the_session = vllm_cpu.chosen()
    for cpus in servers.values():
        if cpus == [of_the_session] or (
            of_the_session == vllm_cpu.PLAIN and not vllm_cpu.is_here(cpus[0])  # its ranks play the CPU
        ):
            found |= refit_on(cpus, cases, own_loader)
        else:
            found |= run_alone(
                refit_on,
                cpus,
                cases,
                own_loader,
                environment={vllm_cpu.VARIABLE: cpus[0]},
                made_by=own_vllm_context,
            )
    return found


def refit_on(cpus: Sequence[str], cases: Sequence[Case], own_loader: Case) -> dict[str, OfCpu]:
    """By CPU; of one server of processes."""
    found = {}
    for cpu in cpus:
        by_rank = run_ranks(refit_experts, RANKS, cpu, cases, made_by=vllm_processes)
        found[cpu] = OfCpu(
            dict(zip([*CONFIGS, "gpt_oss"], map(list, zip(*by_rank, strict=True)), strict=True)),
            run_ranks(refit_by_a_loader_of_its_own, RANKS, cpu, own_loader, made_by=vllm_processes)
            if cpu == OWN_LOADER
            else [],
        )
    return found


AHEAD = (refit_on_each_cpu, refit_on_others)


@pytest.fixture(params=left_to_all(vllm_cpu.CPUS, OTHERS))
def found(request: pytest.FixtureRequest, found_ahead: FoundAhead) -> tuple[str, OfCpu]:
    """The CPU, and what was seen on it."""
    work = refit_on_others if request.param in OTHERS else refit_on_each_cpu
    return request.param, found_ahead.by(work)[request.param]


def test_ranks_form_groups_that_add_up_on_each_cpu(found):
    cpu, seen_there = found
    for rank in seen_there.ranks:
        assert rank.total == sum(range(1, RANKS + 1))
        assert rank.of_its_own == (cpu != "avx2")


def test_a_refit_gives_what_vllm_loads_itself_and_computes_with_on_each_cpu(found):
    for rank in found[1].ranks:
        assert rank.differing == []
        assert rank.error < 0.03


def test_experts_go_in_place_also_those_that_a_library_packs(found):
    cpu, seen_there = found
    assert [rank.misc for rank in seen_there.ranks] == [{}] * len(seen_there.ranks)
    assert not any(rank.by_axes for rank in seen_there.refits["plain"])
    for rank in seen_there.refits["packable"]:
        experts = {name for name in rank.bulk if ".mlp.experts." in name}
        assert len(experts) == 2 * 4 * 3
        assert rank.by_axes == (set() if cpu == "avx2" else experts)
    for rank in seen_there.refits["gpt_oss"]:
        matrices = {
            name for name in rank.bulk if name.endswith(("_proj", "_proj_bias")) and ".experts." in name
        }
        assert {name for name in matrices if not name.endswith("bias")} >= rank.by_axes
        assert bool(rank.by_axes) == (cpu != "avx2")


def test_packed_experts_that_only_the_models_own_loader_writes_are_an_error_and_keep_the_old_weights(
    found_ahead: FoundAhead,
) -> None:
    """Where their packing is not found out: vLLM's reload, which packs them again, takes no notice of that loader."""
    for named, as_before in found_ahead.by(refit_on_each_cpu)[OWN_LOADER].by_own_loader:
        assert ".mlp.experts." in named
        assert as_before


@pytest.mark.parametrize("cpu", list(vllm_cpu.CPUS))
def test_vllm_chooses_the_library_by_what_it_is_shown(cpu, monkeypatch):
    """Without loading it: the machine may have no such instructions."""
    platform = import_module("vllm.platforms.cpu").CpuPlatform
    monkeypatch.setattr(torch.cpu, "get_capabilities", torch.cpu.get_capabilities)
    imported = []

    def record(name: str, *args: Any, **kwargs: Any) -> Any:
        if not name.startswith("vllm._C"):
            return real(name, *args, **kwargs)
        imported.append(name)
        return None

    real = builtins.__import__
    vllm_cpu.show(cpu)
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", record)
        platform.import_kernels()
    assert imported == [f"vllm.{LIBRARIES[cpu]}"]


def seen() -> tuple[list[bool], bool]:
    features = (
        torch.cpu._is_avx512_supported(),
        torch.cpu._is_avx512_bf16_supported(),
        torch.cpu._is_amx_tile_supported(),
    )
    return list(features), hasattr(torch.ops._C, "init_shm_manager")


def map_memory(name: str) -> bool:
    """As vLLM's library, for a group; its mapping lasts as long as the process."""
    path = Path("/dev/shm", name)
    with path.open("wb+") as file:
        file.truncate(mmap.PAGESIZE)
        _mapped.append(mmap.mmap(file.fileno(), mmap.PAGESIZE))
    return path.exists()


_mapped: list[mmap.mmap] = []


def test_a_process_leaves_no_shared_memory_of_vllms_groups_behind():
    name = f"rlrefit-test-{os.getpid()}-tp:0-[0-1]-cpushm_0"
    assert run_alone(map_memory, name, environment={}, made_by=vllm_processes)
    assert not Path("/dev/shm", name).exists()


def test_processes_of_the_tests_see_one_cpu_on_every_machine():
    cpu = vllm_cpu.chosen()
    features, shared_memory = run_alone(seen, environment={}, made_by=vllm_processes)
    assert features == [feature in vllm_cpu.CPUS[cpu] for feature in ("avx512_f", "avx512_bf16", "amx_tile")]
    assert shared_memory == (cpu != vllm_cpu.PLAIN)
