"""What MTP layers that are trained, and engines that decode speculatively, require of the rest of a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...workers.engines.sglang.drafters import drafter_problems, has_drafter, may_follow, settings_in
from ...workers.engines.vllm.drafters import has_weights, is_mtp, method_in
from .engines import DRAFT_SIZES, ENABLED, unsized_drafts
from .errors import Violation
from .schema import TrainConfig

MTP = "trainer.mtp_loss_scaling_factor"
SPECULATIVE = "generation.vllm.speculative_config"
_ARGUMENTS = "generation.sglang.server_args"
ALGORITHM = f"{_ARGUMENTS}.speculative_algorithm"
_THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
_SIMULATED = "SGLANG_SIMULATE_ACC_LEN"
# With either, SGLang keeps a copy of the drafter in host memory while it sleeps.
_BACKUPS = ("enable_draft_weights_cpu_backup", "enable_weights_cpu_backup")
_OTHERWISE = "so that rollouts would be of another distribution than the trainer computes"
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
        (
            "generation.backend",
            generation.backend == "transformers",
            "they draft in vLLM and SGLang; give vllm or sglang",
        ),
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
        ("policy.qat", config.policy.qat != "off", "training in four bits has not run with them; give off"),
    ):  # fmt: skip
        if wrong:
            yield Violation((other, MTP), f"{other}: {MTP} is above 0, and {why}, or {MTP}=0")


def speculation_violations(config: TrainConfig, bad: set[str]) -> Iterator[Violation]:
    """What an engine's speculative decoding would do to a run.

    Args:
        config: whose values are possible each for itself, but for ``bad``.
        bad: keys whose values are not.
    """
    if config.generation.backend == "vllm" and config.generation.vllm.speculative_config:
        yield from _in_vllm(config, config.generation.vllm.speculative_config)
    if config.generation.backend == "sglang" and _algorithm(config):
        yield from _in_sglang(config, config.generation.sglang.server_args)


def _algorithm(config: TrainConfig) -> str:
    return str(config.generation.sglang.server_args.get("speculative_algorithm") or "").upper()


def _in_vllm(config: TrainConfig, given: Mapping[str, Any]) -> Iterator[Violation]:
    method, model = method_in(given), given.get("model")
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
            f"{_OTHERWISE}; leave it out",
        )
    if not has_weights(method):
        return
    served, mtp = model in (None, config.model.path), is_mtp(method)
    if served and not mtp:
        yield Violation(
            (SPECULATIVE, "model.path"),
            f"{SPECULATIVE}: the drafter ({method or model}) would be the policy's own checkpoint, which refits don't bring to it, so that it "
            "would keep the first weights; give method=mtp, a drafter's own model, or a method without weights (ngram, suffix)",
        )
    elif mtp and not served and _trains(config):
        yield Violation(
            (SPECULATIVE, MTP),
            f"{SPECULATIVE}.model: {model} has MTP layers of its own, which refits don't reach, and {MTP} trains those of model.path; "
            f"leave model out, or give {MTP}=0",
        )
    if not (mtp and _trains(config)):
        read = (given.get("draft_load_config") or {}).get("load_format", "dummy") != "dummy"
        key = f"{SPECULATIVE}.draft_load_config.load_format"
        yield from _stays(config, SPECULATIVE, [] if read else [f"{key}=auto"], [f"{ENABLED}=false"])
    yield from _beside(config, SPECULATIVE)


def _in_sglang(config: TrainConfig, given: Mapping[str, Any]) -> Iterator[Violation]:
    for name in _THRESHOLDS:
        if given.get(name, 1) != 1:
            key = f"{_ARGUMENTS}.{name}"
            yield Violation(
                (key, ALGORITHM),
                f"{key}: {given[name]} accepts drafts that the policy did not sample, {_OTHERWISE}; leave it out",
            )
    if _SIMULATED in config.ray.generation_env:
        key = f"ray.generation_env.{_SIMULATED}"
        yield Violation(
            (key, ALGORITHM),
            f"{key}: accepts drafts that the policy did not sample, {_OTHERWISE}; leave it out",
        )
    if not has_drafter(_algorithm(config)):
        return
    settings = settings_in({"model_path": config.model.path} | given)
    problems = [*drafter_problems(settings)]
    for problem in problems:
        yield Violation(
            (ALGORITHM, "model.path"),
            f"{ALGORITHM}: {problem}. Give EAGLE or NEXTN with nothing but its sizes for MTP layers of model.path, or NGRAM, which has no "
            "weights",
        )
    if unsized := unsized_drafts(config):
        yield Violation(
            (ALGORITHM, *(f"{_ARGUMENTS}.{name}" for name in unsized)),
            f"{ALGORITHM}: {given['speculative_algorithm']} without {', '.join(unsized)}, for which the recipe leaves room in the context "
            f"(generation.sglang.context_length); give {', '.join(DRAFT_SIZES)}, each 1 or more: 1, 1 and 2 for one token at a time",
        )
    if not problems and not (may_follow(settings) and _trains(config)):
        read = str(given.get("speculative_draft_load_format") or "dummy") != "dummy"
        backed = any(given.get(name) for name in _BACKUPS)
        key = f"{_ARGUMENTS}.speculative_draft_load_format"
        awake = [] if backed else [f"{_ARGUMENTS}.{_BACKUPS[0]}=true", f"{ENABLED}=false"]
        yield from _stays(config, ALGORITHM, [] if read else [f"{key}=auto"], awake)
    yield from _beside(config, ALGORITHM)


def _stays(config: TrainConfig, key: str, read: Sequence[str], awake: Sequence[str]) -> Iterator[Violation]:
    """What would leave a drafter that refits don't bring without weights.

    Args:
        config: the recipe.
        key: that names the drafter.
        read: what would have the engine read its weights; empty if it does.
        awake: what would keep them while the engine sleeps; empty if something does.
    """
    backend = config.generation.backend
    load_format = f"generation.{backend}.load_format"
    if read and getattr(config.generation, backend).load_format == "dummy":
        yield Violation(
            (load_format, key),
            f"{load_format}: dummy would leave a drafter that refits don't bring with random weights; give auto, or {' or '.join(read)}",
        )
    if awake and config.generation.colocated.enabled:
        yield Violation(
            (ENABLED, key),
            f"{ENABLED}: true, and engines discard their weights as they sleep, so that nothing would be left of a drafter that refits "
            f"don't bring; give {' or '.join(awake)}, or leave {key} out",
        )


def _beside(config: TrainConfig, key: str) -> Iterator[Violation]:
    """What no drafter has run beside; ``key`` names it."""
    # They have been told of weight types already, by mtp_violations.
    trained = _trains(config)
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
        (
            "policy.refit.kv_scales",
            config.policy.refit.kv_scales and config.generation.backend == "sglang",
            "no scale reaches the drafter's cache, which has the same format; give false",
        ),
    ):
        if wrong:
            yield Violation((other, key), f"{other}: {key} names a drafter, and {why}, or leave it out")


def _trains(config: TrainConfig) -> bool:
    return config.trainer.mtp_loss_scaling_factor > 0


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
    """Speculative decoding that engines get wrong without GPUs.

    vLLM's CPU build drops the temperatures of drafted tokens (vllm/utils/cpu_triton_utils.py, ``_expand_kernel_impl``; 0.21), and divides by
    what memory holds. On CPUs SGLang takes the most probable token at each temperature (sglang/srt/speculative/eagle_utils.py,
    ``eagle_sample``; 0.5.17 and 0.5.23).

    Args:
        config: the recipe.
        gpus: CUDA devices of this machine; those of a running cluster may be elsewhere.
    """
    if gpus or config.ray.address is not None:
        return
    if config.generation.backend == "vllm" and config.generation.vllm.speculative_config:
        yield Violation(
            (SPECULATIVE, "ray.address"),
            f"{SPECULATIVE}: on CPUs vLLM samples drafted tokens with temperatures that it has not set, so that rollouts would be of no "
            "distribution that the trainer knows, and this machine has no GPU; give {}, or ray.address of a cluster with some",
        )
    if config.generation.backend == "sglang" and _algorithm(config):
        yield Violation(
            (ALGORITHM, "ray.address"),
            f"{ALGORITHM}: on CPUs SGLang takes the most probable token in the place of a sampled one where it drafts, so that all "
            "rollouts of a prompt would be equal, and this machine has no GPU; leave it out, or give ray.address of a cluster with some",
        )
