"""vLLM models of one rank of a parallel layout, without an engine around them."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm_checkpoints import manifest_of, read_checkpoint
from vllm_refit import refit

if TYPE_CHECKING:
    from rlrefit.workers.engines.vllm.destination import VllmDestination


@dataclass(frozen=True)
class Layout:
    tensor: int = 1
    pipeline: int = 1
    expert: bool = False

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline


@dataclass(frozen=True)
class Case:
    """Two checkpoints of one architecture and the layout in which vLLM holds them."""

    path_a: str
    path_b: str
    layout: Layout = Layout()
    packed: bool = False  # float32, linear weights packed for oneDNN as vLLM does without the plug-in
    quantization: str | None = None  # what the engine makes of BF16 weights as it loads them


@dataclass(frozen=True)
class RankResult:
    """What one rank saw: the routes, the boxes that it wants, and the parameters that differ after refits."""

    bulk: dict[str, list[tuple[tuple[int, int], ...]]]
    misc: dict[str, str]
    parameters: dict[str, tuple[int, ...]]
    differing: list[str]
    differing_after_return: list[str]
    process_state_untouched: bool
    version: int
    failures: dict[str, str]
    processed: list[
        set[int]
    ]  # how often the first and the second refit processed an FP8 layer after loading it
    bare_load: str  # why an FP8 model's own loader can't take new weights after it was started
    without: dict[str, str]  # by tensor: why a manifest without it is refused; empty if it isn't


def _config(path: str, case: Case) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    layout = case.layout
    return EngineArgs(
        model=path,
        tensor_parallel_size=layout.tensor,
        pipeline_parallel_size=layout.pipeline,
        enable_expert_parallel=layout.expert,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32" if case.packed else "bfloat16",
        max_model_len=256,
        quantization=case.quantization,
    ).create_engine_config()


def raw(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes."""
    return parameter.detach().contiguous().reshape(-1).view(torch.uint8)


def _differing(live: torch.nn.Module, expected: torch.nn.Module) -> list[str]:
    """Parameters with other bytes, and linear layers with other outputs (packed weights show only there)."""
    other = dict(expected.named_parameters())
    found = [
        name
        for name, parameter in live.named_parameters()
        if not torch.equal(raw(parameter), raw(other[name]))
    ]
    dtype = next(iter(live.parameters())).dtype  # the embedding's, which is never emptied
    for name, module in live.named_modules():
        linear = getattr(module, "cpu_linear", None)
        if linear is None:
            continue
        twin = expected.get_submodule(name)
        width = next(
            getattr(module, key)
            for key in ("input_size_per_partition", "input_size", "embedding_dim")
            if hasattr(module, key)
        )
        x = torch.randn(3, width, generator=torch.Generator().manual_seed(7)).to(dtype)
        if not torch.equal(linear(x, module.weight, None), twin.cpu_linear(x, twin.weight, None)):
            found.append(name)
    return found


def _failures(
    destination: VllmDestination, live: torch.nn.Module, misc: dict[str, str], case: Case
) -> dict[str, str]:
    """Refits that must fail, and what the errors say; afterwards the model still computes with A."""
    from rlrefit.integration.errors import RefitError

    b = read_checkpoint(case.path_b)
    texts = {}

    def attempt(what: str, *batches: list[str]) -> None:
        try:
            for names in batches:
                destination.load_weights((name, b[name]) for name in names)
            destination.finish(1)
        except RefitError as error:
            texts[what] = str(error)
        unchanged = not _differing(live, loaded(case)[0])
        texts[f"{what}, old weights back"] = str(unchanged)

    q_only = [name for name in misc if "layers.0.self_attn.q_proj" in name]
    attempt("a part of a fused module", q_only)
    attempt("nothing at all")
    attempt("twice", q_only, q_only)
    return texts


@contextmanager
def groups_of(rank: int, case: Case) -> Iterator[None]:
    """vLLM's groups and kernels for a case; nothing of it is left to the next one."""
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    from vllm import _custom_ops
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.model_executor.models.utils import _model_to_pp_missing_layer_names

    with set_current_vllm_config(_config(case.path_a, case)):
        init_distributed_environment(case.layout.ranks, rank, "env://", rank, "gloo")
        initialize_model_parallel(case.layout.tensor, case.layout.pipeline)
    _custom_ops._supports_onednn = case.packed
    _custom_ops.scaled_fp8_quant = _scaled_fp8_quant
    yield
    destroy_model_parallel()
    # vLLM keys this by id(model), so a later case's model could inherit the layers of a dead one.
    _model_to_pp_missing_layer_names.clear()


def refit_there_and_back(rank: int, cases: Sequence[Case]) -> list[RankResult]:
    """For each case load A, refit to B, compare with a model that vLLM itself loaded from B; back to A."""
    results = []
    for case in cases:
        with groups_of(rank, case):
            results.append(_one_case(case))
    return results


def _one_case(case: Case) -> RankResult:
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
    from vllm.model_executor.models.utils import _model_to_pp_missing_layer_names

    from rlrefit.workers.engines.vllm.destination import VllmDestination

    live, config = loaded(case)
    context = config.compilation_config.static_forward_context
    registered = list(context.items())
    remembered, rotary = set(_model_to_pp_missing_layer_names), dict(_ROPE_DICT)
    a, b = read_checkpoint(case.path_a), read_checkpoint(case.path_b)
    destination = VllmDestination(live, config, torch.device("cpu"))
    fragments, misc = destination.fragments(manifest_of(a))
    untouched = (
        list(context.items()) == registered
        and set(_model_to_pp_missing_layer_names) <= remembered
        and rotary == _ROPE_DICT
    )
    failures = _failures(destination, live, misc, case) if case.packed else {}
    without = _refused_without(destination, a)
    bare_load = _bare_load(live, b) if _fp8_methods(live) else ""
    counts = _count_processing(live)
    refit(destination, fragments, misc, b, version=1)
    processed = [set(counts.values())]
    differing = _differing(live, loaded(case, case.path_b)[0])
    counts.update(dict.fromkeys(counts, 0))
    refit(destination, fragments, misc, a, version=2)
    processed.append(set(counts.values()))
    bulk: dict[str, list[tuple[tuple[int, int], ...]]] = {}
    for fragment in fragments:
        bulk.setdefault(fragment.name, []).append(fragment.box)
    return RankResult(
        bulk=bulk,
        misc=misc,
        parameters={name: tuple(parameter.shape) for name, parameter in live.named_parameters()},
        differing=differing,
        differing_after_return=_differing(live, loaded(case)[0]),
        process_state_untouched=untouched,
        version=destination.version,
        failures=failures,
        processed=processed,
        bare_load=bare_load,
        without=without,
    )


def _refused_without(destination: VllmDestination, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Why manifests are refused that lack one tensor: each of the first layer, and those of no layer."""
    from rlrefit.integration.errors import PlanError

    texts = {}
    for name in [name for name in tensors if ".layers.0." in name or ".layers." not in name]:
        try:
            destination.routes(manifest_of({n: tensor for n, tensor in tensors.items() if n != name}))
            texts[name] = ""
        except PlanError as error:
            texts[name] = str(error)
    return texts


def _scaled_fp8_quant(
    values: torch.Tensor, scale: torch.Tensor | None = None, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The arithmetic of vLLM's kernel for a scale per tensor, which its CPU build is without."""
    most = torch.finfo(torch.float8_e4m3fn).max
    if scale is None:
        scale = (values.abs().max().float() / most).reshape(1)
    return (values.float() / scale).clamp(-most, most).to(torch.float8_e4m3fn), scale


def _fp8_methods(live: torch.nn.Module) -> list[Any]:
    methods = [getattr(module, "quant_method", None) for module in live.modules()]
    return [method for method in methods if re.fullmatch(r"Fp8\w*LinearMethod", type(method).__name__)]


def _bare_load(live: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> str:
    """The error of ``model.load_weights`` without a reload, tried on a copy since it may write a part."""
    try:
        with torch.no_grad():
            copy.deepcopy(live).load_weights(iter(tensors.items()))
    except Exception as error:
        return type(error).__name__
    return ""


def _count_processing(live: torch.nn.Module) -> dict[int, int]:
    """Calls of post-load processing by FP8 layer, from now on."""
    counts: dict[int, int] = {}

    def count(method: Any) -> None:
        process = method.process_weights_after_loading

        def counted(layer: torch.nn.Module) -> None:
            counts[id(method)] += 1
            process(layer)

        counts[id(method)] = 0
        method.process_weights_after_loading = counted

    for method in _fp8_methods(live):
        count(method)
    return counts


def loaded(case: Case, path: str = "") -> tuple[torch.nn.Module, Any]:
    """A model that vLLM's own loader made of ``path``, or of the case's first checkpoint, and its configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    config = _config(path or case.path_a, case)
    with set_current_vllm_config(config):
        return get_model(vllm_config=config), config
