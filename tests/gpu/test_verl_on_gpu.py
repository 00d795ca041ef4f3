"""verl's own correctness test of checkpoint engines, with ours, on GPUs: FSDP2 or Megatron actors, and a live vLLM server.

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

pytestmark = pytest.mark.timeout(420)
ONE_GPU, TWO_GPUS = (needs("verl", "vllm", "ray", gpus=gpus) for gpus in (1, 2))
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

# By which manager; in turns on the actor's GPU, where vLLM sleeps before each update unless its sleep mode is off.
VERLS: dict[str, bool] = {}
OURS = {"ours": True}
IN_TURNS = {"ours": True, "in_turns": True}

# The last two are of Bridge's training configuration, which verl's engine imports. Two actors at TP2, and a server.
MEGATRON = needs("megatron", "transformer_engine", "webdataset", "tensorboard", gpus=3)


@pytest.mark.parametrize(
    ("overrides", "how"),
    [
        pytest.param((), VERLS, marks=TWO_GPUS, id="shards_with_sleep_mode"),
        pytest.param(AWAKE, VERLS, marks=TWO_GPUS, id="shards_awake"),
        pytest.param(FP8, VERLS, marks=TWO_GPUS, id="fp8_with_sleep_mode"),
        pytest.param(FULL, VERLS, marks=TWO_GPUS, id="full_tensors"),
        pytest.param((), OURS, marks=TWO_GPUS, id="our_manager"),
        pytest.param(FP8, OURS, marks=TWO_GPUS, id="our_manager_fp8"),
        pytest.param((), IN_TURNS, marks=ONE_GPU, id="in_turns_on_one_gpu"),
        pytest.param(AWAKE, IN_TURNS, marks=ONE_GPU, id="in_turns_awake_on_one_gpu"),
        pytest.param(FP8, IN_TURNS, marks=ONE_GPU, id="in_turns_fp8_on_one_gpu"),
    ],
)
def test_three_changed_updates_land_in_the_live_parameters_bit_for_bit(
    overrides: tuple[str, ...], how: dict[str, bool], tmp_path: Path, record_property: Any
) -> None:
    fp8 = overrides is FP8
    checkpoint = make_checkpoint("qwen3", tmp_path / "model")
    env = {}
    if fp8:
        write_checkpoint(
            checkpoint, 0, fp8=False
        )  # of sizes that vLLM's FP8 kernels take, with the other's tokenizer
        env["VLLM_USE_DEEP_GEMM"] = "0"  # which would want powers of two as scales
    seconds = _three_updates(
        tmp_path,
        checkpoint,
        env,
        overrides,
        fp8=fp8,
        tells_version=overrides is not FULL,
        **how,
    )
    _tell(seconds, record_property)


@pytest.mark.parametrize(
    "offload",
    [
        pytest.param(False, marks=MEGATRON, id="on_the_gpus"),
        pytest.param(True, marks=MEGATRON, id="offloaded_between_updates"),
    ],
)
def test_three_changed_updates_of_verls_megatron_engine_land_bit_for_bit(
    offload: bool, tmp_path: Path, record_property: Any
) -> None:
    from tests.verl_adapter.megatron_actor import MegatronActor

    checkpoint = make_checkpoint("qwen3", tmp_path / "model")
    overrides = (f"actor_rollout_ref.actor.megatron.param_offload={str(offload).lower()}",)
    seconds = _three_updates(tmp_path, checkpoint, {}, overrides, actors=2, actor_class=MegatronActor)
    _tell(seconds, record_property)


def _tell(seconds: list[dict[str, float]], record_property: Any) -> None:
    """Medians of the warm updates, by metric."""
    for name in seconds[-1]:
        record_property(name, statistics.median(told[name] for told in seconds[1:]))


def _three_updates(
    folder: Path,
    checkpoint: Path,
    env: dict[str, str],
    overrides: tuple[str, ...],
    *,
    actors: int = 1,
    fp8: bool = False,
    tells_version: bool = True,
    ours: bool = False,
    **more: Any,
) -> list[dict[str, float]]:
    """What each told of its time."""
    from tests.verl_adapter.fleet import seconds_of_updates, shard_fleet

    env = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), **env}
    with shard_fleet(folder, checkpoint, env, actors, 1, overrides, **more) as fleet:
        return seconds_of_updates(
            fleet,
            checkpoint,
            fleet.manager(0, ours=ours),
            (1, 2, 3),
            fp8=fp8,
            tells_version=tells_version,
        )
