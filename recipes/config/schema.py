"""The schema of a recipe: dataclasses that OmegaConf reads as structured configuration.

Token counts are in tokens, times in seconds, intervals (``every``) in training steps, with 0 for "never". :mod:`.checks` says which
values go together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...integration.config import RefitConfig


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
    def ranks(self) -> int:
        """Ranks of all engines together."""
        return self.replicas * self.tensor_parallel * self.pipeline_parallel

    @property
    def shares_experts(self) -> bool:
        """Whether the ranks of an engine share the experts out, instead of cutting each."""
        if self.backend == "vllm":
            return self.vllm.enable_expert_parallel
        return self.backend == "sglang" and self.sglang.ep_size > 1


@dataclass
class ModelConfig:
    """The policy's architecture and first weights.

    Attributes:
        path: ``tiny:NAME`` for a bundled model that is built with random weights; a checkpoint folder in
            Hugging Face form, which all nodes must reach; or a hub name (``Qwen/Qwen3-4B``), which each node
            fetches to its own cache.
        catalog: bundled model of ``rlrefit plan`` whose shapes this one has. The recipe is checked against them
            before anything is fetched, and the checkpoint's config.json against them afterwards. Null finds it by
            the hub name, where it is bundled.
        dtype: ``bfloat16``, ``float32``, or ``auto``: bfloat16 where the cluster has GPUs, FP8 is made of it, or a
            colocated Megatron trainer needs it, else float32, which CPUs compute faster. It is the trainer's compute dtype, the dtype on the wire and the
            engine's. The optimizer's master weights are float32 in any case.
    """

    path: str = "tiny:qwen3"
    catalog: str | None = None
    dtype: str = "bfloat16"


@dataclass
class DataConfig:
    """Prompts and what their answers are judged by.

    Attributes:
        train: the training prompts: a JSON-lines or Parquet file, ``package:NAME`` for a file that ships
            with rlrefit's recipes, or a hub data set, ``NAME[:CONFIGURATION][@SPLIT]``, where the split may be a
            slice (``train[512:]``).
        validation: the same for the prompts that are held out.
        prompt_key: column with the prompt: a string, or a list of chat messages.
        answer_key: column that is handed to the reward function beside the completion.
        validation_prompt_key: the same of ``validation``; null for ``prompt_key``.
        validation_answer_key: the same of ``validation``; null for ``answer_key``.
        instruction: put after each prompt that is a string, on a line of its own; empty for none.
        max_prompt_tokens: longest prompt, with instruction and template.
        overlong_prompts: what a longer one is when the data are read: ``error``, or ``drop``.
        chat_template: put string prompts through the tokenizer's chat template.
        chat_template_kwargs: variables of the template, e.g. ``enable_thinking: false``; one that it does not read
            is an error.
    """

    train: str = "package:tiny/train.jsonl"
    validation: str = "package:tiny/validation.jsonl"
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    validation_prompt_key: str | None = None
    validation_answer_key: str | None = None
    instruction: str = ""
    max_prompt_tokens: int = 16
    overlong_prompts: str = "error"
    chat_template: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class RewardConfig:
    """How a completion is scored.

    Attributes:
        function: ``arithmetic``, ``boxed_math`` or ``math_verify`` (bundled), or the path of a callable,
            ``package.module.function`` or ``package.module:function``.
        kwargs: keyword arguments that the function gets on every call.
        processes: that judge completions beside one another, each with the function loaded anew; 0 judges them in the
            run's own process, one after another.
        timeout_s: seconds that a process may take for one completion. A longer one is worth 0, is told in the run's log and
            counted in ``reward/overtime`` of the metrics. Without processes there is no limit.
    """

    function: str = "arithmetic"
    kwargs: dict[str, Any] = field(default_factory=dict)
    processes: int = 0
    timeout_s: float = 20.0


@dataclass
class AlgorithmConfig:
    """GRPO (arXiv:2402.03300) or DAPO (arXiv:2503.14476).

    Attributes:
        name: ``grpo`` or ``dapo``.
        steps: training steps; each generates, scores and learns from one batch of rollouts.
        prompts_per_step: prompts of one batch.
        group_size: rollouts per prompt; the group is the baseline of its members.
        minibatches: optimizer steps per batch. With 1 the update is on-policy.
        clip_low: lower clip of the probability ratio, 1 − clip_low.
        clip_high: upper clip, 1 + clip_high. DAPO's "clip higher" sets it above ``clip_low``.
        aggregation: ``sequence`` means each sequence's loss over its tokens and then over sequences (GRPO);
            ``token`` means over all tokens of the batch (DAPO).
        normalize_std: divide a group's centred rewards by their standard deviation.
        kl_coef: weight of the KL penalty against the first weights; 0 leaves out the reference model.
        tis_cap: cap of the importance weight between the trainer's and the engine's probability of a token
            (truncated importance sampling); null leaves the weight out.
        dynamic_sampling: DAPO: replace groups whose rewards are all equal by further prompts.
        max_sampling_rounds: DAPO: rounds of generation that one step may take to fill its batch.
        overlong_buffer: DAPO: length of the zone before ``generation.max_new_tokens`` in which the penalty
            grows linearly; 0 turns overlong reward shaping off.
        overlong_penalty: DAPO: the penalty at the end of that zone.
    """

    name: str = "grpo"
    steps: int = 80
    prompts_per_step: int = 32
    group_size: int = 8
    minibatches: int = 1
    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: str = "sequence"
    normalize_std: bool = True
    kl_coef: float = 0.0
    tis_cap: float | None = 2.0
    dynamic_sampling: bool = False
    max_sampling_rounds: int = 10
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0


@dataclass
class OptimizerConfig:
    """AdamW, Megatron-core's or torch's; biases and norms are not decayed.

    Attributes:
        lr: learning rate.
        weight_decay: decoupled weight decay.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: term of the denominator.
        grad_clip: largest global norm of the gradient; 0 does not clip.
        warmup_steps: training steps until the rate has reached ``lr``, linearly.
        lr_decay: what the rate does then: ``constant``, or ``linear`` or ``cosine`` down to ``min_lr``.
        lr_decay_steps: training steps until the rate has reached ``min_lr``, the warm-up included; null takes
            ``algorithm.steps``.
        min_lr: where a decaying rate ends.
        cpu_offload_fraction: part of the optimizer's state that stays, and is stepped, in host memory, 0 to 1;
            Megatron's hybrid optimizer, on GPUs and with ``distributed_optimizer`` only.
        max_skipped_steps: optimizer steps in a row that may be left out because their gradient is not finite; one more ends
            the run. ``train/skipped`` of the metrics counts those of a training step.
    """

    lr: float = 1e-3
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    grad_clip: float = 1.0
    warmup_steps: int = 0
    lr_decay: str = "constant"
    lr_decay_steps: int | None = None
    min_lr: float = 0.0
    cpu_offload_fraction: float = 0.0
    max_skipped_steps: int = 3


@dataclass
class RecomputeConfig:
    """Activations that the backward pass computes again; names and meanings are Megatron-core's.

    Attributes:
        granularity: ``full`` or ``selective``; null keeps all activations. With FSDP ``full`` is transformers' gradient
            checkpointing of every layer, and there is no other.
        method: of ``full``: ``uniform`` or ``block``.
        num_layers: of ``full``: layers of a unit, or the first layers of each stage.
        modules: of ``selective``; empty for Megatron's choice, ``core_attn``.
    """

    granularity: str | None = None
    method: str | None = None
    num_layers: int | None = None
    modules: list[str] = field(default_factory=list)


@dataclass
class FSDPConfig:
    """Read with ``trainer.backend: fsdp`` only.

    Attributes:
        replicate: copies of the sharded model (HSDP), which average their gradients; 1 shards over all ranks (divided
            by ``trainer.tensor_parallel``).
        reshard_after_forward: free a layer's gathered parameters after the forward pass, and gather them again for
            the backward pass.
        cpu_offload: keep shards, gradients and the optimizer's state in host memory, and step there.
    """

    replicate: int = 1
    reshard_after_forward: bool = True
    cpu_offload: bool = False


@dataclass
class TrainerConfig:
    """The training side and its layout.

    ``trainer=fsdp`` and ``trainer=megatron`` on the command line, or in a file's ``defaults``, change the trainer of a
    recipe, with the keys that only the other one knows.

    Attributes:
        backend: ``megatron``, or ``fsdp``: a transformers model under torch's ``fully_shard``. Of the keys below,
            FSDP reads ``ranks``, ``tensor_parallel``, ``micro_batch_size``, ``recompute.granularity``, ``optimizer``
            and ``fsdp``.
        ranks: trainer processes, one GPU each where there are GPUs (``generation.colocated``: shared with an engine's).
        tensor_parallel: TP of attention and dense layers. With Megatron sequence parallelism is on as well above 1;
            with FSDP it is transformers' own plan, inside of each group that shards.
        pipeline_parallel: PP.
        virtual_pipeline: model chunks of each pipeline rank (interleaved schedule); null for one.
        num_layers_in_first_pipeline_stage: where the layers don't divide evenly; null for as many as the others.
        num_layers_in_last_pipeline_stage: the same for the last stage.
        pipeline_model_parallel_layout: all stages in Megatron's notation, e.g. ``Ettt|(tttt|)*3ttL``, in place of
            the two before.
        expert_parallel: EP.
        expert_tensor_parallel: TP of the experts. Megatron-core's own default is ``tensor_parallel``.
        context_parallel: CP.
        micro_batch_size: sequences of one forward and backward pass.
        distributed_optimizer: shard the optimizer's state over data-parallel ranks.
        recompute: see :class:`RecomputeConfig`.
        optimizer: see :class:`OptimizerConfig`.
        fsdp: see :class:`FSDPConfig`.
    """

    backend: str = "megatron"
    ranks: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_pipeline: int | None = None
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    pipeline_model_parallel_layout: str | None = None
    expert_parallel: int = 1
    expert_tensor_parallel: int = 1
    context_parallel: int = 1
    micro_batch_size: int = 8
    distributed_optimizer: bool = False
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)


@dataclass
class PolicyConfig:
    """How the policy's weights reach the generation engines.

    Attributes:
        nccl_xfer_refit: shard to shard; false takes the conventional packed broadcast.
        refit: see :class:`~rlrefit.integration.config.RefitConfig`.
    """

    nccl_xfer_refit: bool = True
    refit: RefitConfig = field(default_factory=RefitConfig)


@dataclass
class ValidationConfig:
    """Greedy generation on the held-out prompts.

    Attributes:
        every: interval; 0 never validates.
        samples: prompts of one validation, from the start of the file.
    """

    every: int = 10
    samples: int = 64


@dataclass
class CheckpointConfig:
    """Checkpoints of the trainer, which ``resume`` continues from.

    Attributes:
        every: interval; 0 never saves.
        keep: newest checkpoints that stay on disk.
    """

    every: int = 0
    keep: int = 2


@dataclass
class RayConfig:
    """The Ray cluster.

    Attributes:
        address: of a running cluster (``auto``, ``ray://…``); null starts one on this machine for the run.
        cpus_per_rank: CPU cores that each trainer and generation rank reserves.
        timeout_s: seconds that placing or answering may take before the run fails with what it waited for.
        trainer_env: environment variables of the trainer's processes, set before they start. ``PYTHONPATH``, say,
            where trainer and engine have their packages in folders of their own; rlrefit and Ray must be on it.
        generation_env: the same for the generation processes.
    """

    address: str | None = None
    cpus_per_rank: float = 1.0
    timeout_s: float = 600.0
    trainer_env: dict[str, str] = field(default_factory=dict)
    generation_env: dict[str, str] = field(default_factory=dict)


@dataclass
class TrainConfig:
    """All that ``rlrefit train`` reads.

    Attributes:
        name: of the run; its files are in ``run_root/name``.
        seed: of data order, minibatches and sampling, as far as the engine samples by it. First weights are the checkpoint's;
            those of a ``tiny:`` model are the same for all seeds.
        resume: continue from the newest checkpoint of the run of this name, if there is one.
        run_root: folder of all runs.
    """

    name: str = "train"
    seed: int = 0
    resume: bool = False
    run_root: str = "runs"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    ray: RayConfig = field(default_factory=RayConfig)

    @property
    def refit_engine(self) -> str:
        """The checkpoint engine of the refits, by its registered name."""
        if not self.policy.nccl_xfer_refit:
            return "packed_broadcast"
        return "colocated_ipc" if self.generation.colocated.enabled else "nccl_xfer"
