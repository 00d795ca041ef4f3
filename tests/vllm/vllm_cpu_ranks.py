"""Experts of vLLM on one of two ranks, refitted and computed with as on a CPU that vLLM has kernels of its own for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm_checkpoints import manifest_of, read_checkpoint
from vllm_ranks import Case, _state, _unequal, groups_of, loaded, raw
from vllm_refit import refit

from tests import vllm_cpu

RANKS = 2
_TOKENS, _CHOSEN = 5, 2


@dataclass(frozen=True)
class Found:
    """What one rank saw of one checkpoint.

    Attributes:
        of_its_own: whether its group adds up through vLLM's own shared memory.
        total: what the ranks' numbers add up to.
        by_axes: names of what is written in place in another order than the checkpoint's.
        differing: what is not as vLLM itself loads it, after refits there, back and there again.
        error: the largest of what its experts computed after a refit, as a share of the largest value; 0 of experts with biases.
    """

    of_its_own: bool
    total: float
    bulk: set[str]
    by_axes: set[str]
    misc: dict[str, str]
    differing: list[str]
    error: float


def refit_experts(rank: int, cpu: str, cases: Sequence[Case]) -> list[Found]:
    vllm_cpu.play(cpu)
    from rlrefit.workers.engines.vllm.patches import prepare_worker_process

    prepare_worker_process()
    if cpu == "amx" and vllm_cpu.is_here(cpu):
        torch.cpu._init_amx()  # Linux gives tiles to who asks; in an engine its linear layers come first, and do
    found = []
    for case in cases:
        with groups_of(rank, case):
            found.append(_one_case(rank, case))
    return found


def refit_by_a_loader_of_its_own(rank: int, cpu: str, case: Case) -> tuple[str, bool]:
    """The parameter that an error names, if the refit of such experts fails, and whether they hold what they held before."""
    vllm_cpu.play(cpu)
    from rlrefit.integration.errors import RefitError
    from rlrefit.workers.engines.vllm.destination import VllmDestination

    with groups_of(rank, case):
        live, config = loaded(case)
        before = {name: raw(parameter).clone() for name, parameter in live.named_parameters()}
        destination = VllmDestination(live, config, torch.device("cpu"))
        destination._kernel_layouts.of = _not_found_out
        tensors = {name: tensor + 1 for name, tensor in read_checkpoint(case.path_a).items()}
        fragments, misc = destination.fragments(manifest_of(tensors))
        named = ""
        try:
            refit(destination, fragments, misc, tensors, version=1)
        except RefitError as error:
            named = error.parameter or ""
        held = dict(live.named_parameters())
        return named, all(
            torch.equal(raw(held[name]), was) for name, was in before.items() if ".experts." in name
        )


def _not_found_out(*_: Any) -> Any:
    from rlrefit.integration.layout.rearrangement import NotRearranged

    raise NotRearranged("as of a kernel that does more")


def _one_case(rank: int, case: Case) -> Found:
    from vllm.distributed import get_tp_group

    from rlrefit.workers.engines.vllm.destination import VllmDestination

    group = get_tp_group()
    live, config = loaded(case)
    destination = VllmDestination(live, config, torch.device("cpu"))
    a, b = read_checkpoint(case.path_a), read_checkpoint(case.path_b)
    fragments, misc = destination.fragments(manifest_of(b))
    expected = {path: _state(loaded(case, path)[0]) for path in (case.path_a, case.path_b)}
    differing: list[str] = []
    for version, (weights, path) in enumerate([(b, case.path_b), (a, case.path_a), (b, case.path_b)]):
        with torch.no_grad():
            for fragment in fragments:
                fragment.view.fill_(torch.nan)
        refit(destination, fragments, misc, weights, version)
        differing += _unequal(live, expected[path])
    return Found(
        of_its_own=type(group.device_communicator.dist_module).__name__ == "_CPUSHMDistributed",
        total=float(group.all_reduce(torch.tensor([rank + 1.0]))),
        bulk={fragment.name for fragment in fragments},
        by_axes={fragment.name for fragment in fragments if fragment.axes is not None},
        misc=misc,
        differing=differing,
        error=max(
            _error(rank, layer, name, b) if f"{name}.0.gate_proj.weight" in b else 0.0
            for name, layer in live.named_modules()
            if hasattr(layer, "w13_weight")
        ),
    )


def _error(rank: int, layer: Any, name: str, weights: dict[str, torch.Tensor]) -> float:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    values = torch.randn(_TOKENS, layer.hidden_size, generator=torch.Generator().manual_seed(3)).bfloat16()
    logits = torch.randn(_TOKENS, layer.global_num_experts, generator=torch.Generator().manual_seed(4))
    computed = layer.quant_method.cpu_fused_moe(
        layer,
        values.clone(),
        use_grouped_topk=False,
        top_k=_CHOSEN,
        router_logits=logits,
        renormalize=True,
        global_num_experts=layer.global_num_experts,
        activation=MoEActivation.SILU,
    )
    expected = torch.zeros(values.shape)
    for token, (shares, experts) in enumerate(zip(*logits.topk(_CHOSEN), strict=True)):
        for share, expert in zip(shares.softmax(0), experts.tolist(), strict=True):
            gate, up, down = (
                weights[f"{name}.{expert}.{part}_proj.weight"].float() for part in ("gate", "up", "down")
            )
            own = slice(rank * len(gate) // RANKS, (rank + 1) * len(gate) // RANKS)
            value = values[token].float()
            inner = torch.nn.functional.silu(gate[own] @ value) * (up[own] @ value)
            expected[token] += share * (down[:, own] @ inner)
    return float((computed - expected).abs().max() / expected.abs().max())
