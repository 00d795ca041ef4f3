"""What FP8, MXFP8, MXFP4, INT4 and NVFP4 require of the rest of a recipe: weights of the engine, and of the trainer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...integration.quantize.int4 import GROUPS
from .errors import Violation
from .schema import GenerationConfig, TrainConfig

_RUNNER = "moe_runner_backend"


def weight_dtype_violations(config: TrainConfig, bad: set[str]) -> Iterator[Violation]:
    """What would not run, or would quantize otherwise than asked.

    Args:
        config: whose values are possible each for itself, but for ``bad``.
        bad: keys whose values are not.
    """
    for check in (_fp8_weights, _mxfp4_weights, _int4_weights, _fp8_parameters, _qat):
        yield from check(config, bad)


def qat_format(config: TrainConfig) -> str:
    """The format of the weights that ``policy.qat`` trains with, for texts."""
    return "INT4" if config.policy.qat == "int4" else "NVFP4"


def _fp8_weights(config: TrainConfig, bad: set[str]) -> Iterator[Violation]:
    key, stored = "policy.refit.trainer_quantize_fp8", "generation.weight_dtype"
    quantizes, dtype = config.policy.refit.trainer_quantize_fp8, config.generation.weight_dtype
    if stored in bad:
        return
    made = dtype in ("fp8", "mxfp8")
    if quantizes and not made:
        yield Violation(
            (key, stored),
            f"{key}: the engine keeps no weights in FP8, so that nothing is to be quantized so; give {stored}=fp8, or false here",
        )
    if dtype == "mxfp8" and config.generation.backend != "vllm":
        yield Violation(
            (stored, "generation.backend"),
            f"{stored}: recipes bring MXFP8 to vLLM alone; give fp8, or generation.backend=vllm",
        )
    elif dtype == "mxfp8" and not quantizes:
        yield Violation(
            (stored, key),
            f"{stored}: before Blackwell vLLM's own scales of MXFP8 leave half of its range unused, so the trainer makes them; "
            f"give {key}=true",
        )
    if (
        dtype == "mxfp8"
        and config.generation.backend == "vllm"
        and config.generation.vllm.kv_cache_dtype != "auto"
    ):
        yield Violation(
            ("generation.vllm.kv_cache_dtype", stored),
            f"generation.vllm.kv_cache_dtype: an FP8 KV cache beside {stored}=mxfp8 has not run; give auto, or {stored}=fp8",
        )
    if dtype == "fp8" and not quantizes and config.generation.backend != "vllm":
        yield Violation(
            (stored, "generation.backend", key),
            f"{stored}: the {config.generation.backend} engine does not quantize weights itself; give {key}=true",
        )
    if quantizes and made and config.model.dtype not in ("auto", "bfloat16", "float16"):
        yield Violation(
            (key, "model.dtype"),
            f"{key}: codes are made of BF16 or FP16 weights, and model.dtype is {config.model.dtype}; give bfloat16",
        )


def _unmet(dtype: str, requirements: Iterable[tuple[str, bool, str]]) -> Iterator[Violation]:
    """What a ``generation.weight_dtype`` asks for: another key, whether its value is wrong, and why."""
    stored = "generation.weight_dtype"
    for other, wrong, why in requirements:
        if wrong:
            yield Violation((stored, other), f"{other}: {stored} is {dtype}, and {why}, or {stored}=auto")


def _mxfp4_weights(config: TrainConfig, bad: set[str]) -> Iterator[Violation]:
    key, stored = "policy.refit.trainer_quantize_mxfp4", "generation.weight_dtype"
    quantizes, mxfp4 = config.policy.refit.trainer_quantize_mxfp4, config.generation.weight_dtype == "mxfp4"
    if quantizes and not mxfp4 and stored not in bad:
        yield Violation(
            (key, stored),
            f"{key}: the engine does not keep experts in MXFP4; give {stored}=mxfp4, or false here",
        )
    if not mxfp4:
        return
    requirements = (
        (key, not quantizes, "vLLM packs nothing itself; give true"),
        (
            "generation.backend",
            config.generation.backend != "vllm",
            "refits bring packed experts to vLLM alone; give vllm",
        ),
        (
            "model.dtype",
            config.model.dtype not in ("auto", "bfloat16"),
            "vLLM computes with MXFP4 in bfloat16 alone; give that",
        ),
        (
            "generation.vllm.kv_cache_dtype",
            config.generation.vllm.kv_cache_dtype != "auto",
            "an FP8 KV cache beside it has not run; give auto",
        ),
    )
    yield from _unmet("mxfp4", requirements)


def _int4_weights(config: TrainConfig, bad: set[str]) -> Iterator[Violation]:
    key, stored, group = (
        "policy.refit.trainer_quantize_int4",
        "generation.weight_dtype",
        "generation.weight_group",
    )
    quantizes, int4 = config.policy.refit.trainer_quantize_int4, config.generation.weight_dtype == "int4"
    if quantizes and not int4 and stored not in bad:
        yield Violation(
            (key, stored),
            f"{key}: the engine does not keep weights in INT4; give {stored}=int4, or false here",
        )
    if config.generation.weight_group not in GROUPS:
        yield Violation(
            (group,),
            f"{group}: the engines' kernels have no groups of {config.generation.weight_group}; give {', '.join(map(str, GROUPS[:-1]))} or "
            f"{GROUPS[-1]}",
        )
    if not int4:
        if config.generation.weight_group != GenerationConfig.weight_group and stored not in bad:
            yield Violation(
                (group, stored), f"{group}: it is of {stored}=int4 alone; give that, or leave it out"
            )
        return
    requirements = (
        (key, not quantizes, "no engine makes such weights itself; give true"),
        (
            "generation.backend",
            config.generation.backend == "transformers",
            "refits bring INT4 to vLLM and SGLang alone; give vllm or sglang",
        ),
        (
            "model.dtype",
            config.model.dtype not in ("auto", "bfloat16", "float16"),
            "scales have 16 bits; give bfloat16",
        ),
        *(
            (
                f"generation.{engine}.kv_cache_dtype",
                getattr(config.generation, engine).kv_cache_dtype != "auto",
                "an FP8 KV cache beside it has not run; give auto",
            )
            for engine in ("vllm", "sglang")
        ),
        (
            f"generation.sglang.server_args.{_RUNNER}",
            config.generation.sglang.server_args.get(_RUNNER, "marlin") not in ("marlin", "triton"),
            "of its experts rlrefit knows those orders in which Marlin and Triton compute; give marlin or triton, or leave it out",
        ),
    )
    yield from _unmet("int4", requirements)


def _fp8_parameters(config: TrainConfig, bad: set[str]) -> Iterator[Violation]:
    key, trainer = "trainer.fp8_param", config.trainer
    if not trainer.fp8_param or trainer.backend != "megatron":
        return
    for other, wrong, why in (
        (
            "generation.weight_dtype",
            config.generation.weight_dtype != "fp8",
            "an engine in another format would get all of these weights whole, over the misc path; give fp8",
        ),
        (
            "policy.refit.trainer_quantize_fp8",
            config.generation.weight_dtype == "fp8" and not config.policy.refit.trainer_quantize_fp8,
            "the engine would quantize once more what it gets in BF16; give true",
        ),
        (
            "model.dtype",
            config.model.dtype not in ("auto", "bfloat16"),
            "what is not in FP8 is in bfloat16; give that",
        ),
        (
            "trainer.distributed_optimizer",
            not trainer.distributed_optimizer,
            "Megatron's other optimizers have not run with it; give true",
        ),
        (
            "trainer.optimizer.cpu_offload_fraction",
            trainer.optimizer.cpu_offload_fraction,
            "an optimizer in host memory has not run with it; give 0",
        ),
        ("trainer.lora.rank", trainer.lora.rank, "adapters have not run with it; give 0"),
        ("policy.qat", config.policy.qat != "off", "a layer computes in one of both; give off"),
    ):
        if wrong:
            yield Violation((key, other), f"{other}: {key} is true, and {why}, or {key}=false")


def _qat(config: TrainConfig, bad: set[str]) -> Iterator[Violation]:
    key, trainer, generation = "policy.qat", config.trainer, config.generation
    qat, name, int4 = config.policy.qat, qat_format(config), config.policy.qat == "int4"
    if qat == "off" or key in bad:
        return
    for other, wrong, why in (
        (
            "trainer.tensor_parallel",
            trainer.backend == "fsdp" and trainer.tensor_parallel > 1,
            "it knows no tensor parallelism of transformers'; give 1, or trainer.backend=megatron",
        ),
        (
            "trainer.optimizer.cpu_offload_fraction",
            trainer.optimizer.cpu_offload_fraction,
            "weights that an optimizer in host memory steps have not been quantized; give 0",
        ),
        ("trainer.lora.rank", trainer.lora.rank, "adapters beside quantized weights have not run; give 0"),
        (
            "generation.backend",
            generation.backend != "vllm",
            "its weights have been brought to vLLM alone; give vllm",
        ),
        (
            "generation.weight_dtype",
            "generation.weight_dtype" not in bad and generation.weight_dtype != ("int4" if int4 else "auto"),
            f"the engine holds {name} then; give {'int4' if int4 else 'auto'}",
        ),
        (
            "policy.refit.trainer_quantize_int4",
            int4 and not config.policy.refit.trainer_quantize_int4,
            "refits bring the codes that it trains with by this alone; give true",
        ),
        (
            "generation.vllm.kv_cache_dtype",
            generation.vllm.kv_cache_dtype != "auto",
            "an FP8 KV cache beside packed weights has not run; give auto",
        ),
        (
            "trainer.fsdp.cpu_offload",
            trainer.fsdp.cpu_offload,
            "weights in host memory have not been quantized so; give false",
        ),
        (
            "model.dtype",
            config.model.dtype == "float32",
            f"vLLM computes with {name} in 16 bits alone; give bfloat16",
        ),
    ):
        if wrong:
            yield Violation((key, other), f"{other}: {key} is {qat}, and {why}, or {key}=off")
