"""What MTP layers that are trained, and engines that decode speculatively, require of the rest of a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...workers.engines.vllm.drafters import has_weights, is_mtp
from .errors import Violation
from .schema import TrainConfig

MTP = "trainer.mtp_loss_scaling_factor"
SPECULATIVE = "generation.vllm.speculative_config"
# Hugging Face's names for the number of layers for multi-token prediction.
PREDICTION_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def mtp_violations(config: TrainConfig, bad: set[str]) -> Iterator[Violation]:
    """What has not run, or can't, with MTP layers that are trained.

    Args:
        config: whose values are possible each for itself, but for ``bad``.
        bad: keys whose values are not.
    """
    trainer, generation = config.trainer, config.generation
    if trainer.mtp_loss_scaling_factor <= 0 or trainer.backend != "megatron":
        return
    for other, wrong, why in (
        ("generation.backend", generation.backend != "vllm", "they draft in vLLM alone; give vllm"),
        (
            "generation.weight_dtype",
            generation.weight_dtype != "auto",
            "no drafter has run with quantized weights; give auto",
        ),
        (
            "trainer.pipeline_model_parallel_layout",
            trainer.pipeline_model_parallel_layout is not None,
            "stages of one's own have no place for them; give null, and they follow the last layer",
        ),
        ("trainer.context_parallel", trainer.context_parallel > 1, "rows in parts have not run with them; give 1"),
        ("trainer.fp8_param", trainer.fp8_param, "FP8 parameters have not run with them; give false"),
        ("trainer.lora.rank", trainer.lora.rank, "adapters have not run with them; give 0"),
        (
            "trainer.optimizer.cpu_offload_fraction",
            trainer.optimizer.cpu_offload_fraction,
            "an optimizer in host memory has not run with them; give 0",
        ),
        ("policy.qat", config.policy.qat != "off", "NVFP4 training has not run with them; give off"),
    ):  # fmt: skip
        if wrong:
            yield Violation((other, MTP), f"{other}: {MTP} is above 0, and {why}, or {MTP}=0")


def speculation_violations(config: TrainConfig, bad: set[str]) -> Iterator[Violation]:
    """What vLLM's speculative decoding would do to a run.

    Args:
        config: whose values are possible each for itself, but for ``bad``.
        bad: keys whose values are not.
    """
    given = config.generation.vllm.speculative_config
    if config.generation.backend != "vllm" or not given:
        return
    method, model = given.get("method"), given.get("model")
    if method is None and model is None:
        yield Violation(
            (SPECULATIVE,),
            f"{SPECULATIVE}: names neither a method nor a drafter's model; give method=mtp, for example, or {{}} for none",
        )
        return
    if given.get("rejection_sample_method", "standard") != "standard":
        yield Violation(
            (SPECULATIVE,),
            f"{SPECULATIVE}.rejection_sample_method: {given['rejection_sample_method']} accepts drafts that the policy did not sample, "
            "so that rollouts would be of another distribution than the trainer computes; leave it out",
        )
    if not has_weights(method):
        return
    yield from _drafter(config, given)
    # They have been told of weight types already, by mtp_violations.
    trained = config.trainer.mtp_loss_scaling_factor > 0
    for other, wrong, why in (
        (
            "generation.weight_dtype",
            not trained and config.generation.weight_dtype != "auto",
            "no drafter has run with quantized weights; give auto",
        ),
        (
            "policy.qat",
            not trained and config.policy.qat != "off",
            "no drafter has run beside packed weights; give off",
        ),
        (
            "policy.refit.lora",
            config.policy.refit.lora == "adapter",
            "no drafter has run beside an adapter; give merge",
        ),
    ):
        if wrong:
            yield Violation(
                (other, SPECULATIVE), f"{other}: {SPECULATIVE} names a drafter, and {why}, or leave it out"
            )


def _drafter(config: TrainConfig, given: Mapping[str, Any]) -> Iterator[Violation]:
    method, model = given.get("method"), given.get("model")
    served = model in (None, config.model.path)
    mtp, trained = is_mtp(method), config.trainer.mtp_loss_scaling_factor > 0
    if served and not mtp:
        yield Violation(
            (SPECULATIVE, "model.path"),
            f"{SPECULATIVE}: the drafter ({method or model}) would be the policy's own checkpoint, which refits don't bring to it, so that it "
            "would keep the first weights; give method=mtp, a drafter's own model, or a method without weights (ngram, suffix)",
        )
    elif mtp and not served and trained:
        yield Violation(
            (SPECULATIVE, MTP),
            f"{SPECULATIVE}.model: {model} has MTP layers of its own, which refits don't reach, and {MTP} trains those of model.path; "
            f"leave model out, or give {MTP}=0",
        )
    if config.generation.vllm.load_format == "dummy" and not (mtp and trained) and not _loads_drafter(given):
        yield Violation(
            ("generation.vllm.load_format", SPECULATIVE),
            "generation.vllm.load_format: dummy would leave a drafter that refits don't bring with random weights; give auto, or "
            f"{SPECULATIVE}.draft_load_config.load_format=auto",
        )


def _loads_drafter(given: Mapping[str, Any]) -> bool:
    return (given.get("draft_load_config") or {}).get("load_format", "dummy") != "dummy"


def without_prediction(keys: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's configuration as one without MTP layers."""
    return {key: 0 if key in PREDICTION_LAYERS else value for key, value in keys.items()}


def lack_violations(config: TrainConfig, text: Mapping[str, Any]) -> Iterator[Violation]:
    """MTP layers that a model lacks.

    Args:
        config: the recipe.
        text: the language model's keys of config.json.
    """
    if config.trainer.mtp_loss_scaling_factor > 0 and not any(text.get(key) for key in PREDICTION_LAYERS):
        yield Violation(
            (MTP, "model.path"),
            f"{MTP}: {config.trainer.mtp_loss_scaling_factor:g}, but the model has no layers for multi-token prediction "
            f"({', '.join(PREDICTION_LAYERS)}); give 0",
        )


def speculation_gpu_violations(config: TrainConfig, gpus: int) -> Iterator[Violation]:
    """Speculative decoding that vLLM gets wrong without GPUs.

    Its CPU build drops the temperatures of drafted tokens (vllm/utils/cpu_triton_utils.py, ``_expand_kernel_impl``; 0.21), and divides by
    what memory holds.

    Args:
        config: the recipe.
        gpus: CUDA devices of this machine; those of a running cluster may be elsewhere.
    """
    asked = config.generation.backend == "vllm" and config.generation.vllm.speculative_config
    if asked and not gpus and config.ray.address is None:
        yield Violation(
            (SPECULATIVE, "ray.address"),
            f"{SPECULATIVE}: on CPUs vLLM samples drafted tokens with temperatures that it has not set, so that rollouts would be of no "
            "distribution that the trainer knows, and this machine has no GPU; give {}, or ray.address of a cluster with some",
        )
