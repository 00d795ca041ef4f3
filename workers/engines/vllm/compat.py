"""Does the installed vLLM have the functions and classes that rlrefit relies on, with their parameters?

Asked once when a worker starts, and once when a driver does. vLLM's internals move between releases: what is missing shows here, all of it
and by name, and not as an ``AttributeError`` in the middle of a refit.
"""

from __future__ import annotations

import dataclasses
import dis
import importlib
import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....integration.errors import RefitError

logger = logging.getLogger(__name__)

# The one that the tests run. Another is taken if it has all names and parameters below, with a warning.
SUPPORTED = "0.21"
_LAYERS = "vllm.model_executor.layers"
_KERNELS = "vllm.model_executor.kernels.linear.scaled_mm"
_WNA16_MOE = f"{_LAYERS}.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe"
_LOADER = "vllm.model_executor.model_loader"
_TRANSFER = "vllm.distributed.weight_transfer"
_CORE = "vllm.v1.engine.core"
_ASYNC = "vllm.v1.engine.async_llm"
_RESETS = ("reset_running_requests", "reset_connector")


@dataclass(frozen=True)
class Needed:
    """Something of vLLM.

    Attributes:
        module: where it is.
        name: its name there, dotted for what a class holds.
        takes: names of parameters (of a function) or fields (of a dataclass) that are used.
        sets: names of attributes that are used, and that it sets: the constructor of a class, or a function.
    """

    module: str
    name: str
    takes: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()


REFIT = (
    Needed(
        "vllm.config",
        "VllmConfig",
        ("model_config", "parallel_config", "scheduler_config", "weight_transfer_config"),
    ),
    Needed("vllm.config", "CompilationMode.NONE"),
    Needed("vllm.config", "set_current_vllm_config", ("vllm_config",)),
    Needed("vllm.config", "SpeculativeConfig", ("method", "model", "draft_load_config")),
    Needed("vllm.platforms", "CpuArchEnum.POWERPC"),
    Needed("vllm.platforms", "current_platform.is_cpu"),
    Needed("vllm._custom_ops", "_supports_onednn"),
    Needed("vllm.envs", "VLLM_CPU_SGL_KERNEL"),
    Needed("vllm.utils.torch_utils", "set_default_torch_dtype", ("dtype",)),
    Needed(f"{_LOADER}.utils", "initialize_model", ("vllm_config",)),
    Needed(f"{_LOADER}.reload", "initialize_layerwise_reload", ("model",)),
    Needed(f"{_LOADER}.reload", "finalize_layerwise_reload"),
    Needed(f"{_LOADER}.reload.layerwise", "get_layerwise_info", ("layer",)),
    Needed(f"{_LOADER}.reload.layerwise", "_get_original_loader", ("tensor",)),
    Needed(f"{_LOADER}.reload.utils", "get_layer_tensors", ("layer",)),
    Needed(
        f"{_LOADER}.reload.types",
        "LayerReloadingInfo",
        ("restore_metadata", "restore_device", "load_numel", "loaded_weights", "kernel_tensors"),
    ),
    Needed("vllm.model_executor.models.utils", "_model_to_pp_missing_layer_names"),
    Needed(f"{_LAYERS}.rotary_embedding", "_ROPE_DICT"),
    Needed(f"{_LAYERS}.attention", "Attention"),
    Needed(f"{_LAYERS}.attention", "MLAAttention.process_weights_after_loading", ("act_dtype",)),
    Needed(f"{_LAYERS}.attention", "MMEncoderAttention"),
    Needed(f"{_KERNELS}.cutlass", "CutlassFp8BlockScaledMMKernel"),
    Needed(f"{_KERNELS}.deep_gemm", "DeepGemmFp8BlockScaledMMKernel"),
    Needed(f"{_KERNELS}.flashinfer", "FlashInferFp8DeepGEMMDynamicBlockScaledKernel"),
    Needed(f"{_KERNELS}.triton", "TritonFp8BlockScaledMMKernel"),
    Needed("vllm.utils.deep_gemm", "is_deep_gemm_e8m0_used"),
    Needed(f"{_LAYERS}.quantization.fp8", "Fp8LinearMethod.process_weights_after_loading", ("layer",)),
    Needed(f"{_LAYERS}.quantization.fp8", "Fp8MoEMethod.process_weights_after_loading", ("layer",)),
    Needed(f"{_LAYERS}.fused_moe.config", "FusedMoEQuantConfig.w1_scale"),
    Needed(f"{_LAYERS}.fused_moe.oracle.fp8", "Fp8MoeBackend.TRITON"),
    Needed(f"{_LAYERS}.fused_moe.oracle.unquantized", "UnquantizedMoeBackend.TRITON"),
    Needed(f"{_LAYERS}.fused_moe.oracle.unquantized", "UnquantizedMoeBackend.BATCHED_TRITON"),
    Needed(f"{_LAYERS}.fused_moe.oracle.unquantized", "UnquantizedMoeBackend.CPU"),
    Needed(f"{_LAYERS}.fused_moe.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod"),
    Needed(f"{_LAYERS}.fused_moe.cpu_fused_moe", "CPUFusedMOE"),
    Needed(f"{_LAYERS}.fused_moe.cpu_fused_moe", "_CPU_MOE_ACT_FN"),
    Needed(f"{_LAYERS}.fused_moe.activation", "MoEActivation.SILU"),
    Needed(f"{_LAYERS}.activation", "SiluAndMul.forward_native"),
    Needed(f"{_LAYERS}.fused_moe.oracle.nvfp4", "NvFp4MoeBackend.MARLIN"),
    Needed(f"{_LAYERS}.quantization.modelopt", "ModelOptNvFp4FusedMoE", sets=("nvfp4_backend",)),
    Needed(f"{_LAYERS}.quantization.modelopt", "ModelOptNvFp4LinearMethod"),
    Needed(f"{_LAYERS}.quantization.modelopt", "ModelOptNvFp4W4A16LinearMethod"),
    Needed(f"{_WNA16_MOE}_wna16", "CompressedTensorsWNA16MoEMethod"),
    Needed(f"{_WNA16_MOE}_wna16_marlin", "CompressedTensorsWNA16MarlinMoEMethod"),
    Needed(
        "vllm.lora.lora_model",
        "LoRAModel.from_lora_tensors",
        ("peft_helper", "weights_mapper", "skip_prefixes"),
    ),
    Needed("vllm.lora.peft_helper", "PEFTHelper", ("r", "lora_alpha", "target_modules")),
    Needed("vllm.lora.request", "LoRARequest", ("lora_name", "lora_int_id", "lora_path")),
    Needed("vllm.lora.utils", "parse_fine_tuned_lora_name", ("name", "weights_mapper")),
    Needed("vllm.v1.attention.backend", "AttentionType.DECODER"),
    Needed(f"{_LAYERS}.linear", "UnquantizedLinearMethod"),
    Needed(f"{_LAYERS}.vocab_parallel_embedding", "UnquantizedEmbeddingMethod"),
    Needed(
        f"{_LAYERS}.quantization.base_config", "QuantizeMethodBase.process_weights_after_loading", ("layer",)
    ),
    Needed(f"{_LAYERS}.utils", "check_cpu_sgl_kernel", ("n", "k", "dtype")),
    Needed("vllm.v1.worker.gpu_worker", "Worker.load_model"),
    Needed("vllm.v1.worker.gpu_worker", "Worker.sleep", ("level",)),
    Needed("vllm.v1.worker.gpu_worker", "Worker.wake_up", ("tags",)),
    Needed("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.execute_model", ("scheduler_output",)),
    Needed("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.get_model"),
    Needed("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.reset_encoder_cache"),
    Needed(
        "vllm.v1.core.sched.async_scheduler", "AsyncScheduler.reset_prefix_cache", ("reset_running_requests",)
    ),
    # Without it nothing would say whether that drops a token of each running request.
    Needed("vllm.v1.core.sched.async_scheduler", "AsyncScheduler._update_request_with_output", ("request",)),
    Needed("vllm.v1.core.sched.scheduler", "Scheduler", sets=("running",)),
    Needed("vllm.v1.request", "Request", sets=("num_output_placeholders",)),
    Needed("vllm.config", "SchedulerConfig", ("async_scheduling",)),
    Needed("vllm.config", "ParallelConfig", ("worker_extension_cls",)),
    Needed(_CORE, "EngineCore", sets=("vllm_config", "model_executor", "scheduler")),
    Needed(_CORE, "EngineCore.wake_up", ("tags",)),
    Needed(_CORE, "EngineCore.resume_scheduler"),
    Needed("vllm.v1.executor.abstract", "Executor", sets=("is_sleeping",)),
    Needed(_CORE, "DPEngineCoreProc", sets=("pending_pause", "engines_running")),
    Needed(_CORE, "DPEngineCoreProc._init_data_parallel", sets=("dp_group",)),
    Needed(_CORE, "DPEngineCoreProc.resume_scheduler"),
    Needed("vllm.config", "ParallelConfig.has_unfinished_dp", ("dp_group", "has_unfinished")),
)
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"
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
    Needed(_CORE, "EngineCore.collective_rpc", ("method", "timeout", "args", "kwargs")),
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
    Needed("vllm.v1.engine.output_processor", "OutputProcessor", sets=("request_states", "parent_requests")),
    Needed(
        "vllm.v1.engine.output_processor",
        "RequestState",
        sets=("external_req_id", "parent_req", "request_index", "detokenizer"),
    ),
    Needed("vllm.v1.engine.parallel_sampling", "ParentRequest", sets=("external_req_id",)),
    Needed("vllm.v1.engine.detokenizer", "IncrementalDetokenizer.num_output_tokens"),
)
# What drivers use of vllm.LLM.
SCRIPT = (
    Needed("vllm.entrypoints.llm", "LLM", sets=("llm_engine",)),
    Needed("vllm.entrypoints.llm", "LLM.enqueue", ("prompts", "lora_request", "use_tqdm")),
    Needed("vllm.entrypoints.llm", "LLM.collective_rpc", ("method", "args")),
    Needed("vllm.entrypoints.llm", "LLM.sleep", ("level", "mode")),
    Needed("vllm.entrypoints.llm", "LLM.wake_up", ("tags",)),
    Needed("vllm.entrypoints.llm", "LLM.reset_prefix_cache", _RESETS),
    Needed("vllm.v1.engine.llm_engine", "LLMEngine", sets=("vllm_config", "output_processor", "engine_core")),
    Needed("vllm.v1.engine.llm_engine", "LLMEngine.step"),
    Needed("vllm.v1.engine.llm_engine", "LLMEngine.has_unfinished_requests"),
    Needed("vllm.v1.engine.llm_engine", "LLMEngine.abort_request", ("internal",)),
    Needed("vllm.v1.engine.llm_engine", "LLMEngine.reset_encoder_cache"),
    Needed("vllm.v1.engine.llm_engine", "LLMEngine.is_sleeping"),
    Needed("vllm.v1.engine.core_client", "SyncMPClient", sets=("outputs_queue",)),
    Needed("vllm.v1.engine.core_client", "InprocClient", sets=("engine_core",)),
    Needed(_CORE, "EngineCore", sets=("batch_queue",)),
    *_OUTPUTS,
    *_CONNECTORS,
)
# What drivers use of AsyncLLM.
SERVER = (
    Needed(_ASYNC, "AsyncLLM", sets=("vllm_config", "output_processor", "output_handler", "engine_core")),
    Needed(_ASYNC, "AsyncLLM.add_request", ("request_id", "prompt", "params", "lora_request")),
    Needed(_ASYNC, "AsyncLLM.abort", ("request_id",)),
    Needed(_ASYNC, "AsyncLLM.pause_generation", ("mode", "clear_cache")),
    Needed(_ASYNC, "AsyncLLM.resume_generation"),
    # Without it a core that dies before the first request would be waited for.
    Needed(_ASYNC, "AsyncLLM._run_output_handler"),
    Needed(_ASYNC, "AsyncLLM.reset_encoder_cache"),
    # Each replica's answers, and the queue in which their outputs wait.
    Needed("vllm.v1.engine.core_client", "MPClient", sets=("core_engines", "engine_ranks_managed")),
    Needed("vllm.v1.engine.core_client", "AsyncMPClient", sets=("outputs_queue",)),
    Needed("vllm.v1.engine.core_client", "AsyncMPClient._call_utility_async", ("method", "engine")),
    Needed(_CORE, "EngineCore.collective_rpc", ("method", "timeout", "args", "kwargs")),
    Needed(_CORE, "EngineCore.reset_prefix_cache", _RESETS),
    Needed("vllm.v1.engine.output_processor", "RequestOutputCollector.get"),
    Needed("vllm.v1.engine.output_processor", "RequestOutputCollector.get_nowait"),
    Needed("vllm.v1.engine.output_processor", "RequestOutputCollector.put", ("output",)),
    *_OUTPUTS,
    *_CONNECTORS,
)


def require_supported_vllm(needed: Sequence[Needed] = REFIT) -> None:
    """Check what is ``needed`` against the installed vLLM.

    Raises:
        RefitError: lists everything that is missing or takes other parameters, vLLM's version and the supported one.
    """
    installed = _version()
    wrong = [problem for problem in map(_problem, needed) if problem]
    if wrong:
        listed = "\n".join(f"  - {problem}" for problem in wrong)
        raise RefitError(
            f"vLLM {installed} differs from vLLM {SUPPORTED}, for which this rlrefit is made, in {len(wrong)} things "
            f"that refits rely on:\n{listed}\nNothing was changed in the engine. Install vllm>={SUPPORTED},<0.22, or a "
            "newer rlrefit",
            stage="start",
        )
    if not installed.startswith(f"{SUPPORTED}."):
        logger.warning(
            "rlrefit is tested with vLLM %s, and this is %s. It has the %d names that refits rely on, with their parameters; "
            "what they do was not tested. Compare its generations with the trainer's log-probabilities before relying on it, "
            "or install vllm>=%s,<0.22",
            SUPPORTED,
            installed,
            len(needed),
            SUPPORTED,
        )


def require_driver(engine: object, needed: Sequence[Needed]) -> None:
    """Check what a driver is about to use of ``engine``, before a request or a refit begins.

    Args:
        engine: of vLLM, whose modules are loaded by then; one that is not derived from vLLM's classes is the caller's own.
        needed: :data:`SCRIPT` or :data:`SERVER`.

    Raises:
        RefitError: as :func:`require_supported_vllm`.
    """
    if any(kind.__module__.partition(".")[0] == "vllm" for kind in type(engine).__mro__):
        require_supported_vllm(needed)


def require_supported_runner(runner: Any) -> None:
    """Check which of vLLM's model runners a worker has; before it loads its model, where rlrefit is loaded by then.

    Model Runner V2 is another class than the one held against :data:`REFIT`. Its profiling and its warm-up are steps with
    tokens through ``execute_model``, which the guard would refuse with ``load_format=dummy``, and refits into it are
    untested.

    Raises:
        RefitError: it is not V1's.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not isinstance(runner, GPUModelRunner):
        kind = type(runner)
        raise RefitError(
            f"vLLM {_version()} uses {kind.__module__}.{kind.__name__} as its model runner (Model Runner V2, which vLLM from "
            f"0.24 takes for many models by itself); refits are made for V1's {GPUModelRunner.__module__}. Nothing was "
            "changed. Set VLLM_USE_V2_MODEL_RUNNER=0 in the environment of the engine and its workers",
            stage="start",
        )


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
    absent += sorted(set(needed.sets) - _attributes(found)) if needed.sets else []
    return f"{where}: has no {' and no '.join(absent)}" if absent else ""


def _accepted(found: Any, name: str) -> set[str]:
    """Parameters or fields of ``found``; ``name`` among them if it takes any keyword."""
    if dataclasses.is_dataclass(found):
        return {field.name for field in dataclasses.fields(found)}
    parameters = inspect.signature(found).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return {*parameters, *([name] if takes_all else [])}


def _attributes(found: Any) -> set[str]:
    """What a function sets; of a class what its constructors do, wrapped or inherited, and what it has itself."""
    setters = (
        [vars(kind)["__init__"] for kind in found.__mro__ if "__init__" in vars(kind)]
        if inspect.isclass(found)
        else [found]
    )
    codes = [setter.__code__ for setter in map(inspect.unwrap, setters) if inspect.isfunction(setter)]
    stored = {
        step.argval for code in codes for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"
    }
    return stored | set(dir(found))


def _version() -> str:
    vllm = importlib.import_module("vllm")
    return str(getattr(vllm, "__version__", "of unknown version"))
