"""The part of a recipe's schema that is about the engines; :mod:`.schema` has the rest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class VllmConfig:
    """Read with ``generation.backend: vllm`` only; names and meanings are vLLM's.

    Attributes:
        max_model_len: longest prompt and completion together; null takes what the recipe can produce.
        max_num_seqs: most sequences of one batch of decoding; null takes vLLM's own.
        enforce_eager: run without compilation and CUDA graphs.
        gpu_memory_utilization: part of a GPU's memory for weights and KV cache, above 0 and at most 1.
        enable_expert_parallel: share the experts out among an engine's tensor-parallel ranks, instead of cutting
            each expert.
        distributed_executor_backend: ``mp``, processes on one host, or ``ray``, actors that may be on several,
            which an engine needs that is larger than a host.
        load_format: ``auto`` reads the checkpoint. ``dummy`` starts with random weights, which the refit of step 1
            replaces before anything is generated; it saves each engine the reading.
        kv_cache_dtype: ``auto``: that of the model. ``fp8``: E4M3 of half the size, for twice the tokens; with
            ``policy.refit.kv_scales`` its scales are calibrated on the rollouts of each step, else they are 1.
        attention_backend: by vLLM's name, ``FLASH_ATTN`` or ``TRITON_ATTN``, say; null takes vLLM's choice.
        seed_per_request: give each rollout a seed of its own, made of the recipe's, the step and its place in the step: what it
            draws then depends on nothing that vLLM batches it with, so that equal weights give equal rollouts but for
            rounding, and a run that is resumed goes on with the same ones. vLLM then samples one request after another
            for each token, in Python. False lets an engine draw from one generator, which starts at a seed made of the
            recipe's and of the replica: what a rollout draws depends on how vLLM happens to batch.
    """

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    enforce_eager: bool = False
    gpu_memory_utilization: float = 0.9
    enable_expert_parallel: bool = False
    distributed_executor_backend: str = "mp"
    load_format: str = "auto"
    kv_cache_dtype: str = "auto"
    attention_backend: str | None = None
    seed_per_request: bool = False


@dataclass
class SglangConfig:
    """Read with ``generation.backend: sglang`` only; but for ``asynchronous``, names and meanings are those of SGLang's ``ServerArgs``.

    Attributes:
        asynchronous: each rollout is a request of its own, ``Engine.async_generate``, all of them and the refits in the
            engine's one event loop. False gives ``Engine.generate`` a step's prompts at once, and equal runs equal rollouts.
        context_length: longest prompt and completion together, with 8 tokens that SGLang keeps free; null takes what
            the recipe can produce.
        max_running_requests: most sequences of one batch of decoding; null takes SGLang's own.
        mem_fraction_static: part of a GPU's memory for weights and KV cache, above 0 and below 1; null takes SGLang's own.
        attention_backend: by SGLang's name, ``fa3`` or ``triton``, say; null takes SGLang's choice, and ``torch_native`` on CPUs.
        ep_size: 1 cuts each expert; ``generation.tensor_parallel`` shares the experts out among an engine's ranks.
        disable_cuda_graph: decode without CUDA graphs, whose memory stays as a colocated engine sleeps.
        enable_deterministic_inference: kernels that give a request the same whatever it is batched with, and a seed for
            each request; on GPUs. Without, samples come from a generator that ``seed`` starts, batch by batch.
        load_format: ``auto`` reads the checkpoint. ``dummy`` starts with random weights, which the refit of step 1
            replaces before anything is generated.
        server_args: further ones by name; those that the recipe itself sets, and those that refits can't serve, are refused.
    """

    asynchronous: bool = False
    context_length: int | None = None
    max_running_requests: int | None = None
    mem_fraction_static: float | None = None
    attention_backend: str | None = None
    ep_size: int = 1
    disable_cuda_graph: bool = False
    enable_deterministic_inference: bool = False
    load_format: str = "auto"
    server_args: dict[str, Any] = field(default_factory=dict)


@dataclass
class ColocatedConfig:
    """Trainer and engines on the same GPUs, in two processes each, that take turns; NeMo-RL's key.

    While the trainer has the GPUs the engines sleep, and while the engines generate the trainer's weights, gradients
    and optimizer are in host memory. The refit is that of ``colocated_ipc``, for which all ranks have to be on one host.

    Attributes:
        enabled: give each trainer rank and one engine rank a GPU together; ``trainer.ranks`` must be the engines' ranks.
        multi_stage_wake_up: wake an engine's weights before the refit, and its KV cache once the trainer's weights
            have left the GPU. False wakes all at once before the refit, which needs memory for both.
    """

    enabled: bool = False
    multi_stage_wake_up: bool = True


@dataclass
class GenerationConfig:
    """The generation side and its layout.

    Attributes:
        backend: ``transformers``, ``vllm`` or ``sglang``.
        tensor_parallel: TP of one engine.
        pipeline_parallel: PP of one engine; vLLM only.
        replicas: engines, each with a full copy of the model: data parallelism of the generation.
        weight_dtype: ``auto``: that of the model. ``fp8``: E4M3 in blocks of 128 by 128 for the decoder layers'
            matrices but the routers; with ``policy.refit.trainer_quantize_fp8`` the trainer quantizes them as it sends
            them, else vLLM does after each refit, and no other engine. The transformers engine holds them so and computes in
            the model's dtype.
        max_new_tokens: longest completion.
        temperature: of training rollouts, and of the trainer's log-probabilities with them; above 0.
        vllm: see :class:`VllmConfig`.
        sglang: see :class:`SglangConfig`.
        colocated: see :class:`ColocatedConfig`.
    """

    backend: str = "transformers"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    replicas: int = 1
    weight_dtype: str = "auto"
    max_new_tokens: int = 4
    temperature: float = 1.0
    vllm: VllmConfig = field(default_factory=VllmConfig)
    sglang: SglangConfig = field(default_factory=SglangConfig)
    colocated: ColocatedConfig = field(default_factory=ColocatedConfig)

    @property
    def shares_experts(self) -> bool:
        """Whether the ranks of an engine share the experts out, instead of cutting each."""
        if self.backend == "vllm":
            return self.vllm.enable_expert_parallel
        return self.backend == "sglang" and self.sglang.ep_size > 1
