"""What rlrefit finds out of layers of experts that vLLM holds for FlashInfer's CUTLASS, in a process of vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from vllm_checkpoints import manifest_of, read_checkpoint
from vllm_ranks import Case, _state, _unequal, fill, groups_of, loaded, raw, reload_by_vllm
from vllm_refit import refit

from tests.vllm_cpu import accept_experts_without_gates

CPU = torch.device("cpu")
SHAPES = 20


def place_in_random_shapes(rank: int, cases: Sequence[Case]) -> list[int]:
    """Of each case how often an order of a layer's weights was found out and was vLLM's, though not the loader's."""
    accept_experts_without_gates()
    found = []
    for case in cases:
        with groups_of(rank, case):
            live, config = loaded(case)
            found.append(_place_in_random_shapes(_experts(live), config))
    return found


def _place_in_random_shapes(layer: Any, config: Any) -> int:
    from rlrefit.workers.engines.vllm.kernel_layouts import KernelLayouts

    halves = 1 + layer.quant_method.moe.is_act_and_mul
    sizes = st.integers(1, 33)
    moved: set[tuple[int, ...]] = set()

    @settings(max_examples=SHAPES, deadline=None, database=None)
    @given(count=st.integers(1, 5), rows=sizes, columns=sizes, seed=st.integers(0, 1 << 30))
    def agrees(count: int, rows: int, columns: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shapes = {"w13_weight": (count, halves * rows, columns), "w2_weight": (count, columns, rows)}
        tensors = {n: torch.randn(shape, generator=generator).bfloat16() for n, shape in shapes.items()}
        live = _made_of(layer, config, tensors)
        orders = KernelLayouts(config, CPU).of(live, _twin(tensors))
        for name, tensor in tensors.items():
            placed = torch.full_like(tensor, torch.nan)
            if name in orders:
                steps = [torch.tensor(along) for along in orders[name].steps]
                places = orders[name].first + steps[0][:, None, None] + steps[1][:, None] + steps[2]
                placed.view(-1)[places.view(-1)] = tensor.view(-1)
                moved.add(shapes[name])
            else:
                placed.copy_(tensor)
            assert torch.equal(raw(placed), raw(live.get_parameter(name)))

    agrees()
    return len(moved)


def refit_after_reload(rank: int, case: Case) -> list[str]:
    """What is not as vLLM loads it, after a refit in place of a model that vLLM itself has reloaded."""
    from rlrefit.workers.engines.vllm.destination import VllmDestination

    with groups_of(rank, case):
        live, config = loaded(case)
        as_a, a = _state(live), read_checkpoint(case.path_a)
        destination = VllmDestination(live, config, CPU)
        destination.fragments(manifest_of(a))
        reload_by_vllm(live, config, read_checkpoint(case.path_b))
        fragments, misc = destination.fragments(manifest_of(a))
        assert any(".experts." in fragment.name for fragment in fragments)
        fill(live, 0xFF)
        refit(destination, fragments, misc, a, 1)
        return _unequal(live, as_a)


def refuse(rank: int, case: Case) -> dict[str, str | None]:
    """By what is the matter with a layer the reason for which no order is found out; None if it is not asked about."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    from rlrefit.integration.layout.rearrangement import NotRearranged
    from rlrefit.workers.engines.vllm.kernel_layouts import KernelLayouts

    def keep_a_copy(layer: Any) -> None:
        kernel(layer).own = layer.w13_weight.detach().clone()

    def keep_another_beside(layer: Any) -> None:
        layer.quant_method.process_weights_after_loading = _and_then(
            layer.quant_method.process_weights_after_loading,
            lambda made: setattr(made, "sums", made.w13_weight.sum(-1)),
        )

    def scale(layer: Any) -> None:
        layer.quant_method.process_weights_after_loading = _and_then(
            layer.quant_method.process_weights_after_loading, lambda made: made.w2_weight.data.mul_(2)
        )

    def turn_the_live_one(layer: Any) -> None:
        turned = layer.w2_weight.data.transpose(1, 2)
        layer._parameters["w2_weight"] = nn.Parameter(turned, requires_grad=False)

    def have_communicators(layer: Any) -> None:
        parallel = SimpleNamespace(use_all2all_kernels=True)
        layer.quant_method.moe = SimpleNamespace(moe_parallel_config=parallel, is_act_and_mul=True)

    def pad(layer: Any) -> None:
        layer.moe_config = replace(layer.moe_config, hidden_dim_unpadded=layer.moe_config.hidden_dim - 1)

    def have_another_kernel(layer: Any) -> None:
        experts = kernel(layer)
        experts.__class__ = type("Other", (type(experts),), {})

    def have_another_backend(layer: Any) -> None:
        layer.quant_method.unquantized_backend = UnquantizedMoeBackend.FLASHINFER_TRTLLM

    def kernel(layer: Any) -> Any:
        return layer.quant_method.moe_kernel.fused_experts

    matters = (keep_a_copy, keep_another_beside, scale, turn_the_live_one, have_communicators, pad)
    others = (have_another_kernel, have_another_backend)
    found: dict[str, str | None] = {}
    with groups_of(rank, case):
        live, config = loaded(case)
        as_loaded = _experts(live)
        tensors = {name: p.detach().clone() for name, p in as_loaded.named_parameters(recurse=False)}
        for change in (*matters, *others):
            layer = _made_of(as_loaded, config, tensors)
            change(layer)
            try:
                orders = KernelLayouts(config, CPU).of(layer, _twin(tensors))
                found[change.__name__] = None if orders is None else f"found: {[*orders]}"
            except NotRearranged as reason:
                found[change.__name__] = str(reason)
    return found


def _and_then(step: Callable[[Any], None], more: Callable[[Any], Any]) -> Callable[[Any], None]:
    def both(layer: Any) -> None:
        step(layer)
        more(layer)

    return both


def _experts(live: nn.Module) -> Any:
    return next(module for module in live.modules() if hasattr(module, "w13_weight"))


def _twin(tensors: dict[str, torch.Tensor]) -> nn.Module:
    return nn.ParameterDict(
        {name: nn.Parameter(tensor.to("meta"), requires_grad=False) for name, tensor in tensors.items()}
    )


def _made_of(layer: Any, config: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """A layer like a live one, which vLLM has processed with ``tensors`` in it."""
    from vllm.config import set_current_vllm_config

    from rlrefit.workers.engines.common.packed.layers import apart

    made = apart(layer)
    made._parameters = {
        name: nn.Parameter(tensor.clone(), requires_grad=False) for name, tensor in tensors.items()
    }
    made.quant_method = apart(layer.quant_method)
    made.quant_method.moe_kernel = None
    with set_current_vllm_config(config), torch.no_grad():
        made.quant_method.process_weights_after_loading(made)
    return made
