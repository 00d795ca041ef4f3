"""What verl may have an engine serve that refits shard to shard leave as it is, or can't make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Never

from ....integration.config import RefitConfig
from ....integration.control import Rendezvous
from ....integration.control.channel import Channel
from ....integration.control.world import RefitWorld
from ....integration.errors import RefitError
from ....integration.quantize.fp8_blockwise import BLOCK
from ...engines.sglang.loader import LOADER
from ...engines.vllm.drafters import has_weights
from .options import EXTENSION, PACKS, QUANTIZES
from .orders import Order

_NOT_RUN = (
    "of drafters, refits reach MTP layers of the served checkpoint alone, and that has not run under verl"
)
_HAVE_IT_QUANTIZED = (
    f"shard to shard, the trainer quantizes for such an engine: set {QUANTIZES}=true, or take checkpoint_engine.backend=nccl_xfer, "
    "which sends BF16 for verl to quantize"
)
_ONE_FORMAT = (
    f"FP8 in blocks of 128x128 is the one format in which weights go shard to shard quantized: rollout.quantization=fp8 with "
    f"{QUANTIZES}=true. Otherwise leave both out"
)


def asked_violations(rollout: Mapping[str, Any], config: RefitConfig) -> list[str]:
    """By ``actor_rollout_ref.rollout``, on the actors; what a checkpoint's own configuration adds, the engine's worker knows."""
    engine = rollout["name"]
    if engine not in _BY_ENGINE:
        return [
            f"rollout.name is {engine}; {' and '.join(_BY_ENGINE)} have parameters that can be written in place"
        ]
    found = []
    kwargs = (rollout.get("engine_kwargs") or {}).get(engine) or {}
    name = rollout.get("quantization")
    if name == "fp8":
        if not config.trainer_quantize_fp8:
            found.append(f"rollout.quantization is fp8; {_HAVE_IT_QUANTIZED}")
    elif name is not None:
        found.append(f"rollout.quantization is {name}; {_ONE_FORMAT}")
    if config.trainer_quantize_mxfp4:
        found.append(f"{PACKS} is true, and no engine of verl's has run with experts in MXFP4; give false")
    if (rollout.get("qat") or {}).get("enable"):
        found.append(
            "actor.fsdp_config.qat or actor.megatron.qat is enabled, by which verl has vLLM serve another format; "
            f"{_ONE_FORMAT}"
        )
    if kwargs.get("quantization") is not None:
        found.append(
            f"rollout.engine_kwargs.{engine}.quantization is {kwargs['quantization']}, by which the engine quantizes in a way of "
            f"its own; {_ONE_FORMAT}"
        )
    mtp = rollout.get("mtp") or {}
    if mtp.get("enable") and mtp.get("enable_rollout"):
        found.append(f"rollout.mtp.enable_rollout is true; {_NOT_RUN}; set model.mtp.enable_rollout=false")
    return found + _BY_ENGINE[engine](rollout, kwargs)


def _asked_of_vllm(rollout: Mapping[str, Any], vllm: Mapping[str, Any]) -> list[str]:
    found = []
    speculative = vllm.get("speculative_config")
    # vLLM takes JSON as a text too, which is not read here: it counts as a drafter.
    asked = speculative if isinstance(speculative, Mapping) else {}
    if speculative and has_weights(asked.get("method") or asked.get("model")):
        found.append(
            f"rollout.engine_kwargs.vllm.speculative_config names a drafter; {_NOT_RUN}; leave it out"
        )
    if not vllm.get("worker_extension_cls"):
        found.append(
            "vLLM's workers have verl's own extension; set rollout.engine_kwargs.vllm.worker_extension_cls="
            f"{EXTENSION}, or a class that inherits it"
        )
    return found


def _asked_of_sglang(rollout: Mapping[str, Any], sglang: Mapping[str, Any]) -> list[str]:
    """What SGLang's settings add, its server tells (``unsupported_settings``)."""
    found = []
    speculative = sglang.get("speculative_algorithm")
    if speculative and str(speculative).upper() != "NGRAM":
        found.append(
            f"rollout.engine_kwargs.sglang.speculative_algorithm is {speculative}; {_NOT_RUN}; leave it out, or take NGRAM"
        )
    for key in ("data_parallel_size", "pipeline_model_parallel_size"):
        if rollout.get(key, 1) > 1:
            found.append(
                f"rollout.{key} is {rollout[key]}, and of an SGLang server one tensor-parallel group can be refitted; set it to 1, "
                "and have more replicas instead"
            )
    if (rollout.get("disaggregation") or {}).get("enabled"):
        found.append(
            "rollout.disaggregation.enabled is true, and the queues of such servers are not flushed; set it to false"
        )
    if LOADER not in (sglang.get("custom_weight_loader") or []):
        found.append(
            "SGLang's workers don't know rlrefit's loader; set "
            f"rollout.engine_kwargs.sglang.custom_weight_loader=[{LOADER}]"
        )
    return found


_BY_ENGINE: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any]], list[str]]] = {
    "vllm": _asked_of_vllm,
    "sglang": _asked_of_sglang,
}


def model_violations(model: Mapping[str, Any]) -> list[str]:
    """By ``actor_rollout_ref.model``: under LoRA that is not merged, verl hands checkpoint engines the base weights alone."""
    lora = model.get("lora") or {}
    if (model.get("lora_rank", 0) > 0 or lora.get("rank", 0) > 0) and not lora.get("merge", False):
        return [
            "model.lora.merge is false, so that verl would serve the LoRA adapter beside the base model, and it hands checkpoint engines "
            "the base model alone: nothing that is trained would reach the engines; set model.lora.merge=true"
        ]
    return []


def served_violations(vllm_config: Any, config: RefitConfig) -> list[str]:
    """By what vLLM's worker made of all its settings and of its checkpoint."""
    found = _quantized(vllm_config.quant_config, config.trainer_quantize_fp8)
    speculative = vllm_config.speculative_config
    if speculative is not None and has_weights(speculative.method):
        found.append(
            f"it decodes speculatively ({speculative.method}); {_NOT_RUN}; set model.mtp.enable_rollout=false, and no "
            "engine_kwargs.vllm.speculative_config"
        )
    return found


def _quantized(quant_config: Any, by_trainer: bool) -> list[str]:
    """What hinders weights that are quantized, by vLLM's configuration of them; None where they aren't."""
    if quant_config is None:
        unquantized = f"{QUANTIZES} is true, and its weights are not quantized; {_ONE_FORMAT}"
        return [unquantized] if by_trainer else []
    name, block = quant_config.get_name(), getattr(quant_config, "weight_block_size", None)
    how, remedy = "", _ONE_FORMAT
    if name == "fp8" and (block is None or not quant_config.is_checkpoint_fp8_serialized):
        how = " with a scale for each weight"
    elif name == "fp8" and tuple(block) != BLOCK:
        how = f" in blocks of {'x'.join(map(str, block))}"
    elif name == "fp8" and by_trainer:
        return []
    elif name == "fp8":
        remedy = _HAVE_IT_QUANTIZED
    return [
        f"its weights are quantized ({name}{how}, by rollout.quantization, engine_kwargs.vllm or the checkpoint's own "
        f"quantization_config); {remedy}"
    ]


def refuse(order: Order, wrong: list[str]) -> Never:
    """Join the epoch of an order only to tell all other ranks why this one can't take part; other workers may never join.

    Raises:
        RefitError: with all reasons.
    """
    error = RefitError(
        "this engine of verl's can't be refitted shard to shard:\n  "
        + "\n  ".join(wrong)
        + "\nNothing was sent. checkpoint_engine.backend=nccl_xfer with "
        "custom_backend_module=rlrefit.workers.frameworks.verl.full_tensors hands full tensors to verl's own loading",
        stage="settings",
        rank=order.rank,
    )
    assert order.meeting is not None, "an epoch that is open was joined"
    rendezvous = Rendezvous.from_json(order.meeting)
    world = RefitWorld(order.rank, rendezvous.train_ranks, rendezvous.gen_ranks, rendezvous.epoch)
    channel = Channel(rendezvous, world, RefitConfig(**order.config).timeout_s)
    channel.give_up(error)
    channel.close()
    raise error
