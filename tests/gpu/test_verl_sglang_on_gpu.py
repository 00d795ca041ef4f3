"""verl's own SGLang server on a GPU, refitted from an FSDP2 actor on another one: every live parameter against SGLang's own load."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlrefit.recipes.tiny.checkpoints import make_checkpoint
from rlrefit.workers.engines.sglang.loader import LOADER
from tests.gpu.vllm_checkpoints import write_checkpoint

from .needs import needs

pytestmark = [
    *needs("verl", "sglang", "ray", "torch_memory_saver", gpus=2),
    # SGLang compiles kernels for its first batch.
    pytest.mark.timeout(500),
]
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize("frees_cache", [True, False], ids=["kv_cache_released", "kv_cache_kept"])
def test_three_changed_updates_leave_what_sglang_loads_of_a_checkpoint(
    frees_cache: bool, tmp_path: Path
) -> None:
    import ray

    from tests.verl_adapter.fleet import shard_fleet
    from tests.verl_adapter.sglang_run import PROBE, calls_of, written

    checkpoint = make_checkpoint("qwen3", tmp_path / "model")
    write_checkpoint(
        checkpoint, 0, fp8=False
    )  # of sizes that SGLang's kernels take, with the other's tokenizer
    engine = (
        f"{{custom_weight_loader:[{LOADER},{PROBE}],attention_backend:triton,sampling_backend:pytorch,"
        "grammar_backend:none,max_total_tokens:4096,random_seed:0}"
    )
    overrides = (
        f"{ROLLOUT}.name=sglang",
        f"{ROLLOUT}.load_format=dummy",
        f"{ROLLOUT}.free_cache_engine={str(frees_cache).lower()}",
        f"+{ROLLOUT}.engine_kwargs.sglang={engine}",
    )
    env = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "NCCL_CUMEM_ENABLE": "0"}
    with shard_fleet(tmp_path, checkpoint, env, 1, 1, overrides) as fleet:
        calls = calls_of(fleet, 0)
        loaded = {}
        for version in (1, 2, 3):
            path = str(written(tmp_path, checkpoint, version))
            calls.step("update_weights_from_disk", model_path=path, load_format="auto")
            loaded[version] = calls.ask("probe_digests")
        manager = fleet.manager(0)
        for version in (1, 2, 3):
            fleet.actors.change(version)
            calls.ask("probe_poison")
            manager.update_weights(version)
            assert calls.ask("probe_digests") == loaded[version]
            tokens, _, told = fleet.generate(0)
            assert told == version
            ray.get(fleet.replicas[0].server_handle.clear_kv_cache.remote(), timeout=120)
            assert fleet.generate(0)[0] == tokens
