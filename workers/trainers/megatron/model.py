"""Build a Megatron-core model of a Hugging Face checkpoint, in a given layout, through Megatron-Bridge."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..checkpoint_ranks import check_on_all_ranks
from .cpu_standins import ensure_megatron
from .enumeration import conversion_tasks
from .hf_checkpoint import CheckpointMismatch
from .pipeline_layout import pipeline_layout_violations


@dataclass(frozen=True)
class MegatronLayout:
    """How a model is spread over the ranks, in Megatron's terms; what is left over is data parallelism.

    Attributes:
        tensor_parallel: TP size of all but the experts. Above 1, sequence parallelism is on too.
        pipeline_parallel: PP size.
        virtual_pipeline: model chunks per pipeline rank (interleaved schedule); None for one.
        expert_parallel: EP size, within the ranks of one pipeline stage.
        expert_tensor_parallel: TP size of the experts.
        context_parallel: CP size. Each rank has two chunks of every row (:mod:`.zigzag`).
        num_layers_in_first_pipeline_stage: of the first pipeline rank, where it has not as many as the others.
        num_layers_in_last_pipeline_stage: of the last one.
        pipeline_model_parallel_layout: all stages in Megatron's notation, in place of the two before.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_pipeline: int | None = None
    expert_parallel: int = 1
    expert_tensor_parallel: int = 1
    context_parallel: int = 1
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    pipeline_model_parallel_layout: str | None = None

    @property
    def sizes(self) -> MegatronLayout:
        """The parallel sizes alone."""
        return replace(
            self,
            num_layers_in_first_pipeline_stage=None,
            num_layers_in_last_pipeline_stage=None,
            pipeline_model_parallel_layout=None,
        )

    def violations(self, world_size: int) -> list[str]:
        """Why ``world_size`` ranks can't have this layout, one sentence each; empty if they can."""
        found = [
            f"{name} is {size}; give at least 1"
            for name, size in vars(self).items()
            if isinstance(size, int) and size < 1
        ]
        if found:
            return found
        dense = self.tensor_parallel * self.context_parallel * self.pipeline_parallel
        expert = self.expert_tensor_parallel * self.expert_parallel * self.pipeline_parallel
        if world_size % dense:
            found.append(
                f"{world_size} ranks are no multiple of tensor_parallel x context_parallel x "
                f"pipeline_parallel = {dense}"
            )
        if world_size % expert:
            found.append(
                f"{world_size} ranks are no multiple of expert_tensor_parallel x expert_parallel x "
                f"pipeline_parallel = {expert}"
            )
        if self.virtual_pipeline is not None and self.pipeline_parallel == 1:
            found.append("virtual_pipeline needs pipeline_parallel above 1; leave it null")
        ends = (self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage)
        if self.pipeline_parallel == 1 and ends != (None, None):
            found.append(
                "layers of the first and last pipeline stage need pipeline_parallel above 1; leave them null"
            )
        if self.pipeline_model_parallel_layout is not None:
            if ends != (None, None):
                found.append(
                    "pipeline_model_parallel_layout tells all stages, num_layers_in_… two of them; give one of both"
                )
            stages = self.pipeline_parallel * (self.virtual_pipeline or 1)
            found += [
                f"pipeline_model_parallel_layout {self.pipeline_model_parallel_layout!r}: {problem}"
                for problem in pipeline_layout_violations(self.pipeline_model_parallel_layout, stages)
            ]
        return found


@dataclass(frozen=True)
class Recompute:
    """Activations that are computed again in the backward pass instead of being kept; Megatron's own settings.

    Attributes:
        granularity: ``full``, whole layers, or ``selective``, the parts in ``modules``.
        method: of ``full``: ``uniform``, all layers in units of ``num_layers``, or ``block``, the first
            ``num_layers`` of each stage.
        num_layers: of ``full``.
        modules: of ``selective``, e.g. ``core_attn``, ``moe_act``, ``layernorm``, ``mla_up_proj``, ``mlp``, ``moe``;
            empty for Megatron's choice, ``core_attn``.
    """

    granularity: str
    method: str | None = None
    num_layers: int | None = None
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lora:
    """Adapters of Megatron-Bridge beside frozen weights; they alone are trained. Each expert has its own.

    Attributes:
        rank: of the factors.
        alpha: what the factors add is scaled by ``alpha / rank``.
        target_modules: Megatron's names of the linear layers that get factors, e.g. ``linear_qkv``; those that a model
            lacks count for nothing.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...]


@dataclass(frozen=True)
class MegatronModel:
    """A built model.

    Attributes:
        bridge: the ``AutoBridge`` that converts between the two name spaces.
        provider: Bridge's model provider, which is the model's ``TransformerConfig`` as well.
        model: this rank's model chunks, one or ``virtual_pipeline`` many.
        config: the transformers config of the checkpoint.
        unquantized: with ``fp8_param``, this rank's weights as the checkpoint has them, by chunk and name, for
            ``reload_model_params`` of Megatron's optimizer: it would begin with the values before loading. Else None.
    """

    bridge: Any
    provider: Any
    model: list[Any]
    config: Any
    unquantized: dict[str, dict[str, torch.Tensor]] | None = None


def build_megatron(
    model_path: str | Path,
    layout: MegatronLayout,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    wrap_with_ddp: bool = True,
    distributed_optimizer: bool = True,
    load_weights: bool = True,
    recompute: Recompute | None = None,
    fuse_gradient_accumulation: bool = True,
    fp8_param: bool = False,
    lora: Lora | None = None,
    mtp_loss_scaling_factor: float = 0.0,
    trust_remote_code: bool = False,
) -> MegatronModel:
    """Build this rank's part of the model and load its weights; every rank calls it.

    ``torch.distributed`` must be initialised (NCCL on GPUs, gloo on CPUs). The first call initialises
    Megatron's model-parallel state and its random states; a later one (a reference policy) joins it.

    Args:
        model_path: a Hugging Face checkpoint of safetensors: a folder, or a hub name, which is fetched to this
            host's cache.
        layout: the parallel sizes.
        dtype: of parameters and activations: bfloat16, float16 or float32.
        seed: of Megatron's random states, which differ between tensor- and pipeline-parallel ranks as usual.
        wrap_with_ddp: wrap the chunks in Megatron's ``DistributedDataParallel``, which training needs;
            gradients are then reduced in float32.
        distributed_optimizer: lay out the gradient buffers for Megatron's distributed optimizer.
        load_weights: without it the weights stay as Megatron initialises them, and of the checkpoint only
            ``config.json`` and the names in ``model.safetensors.index.json`` are read.
        recompute: activations to compute again; None keeps them all.
        fuse_gradient_accumulation: kernels add gradients to the parameters' buffers, on GPUs with Apex. NVFP4 training wants
            it off.
        fp8_param: linear layers compute in FP8 (E4M3, blocks of 128 by 128) and keep their weights so: Transformer Engine's
            blockwise recipe. On GPUs from Hopper on, with ``dtype`` bfloat16.
        lora: adapters, whose factors have ``dtype``; None trains all weights.
        mtp_loss_scaling_factor: above 0 the model has the checkpoint's layers for multi-token prediction (MTP), and training adds
            their loss with this weight, by Megatron's own rule. Their gradients end at these layers, so that the policy is
            trained as without them. 0 leaves them out: neither trained nor exported.
        trust_remote_code: run the code that the checkpoint brings.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised.
        ValueError: the layout fits neither the ranks nor the model-parallel state that is there already; no layer gets an
            adapter of ``lora``; MTP layers are asked for, and the checkpoint's configuration has none.
        CheckpointMismatch: the checkpoint is incomplete, damaged, or of another shape, or has no weights for MTP layers that are
            asked for; the same on all ranks.
    """
    folder, checked = check_on_all_ranks(model_path, layout, load_weights, trust_remote_code)

    auto_bridge = ensure_megatron()
    bridge = auto_bridge.from_hf_pretrained(str(folder), trust_remote_code=trust_remote_code)
    provider = bridge.to_megatron_provider(load_weights=False)
    set_layout(provider, layout)
    set_precision(provider, dtype)
    _set_for_reinforcement_learning(provider, mtp_loss_scaling_factor)
    if recompute is not None:
        _set_recompute(provider, recompute)
    if fp8_param:
        _set_fp8_parameters(provider)
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        set_for_cpu(provider)
    elif not fuse_gradient_accumulation or importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        # Bridge turns it on wherever there is a GPU, but the output layer needs Apex's extension for it.
        provider.gradient_accumulation_fusion = False
    provider.finalize()
    _initialize_model_parallel(provider, layout, seed)

    from megatron.core.distributed import DistributedDataParallelConfig

    if lora is not None:
        provider.register_pre_wrap_hook(partial(_put_adapters, lora))
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer, fp8_param_gather=fp8_param
    )
    model = provider.provide_distributed_model(
        ddp_config=ddp if wrap_with_ddp else None,
        wrap_with_ddp=wrap_with_ddp,
        use_cpu_initialization=on_cpu,
    )
    unquantized = None
    if mtp_loss_scaling_factor and load_weights:
        _require_prediction(bridge, model, folder)
    if lora is not None:
        _require_adapters(lora, model)
    if load_weights:
        # Bridge then keeps what it loads. Its export must give BF16 again: it is what rules are held against.
        usual = bridge.export_weight_dtype
        bridge.export_weight_dtype = "fp8" if fp8_param else usual
        bridge.load_hf_weights(model)
        bridge.export_weight_dtype = usual
        if fp8_param:
            unquantized, bridge.unquantized_state_dict = bridge.unquantized_state_dict, None
    return MegatronModel(
        bridge=bridge,
        provider=provider,
        model=model,
        config=checked or bridge.hf_pretrained.config,
        unquantized=unquantized,
    )


def _put_adapters(lora: Lora, model: list[Any]) -> list[Any]:
    from megatron.bridge.peft.lora import LoRA

    # Bridge warns of names that it finds nowhere, and takes all linear layers if it is given none.
    present = {path.rpartition(".")[2] for chunk in model for path, _ in chunk.named_modules()}
    targets = [name for name in lora.target_modules if name in present] or [*lora.target_modules]
    # One that experts share would count in the gradient's norm as often as there are ranks of expert parallelism.
    return LoRA(target_modules=targets, dim=lora.rank, alpha=lora.alpha, share_expert_adapters=False)(model)


def _require_adapters(lora: Lora, model: list[Any]) -> None:
    """A collective: a pipeline stage may have none."""
    trained = sum(p.requires_grad for chunk in model for p in chunk.parameters())
    found: list[int] = [0] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, trained)
    if not any(found):
        raise ValueError(
            f"no layer of the model is named {' or '.join(lora.target_modules)}, so that nothing would be trained"
        )


def _require_prediction(bridge: Any, model: list[Any], folder: Path) -> None:
    """Raise CheckpointMismatch if MTP layers would stay random: Bridge passes over what it finds no weights for. A collective."""
    filled = {id(task.param_weight) for task in conversion_tasks(bridge, model)}
    lacking = [
        name
        for chunk in model
        for name, parameter in chunk.named_parameters()
        if ".mtp." in f".{name}" and id(parameter) not in filled
    ]
    found: list[list[str]] = [[]] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, lacking)
    for rank, names in enumerate(found):
        if names:
            raise CheckpointMismatch(
                f"rank {rank}: checkpoint {folder} has no weights that Megatron-Bridge knows for {len(names)} parameters of the layers "
                f"for multi-token prediction, among them {names[0]}; they would stay random, and no refit would bring them. Give a "
                "checkpoint with these layers, or mtp_loss_scaling_factor 0"
            )


def set_layout(provider: Any, layout: MegatronLayout) -> None:
    """Give Bridge's model provider the layout, and all that follows from it."""
    provider.tensor_model_parallel_size = layout.tensor_parallel
    provider.pipeline_model_parallel_size = layout.pipeline_parallel
    provider.virtual_pipeline_model_parallel_size = layout.virtual_pipeline
    provider.expert_model_parallel_size = layout.expert_parallel
    provider.expert_tensor_parallel_size = layout.expert_tensor_parallel
    provider.context_parallel_size = layout.context_parallel
    if provider.cp_comm_type is None and (provider.window_size or provider.softmax_type != "vanilla"):
        # Transformer Engine's ring, which it takes otherwise, knows neither windows nor sinks.
        provider.cp_comm_type = "a2a"
    # Bridge has settings of its own here for some models and sizes, which would contradict these.
    provider.num_layers_in_first_pipeline_stage = layout.num_layers_in_first_pipeline_stage
    provider.num_layers_in_last_pipeline_stage = layout.num_layers_in_last_pipeline_stage
    provider.pipeline_model_parallel_layout = layout.pipeline_model_parallel_layout
    provider.sequence_parallel = layout.tensor_parallel > 1
    # The interleaved schedule sends both ways at once. In one batch between two ranks (PP 2: each is the
    # other's predecessor and successor) the messages would be taken for one another, and gradients be wrong.
    provider.overlap_p2p_comm = layout.virtual_pipeline is not None
    provider.batch_p2p_comm = not provider.overlap_p2p_comm
    # Bridge pads with zero rows, and only where the vocabulary does not divide evenly.
    provider.should_pad_vocab = provider.vocab_size % layout.tensor_parallel != 0
    provider.make_vocab_size_divisible_by = 1


def _set_recompute(provider: Any, recompute: Recompute) -> None:
    provider.recompute_granularity = recompute.granularity
    provider.recompute_method = recompute.method
    provider.recompute_num_layers = recompute.num_layers
    if recompute.modules:
        provider.recompute_modules = list(recompute.modules)


def _set_fp8_parameters(provider: Any) -> None:
    provider.fp8, provider.fp8_recipe, provider.fp8_param = "e4m3", "blockwise", True
    if provider.num_moe_experts is not None:
        # Each expert's tokens are padded to what FP8 products take.
        provider.moe_router_padding_for_quantization = True


def set_precision(provider: Any, dtype: torch.dtype) -> None:
    """Give Bridge's model provider the dtype of parameters and activations."""
    provider.params_dtype = provider.pipeline_dtype = provider.autocast_dtype = dtype
    provider.bf16 = dtype == torch.bfloat16
    provider.fp16 = dtype == torch.float16


def _set_for_reinforcement_learning(provider: Any, mtp_loss_scaling_factor: float) -> None:
    """Log-probabilities must depend on the tokens alone, and the loss of the policy be its own alone."""
    provider.hidden_dropout = 0.0
    provider.attention_dropout = 0.0
    _set_prediction(provider, mtp_loss_scaling_factor)
    if provider.num_moe_experts is None:
        return
    provider.moe_grouped_gemm = True
    provider.moe_token_dispatcher_type = "alltoall"
    # No auxiliary loss, no moving bias, no capacity: nothing pulls at the router beside the policy's loss,
    # and no token's output depends on which other tokens are in its batch.
    provider.moe_router_load_balancing_type = "none"
    provider.moe_aux_loss_coeff = 0.0
    provider.moe_z_loss_coeff = None
    provider.moe_router_bias_update_rate = 0.0
    provider.moe_expert_capacity_factor = None
    # Top-k among nearly equal logits in bfloat16 would choose other experts than the engine does.
    provider.moe_router_dtype = "fp32"


def _set_prediction(provider: Any, loss_scaling_factor: float) -> None:
    """MTP layers take no part in the policy's probabilities; those that are trained get gradients of their own loss alone."""
    if not loss_scaling_factor:
        provider.mtp_num_layers = None
        # Hybrid models take the number from the pattern then, and Megatron would add the layers' loss to the policy's.
        provider.mtp_hybrid_override_pattern = None
        return
    if not provider.mtp_num_layers:
        raise ValueError(
            "mtp_loss_scaling_factor is above 0, and the checkpoint's config.json has no layers for multi-token prediction "
            "(num_nextn_predict_layers, mtp_num_hidden_layers) that Megatron-Bridge reads; give 0"
        )
    provider.mtp_loss_scaling_factor = loss_scaling_factor
    provider.mtp_detach_heads = True


def set_for_cpu(provider: Any) -> None:
    """Turn off what Bridge's model provider would have GPU kernels do."""
    for fusion in (
        "apply_rope_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "cross_entropy_loss_fusion",
        "gradient_accumulation_fusion",
        "masked_softmax_fusion",
        "moe_permute_fusion",
        "persist_layer_norm",
    ):
        setattr(provider, fusion, False)
    if getattr(provider, "moe_token_dispatcher_type", None) == "flex":
        # DeepEP's and HybridEP's kernels; this one moves tokens by collectives.
        provider.moe_token_dispatcher_type = "alltoall"
    # The unfused softmax would otherwise round to bfloat16, where flash attention keeps float32.
    provider.attention_softmax_in_fp32 = True


def _initialize_model_parallel(provider: Any, layout: MegatronLayout, seed: int) -> None:
    from megatron.core import parallel_state

    if not parallel_state.is_initialized():
        provider.initialize_model_parallel(seed=seed)
        return
    present = MegatronLayout(
        tensor_parallel=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_parallel=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline=parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        expert_parallel=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel=parallel_state.get_expert_tensor_parallel_world_size(),
        context_parallel=parallel_state.get_context_parallel_world_size(),
    )
    if present != layout.sizes:
        raise ValueError(
            f"this process has Megatron's model-parallel state of {present}, and a model of {layout.sizes} is asked "
            "for; use one layout per process, or call parallel_state.destroy_model_parallel() first"
        )
