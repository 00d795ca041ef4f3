"""Runs of a recipe whose vLLM computes with INT4 weights that the trainer makes, in the order of the CPU's own kernel.

Its product is there from AVX-512 on; :mod:`tests.vllm_cpu` has one for the tests' CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ahead import FoundAhead, Work, keeping_time, of_all_tests
from tests.vllm_processes import vllm_processes
from tests.warm_python import ENGINE, warm_python

from .shared_cluster import on_shared_cluster
from .test_fsdp_runs import Ran, run
from .test_qat_runs import CheckedRefits, Trained, with_what_vllm_loads

STEPS = 2
QAT = (
    "policy.qat=int4",
    # Or it would take no function to its workers.
    "ray.generation_env.VLLM_ALLOW_INSECURE_SERIALIZATION='1'",
)
INT4 = (
    "generation.weight_dtype=int4",
    "policy.refit.trainer_quantize_int4=true",
    "policy.refit.verify=full",
    f"algorithm.steps={STEPS}",
    "validation.every=0",
    "checkpoint.every=0",
)


def _train(folder: Path, ray_address: str, trainer: str, *overrides: str) -> Ran:
    refits = CheckedRefits if overrides else None
    with warm_python(vllm_processes, ENGINE) as python:
        warm = f"ray.generation_env.WARM_PYTHON={python.with_name('socket')}"
        return run(
            "grpo_tiny_vllm", folder, ray_address, *INT4, *overrides, warm, trainer=trainer, refits=refits
        )


# The same ranks, engine and refits are those of train_fsdp_in_int4, but for what the policy computes with.
@of_all_tests
@keeping_time
def train_fsdp_for_int4(folder: Path) -> Ran:
    """Over two ranks, which hold rows of weights."""
    return on_shared_cluster(_train, folder, "fsdp")


@keeping_time
def train_fsdp_in_int4(folder: Path) -> Trained:
    """The same, of a policy that trains with what the engine computes with."""
    return with_what_vllm_loads(on_shared_cluster(_train, folder, "fsdp", *QAT))


# Its ranks send rows and columns of codes in tests/quantize, and train for a vLLM in test_train.
@of_all_tests
@keeping_time
def train_megatron_for_int4(folder: Path) -> Ran:
    """In TP2."""
    return on_shared_cluster(_train, folder, "megatron")


# Its ranks compute in tests/qat.
@of_all_tests
@keeping_time
def train_megatron_in_int4(folder: Path) -> Trained:
    """In TP2, by Megatron-Bridge's rule for scales."""
    overrides = (*QAT, "policy.refit.int4_scale=amax/7")
    return with_what_vllm_loads(on_shared_cluster(_train, folder, "megatron", *overrides))


AHEAD = (train_fsdp_for_int4, train_fsdp_in_int4, train_megatron_for_int4, train_megatron_in_int4)


@pytest.mark.full
@pytest.mark.parametrize("train", [train_fsdp_for_int4, train_megatron_for_int4], ids=["fsdp", "megatron"])
def test_the_engine_generates_with_int4_weights_of_the_policy_that_all_came_shard_to_shard(
    found_ahead: FoundAhead, train: Work
) -> None:
    rows = found_ahead.by(train).rows
    assert [row["weights/version"] for row in rows] == list(range(STEPS))
    # The engine began with random weights. 1e-3 was the most that was seen.
    assert all(0 < row["generation_kl"] < 5e-3 for row in rows)
    assert rows[-1]["refit/bytes_misc"] == 0


IN_INT4 = pytest.mark.parametrize(
    "train",
    [
        pytest.param(train_fsdp_in_int4, id="fsdp"),
        pytest.param(train_megatron_in_int4, id="megatron", marks=pytest.mark.full),
    ],
)


@IN_INT4
def test_a_policy_that_trains_in_int4_is_as_near_to_its_engine_as_one_in_bf16(
    found_ahead: FoundAhead, train: Work
) -> None:
    rows = found_ahead.by(train).ran.rows
    assert [row["weights/version"] for row in rows] == list(range(STEPS))
    assert rows[-1]["refit/bytes_misc"] == 0
    assert all(0 < row["generation_kl"] < 5e-5 for row in rows)


@pytest.mark.full
@pytest.mark.parametrize(
    ("with_rounding", "without"),
    [(train_fsdp_in_int4, train_fsdp_for_int4), (train_megatron_in_int4, train_megatron_for_int4)],
    ids=["fsdp", "megatron"],
)
def test_a_policy_that_trains_in_int4_is_ten_times_as_near_to_its_engine_as_one_that_does_not(
    found_ahead: FoundAhead, with_rounding: Work, without: Work
) -> None:
    rows, others = found_ahead.by(with_rounding).ran.rows, found_ahead.by(without).rows
    for row, other in zip(rows, others, strict=True):
        assert row["generation_kl"] < other["generation_kl"] / 10


@IN_INT4
def test_the_engine_holds_bit_for_bit_what_vllm_loads_from_the_policys_checkpoint(
    found_ahead: FoundAhead, train: Work
) -> None:
    found = found_ahead.by(train)
    # Beside them are constants with which nothing computes: shapes of weights, and scales of a KV cache that is in BF16.
    held, loaded = (
        {name: digest for name, digest in of.items() if "weight" in name and not name.endswith("_shape")}
        for of in (found.held, found.loaded)
    )
    assert any(name.endswith("weight_packed") for name in loaded)
    assert held == loaded
