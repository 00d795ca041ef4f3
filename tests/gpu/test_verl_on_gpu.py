"""verl's own correctness test of checkpoint engines, with ours, on two GPUs: an FSDP2 actor, and a live vLLM server.

verl's compares with a mock of the engine; here every live parameter of vLLM is compared, after it was made a NaN.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

import pytest

from rlrefit.recipes.tiny.checkpoints import make_checkpoint
from tests.gpu.vllm_checkpoints import write_checkpoint

from .needs import needs

pytestmark = [
    *needs("verl", "vllm", "ray", gpus=2),
    pytest.mark.timeout(420),
]
ROLLOUT = "actor_rollout_ref.rollout"
ENGINE = f"{ROLLOUT}.checkpoint_engine"
# With vLLM's sleep mode verl discards and remaps all weights before an update.
AWAKE = (f"{ROLLOUT}.free_cache_engine=false", f"+{ROLLOUT}.enable_sleep_mode=false")
FULL = (
    f"{ENGINE}.backend=nccl_xfer",
    f"{ENGINE}.custom_backend_module=rlrefit.workers.frameworks.verl.full_tensors",
    f"+{ENGINE}.engine_kwargs.nccl_xfer.timeout_s=120.0",
    f"{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls=tests.verl_adapter.probe.FullProbe",
)
# verl patches vLLM's FP8 layers, and the actor makes codes and scales.
FP8 = (f"{ROLLOUT}.quantization=fp8", f"+{ENGINE}.engine_kwargs.nccl_xfer_shards.trainer_quantize_fp8=true")


@pytest.mark.parametrize(
    "overrides",
    [(), AWAKE, FP8, FULL],
    ids=["shards_with_sleep_mode", "shards_awake", "fp8_with_sleep_mode", "full_tensors"],
)
def test_three_changed_updates_land_in_the_live_parameters_bit_for_bit(
    overrides: tuple[str, ...], tmp_path: Path, record_property: Any
) -> None:
    from tests.verl_adapter.fleet import expected, shard_fleet

    fp8 = overrides is FP8
    checkpoint = make_checkpoint("qwen3", tmp_path / "model")
    env = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    if fp8:
        write_checkpoint(
            checkpoint, 0, fp8=False
        )  # of sizes that vLLM's FP8 kernels take, with the other's tokenizer
        env["VLLM_USE_DEEP_GEMM"] = "0"  # which would want powers of two as scales
    seconds: list[float] = []
    answers: list[list[float]] = []
    with shard_fleet(tmp_path, checkpoint, env, 1, 1, overrides) as fleet:
        manager = fleet.manager(0)
        for version in (1, 2, 3):
            metrics = fleet.update(manager, version)
            seconds.append(metrics["checkpoint_engine/seconds"])
            found = fleet.held(0)
            assert found["parameters"] == expected(checkpoint, version, fp8=fp8)
            if overrides is not FULL:
                assert found["version"] == {"version": version}
            _, logprobs, told = fleet.generate(0)
            assert told == version
            assert logprobs not in answers  # not from what a cache holds of the version before
            answers.append(logprobs)
    record_property("warm_update_seconds", statistics.median(seconds[1:]))
