"""What verl may have an engine serve that refits shard to shard leave as it is, or can't make."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Never

from ....integration.config import RefitConfig
from ....integration.control import Rendezvous
from ....integration.control.channel import refusals_told
from ....integration.errors import RefitError
from ....integration.quantize.fp8_blockwise import BLOCK
from ...engines.sglang import drafters as of_sglang
from ...engines.sglang.loader import LOADER
from ...engines.vllm.drafters import has_weights, is_mtp, may_follow, method_in
from .options import EXTENSION, MAKES_INT4, PACKS, QUANTIZES
from .orders import Order

_STAYS = (
    "refits reach MTP layers of the served checkpoint alone, so that this drafter would keep what it was started with: with "
    "load_format=dummy, random numbers"
)
_NOT_SENT = (
    "it drafts with MTP layers of the served checkpoint, which these actors don't have, so that nothing would reach them: verl builds "
    "them in its Megatron engine (actor.strategy=megatron) with model.mtp.enable=true"
)
_ENGINES = ("vllm", "sglang")
_HAVE_IT_QUANTIZED = (
    f"shard to shard, the trainer quantizes for such an engine: set {QUANTIZES}=true, or take checkpoint_engine.backend=nccl_xfer, "
    "which sends BF16 for verl to quantize"
)
_FORMATS = (
    f"weights go shard to shard quantized in FP8 blocks of 128x128, by rollout.quantization=fp8 with {QUANTIZES}=true, and in INT4, by "
    f"engine_kwargs.vllm.hf_overrides with {MAKES_INT4}=true. Otherwise leave these out"
)


def asked_violations(
    rollout: Mapping[str, Any], config: RefitConfig, model: Mapping[str, Any], strategy: str
) -> list[str]:
    """On the actors; what a checkpoint's own configuration adds, the engine's worker knows.

    Args:
        rollout: ``actor_rollout_ref.rollout``.
        config: of the refit.
        model: ``actor_rollout_ref.model``.
        strategy: ``actor_rollout_ref.actor.strategy``.
    """
    engine = rollout["name"]
    if engine not in _ENGINES:
        return [
            f"rollout.name is {engine}; {' and '.join(_ENGINES)} have parameters that can be written in place"
        ]
    found = []
    kwargs = (rollout.get("engine_kwargs") or {}).get(engine) or {}
    name = rollout.get("quantization")
    if name == "fp8":
        if not config.trainer_quantize_fp8 and not config.trainer_quantize_int4:
            found.append(f"rollout.quantization is fp8; {_HAVE_IT_QUANTIZED}")
    elif name is not None:
        found.append(f"rollout.quantization is {name}; {_FORMATS}")
    if config.trainer_quantize_mxfp4:
        found.append(f"{PACKS} is true, and no engine of verl's has run with experts in MXFP4; give false")
    if config.trainer_quantize_int4:
        found += _int4_violations(engine, name, kwargs)
    if (rollout.get("qat") or {}).get("enable"):
        found.append(
            "actor.fsdp_config.qat or actor.megatron.qat is enabled, by which verl has vLLM serve another format; "
            f"{_FORMATS}"
        )
    if kwargs.get("quantization") is not None:
        found.append(
            f"rollout.engine_kwargs.{engine}.quantization is {kwargs['quantization']}, by which the engine quantizes in a way of "
            f"its own; {_FORMATS}"
        )
    mtp = rollout.get("mtp") or model.get("mtp") or {}
    drafts = mtp if mtp.get("enable") and mtp.get("enable_rollout") else {}
    of_engine = _drafter_of_vllm if engine == "vllm" else _drafter_of_sglang
    drafter = of_engine(kwargs, drafts, model.get("path"))
    if drafter is not None:
        sent = strategy == "megatron" and (model.get("mtp") or {}).get("enable")
        off = f"set model.mtp.enable_rollout=false, and no engine_kwargs.{engine}.{drafter.key}"
        if not drafter.served:
            found.append(f"{drafter.where} names a drafter ({drafter.name}); {_STAYS}; {off}")
        elif not sent:
            found.append(f"{drafter.where}: {_NOT_SENT}; or {off}")
        made = QUANTIZES if config.trainer_quantize_fp8 else MAKES_INT4
        if config.trainer_quantize_fp8 or config.trainer_quantize_int4:
            found.append(
                f"{drafter.where}: no drafter has run with quantized weights; {off}, or {made}=false"
            )
    return found + (_asked_of_vllm(kwargs) if engine == "vllm" else _asked_of_sglang(rollout, kwargs))


def _int4_violations(engine: str, quantization: str | None, kwargs: Mapping[str, Any]) -> list[str]:
    """What keeps an engine from holding the INT4 that the actors make."""
    if engine != "vllm":
        return [
            f"{MAKES_INT4} is true, and {engine} has not run in INT4 under verl; give false, or rollout.name=vllm"
        ]
    if quantization is not None:
        return [
            f"{MAKES_INT4} is true, and rollout.quantization is {quantization}, which is another format; give false, or null there"
        ]
    served = _settings(kwargs, "hf_overrides").get("quantization_config") or {}
    if (served.get("quant_method"), served.get("format")) != ("compressed-tensors", "pack-quantized"):
        return [
            f"{MAKES_INT4} is true, and rollout.engine_kwargs.vllm.hf_overrides has no quantization_config of compressed-tensors' "
            "pack-quantized weights, so that the engine would not hold INT4; give it that of "
            "rlrefit.recipes.rollout.arguments.int4(group)"
        ]
    return []


@dataclass(frozen=True)
class _Drafter:
    """A model by which an engine shall draft.

    Attributes:
        name: of it, or of the way to draft.
        served: whether it is MTP layers of the served checkpoint.
        key: of the engine's arguments that asks for one.
        where: the key of verl's that asks for this one.
    """

    name: str
    served: bool
    key: str
    where: str


def _settings(vllm: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Those that an argument of vLLM's has, which may be their JSON."""
    given = vllm.get(key) or {}
    return json.loads(given) if isinstance(given, str) else given


def _drafter_of_vllm(vllm: Mapping[str, Any], mtp: Mapping[str, Any], served: str | None) -> _Drafter | None:
    """Of an engine with these arguments, and ``model.mtp`` where it drafts by that (verl's ``build_mtp_speculative_config``)."""
    key = "speculative_config"
    given = _settings(vllm, key)
    asked = {"method": mtp["method"]} if mtp else {}
    asked |= {name: value for name, value in given.items() if value is not None}
    method, model = method_in(asked), asked.get("model")
    if not asked or not has_weights(method):
        return None
    where = "model.mtp.enable_rollout" if mtp and not given else f"rollout.engine_kwargs.vllm.{key}"
    return _Drafter(str(model or method), is_mtp(method) and model in (None, served), key, where)


def _drafter_of_sglang(
    sglang: Mapping[str, Any], mtp: Mapping[str, Any], served: str | None
) -> _Drafter | None:
    """As :func:`_drafter_of_vllm`; here ``model.mtp`` comes last."""
    key = "speculative_algorithm"
    algorithm = (mtp or sglang).get(key)
    if not of_sglang.has_drafter(algorithm):
        return None
    where = "model.mtp.enable_rollout" if mtp else f"rollout.engine_kwargs.sglang.{key}"
    settings = of_sglang.settings_in({"model_path": served, **sglang, key: algorithm})
    return _Drafter(
        str(settings["speculative_draft_model_path"] or algorithm), of_sglang.may_follow(settings), key, where
    )


def _asked_of_vllm(vllm: Mapping[str, Any]) -> list[str]:
    found = []
    if not vllm.get("worker_extension_cls"):
        found.append(
            "vLLM's workers have verl's own extension; set rollout.engine_kwargs.vllm.worker_extension_cls="
            f"{EXTENSION}, or a class that inherits it"
        )
    return found


def _asked_of_sglang(rollout: Mapping[str, Any], sglang: Mapping[str, Any]) -> list[str]:
    """What SGLang's settings add, its server tells (``unsupported_settings``)."""
    found = []
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
    found = _quantized(vllm_config.quant_config, config)
    speculative = vllm_config.speculative_config
    if speculative is not None and has_weights(speculative.method) and not may_follow(vllm_config):
        found.append(
            f"it decodes speculatively ({speculative.method}); {_STAYS}; set model.mtp.enable_rollout=false, and no "
            "engine_kwargs.vllm.speculative_config"
        )
    return found


def _quantized(quant_config: Any, config: RefitConfig) -> list[str]:
    """What hinders weights that are quantized, by vLLM's configuration of them; None where they aren't."""
    by_trainer = config.trainer_quantize_fp8
    if quant_config is None:
        made = QUANTIZES if by_trainer else MAKES_INT4
        unquantized = f"{made} is true, and its weights are not quantized; {_FORMATS}"
        return [unquantized] if by_trainer or config.trainer_quantize_int4 else []
    name, block = quant_config.get_name(), getattr(quant_config, "weight_block_size", None)
    if name == "compressed-tensors" and config.trainer_quantize_int4:
        return []  # layers that hold another format of it are refused one by one
    how, remedy = "", _FORMATS
    if name == "fp8" and (block is None or not quant_config.is_checkpoint_fp8_serialized):
        how = " with a scale for each weight"
    elif name == "fp8" and tuple(block) != BLOCK:
        how = f" in blocks of {'x'.join(map(str, block))}"
    elif name == "fp8" and by_trainer:
        return []
    elif name == "fp8" and config.trainer_quantize_int4:
        remedy = f"{MAKES_INT4} is of another format: set {QUANTIZES}=true in its place"
    elif name == "fp8":
        remedy = _HAVE_IT_QUANTIZED
    return [
        f"its weights are quantized ({name}{how}, by rollout.quantization, engine_kwargs.vllm or the checkpoint's own "
        f"quantization_config); {remedy}"
    ]


def refuse(order: Order, wrong: list[str]) -> Never:
    """Tell all other ranks of an order's epoch why this one can't take part; other workers may never join.

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
    with refusals_told(Rendezvous.from_json(order.meeting), order.rank):
        raise error
