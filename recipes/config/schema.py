"""The schema of a recipe: dataclasses that OmegaConf reads as structured configuration.

Token counts are in tokens, times in seconds, intervals (``every``) in training steps, with 0 for "never". :mod:`.checks` says which
values go together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...integration.config import RefitConfig


@dataclass
class VllmConfig:
    """Read with ``generation.backend: vllm`` only; names and meanings are vLLM's.

    Attributes:
        max_model_len: longest prompt and completion together; null for the longest that the recipe produces.
        max_num_seqs: most sequences of a decoding batch; null for vLLM's default.
        enforce_eager: run without compilation and CUDA graphs.
        gpu_memory_utilization: fraction of a GPU's memory for weights and KV cache, above 0 and at most 1.
        enable_expert_parallel: give each of an engine's tensor-parallel ranks whole experts, instead of a part of each.
        distributed_executor_backend: ``mp`` for processes on one host; ``ray`` for actors, which may be on several hosts.
        load_format: ``auto`` reads the checkpoint. ``dummy`` starts with random weights and saves the reading: the refit of
            step 1 replaces them before anything is generated.
        kv_cache_dtype: ``auto`` for the model's dtype, ``fp8`` for E4M3, which holds twice the tokens. Its scales are
            calibrated on each step's rollouts with ``policy.refit.kv_scales``, and are 1 without.
        attention_backend: vLLM's name of it, e.g. ``FLASH_ATTN``; null for vLLM's choice.
        seed_per_request: give each rollout its own seed, so that its samples do not depend on how vLLM batches it. Equal
            weights then give equal rollouts, up to rounding, and a resumed run samples the same ones. vLLM samples such
            requests one after another in Python, for each token. False: each engine draws from one generator, which begins anew
            at each step, so that a resumed run does not draw again what step 1 drew.
        speculative_config: vLLM's own settings of speculative decoding, e.g. ``{method: mtp, num_speculative_tokens: 1}``; empty
            for none. MTP layers that ``trainer.mtp_loss_scaling_factor`` trains follow each refit, other drafters keep their weights.
            Rollouts stay the policy's, which verifies each draft, and so do their log-probabilities.
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
    speculative_config: dict[str, Any] = field(default_factory=dict)


@dataclass
class SglangConfig:
    """Read with ``generation.backend: sglang`` only; but for ``asynchronous``, names and meanings are those of SGLang's ``ServerArgs``.

    Attributes:
        asynchronous: send each rollout as its own request (``Engine.async_generate``); requests and refits share the engine's
            event loop. False passes a step's prompts to ``Engine.generate`` at once, and equal runs give equal rollouts.
        context_length: longest prompt and completion together, plus 8 tokens that SGLang keeps free, and those
            that it drafts; null for the longest that the recipe produces.
        max_running_requests: most sequences of a decoding batch; null for SGLang's default.
        mem_fraction_static: fraction of a GPU's memory for weights and KV cache, above 0 and below 1; null for SGLang's default.
        attention_backend: SGLang's name of it, e.g. ``fa3``; null for SGLang's choice, or ``torch_native`` on CPUs.
        ep_size: 1 cuts each expert; ``generation.tensor_parallel`` gives each rank whole experts.
        disable_cuda_graph: decode without CUDA graphs. Their memory stays allocated while a colocated engine sleeps.
        enable_deterministic_inference: kernels whose result does not depend on the batch, and a seed for each request; on
            GPUs. False: each engine draws from one generator, batch by batch, which begins anew at each step.
        load_format: ``auto`` reads the checkpoint. ``dummy`` starts with random weights, as with vLLM.
        kv_cache_dtype: ``auto`` for the model's dtype, ``fp8`` for E4M3 (SGLang's ``fp8_e4m3``), as with vLLM. Calibrated scales
            need ``attention_backend`` ``fa3`` or ``triton``.
        server_args: further arguments by name, those of speculative decoding too (``speculative_algorithm``), as vLLM's
            ``speculative_config``. Those that the recipe sets, or that refits can't support, are refused.
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
    kv_cache_dtype: str = "auto"
    server_args: dict[str, Any] = field(default_factory=dict)


@dataclass
class ColocatedConfig:
    """Trainer and engines on the same GPUs; NeMo-RL's key.

    The engines sleep while the trainer trains. The trainer's weights, gradients and optimizer are in host memory while the
    engines generate. All ranks must be on one host, since the refit (``colocated_ipc``) goes through its memory.

    Attributes:
        enabled: each GPU has one trainer rank and one engine rank, so ``trainer.ranks`` must equal the engines' ranks.
        multi_stage_wake_up: wake an engine's weights before the refit, and its KV cache after the trainer's weights
            have left the GPU. False wakes both before the refit, which needs memory for all three.
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
        weight_dtype: ``auto`` for the model's dtype. ``fp8``: the decoder layers' matrices, except routers, are E4M3 in blocks
            of 128 by 128. With ``policy.refit.trainer_quantize_fp8`` the trainer quantizes them as it sends them; without,
            vLLM quantizes them after each refit, and other engines are refused. The transformers engine computes in the
            model's dtype. ``mxfp8``: the same matrices in MXFP8, quantized by the trainer, for vLLM on GPUs. ``mxfp4``: GPT-OSS's
            experts are, which takes ``policy.refit.trainer_quantize_mxfp4`` and vLLM. ``int4``: the same matrices as ``fp8`` are INT4
            (W4A16), which takes ``policy.refit.trainer_quantize_int4``, and vLLM or SGLang.
        weight_group: elements of a row that share a scale with ``weight_dtype: int4``: 32, 64 or 128.
        max_new_tokens: longest completion.
        temperature: of training rollouts, and of the trainer's log-probabilities with them; at least 0.01.
        vllm: see :class:`VllmConfig`.
        sglang: see :class:`SglangConfig`.
        colocated: see :class:`ColocatedConfig`.
    """

    backend: str = "transformers"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    replicas: int = 1
    weight_dtype: str = "auto"
    weight_group: int = 32
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
        path: ``tiny:NAME`` for a bundled model with random weights; a Hugging Face checkpoint folder, which all nodes must
            reach; or a hub name (``Qwen/Qwen3-4B``), which each node downloads.
        catalog: bundled model of ``rlrefit plan`` with the same shapes. The recipe is checked against it before anything is
            downloaded, and the checkpoint's config.json afterwards. Null looks it up by the hub name.
        dtype: of the trainer's compute, the wire and the engine: ``bfloat16``, ``float32`` or ``auto``. ``auto`` is bfloat16 with
            GPUs, with FP8 weights and for a colocated Megatron trainer; otherwise float32, which CPUs compute faster. The
            optimizer's master weights are float32.
        trust_remote_code: run the code that the checkpoint brings, of its configuration, its tokenizer, its model and its generation, in
            trainer and engine, also where transformers has classes of its own; vLLM and Megatron-Bridge keep to their own models. Its
            authors' code then does whatever it does, as you; read it first.
    """

    path: str = "tiny:qwen3"
    catalog: str | None = None
    dtype: str = "bfloat16"
    trust_remote_code: bool = False


@dataclass
class DataConfig:
    """Prompts and what their answers are judged by.

    Attributes:
        train: training prompts: a JSON-lines or Parquet file; ``package:NAME`` for a file of rlrefit's recipes; or a hub data
            set, ``NAME[:CONFIGURATION][@SPLIT]``, whose split may be a slice (``train[512:]``).
        validation: held-out prompts, likewise.
        prompt_key: column of the prompt: a string, or a list of chat messages.
        answer_key: column that the reward function gets with the completion.
        validation_prompt_key: of ``validation``; null for ``prompt_key``.
        validation_answer_key: of ``validation``; null for ``answer_key``.
        instruction: line that is added to each prompt that is a string; empty for none.
        max_prompt_tokens: longest prompt, with instruction and template.
        overlong_prompts: longer prompts are an ``error``, or ``drop`` leaves them out.
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
        function: ``arithmetic``, ``boxed_math`` or ``math_verify`` (bundled), or a callable's path:
            ``package.module.function`` or ``package.module:function``.
        kwargs: keyword arguments of every call.
        processes: number of processes that score completions in parallel; 0 scores them one by one in the run's process.
        timeout_s: limit for one completion, with ``processes``. A completion over the limit scores 0; the log names it and
            ``reward/overtime`` of the metrics counts it.
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
        steps: training steps, one batch of rollouts each.
        prompts_per_step: prompts of a batch.
        group_size: rollouts per prompt.
        minibatches: optimizer steps per batch. With 1 the update is on-policy.
        clip_low: lower clip of the probability ratio, 1 − clip_low.
        clip_high: upper clip, 1 + clip_high. DAPO's "clip higher" sets it above ``clip_low``.
        aggregation: of the loss: ``sequence`` averages over each sequence's tokens, then over sequences (GRPO); ``token``
            averages over all tokens of the batch (DAPO).
        normalize_std: divide a group's centred rewards by their standard deviation.
        kl_coef: weight of the KL penalty against the initial weights; with 0 there is no reference model.
        tis_cap: cap of a token's importance weight, the trainer's probability over the engine's (truncated importance
            sampling); null for no weight.
        dynamic_sampling: DAPO: replace groups whose rewards are all equal by further prompts.
        max_sampling_rounds: DAPO: rounds of generation that one step may take to fill its batch.
        overlong_buffer: DAPO: tokens before ``generation.max_new_tokens`` over which the length penalty grows linearly; 0 for no
            penalty.
        overlong_penalty: DAPO: the penalty at ``generation.max_new_tokens``.
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
        warmup_steps: training steps of linear warm-up to ``lr``. A run of fewer takes the first of them, as a longer one does.
        lr_decay: after the warm-up: ``constant``, or ``linear`` or ``cosine`` down to ``min_lr``.
        lr_decay_steps: training steps until ``min_lr``, warm-up included; null for ``algorithm.steps``, if the warm-up ends before.
        min_lr: final rate of a decay.
        cpu_offload_fraction: fraction (0 to 1) of the optimizer's state that is kept and stepped in host memory. Megatron's
            hybrid optimizer; on GPUs, with ``distributed_optimizer``.
        max_skipped_steps: successive optimizer steps that may be skipped because their gradient is not finite; one more ends
            the run. ``train/skipped`` of the metrics counts them.
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
        replicate: copies of the sharded model (HSDP); 1 shards over all ranks.
        reshard_after_forward: free a layer's gathered parameters after the forward pass and gather them again for the
            backward pass.
        cpu_offload: keep shards, gradients and optimizer state in host memory, and step there.
    """

    replicate: int = 1
    reshard_after_forward: bool = True
    cpu_offload: bool = False


@dataclass
class LoraConfig:
    """LoRA (arXiv:2106.09685), by peft under FSDP and by Megatron-Bridge's own under Megatron: the checkpoint's weights stay, and small
    factors beside them are trained. ``policy.refit.lora`` says whether merged weights or the adapter alone travel.

    Attributes:
        rank: of the factors; 0 trains all weights. Under Megatron a multiple of ``tensor_parallel``.
        alpha: what the factors add is scaled by ``alpha / rank``.
        target_modules: the layers that get factors; ``[all-linear]`` for all linear layers but the head. Otherwise endings of names,
            such as ``q_proj``. Under Megatron layers that it joins have one adapter together, so that they are named together
            (``q_proj``, ``k_proj`` and ``v_proj``; ``gate_proj`` and ``up_proj``), or by Megatron's own names, such as ``linear_qkv``.
            Each expert has its own.
        use_rslora: scale by ``alpha / sqrt(rank)`` (arXiv:2312.03732).
    """

    rank: int = 0
    alpha: int = 32
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    use_rslora: bool = False


@dataclass
class TrainerConfig:
    """The training side and its layout.

    ``trainer=fsdp`` and ``trainer=megatron`` on the command line, or in a file's ``defaults``, change the trainer of a
    recipe, with the keys that only the other one knows.

    Attributes:
        backend: ``megatron``, or ``fsdp``: a transformers model under torch's ``fully_shard``. Of the keys below,
            FSDP reads ``ranks``, ``tensor_parallel``, ``micro_batch_size``, ``recompute.granularity``, ``optimizer``,
            ``fsdp`` and ``lora``; Megatron all but ``fsdp``.
        ranks: trainer processes, one GPU each where there are GPUs (``generation.colocated``: shared with an engine's).
        tensor_parallel: TP of attention and dense layers. Above 1, Megatron also uses sequence parallelism; FSDP uses
            transformers' own TP plan inside each sharding group.
        pipeline_parallel: PP.
        virtual_pipeline: model chunks of each pipeline rank (interleaved schedule); null for one.
        num_layers_in_first_pipeline_stage: where the layers don't divide evenly; null for as many as in other stages.
        num_layers_in_last_pipeline_stage: the same for the last stage.
        pipeline_model_parallel_layout: all stages in Megatron's notation, e.g. ``Ettt|(tttt|)*3ttL``, instead of the two keys
            above.
        expert_parallel: EP.
        expert_tensor_parallel: TP of the experts. Megatron-core's own default is ``tensor_parallel``.
        context_parallel: CP: each of so many ranks computes two chunks of every row. Rows are padded to a multiple of twice as
            many tokens.
        micro_batch_size: sequences of one forward and backward pass.
        distributed_optimizer: shard the optimizer's state over data-parallel ranks.
        fp8_param: linear layers compute in FP8 and keep their weights so, in blocks of 128 by 128 (Transformer Engine's blockwise
            recipe). Refits send these codes and scales as they are to engines that hold the same blocks
            (``generation.weight_dtype: fp8``). On GPUs from Hopper on.
        mtp_loss_scaling_factor: above 0 the trainer has the checkpoint's layers for multi-token prediction (MTP), which learn the
            rollouts' tokens; their loss has this weight (Megatron's name; 0.1 is usual), and its gradients end at these layers. They
            are what engines draft with (``generation.vllm.speculative_config``, ``generation.sglang.server_args``). 0: the trainer
            has none.
        recompute: see :class:`RecomputeConfig`.
        optimizer: see :class:`OptimizerConfig`.
        fsdp: see :class:`FSDPConfig`.
        lora: see :class:`LoraConfig`.
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
    fp8_param: bool = False
    mtp_loss_scaling_factor: float = 0.0
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class PolicyConfig:
    """How the policy's weights reach the generation engines.

    Attributes:
        nccl_xfer_refit: shard to shard; false takes the conventional packed broadcast.
        qat: ``off``, or the policy trains for an engine in NVFP4, which gets packed weights: ``w4a4`` with inputs and weights of the
            linear layers in four bits, ``w4a16`` with weights alone. For vLLM; ``docs/nvfp4.md`` says which GPU wants which. ``int4``: for an
            engine with ``generation.weight_dtype: int4``, in its groups (``docs/int4.md``).
        refit: see :class:`~rlrefit.integration.config.RefitConfig`.
    """

    nccl_xfer_refit: bool = True
    qat: str = "off"
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
        timeout_s: limit for placing ranks and for each answer; the error names what the run waited for.
        trainer_env: environment variables of the trainer's processes. ``PYTHONPATH``, for example, where trainer and engine
            have different packages; rlrefit and Ray must be on it.
        generation_env: environment variables of the engines' processes.
        generation_python: interpreter of the engines' processes, of an environment that has rlrefit, the engine and the same
            releases of Ray and, but for the patch, Python; null takes the trainer's.
    """

    address: str | None = None
    cpus_per_rank: float = 1.0
    timeout_s: float = 600.0
    trainer_env: dict[str, str] = field(default_factory=dict)
    generation_env: dict[str, str] = field(default_factory=dict)
    generation_python: str | None = None


@dataclass
class TrainConfig:
    """All that ``rlrefit train`` reads.

    Attributes:
        name: of the run; its files are in ``run_root/name``.
        seed: of data order, minibatches and, where the engine supports it, sampling; below 2147483648. It does not change initial weights.
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
    def folder(self) -> Path:
        """Of the run's files."""
        # A shell leaves ~ as it is behind the = of some, and in files.
        return Path(self.run_root).expanduser() / self.name

    @property
    def refit_engine(self) -> str:
        """The checkpoint engine of the refits, by its registered name."""
        if not self.policy.nccl_xfer_refit:
            return "packed_broadcast"
        return "colocated_ipc" if self.generation.colocated.enabled else "nccl_xfer"
