"""verl's own actors and its own vLLM replicas on a Ray cluster of one host, with shards between them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
import verl
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import create_colocated_worker_cls
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.rollout.replica import get_rollout_replica_class

from rlrefit.integration.quantize.fp8_blockwise import quantize
from tests.digests import digest_of
from tests.ray_cluster import patient_ray
from tests.verl_adapter.fsdp_actor import SPARSE, Actor, weight

ROOT = Path(__file__).resolve().parents[2]
_ROLLOUT = "actor_rollout_ref.rollout"
# Tokens of a prompt; vLLM's blocks on CPUs have 128.
PROMPT = 300


@dataclass
class ShardFleet:
    """Actors and replicas, all of which have come up."""

    config: Any
    actors: RayWorkerGroup
    replicas: list[Any]
    folder: Path
    in_turns: bool = False
    asked: int = 0

    def manager(self, *replicas: int, ours: bool = False) -> CheckpointEngineManager:
        """verl's own, or ours."""
        from rlrefit.workers.frameworks.verl.manager import RefitCheckpointManager

        kind = RefitCheckpointManager if ours else CheckpointEngineManager
        engine = omega_conf_to_dataclass(self.config.rollout.checkpoint_engine)
        return kind(engine, self.actors, [self.replicas[i] for i in replicas])

    def update(self, manager: CheckpointEngineManager, version: int) -> dict[str, float]:
        """Change the weights, spoil those of the engines unless the update is to be sparse, and update by ``manager``."""
        if self.in_turns and self.config.rollout.free_cache_engine:
            manager.sleep_replicas()  # which discards the weights
            self.actors.change(version)
            return manager.update_weights(version)
        self.actors.change(version)
        for replica in manager.replicas if version not in SPARSE else []:
            self.call(replica, "probe_poison")
        return manager.update_weights(version)

    def call(self, replica: Any, method: str, *args: Any) -> None:
        ray.get(replica.server_handle.collective_rpc.remote(method, args=args), timeout=120)

    def generate(self, replica: int) -> tuple[list[int], list[float], Any]:
        """A token by a replica's server, after more than a block of its KV cache: with its logprob, and verl's version."""
        self.asked += 1
        found = ray.get(
            self.replicas[replica].server_handle.generate.remote(
                prompt_ids=[7 * i % 50 + 3 for i in range(PROMPT)],
                sampling_params={"temperature": 0.0, "max_tokens": 1, "logprobs": True},
                request_id=f"probe-{self.asked}",
            ),
            timeout=120,
        )
        return found.token_ids, found.log_probs, found.extra_fields.get("global_steps")

    def continued(self, replica: int, prompt: list[int], tokens: int) -> list[int]:
        """The most probable tokens after a prompt, by a replica's server."""
        self.asked += 1
        sampling = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
        asked = self.replicas[replica].server_handle.generate.remote(
            prompt_ids=prompt, sampling_params=sampling, request_id=f"probe-{self.asked}"
        )
        found: list[int] = ray.get(asked, timeout=120).token_ids
        return found

    def told_by_server(self, replica: int, ask: Callable[[Any], Any]) -> Any:
        """What a function finds in the process of a replica's server."""
        return ray.get(self.replicas[replica].server_handle.__ray_call__.remote(ask), timeout=120)

    def hand_over(self, replica: int, checkpoint: Path) -> None:
        """A whole model by verl's own hand-over, as of a trainer on the replica's GPU."""

        def hand(worker: Any) -> None:
            weights = iter(load_file(checkpoint / "model.safetensors").items())
            call = worker.server_adapter.update_weights(weights, peft_config=None, base_sync_done=True)
            with ThreadPoolExecutor(1) as pool:  # the actor's own loop runs already
                pool.submit(asyncio.run, call).result()

        ray.get(self.replicas[replica].workers[0].__ray_call__.remote(hand), timeout=120)

    def held(self, replica: int) -> dict[str, Any]:
        """Digests of a replica's live parameters, and its version."""
        file = self.folder / f"held-{replica}.json"
        self.call(self.replicas[replica], "probe_write", str(file))
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def records(self, role: str) -> list[dict[str, Any]]:
        """Of rank 0 of a role, in order."""
        lines = (self.folder / f"refits-{role}-0.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def seconds_of_updates(
    fleet: ShardFleet,
    checkpoint: Path,
    manager: CheckpointEngineManager,
    versions: Sequence[int],
    *,
    fp8: bool = False,
    tells_version: bool = True,
) -> list[dict[str, float]]:
    """Update the first replica to each version in turn, and hold all its parameters against it, and what it answers.

    Returns:
        What each update told of its time, by metric.
    """
    seconds: list[dict[str, float]] = []
    answers: list[list[float]] = []
    for version in versions:
        metrics = fleet.update(manager, version)
        seconds.append(
            {name: told for name, told in metrics.items() if "seconds" in name or "timing_s" in name}
        )
        found = fleet.held(0)
        assert found["parameters"] == expected(checkpoint, version, fp8=fp8)
        if tells_version:
            assert found["version"] == {"version": version}
        _, logprobs, told = fleet.generate(0)
        assert told == version
        assert logprobs not in answers  # not from what a cache holds of the version before
        answers.append(logprobs)
    return seconds


def expected(checkpoint: Path, version: int, *, fp8: bool = False) -> dict[str, str]:
    """Digests of what vLLM's parameters have to be at a version, for a dense Qwen3 at TP1; its projections in FP8 blocks."""
    shapes = {name: tensor.shape for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    whole = {name: weight(name, shape, version).bfloat16() for name, shape in shapes.items()}
    if fp8:
        for name in [name for name in whole if name.endswith("_proj.weight")]:
            whole[name], whole[f"{name}_scale_inv"] = quantize(whole[name])
    fused: dict[str, torch.Tensor] = {}
    for name, tensor in whole.items():
        for part, parts, joined in (
            ("q_proj", ("q_proj", "k_proj", "v_proj"), "qkv_proj"),
            ("gate_proj", ("gate_proj", "up_proj"), "gate_up_proj"),
        ):
            if part in name:
                fused[name.replace(part, joined)] = torch.cat([whole[name.replace(part, p)] for p in parts])
        if not any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            fused[name] = tensor
    return {name: digest_of([tensor]) for name, tensor in fused.items()}


@contextmanager
def shard_fleet(
    folder: Path,
    checkpoint: Path,
    env: dict[str, str],
    actors: int,
    replicas: int,
    overrides: tuple[str, ...] = (),
    python: str = sys.executable,
    actor_class: type = Actor,
    in_turns: bool = False,
) -> Iterator[ShardFleet]:
    """Actors, and replicas of one worker each unless ``overrides`` say more, on a cluster of their own, whose workers
    ``python`` runs; a GPU of Ray's each, or with ``in_turns`` the replicas on the actors'."""
    training = actor_class.TRAINING  # type: ignore[attr-defined]
    config = _config(folder, checkpoint, (*training, *overrides)).actor_rollout_ref
    workers = config.rollout.tensor_model_parallel_size
    gpus = actors if in_turns else actors + replicas * workers
    with patient_ray():
        ray.init(
            num_cpus=2 * gpus,
            num_gpus=gpus,
            include_dashboard=False,
            object_store_memory=128 << 20,
            runtime_env={
                "py_executable": python,
                "env_vars": {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **env},
            },
        )
    try:
        pool = RayResourcePool([actors], use_gpu=True, max_colocate_count=2, name_prefix="actors")
        actor = RayClassWithInitArgs(ray.remote(actor_class), config=config, role="actor")
        fused = RayWorkerGroup(
            resource_pool=pool, ray_cls_with_init=create_colocated_worker_cls({"actor": actor})
        )
        group = fused.spawn(prefix_set=["actor"])["actor"]
        made = [
            get_rollout_replica_class(config.rollout.name)(
                replica_rank=rank,
                config=omega_conf_to_dataclass(config.rollout),
                model_config=omega_conf_to_dataclass(config.model, dataclass_type=HFModelConfig),
                gpus_per_node=workers,
            )
            for rank in range(replicas)
        ]

        async def start() -> None:
            load = asyncio.to_thread(group.init_model)
            if in_turns:
                await load  # before an engine measures what is free
                await asyncio.gather(*(replica.init_hybrid(group) for replica in made))
            else:
                await asyncio.gather(load, *(replica.init_standalone() for replica in made))

        asyncio.run(start())
        yield ShardFleet(config, group, made, folder, in_turns)
    finally:
        ray.shutdown()


def _config(folder: Path, checkpoint: Path, overrides: tuple[str, ...]) -> Any:
    engine = f"{_ROLLOUT}.checkpoint_engine"
    wanted = [
        f"actor_rollout_ref.model.path={checkpoint}",
        "actor_rollout_ref.model.use_remove_padding=false",
        "actor_rollout_ref.hybrid_engine=false",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu=1",
        f"{_ROLLOUT}.name=vllm",
        f"{_ROLLOUT}.tensor_model_parallel_size=1",
        f"{_ROLLOUT}.enforce_eager=true",
        f"{_ROLLOUT}.max_model_len=512",
        f"{_ROLLOUT}.prompt_length=400",
        f"{_ROLLOUT}.response_length=64",
        f"{_ROLLOUT}.enable_prefix_caching=true",
        f"{_ROLLOUT}.max_num_seqs=4",
        f"{_ROLLOUT}.gpu_memory_utilization=0.3",
        f"+{_ROLLOUT}.engine_kwargs.vllm.worker_extension_cls=tests.verl_adapter.probe.ShardProbe",
        f"{engine}.backend=nccl_xfer_shards",
        f"{engine}.custom_backend_module=rlrefit.workers.frameworks.verl.engine",
        f"{engine}.update_weights_bucket_megabytes=1",
        f"+{engine}.engine_kwargs.nccl_xfer_shards={{timeout_s:120.0,verify:full,records_dir:{folder}}}",
        *overrides,
    ]
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", wanted)
