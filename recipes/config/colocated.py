"""What ``generation.colocated`` asks of the rest of a recipe: trainer and engines that take turns on the same GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from .errors import Violation
from .schema import TrainConfig

ENABLED = "generation.colocated.enabled"
STAGES = "generation.colocated.multi_stage_wake_up"
# Engines that sleep on GPUs, and what has them do so.
_SLEEPING = {"vllm": ("vLLM", "vLLM's sleep mode"), "sglang": ("SGLang", "SGLang's memory saver")}
# What torch and engines read their allocator's settings from.
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def needs_bfloat16(config: TrainConfig) -> bool:
    """Whether the trainer can leave its GPU only if the optimizer has masters beside the model's weights."""
    return config.generation.colocated.enabled and config.trainer.backend == "megatron"


def colocated_violations(config: TrainConfig, bad: set[str]) -> Iterator[Violation]:
    """What would not run on shared GPUs.

    Args:
        config: whose values are possible each for itself, but for ``bad``.
        bad: keys whose values are not.
    """
    if not config.generation.colocated.enabled:
        if not config.generation.colocated.multi_stage_wake_up:
            yield Violation(
                (STAGES, ENABLED),
                f"{STAGES}: false, but engines have GPUs of their own and never sleep; give true, or {ENABLED}=true",
            )
        return
    yield from _sizes(config, bad)
    yield from _engine(config)
    yield from _trainer(config)


def colocated_gpu_violations(config: TrainConfig, gpus: int) -> Iterator[Violation]:
    """What shared GPUs of this machine rule out.

    Args:
        config: the recipe.
        gpus: CUDA devices of this machine; without any, memory stays where it is and nothing is asked.
    """
    if not config.generation.colocated.enabled or not gpus:
        return
    if config.generation.backend == "transformers":
        yield Violation(
            (ENABLED, "generation.backend"),
            f"{ENABLED}: true, but the transformers engine gives its memory back on CPUs only; give "
            "generation.backend=vllm or sglang, or false here",
        )
    if config.ray.address is None and (
        text := too_large_for(config.trainer.ranks, gpus, "this machine", "ray.address of a cluster with one")
    ):
        yield Violation(("trainer.ranks", ENABLED, "ray.address"), text)


def too_large_for(ranks: int, gpus: int, host: str, larger: str) -> str:
    """Why a host can't hold a trainer and the engines that share its GPUs; empty if it can.

    Args:
        ranks: of the trainer.
        gpus: of the host.
        host: what it is called.
        larger: what to give for a larger one.
    """
    if ranks <= gpus:
        return ""
    return (
        f"trainer.ranks: {ranks} ranks share a GPU each with an engine's, all on one host, whose memory the weights go "
        f"through, and {host} has {gpus}; use fewer ranks, a larger host ({larger}), or {ENABLED}=false"
    )


def _sizes(config: TrainConfig, bad: set[str]) -> Iterator[Violation]:
    generation, ranks = config.generation, config.trainer.ranks
    sizes = {
        "generation.replicas": generation.replicas,
        "generation.tensor_parallel": generation.tensor_parallel,
        "generation.pipeline_parallel": generation.pipeline_parallel,
    }
    keys = ("trainer.ranks", *sizes, ENABLED)
    copy = generation.tensor_parallel * generation.pipeline_parallel
    engines = generation.replicas * copy
    if bad.intersection(keys) or ranks == engines:
        return
    product = " x ".join(f"{key.rpartition('.')[2]} {size}" for key, size in sizes.items())
    remedy = f"generation.replicas={ranks // copy}" if ranks % copy == 0 else f"trainer.ranks={engines}"
    yield Violation(
        keys,
        f"trainer.ranks: {ranks} trainer ranks and {engines} generation ranks ({product}) can't share GPUs one to one; give "
        f"{remedy}",
    )


def _engine(config: TrainConfig) -> Iterator[Violation]:
    backend, vllm = config.generation.backend, config.generation.vllm
    if backend not in _SLEEPING:
        return
    engine, by = _SLEEPING[backend]
    if config.policy.nccl_xfer_refit and config.policy.refit.transport == "ipc":
        yield Violation(
            ("policy.refit.transport", "generation.backend", ENABLED),
            f"policy.refit.transport: ipc, but {by} keeps weights in memory that other processes can map on some hosts only, or "
            "on none; give auto, which goes through buckets elsewhere",
        )
    if backend == "vllm" and vllm.distributed_executor_backend == "ray":
        key = "generation.vllm.distributed_executor_backend"
        yield Violation(
            (key, ENABLED),
            f"{key}: ray spreads an engine over hosts, where memory can't be shared, and would take GPUs that the trainer "
            "holds; give mp",
        )
    for name in _ALLOCATOR:
        if "expandable_segments:true" in config.ray.generation_env.get(name, "").lower().replace(" ", ""):
            key = f"ray.generation_env.{name}"
            yield Violation(
                (key, ENABLED),
                f"{key}: {engine} refuses expandable segments where it sleeps; leave expandable_segments out",
            )


def _trainer(config: TrainConfig) -> Iterator[Violation]:
    trainer = config.trainer
    if trainer.backend != "megatron":
        return
    if not trainer.distributed_optimizer:
        yield Violation(
            ("trainer.distributed_optimizer", ENABLED),
            "trainer.distributed_optimizer: false, but without it Megatron's buffers hold no parameters, so that these could "
            "not leave the GPU while an engine generates; give true",
        )
    if config.model.dtype == "float32":
        yield Violation(
            ("model.dtype", "trainer.backend", ENABLED),
            "model.dtype: float32, in which Megatron's optimizer steps the model's parameters themselves and can't leave "
            "the GPU without them; give bfloat16 or auto, or train with trainer=fsdp",
        )
    if trainer.optimizer.cpu_offload_fraction > 0:
        yield Violation(
            ("trainer.optimizer.cpu_offload_fraction", ENABLED),
            f"trainer.optimizer.cpu_offload_fraction: {trainer.optimizer.cpu_offload_fraction:g}, but Megatron's hybrid "
            "optimizer steps the model's parameters themselves, which have to leave the GPU without it; give 0: all of the "
            "optimizer is in host memory while an engine generates",
        )
