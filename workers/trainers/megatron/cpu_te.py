"""Transformer Engine's modules in plain torch, for machines without a GPU.

Megatron-Bridge maps a parameter by the *class name* of its module and by its parameter names
(``linear_qkv.layer_norm_weight``, ``experts.linear_fc1.weight3``), and builds its layers from Transformer
Engine's classes, which need CUDA. The classes here carry the same names over Megatron-core's own parallel
layers, so that the mapping, the sharding and the communication are the real ones; the kernels are not.

Imports Megatron-core at module level: import it through :mod:`.cpu_standins` only.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.tensor_parallel.utils import divide
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, SequentialMLP, TEGroupedMLP
from torch import Tensor, nn

from .zigzag import row_order, token_places

# Arguments that steer CUDA kernels or label a module; they change no value.
_KERNEL_ARGUMENTS = frozenset(
    {"tp_comm_buffer_name", "symmetric_ar_type", "name", "cp_comm_type", "num_splits"}
)


def _fitting(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """``arguments`` without the kernel arguments that ``function`` does not take; others stay, and may raise."""
    accepted = inspect.signature(function).parameters
    return {k: v for k, v in arguments.items() if k in accepted or k not in _KERNEL_ARGUMENTS}


def _normalize(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, rms: bool, zero_centered: bool
) -> Tensor:
    """Norm over the last dimension in float32, as Transformer Engine computes it; the result has x's dtype."""
    scale = weight.float() + 1 if zero_centered else weight.float()
    shape = (x.shape[-1],)
    if rms:
        normed = nn.functional.rms_norm(x.float(), shape, scale, eps)
    else:
        normed = nn.functional.layer_norm(
            x.float(), shape, scale, None if bias is None else bias.float(), eps
        )
    return normed.to(x.dtype)


def _norm_parameter(config: Any, size: int, fill: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.full((size,), fill, dtype=config.params_dtype))
    # Sequence parallelism gives each rank the gradient of its tokens only; Megatron sums where this is set.
    parameter.sequence_parallel = config.sequence_parallel
    return parameter


class _Norm(nn.Module):
    rms: bool

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.config = config
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = _norm_parameter(config, hidden_size, 0.0 if self.zero_centered else 1.0)
        if not self.rms:
            self.bias = _norm_parameter(config, hidden_size, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return _normalize(
            x,
            self.weight,
            None if self.rms else self.bias,
            self.eps,
            rms=self.rms,
            zero_centered=self.zero_centered,
        )


class RMSNorm(_Norm):
    """``te.pytorch.RMSNorm``."""

    rms = True


class LayerNorm(_Norm):
    """``te.pytorch.LayerNorm``."""

    rms = False


class TENorm:
    """Makes an RMSNorm or a LayerNorm by ``config.normalization``, as Megatron's ``TENorm`` does."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, has_residual: bool = False) -> _Norm:
        if config.normalization == "RMSNorm":
            return RMSNorm(config, hidden_size, eps)
        if config.normalization == "LayerNorm":
            return LayerNorm(config, hidden_size, eps)
        raise ValueError(f"normalization {config.normalization!r} is neither RMSNorm nor LayerNorm")


class _TellsSizes:
    """Sizes of this rank's part under Transformer Engine's names, by which Bridge's LoRA knows a layer."""

    weight: Tensor

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]


class TEColumnParallelLinear(_TellsSizes, ColumnParallelLinear):
    """Column-parallel linear layer: Megatron-core's own."""

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **_fitting(ColumnParallelLinear.__init__, kwargs))


class TERowParallelLinear(_TellsSizes, RowParallelLinear):
    """Row-parallel linear layer: Megatron-core's own."""

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **_fitting(RowParallelLinear.__init__, kwargs))


class TELayerNormColumnParallelLinear(_TellsSizes, ColumnParallelLinear):
    """Norm and column-parallel linear layer in one module (``layer_norm_weight``, ``weight``).

    As Transformer Engine's it returns the normed input too, if it is asked to: under sequence parallelism gathered, or
    this rank's part.
    """

    return_layernorm_output = False
    return_layernorm_output_gathered = False

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(
            input_size, output_size, config=config, **_fitting(ColumnParallelLinear.__init__, kwargs)
        )
        self.eps = config.layernorm_epsilon
        self.rms = config.normalization == "RMSNorm"
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.layer_norm_weight = _norm_parameter(config, input_size, 0.0 if self.zero_centered else 1.0)
        if not self.rms:
            self.layer_norm_bias = _norm_parameter(config, input_size, 0.0)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        normed = _normalize(
            x,
            self.layer_norm_weight,
            None if self.rms else self.layer_norm_bias,
            self.eps,
            rms=self.rms,
            zero_centered=self.zero_centered,
        )
        output, bias = super().forward(normed, *args, **kwargs)
        if not self.return_layernorm_output:
            return output, bias
        if self.return_layernorm_output_gathered and self.config.sequence_parallel:
            normed = gather_from_sequence_parallel_region(normed, group=self.tp_group)
        return ((output, normed), None) if bias is None else (output, bias, normed)


class TELinear(_TellsSizes, nn.Module):
    """Linear layer whose weight every tensor-parallel rank holds (``parallel_mode="duplicated"``)."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str | None,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        skip_bias_add: bool,
        **kwargs: Any,
    ) -> None:
        if parallel_mode not in (None, "duplicated"):
            raise ValueError(f"TELinear on a CPU holds whole weights; parallel_mode is {parallel_mode!r}")
        super().__init__()
        self.config = config
        self.parallel_mode = parallel_mode
        self.skip_bias_add = skip_bias_add
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        if config.perform_initialization:
            init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel
        self.bias = _norm_parameter(config, output_size, 0.0) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        inner = None if self.skip_bias_add else self.bias
        return nn.functional.linear(x, self.weight, inner), self.bias if self.skip_bias_add else None


class _GroupedLinear(nn.Module):
    """One weight per local expert (``weight0`` …), split over expert tensor parallelism along ``split_dim``, and if
    there are biases one each (``bias0`` …), which are outputs and so whole if inputs are split."""

    split_dim: int

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool = True,
        pg_collection: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        split = groups.expt_tp.size()
        shape = [output_size, input_size]
        shape[self.split_dim] = divide(shape[self.split_dim], split)
        self.config = config
        self.out_features, self.in_features = shape
        self.num_gemms = num_gemms
        self.use_bias = bias
        self.skip_bias_add = skip_bias_add
        # As Megatron marks Transformer Engine's experts: they have a data-parallel group of their own.
        own_groups = is_expert and (
            groups.ep.size() > 1 or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        )
        for index in range(num_gemms):
            weight = nn.Parameter(torch.empty(*shape, dtype=config.params_dtype))
            if config.perform_initialization:
                with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                    init_method(weight)
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=self.split_dim, stride=1)
            weight.allreduce = not own_groups
            self.register_parameter(f"weight{index}", weight)
            if bias:
                offset = nn.Parameter(torch.zeros(shape[0], dtype=config.params_dtype))
                if self.split_dim == 0:
                    set_tensor_model_parallel_attributes(offset, is_parallel=True, dim=0, stride=1)
                offset.allreduce = not own_groups
                self.register_parameter(f"bias{index}", offset)

    def forward(self, x: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, list[Tensor] | None]:
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)] if self.use_bias else None
        inner = biases if biases and not self.skip_bias_add else [None] * self.num_gemms
        outputs = [
            nn.functional.linear(chunk, getattr(self, f"weight{i}"), inner[i])
            for i, chunk in enumerate(torch.split(x, list(m_splits)))
        ]
        return torch.cat(outputs), biases if self.skip_bias_add else None


class TEColumnParallelGroupedLinear(_GroupedLinear):
    """Grouped experts' first layer: outputs split over expert tensor parallelism."""

    split_dim = 0


class TERowParallelGroupedLinear(_GroupedLinear):
    """Grouped experts' second layer: inputs split over expert tensor parallelism."""

    split_dim = 1


class TEDotProductAttention(DotProductAttention):
    """Causal attention: Megatron-core's unfused one.

    Under context parallelism each rank has the keys and values of all ranks, in the row's order, and masks by its queries'
    places. Transformer Engine gets the same by any ``cp_comm_type``.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1  # Megatron-core's own knows no more
        super().__init__(alone, *args, **_fitting(DotProductAttention.__init__, kwargs))
        self.config = config
        groups = kwargs.get("pg_collection") or ProcessGroupCollection.use_mpu_process_groups(["cp"])
        self._context_group = groups.cp
        self._window = self.scale_mask_softmax.window_size
        if config.context_parallel_size > 1:
            # It would take the places in this rank's part for those in the row.
            self.scale_mask_softmax.window_size = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        if self.config.context_parallel_size > 1:
            key, value = self._of_all_ranks(key), self._of_all_ranks(value)
            attention_mask = self._unseen(key.shape[0])
        elif self.attn_mask_type == AttnMaskType.causal:
            # Transformer Engine, too, reads no mask where attention is causal: verl gives one of rows ``[B, S]`` there.
            attention_mask = None
        kwargs = _fitting(DotProductAttention.forward, kwargs)
        return super().forward(query, key, value, attention_mask, *args, **kwargs)

    def _of_all_ranks(self, own: Tensor) -> Tensor:
        """Whole rows ``[S, B, heads, width]`` of keys or values; their gradients are summed, and cut again."""
        whole = gather_from_sequence_parallel_region(own.contiguous(), group=self._context_group)
        return whole.index_select(0, row_order(len(whole), self._context_group.size(), own.device))

    def _unseen(self, tokens: int) -> Tensor:
        """``[1, 1, S / CP, S]``, true where a query of this rank does not see a key."""
        if self.attn_mask_type != AttnMaskType.causal:
            raise NotImplementedError(
                f"attention with a mask of type {self.attn_mask_type.name} has no context parallelism on CPUs; give 1"
            )
        keys = torch.arange(tokens)
        own = token_places(tokens, self._context_group.rank(), self._context_group.size())
        behind = own.unsqueeze(1) - keys
        unseen = behind < 0
        if self._window is not None:
            unseen |= behind > self._window[0]
        return unseen[None, None]


class CpuSpecProvider(TESpecProvider):
    """Transformer Engine's layer specification without the questions about the engine's version."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return TENorm

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> partial[Any]:
        if moe_use_grouped_gemm:
            return partial(
                TEGroupedMLP,
                submodules=GroupedMLPSubmodules(
                    linear_fc1=TEColumnParallelGroupedLinear, linear_fc2=TERowParallelGroupedLinear
                ),
            )
        return partial(
            SequentialMLP,
            submodules=MLPSubmodules(linear_fc1=TEColumnParallelLinear, linear_fc2=TERowParallelLinear),
        )

    def activation_func(self) -> None:
        return None


_STANDINS = (
    TENorm,
    TELinear,
    TEColumnParallelLinear,
    TERowParallelLinear,
    TELayerNormColumnParallelLinear,
    TEColumnParallelGroupedLinear,
    TERowParallelGroupedLinear,
    TEDotProductAttention,
)


def place_standins() -> None:
    """Put the stand-ins wherever Megatron-core's loaded modules name the Transformer Engine classes."""
    import megatron.core.models.gpt.gpt_layer_specs as layer_specs
    import megatron.core.transformer.moe.moe_layer as moe_layer
    import megatron.core.transformer.transformer_block as transformer_block

    replacements: dict[str, Any] = {standin.__name__: standin for standin in _STANDINS}
    replacements["TESpecProvider"] = CpuSpecProvider
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core"):
            for attribute in replacements.keys() & vars(module).keys():
                setattr(module, attribute, replacements[attribute])
    # All were decided when these modules found no Transformer Engine.
    layer_specs.HAVE_TE = moe_layer.HAVE_TE = True
    transformer_block.LayerNormImpl = TENorm
