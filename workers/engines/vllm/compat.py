"""Does the installed vLLM have the functions and classes that rlrefit relies on, with their parameters?

vLLM's internals move between releases. What is missing shows here, all of it and by name, and not as an ``AttributeError`` in
the middle of a refit. Each list is asked for where its feature begins: :data:`WORKER` and :data:`CORE` as a worker starts,
those of drivers as a driver is made, all others by an engine that has the feature.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....integration.errors import RefitError

logger = logging.getLogger(__name__)

# The first and the last series that the tests have run. One beyond is taken if it has what is asked for, with a warning.
FIRST, LAST = "0.21", "0.32"
_LAYERS = "vllm.model_executor.layers"
_MODELOPT = f"{_LAYERS}.quantization.modelopt"
# Methods of linear layers, as :func:`method_of` tells them.
NVFP4_LINEAR = f"{_MODELOPT}.ModelOptNvFp4LinearMethod"
NVFP4_W4A16_LINEAR = f"{_MODELOPT}.ModelOptNvFp4W4A16LinearMethod"
MXFP8_LINEAR = f"{_MODELOPT}.ModelOptMxFp8LinearMethod"
_COMPRESSED = f"{_LAYERS}.quantization.compressed_tensors"
_COMPRESSED_EXPERTS = f"{_COMPRESSED}.compressed_tensors_moe.compressed_tensors_moe"
# compressed-tensors' scheme of packed integers for linear layers, and its methods for experts.
WNA16_LINEAR = f"{_COMPRESSED}.schemes.compressed_tensors_wNa16.CompressedTensorsWNA16"
WNA16_EXPERTS = f"{_COMPRESSED_EXPERTS}_wna16.CompressedTensorsWNA16MoEMethod"
WNA16_MARLIN_EXPERTS = f"{_COMPRESSED_EXPERTS}_wna16_marlin.CompressedTensorsWNA16MarlinMoEMethod"
_FP4 = "quantization.utils.marlin_utils_fp4"
_LOADER = "vllm.model_executor.model_loader"
_TRANSFER = "vllm.distributed.weight_transfer"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"
_CORE = "vllm.v1.engine.core"
_ASYNC = "vllm.v1.engine.async_llm"
_OUTPUT = "vllm.v1.engine.output_processor"
_RESETS = ("reset_running_requests", "reset_connector")


@dataclass(frozen=True)
class Needed:
    """Something of vLLM.

    Attributes:
        module: where it is.
        name: its name there, dotted for what a class holds.
        takes: names that are used of its parameters (a function, or the constructor of a class) or of its fields.
    """

    module: str
    name: str
    takes: tuple[str, ...] = ()


# Every worker: its start, the trace and the reload.
WORKER = (
    Needed("vllm.config", "VllmConfig", ("model_config", "parallel_config", "weight_transfer_config")),
    Needed("vllm.config", "CompilationMode.NONE"),
    Needed("vllm.config", "set_current_vllm_config", ("vllm_config",)),
    Needed("vllm.config", "ParallelConfig", ("worker_extension_cls",)),
    Needed("vllm.platforms", "current_platform.is_cpu"),
    Needed("vllm.utils.torch_utils", "set_default_torch_dtype", ("dtype",)),
    Needed(f"{_LOADER}.utils", "initialize_model", ("vllm_config",)),
    Needed(f"{_LOADER}.reload", "initialize_layerwise_reload", ("model",)),
    Needed(f"{_LOADER}.reload", "finalize_layerwise_reload"),
    Needed(f"{_LOADER}.reload.layerwise", "get_layerwise_info", ("layer",)),
    Needed(f"{_LOADER}.reload.layerwise", "_get_original_loader", ("tensor",)),
    Needed(f"{_LOADER}.reload.meta", "materialize_meta_tensor", ("meta_tensor",)),
    Needed(f"{_LOADER}.reload.utils", "get_layer_tensors", ("layer",)),
    Needed(
        f"{_LOADER}.reload.types",
        "LayerReloadingInfo",
        ("restore_metadata", "restore_device", "load_numel", "loaded_weights", "kernel_tensors"),
    ),
    Needed("vllm.model_executor.models.utils", "_model_to_pp_missing_layer_names"),
    Needed("vllm.model_executor.offloader", "NoopOffloader"),
    Needed("vllm.model_executor.offloader", "get_offloader"),
    Needed("vllm.model_executor.offloader", "set_offloader", ("instance",)),
    Needed(f"{_LAYERS}.rotary_embedding", "_ROPE_DICT"),
    Needed(f"{_LAYERS}.attention", "Attention"),
    Needed(f"{_LAYERS}.attention", "MLAAttention.process_weights_after_loading", ("act_dtype",)),
    Needed(f"{_LAYERS}.attention", "MMEncoderAttention"),
    Needed(f"{_LAYERS}.linear", "UnquantizedLinearMethod"),
    Needed(f"{_LAYERS}.vocab_parallel_embedding", "UnquantizedEmbeddingMethod"),
    Needed(
        f"{_LAYERS}.quantization.base_config", "QuantizeMethodBase.process_weights_after_loading", ("layer",)
    ),
    Needed("vllm.v1.worker.gpu_worker", "Worker.load_model"),
    Needed("vllm.v1.worker.gpu_worker", "Worker.sleep", ("level",)),
    Needed("vllm.v1.worker.gpu_worker", "Worker.wake_up", ("tags",)),
    Needed("vllm.v1.worker.gpu_worker", "Worker.reload_weights"),
    Needed("vllm.v1.worker.gpu_worker", "Worker.compile_or_warm_up_model"),
)
# Of each worker's model runner, whose class is V1's or V2's.
RUNNER_HOLDS = ("device", "execute_model", "get_model", "reset_encoder_cache")
# Every engine's core, which the plug-in patches.
CORE = (
    Needed("vllm.config", "VllmConfig", ("scheduler_config",)),
    Needed("vllm.config", "SchedulerConfig", ("async_scheduling",)),
    Needed("vllm.v1.request", "Request"),
    Needed("vllm.config", "ParallelConfig.has_unfinished_dp", ("dp_group", "has_unfinished")),
    Needed(
        "vllm.v1.core.sched.async_scheduler", "AsyncScheduler.reset_prefix_cache", ("reset_running_requests",)
    ),
    Needed("vllm.v1.executor.abstract", "Executor.__init__", ("vllm_config",)),
    Needed(_CORE, "EngineCore.wake_up", ("tags",)),
    Needed(_CORE, "EngineCore.resume_scheduler"),
    Needed(_CORE, "DPEngineCoreProc.resume_scheduler"),
    Needed(_CORE, "EngineCore.collective_rpc", ("method", "timeout", "args", "kwargs")),
)
# The CPU platform, of a vLLM that has it: what keeps linear weights plain, and experts.
CPU_LINEAR = (Needed("vllm._custom_ops", "_supports_onednn"),)
CPU_EXPERTS = (
    Needed(f"{_LAYERS}.fused_moe.cpu_fused_moe", "_CPU_MOE_ACT_FN"),
    Needed(f"{_LAYERS}.fused_moe.activation", "MoEActivation.SILU"),
    Needed(f"{_LAYERS}.activation", "SiluAndMul.forward_native"),
)
CPU_NVFP4 = (
    Needed("vllm.platforms", "PlatformEnum.CPU"),
    Needed("vllm.model_executor.kernels.linear", "_POSSIBLE_NVFP4_KERNELS"),
    Needed("vllm.model_executor.kernels.linear", "EmulationNvFp4LinearKernel"),
    Needed(
        "vllm.model_executor.kernels.linear",
        "register_linear_kernel",
        ("kernel_class", "platform", "kernel_type"),
    ),
)
# Checkpoints in FP8.
FP8 = (
    Needed(f"{_LAYERS}.quantization.fp8", "Fp8LinearMethod.process_weights_after_loading", ("layer",)),
    Needed(f"{_LAYERS}.quantization.fp8", "Fp8MoEMethod.process_weights_after_loading", ("layer",)),
    Needed(f"{_LAYERS}.fused_moe.config", "FusedMoEQuantConfig.w1_scale"),
    Needed("vllm.utils.deep_gemm", "is_deep_gemm_e8m0_used"),
)
# Checkpoints in INT4.
INT4 = (
    Needed(
        "vllm.model_executor.parameter",
        "ModelWeightParameter",
        ("input_dim", "output_dim", "weight_loader"),
    ),
)
# Checkpoints in NVFP4 for Marlin: its block scales, and what becomes of global ones.
MARLIN_NVFP4 = (
    Needed(f"{_LAYERS}.{_FP4}", "_nvfp4_compute_scale_factor", ("marlin_scales", "a_dtype")),
    Needed(f"{_LAYERS}.{_FP4}", "nvfp4_marlin_process_scales", ("marlin_scales", "scale_factor", "a_dtype")),
    Needed(f"{_LAYERS}.{_FP4}", "nvfp4_marlin_process_global_scale", ("global_scale", "a_dtype")),
)
# By which a linear layer of ModelOpt's method for all formats (0.32) tells its own.
MODELOPT_SPECS = (
    Needed(f"{_LAYERS}.quantization.utils.quant_utils", "kNvfp4Static"),
    Needed(f"{_LAYERS}.quantization.utils.quant_utils", "kNvfp4Dynamic"),
    Needed(f"{_LAYERS}.quantization.utils.quant_utils", "kMxfp8Static"),
)
# A drafter beside the model.
SPECULATIVE = (
    Needed(
        "vllm.config", "SpeculativeConfig", ("method", "model", "draft_load_config", "draft_model_config")
    ),
    Needed("vllm.config", "SpeculativeConfig", ("attention_backend", "moe_backend")),
    Needed("vllm.config", "VllmConfig", ("attention_config", "kernel_config")),
    Needed("vllm.config", "AttentionConfig", ("backend",)),
    Needed("vllm.config", "KernelConfig", ("moe_backend",)),
    Needed("vllm.distributed", "get_pp_group"),
    Needed(f"{_LOADER}.utils", "initialize_model", ("model_config",)),
)
# The switch of a check that a drafter's loader gets weights of all layers in each call; earlier releases have none.
MTP_SWITCH = (Needed(f"{_LOADER}.mtp_validation", "disable_mtp_completeness_check"),)
# policy.refit.kv_scales
KV_SCALES = (Needed("vllm.v1.attention.backend", "AttentionType.DECODER"),)
# policy.refit.lora=adapter
ADAPTERS = (
    Needed(
        "vllm.lora.lora_model",
        "LoRAModel.from_lora_tensors",
        ("peft_helper", "weights_mapper", "skip_prefixes"),
    ),
    Needed("vllm.lora.peft_helper", "PEFTHelper", ("r", "lora_alpha", "target_modules")),
    Needed("vllm.lora.request", "LoRARequest", ("lora_name", "lora_int_id", "lora_path")),
    Needed("vllm.lora.utils", "parse_fine_tuned_lora_name", ("name", "weights_mapper")),
)
# What tells connectors that keep blocks through a reset.
_CONNECTORS = (
    Needed(
        "vllm.config",
        "KVTransferConfig",
        ("kv_connector", "kv_connector_module_path", "kv_connector_extra_config"),
    ),
    Needed("vllm.config", "ECTransferConfig", ("ec_connector",)),
    Needed("vllm.config", "VllmConfig", ("kv_transfer_config", "ec_transfer_config")),
    Needed(f"{_CONNECTOR}.factory", "KVConnectorFactory.get_connector_class", ("kv_transfer_config",)),
    Needed(f"{_CONNECTOR}.v1.base", "KVConnectorBase_V1.reset_cache"),
    Needed(f"{_CONNECTOR}.v1.multi_connector", "MultiConnector"),
)
WEIGHT_TRANSFER = (
    Needed("vllm.config.weight_transfer", "WeightTransferConfig", ("backend",)),
    Needed(f"{_TRANSFER}.factory", "WeightTransferEngineFactory.create_engine", ("config",)),
    Needed(f"{_TRANSFER}.base", "WeightTransferInitInfo"),
    Needed(f"{_TRANSFER}.base", "WeightTransferUpdateInfo"),
    Needed(f"{_TRANSFER}.base", "WeightTransferEngine.parse_init_info", ("init_dict",)),
    Needed(f"{_TRANSFER}.base", "WeightTransferEngine.parse_update_info", ("update_dict",)),
    Needed("vllm.v1.worker.gpu_worker", "Worker.init_weight_transfer_engine", ("init_info",)),
    Needed("vllm.v1.worker.gpu_worker", "Worker.start_weight_update"),
    Needed("vllm.v1.worker.gpu_worker", "Worker.update_weights", ("update_info",)),
    Needed("vllm.v1.worker.gpu_worker", "Worker.finish_weight_update"),
    Needed(_CORE, "EngineCore.reset_prefix_cache", _RESETS),
    Needed(_CORE, "EngineCore.reset_encoder_cache"),
    Needed(_CORE, "EngineCore.is_scheduler_paused"),
    Needed(_CORE, "EngineCore.pause_scheduler", ("mode", "clear_cache")),
    Needed(_CORE, "EngineCoreProc.pause_scheduler", ("mode", "clear_cache")),
    Needed("vllm.v1.core.sched.scheduler", "Scheduler.has_unfinished_requests"),
    Needed("vllm.config", "ModelConfig.is_multimodal_model"),
    *_CONNECTORS,
)
_OUTPUTS = (
    Needed(_OUTPUT, "RequestState", ("external_req_id", "parent_req", "request_index", "detokenizer")),
    Needed("vllm.v1.engine.parallel_sampling", "ParentRequest", ("external_req_id",)),
    Needed("vllm.v1.engine.detokenizer", "IncrementalDetokenizer.num_output_tokens"),
)
# By which a process of ours is known to make an engine, whose pauses then wait for outputs in the place of a time.
PAUSING = (Needed("vllm.v1.engine.core_client", "EngineCoreClient.make_async_mp_client", ("vllm_config",)),)
# By which a server's process refits in one call.
REFITTING = (
    Needed("fastapi", "FastAPI.include_router", ("router",)),
    Needed("vllm.v1.engine.exceptions", "EngineDeadError"),
    Needed(_ASYNC, "AsyncLLM.pause_generation", ("mode",)),
    Needed(_ASYNC, "AsyncLLM.collective_rpc", ("method", "kwargs")),
    Needed(_ASYNC, "AsyncLLM.errored"),
    Needed(_ASYNC, "AsyncLLM.dead_error"),
    Needed(_ASYNC, "AsyncLLM.resume_generation"),
    Needed(_ASYNC, "AsyncLLM.is_paused"),
)
# What drivers use of vllm.LLM.
SCRIPT = (
    Needed("vllm.entrypoints.llm", "LLM.enqueue", ("prompts", "lora_request", "use_tqdm")),
    Needed("vllm.entrypoints.llm", "LLM.collective_rpc", ("method", "args")),
    Needed("vllm.entrypoints.llm", "LLM.sleep", ("level", "mode")),
    Needed("vllm.entrypoints.llm", "LLM.wake_up", ("tags",)),
    Needed("vllm.entrypoints.llm", "LLM.reset_prefix_cache", _RESETS),
    Needed("vllm.v1.engine.llm_engine", "LLMEngine.step"),
    Needed("vllm.v1.engine.llm_engine", "LLMEngine.has_unfinished_requests"),
    Needed("vllm.v1.engine.llm_engine", "LLMEngine.abort_request", ("internal",)),
    Needed("vllm.v1.engine.llm_engine", "LLMEngine.reset_encoder_cache"),
    Needed("vllm.v1.engine.llm_engine", "LLMEngine.is_sleeping"),
    *_OUTPUTS,
    *_CONNECTORS,
)
# And of one that was made; of two names either does.
SCRIPT_HOLDS = (
    "llm_engine.vllm_config",
    "llm_engine.output_processor.request_states",
    "llm_engine.output_processor.parent_requests",
    "llm_engine.engine_core.outputs_queue|llm_engine.engine_core.engine_core.batch_queue",
)
# What drivers use of AsyncLLM.
SERVER = (
    Needed(_ASYNC, "AsyncLLM.add_request", ("request_id", "prompt", "params", "lora_request")),
    Needed(_ASYNC, "AsyncLLM.abort", ("request_id",)),
    Needed(_ASYNC, "AsyncLLM.pause_generation", ("mode", "clear_cache")),
    Needed(_ASYNC, "AsyncLLM.resume_generation"),
    # Without it a core that dies before the first request would be waited for.
    Needed(_ASYNC, "AsyncLLM._run_output_handler"),
    Needed(_ASYNC, "AsyncLLM.reset_encoder_cache"),
    Needed(_ASYNC, "AsyncLLM.sleep", ("level",)),
    Needed(_ASYNC, "AsyncLLM.wake_up", ("tags",)),
    Needed("vllm.v1.engine.core_client", "AsyncMPClient._call_utility_async", ("method", "engine")),
    Needed(_CORE, "EngineCore.collective_rpc", ("method", "timeout", "args", "kwargs")),
    Needed(_CORE, "EngineCore.reset_prefix_cache", _RESETS),
    Needed(_OUTPUT, "RequestOutputCollector.get"),
    Needed(_OUTPUT, "RequestOutputCollector.get_nowait"),
    Needed(_OUTPUT, "RequestOutputCollector.put", ("output",)),
    *_OUTPUTS,
    *_CONNECTORS,
)
# Each replica's answers, and the queue in which their outputs wait.
SERVER_HOLDS = (
    "vllm_config",
    "output_processor.request_states",
    "output_handler",
    "engine_core.core_engines",
    "engine_core.engine_ranks_managed",
    "engine_core.outputs_queue",
)
_CORE_HOLDS = ("model_executor.is_sleeping", "scheduler.running")
_REPLICA_HOLDS = (*_CORE_HOLDS, "pending_pause", "engines_running", "dp_group")
_seen_cores: set[type[Any]] = set()


def require_supported_vllm(needed: Sequence[Needed] = (*WORKER, *CORE)) -> None:
    """Check what is ``needed`` against the installed vLLM.

    Raises:
        RefitError: lists everything that is missing or takes other parameters, and vLLM's version.
    """
    _require(needed, [])


def has(needed: Sequence[Needed]) -> bool:
    """Whether the installed vLLM has all that is ``needed``, where there is another way without it."""
    return not any(map(_problem, needed))


def require_driver(engine: object, needed: Sequence[Needed], holds: Sequence[str]) -> None:
    """Check what a driver is about to use of ``engine``, before a request or a refit begins.

    Args:
        engine: of vLLM, whose modules are loaded by then; one that is not derived from vLLM's classes is the caller's own.
        needed: :data:`SCRIPT` or :data:`SERVER`.
        holds: :data:`SCRIPT_HOLDS` or :data:`SERVER_HOLDS`.

    Raises:
        RefitError: as :func:`require_supported_vllm`.
    """
    if any(kind.__module__.partition(".")[0] == "vllm" for kind in type(engine).__mro__):
        _require(needed, _absent(engine, holds))


def require_core(core: Any) -> None:
    """Check what the plug-in's patches are about to use of an engine's core, once for each class of cores.

    Raises:
        RefitError: as :func:`require_supported_vllm`.
    """
    kind = type(core)
    if kind in _seen_cores:
        return
    from vllm.v1.engine.core import DPEngineCoreProc

    _require((), _absent(core, _REPLICA_HOLDS if isinstance(core, DPEngineCoreProc) else _CORE_HOLDS))
    _seen_cores.add(kind)


def _require(needed: Sequence[Needed], absent: Sequence[str]) -> None:
    installed = _version()
    wrong = [problem for problem in map(_problem, needed) if problem] + list(absent)
    if wrong:
        listed = "\n".join(f"  - {problem}" for problem in wrong)
        raise RefitError(
            f"vLLM {installed} lacks {len(wrong)} things that this engine's refits rely on:\n{listed}\nNothing was changed in "
            f"the engine. Install a vLLM from {FIRST} to {LAST}, or a newer rlrefit",
            stage="start",
        )
    if needed and not _series(FIRST) <= _series(installed) <= _series(LAST):
        logger.warning(
            "rlrefit's tests have run vLLM %s to %s, and this is %s. It has the %d names that this engine's refits rely on, with "
            "their parameters; what they do was not tested. Compare its generations with the trainer's log-probabilities before "
            "relying on it",
            FIRST,
            LAST,
            installed,
            len(needed),
        )


def _series(version: str) -> tuple[int, ...]:
    """The first two numbers of a version; none of one that has no numbers."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def _absent(holder: object, paths: Sequence[str]) -> list[str]:
    """Those of ``paths`` that lead to no attribute, in words; of alternatives, joined by ``|``, one suffices."""
    name = type(holder).__name__
    return [
        f"{name}.{path.replace('|', f' and {name}.')}: does not exist"
        for path in paths
        if not any(_leads(holder, one) for one in path.split("|"))
    ]


def _leads(holder: object, path: str) -> bool:
    for part in path.split("."):
        if not hasattr(holder, part):
            return False
        holder = getattr(holder, part)
    return True


def require_supported_runner(runner: Any) -> None:
    """Check that a worker's model runner has what refits use of it; before it loads its model, where rlrefit is loaded by then.

    vLLM has two, V1 and V2. It is asked for its methods and not for its class.

    Raises:
        RefitError: lists what it lacks.
    """
    _require((), _absent(runner, RUNNER_HOLDS))


def _problem(needed: Needed) -> str:
    where = f"{needed.module}.{needed.name}"
    try:
        found: Any = importlib.import_module(needed.module)
    except ImportError as error:
        return f"{where}: the module can't be imported ({error})"
    for part in needed.name.split("."):
        if not hasattr(found, part):
            return f"{where}: {part} does not exist"
        found = getattr(found, part)
    absent = [name for name in needed.takes if name not in _accepted(found, name)]
    return f"{where}: has no {' and no '.join(absent)}" if absent else ""


def _accepted(found: Any, name: str) -> set[str]:
    """Parameters, fields and annotated attributes of ``found``; ``name`` among them if it takes any keyword."""
    if dataclasses.is_dataclass(found):
        return {field.name for field in dataclasses.fields(found)}
    parameters = inspect.signature(found).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return {*parameters, *getattr(found, "__annotations__", ()), *([name] if takes_all else [])}


def kind_of(thing: object) -> str:
    """Module and name of the class of ``thing``."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def method_of(method: object) -> str:
    """As :func:`kind_of`; of ModelOpt's method for linear layers of all formats the one that vLLM had for that format before (0.32)."""
    kind = kind_of(method)
    if kind != f"{_MODELOPT}.ModelOptLinearMethod" or not has(MODELOPT_SPECS):
        return kind
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        kMxfp8Static,
        kNvfp4Dynamic,
        kNvfp4Static,
    )

    spec: Any = method.spec  # type: ignore[attr-defined]
    if spec.weight == kMxfp8Static:
        return MXFP8_LINEAR
    known = {(kNvfp4Static, kNvfp4Dynamic): NVFP4_LINEAR, (kNvfp4Static, None): NVFP4_W4A16_LINEAR}
    return known.get((spec.weight, spec.activation), kind)


def _version() -> str:
    vllm = importlib.import_module("vllm")
    return str(getattr(vllm, "__version__", "of unknown version"))
