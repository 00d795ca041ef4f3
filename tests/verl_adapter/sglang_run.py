"""Updates of a verl fleet with a real SGLang server of two workers on CPUs, for ``test_sglang_rollouts``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from safetensors.torch import load_file, save_file

from examples.verl.on_cpus import CPU, PLATFORM, SGLANG, SGLANG_SERVER
from rlrefit.recipes.tiny.checkpoints import make_checkpoint
from rlrefit.workers.engines.sglang.callers import EngineCalls
from rlrefit.workers.engines.sglang.loader import LOADER

# Not imported here, since that takes SGLang.
PROBE = "tests.verl_adapter.sglang_probe.load"
ROOT = Path(__file__).resolve().parents[2]
# Of fsdp_actor's, the third differs little from the second. Two are as of a replica on the actors' GPUs.
UPDATED, SPARSE, REFUSED, FAILED, IN_TURN, KILLED = (1, 2, 3, 7, 8, 9), 3, 0, 6, (8, 9), 10
LACKS = "SGLang 0.0.0 lacks what rlrefit's refits rely on"
_ENGINE = {"custom_weight_loader": [LOADER, PROBE], **SGLANG_SERVER}
_ROLLOUT = "actor_rollout_ref.rollout"


@dataclass
class Seen:
    """What SGLang's own loading and the updates left in the engine, by version.

    Attributes:
        loaded: digests of each worker's parameters, as SGLang loads a checkpoint of the version.
        held: the same after an update.
        answers: a token, its log-probability and verl's version after the update; ``afresh`` with empty caches.
        errors: of updates that failed, and the seconds until they did.
    """

    loaded: dict[int, Any] = field(default_factory=dict)
    held: dict[int, Any] = field(default_factory=dict)
    answers: dict[int, Any] = field(default_factory=dict)
    afresh: dict[int, Any] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    sent: list[dict[str, Any]] = field(default_factory=list)
    received: list[list[dict[str, Any]]] = field(default_factory=list)
    errors: dict[int, tuple[str, float]] = field(default_factory=dict)


def engine_settings(added: str, **changes: Any) -> dict[str, Any]:
    """Of such an engine, with some changed and another custom weight loader."""
    return _ENGINE | changes | {"custom_weight_loader": [LOADER, PROBE, added]}


def settings(tensor_parallel: int, *more: str, engine: dict[str, Any] | None = None) -> tuple[str, ...]:
    """Overrides of verl's configuration for such a server on CPUs."""
    return (
        f"{_ROLLOUT}.name=sglang",
        f"{_ROLLOUT}.tensor_model_parallel_size={tensor_parallel}",
        f"{_ROLLOUT}.load_format=dummy",
        f"+{_ROLLOUT}.engine_kwargs.sglang={_as_hydra(engine or _ENGINE)}",
        *more,
    )


def environment() -> dict[str, str]:
    """Variables of all processes of such a fleet."""
    return {
        **CPU,
        "VERL_USE_EXTERNAL_MODULES": f"{PLATFORM},{SGLANG}",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5",  # numbers that Ray hands out
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",  # of the two ranks
    }


def as_of_a_release(text: str) -> Callable[[Any], None]:
    """Called by Ray with a rollout worker: what rlrefit finds that its SGLang lacks."""

    def found(worker: Any) -> None:
        from rlrefit.workers.frameworks.verl import sglang_server

        sglang_server.differences = lambda: text

    return found


def calls_of(fleet: Any, replica: int) -> EngineCalls:
    """To the SGLang workers of a replica, which know the probe's commands then."""
    from rlrefit.workers.frameworks.verl.sglang_server import VerlServerCaller, _address

    url, _ = ray.get(fleet.replicas[replica].server_handle.__ray_call__.remote(_address), timeout=120)
    calls = EngineCalls(VerlServerCaller(url))
    calls.update([])
    calls.extend(PROBE)
    return calls


def run(folder: Path) -> Seen:
    """Nine updates: one that is refused, two into spoiled parameters, one of what changed alone, one that fails, the next, two
    in turns, and one in which a worker is killed."""
    from verl.workers.rollout.replica import RolloutMode

    from rlrefit.workers.frameworks.verl.manager import RefitCheckpointManager
    from tests.verl_adapter.fleet import shard_fleet

    checkpoint = make_checkpoint("qwen3", folder / "model")
    seen = Seen()
    delta = f"+{_ROLLOUT}.checkpoint_engine.engine_kwargs.nccl_xfer_shards.delta=always"
    with shard_fleet(folder, checkpoint, environment(), 2, 1, settings(2, delta)) as fleet:
        calls = calls_of(fleet, 0)
        for version in UPDATED:
            path = str(written(folder, checkpoint, version))
            calls.step("update_weights_from_disk", model_path=path, load_format="auto")
            seen.loaded[version] = calls.ask("probe_digests")
        manager = fleet.manager(0)

        def update(version: int, asleep: bool = False) -> None:
            fleet.actors.change(version)
            if version != SPARSE:
                calls.ask("probe_poison")
            if asleep:
                calls.step("release_memory_occupation", tags=["kv_cache", "weights"])
            seen.metrics[version] = manager.update_weights(version)
            seen.held[version] = calls.ask("probe_digests")
            seen.answers[version] = fleet.generate(0)
            ray.get(fleet.replicas[0].server_handle.clear_kv_cache.remote())
            seen.afresh[version] = fleet.generate(0)

        def fail(version: int) -> None:
            fleet.actors.change(version)
            start = time.monotonic()
            try:
                manager.update_weights(version)
            except Exception as error:
                seen.errors[version] = str(error), time.monotonic() - start

        first = fleet.replicas[0].workers[0].__ray_call__
        ray.get(first.remote(as_of_a_release(LACKS)), timeout=120)
        fail(REFUSED)
        ray.get(first.remote(as_of_a_release("")), timeout=120)
        for version in (1, 2, 3):
            update(version)
        calls.ask("probe_cast", "float32")
        fail(FAILED)
        calls.ask("probe_cast", "bfloat16")
        update(7)
        # As a replica on the actors' GPUs, which verl has put to sleep before.
        fleet.replicas[0].rollout_mode = RolloutMode.HYBRID
        apart, manager = manager, RefitCheckpointManager(manager.config, fleet.actors, fleet.replicas)
        for version in IN_TURN:
            update(version, asleep=True)
        fleet.replicas[0].rollout_mode = RolloutMode.STANDALONE
        manager = apart
        seen.sent = fleet.records("trainer")
        seen.received = [
            [
                json.loads(line)
                for line in (folder / f"refits-generation-{rank}.jsonl").read_text().splitlines()
            ]
            for rank in (0, 1)
        ]
        calls.ask("probe_die_in_the_next_refit")
        fail(KILLED)
    return seen


def written(folder: Path, checkpoint: Path, version: int) -> Path:
    """The checkpoint with the weights of a version."""
    from tests.verl_adapter.fsdp_actor import weight

    made = folder / f"version-{version}"
    made.mkdir()
    for file in checkpoint.iterdir():
        if file.suffix == ".json":
            (made / file.name).write_bytes(file.read_bytes())
    tensors = load_file(checkpoint / "model.safetensors")
    whole = {name: weight(name, tensor.shape, version).bfloat16() for name, tensor in tensors.items()}
    save_file(whole, made / "model.safetensors", metadata={"format": "pt"})
    return made


def _as_hydra(settings: dict[str, Any]) -> str:
    return json.dumps(settings).replace('"', "").replace(" ", "")
