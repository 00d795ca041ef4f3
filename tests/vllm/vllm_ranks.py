"""vLLM models of one rank of a parallel layout, without an engine around them."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from vllm_checkpoints import manifest_of, read_checkpoint
from vllm_refit import refit

from tests.families.checkpoints import know_configuration
from tests.vllm_cpu import accept_experts_without_gates

if TYPE_CHECKING:
    from rlrefit.workers.engines.vllm.destination import VllmDestination

Tensors = dict[str, torch.Tensor]
# What configurations of DeepSeek's family have in published checkpoints, and vLLM goes by.
BIASED_ROUTER = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
# The class inside of the one with an image encoder, by which alone vLLM's registry knows the family.
_INNER = dict.fromkeys(("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), "vllm.model_executor.models.qwen3_5")


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
    """Two checkpoints of one architecture and the layout in which vLLM holds them.

    Attributes:
        packed: float32, linear weights packed for oneDNN as vLLM does without the plug-in.
        family: all of the model is poisoned before each refit, so that it must have no padding, which refits leave alone;
            and one more refit brings all through the loader.
        flashinfer: unquantized experts are held as on a GPU of Hopper's that has FlashInfer; nothing can be computed with them.
        more: arguments of the engine.
    """

    path_a: str
    path_b: str
    layout: Layout = Layout()
    packed: bool = False
    family: bool = False
    flashinfer: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RankResult:
    """What one rank saw: names by route, with boxes or reasons, and shapes of its parameters.

    Attributes:
        differing: what is not as in a model that vLLM itself loaded; by occasion.
        alike: parameters that both checkpoints fill with the same, so that no refit of them was seen. Those of zeros are
            left out: so has vLLM biases of what all ranks add up, on all but the first.
        failures: of refits that had to fail, the error, and the difference to the old weights afterwards.
        processed: how often the first and the second refit processed an FP8 layer after loading it.
        bare_load: why an FP8 model's own loader can't take new weights after it was started.
        without: tensors of the first layer (of experts: the first and the last), and those of no layer, without which a manifest is refused, and not refused.
    """

    bulk: dict[str, list[tuple[tuple[int, int], ...]]]
    misc: dict[str, str]
    unused: list[str]
    parameters: dict[str, tuple[int, ...]]
    differing: dict[str, list[str]]
    alike: list[str]
    process_state_untouched: bool
    failures: dict[str, tuple[str, list[str]]]
    processed: list[set[int]]
    bare_load: str
    without: tuple[set[str], set[str]]


def _config(path: str, case: Case) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=path,
        tensor_parallel_size=case.layout.tensor,
        pipeline_parallel_size=case.layout.pipeline,
        enable_expert_parallel=case.layout.expert,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32" if case.packed else "bfloat16",
        max_model_len=256,
        **case.more,
    ).create_engine_config()


def raw(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes."""
    return parameter.detach().contiguous().reshape(-1).view(torch.uint8)


def _state(model: torch.nn.Module) -> Tensors:
    """A copy of what :func:`_held` finds."""
    return {name: held.clone() for name, held in _held(model).items()}


def _held(model: torch.nn.Module) -> Tensors:
    """Bytes of parameters and buffers, of tensors beside them, such as the absorbed projections of latent attention, of those
    that kernels of experts hold, and of what linear layers give that compute with packed weights."""
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, module in model.named_modules():
        found |= {
            f"{name}.{key}": held for key, held in vars(module).items() if isinstance(held, torch.Tensor)
        }
        config = getattr(getattr(module, "quant_method", None), "moe_quant_config", None)
        parts = (
            *("w1_scale", "w2_scale", "w1_bias", "w2_bias", "g1_alphas", "g2_alphas"),
            *("a1_gscale", "a2_gscale"),
        )
        found |= {
            f"{name}, {part} of its kernel": held
            for part in parts
            if isinstance(held := getattr(config, part, None), torch.Tensor)
        }
        linear = getattr(module, "cpu_linear", None)
        if linear is not None:
            sizes = ("input_size_per_partition", "input_size", "embedding_dim")
            width = next(getattr(module, key) for key in sizes if hasattr(module, key))
            x = torch.randn(3, width, generator=torch.Generator().manual_seed(7)).to(module.weight.dtype)
            found[f"outputs of {name}"] = linear(x, module.weight, None)
    # Where sparse attention notes which tokens it has chosen, all layers in the same memory, nothing is before it runs.
    return {name: raw(tensor) for name, tensor in found.items() if not name.endswith("topk_indices_buffer")}


def _unequal(live: torch.nn.Module, expected: Tensors) -> list[str]:
    found = _held(live)
    assert found.keys() == expected.keys()
    return [name for name, held in found.items() if not torch.equal(held, expected[name])]


def _differing(live: torch.nn.Module, expected: torch.nn.Module) -> list[str]:
    return _unequal(live, _held(expected))


def fill(model: torch.nn.Module, byte: int) -> None:
    """Let parameters, and the locks of Marlin's kernels, hold nothing but this byte."""
    locks = [vars(module)["workspace"] for module in model.modules() if "workspace" in vars(module)]
    for tensor in [*(p.data for p in model.parameters()), *locks]:
        tensor.view(-1).view(torch.uint8).fill_(byte)


def reload_by_vllm(live: torch.nn.Module, config: Any, tensors: Tensors) -> None:
    """As vLLM's ``reload_weights`` does: kernels hold tensors of the reload afterwards."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    with set_current_vllm_config(config), torch.device("cpu"), torch.no_grad():
        initialize_layerwise_reload(live)
        live.load_weights(iter(tensors.items()))
        finalize_layerwise_reload(live, config.model_config)


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
    with _experts_of_flashinfer() if case.flashinfer else nullcontext():
        yield
    destroy_model_parallel()
    # vLLM keys this by id(model), so a later case's model could inherit the layers of a dead one.
    _model_to_pp_missing_layer_names.clear()


@contextmanager
def _experts_of_flashinfer() -> Iterator[None]:
    """vLLM chooses FlashInfer's CUTLASS for them, whose loading and processing is vLLM's own code."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as module
    from vllm.model_executor.layers.fused_moe.experts.flashinfer_cutlass_moe import FlashInferExperts

    chosen = module.UnquantizedMoeBackend.FLASHINFER_CUTLASS, FlashInferExperts
    with patch.object(module, "select_unquantized_moe_backend", lambda moe_config: chosen):
        yield


def refit_there_and_back(rank: int, cases: Sequence[Case]) -> list[RankResult | str]:
    """For each case load A, refit to B, compare with a model that vLLM itself loaded from B; back to A.

    Of a case whose model vLLM can't build on this CPU, vLLM's words.
    """
    accept_experts_without_gates()
    results = []
    for case in cases:
        if case.family:
            accept_family(case.path_a)
        with groups_of(rank, case):
            results.append(_one_case(case))
    return results


def accept_family(path: str) -> None:
    """Let this process's vLLM build the model of a checkpoint."""
    _accept_latent_attention()
    _know_architecture(path)


def _accept_latent_attention() -> None:
    """The CPU platform has no kernels for it. All else of the layer is vLLM's, with what it derives from weights."""
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.v1.attention.backend import AttentionImplBase

    class Kernels:
        is_sparse, dcp_world_size = False, 1
        process_weights_after_loading = AttentionImplBase.process_weights_after_loading

        def __init__(self, **_: Any) -> None:
            pass

    backend = SimpleNamespace(get_name=lambda: "none", get_impl_cls=lambda: Kernels)
    mla_attention.get_attn_backend = lambda *_, **__: backend
    mla_attention.get_mla_prefill_backend = lambda config: Kernels


def _know_architecture(path: str) -> None:
    """vLLM would start a process to learn what a class can do, for ten seconds where it has never asked before."""
    from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel

    written = json.loads((Path(path) / "config.json").read_text())
    know_configuration(Path(path))
    [name] = written["architectures"]
    ModelRegistry.models.setdefault(name, _LazyRegisteredModel(_INNER.get(name, ""), name))
    _know_class(name)


def _know_class(name: str) -> None:
    from vllm.model_executor.models.registry import ModelRegistry, _RegisteredModel

    known = ModelRegistry.models[name]
    ModelRegistry.models[name] = _RegisteredModel.from_model_cls(known.load_model_cls())


def _one_case(case: Case) -> RankResult | str:
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
    from vllm.model_executor.models.utils import _model_to_pp_missing_layer_names

    from rlrefit.workers.engines.vllm.destination import VllmDestination

    try:
        live, config = loaded(case)
    except NotImplementedError as error:
        return str(error)
    context = config.compilation_config.static_forward_context
    registered, rotary = list(context.items()), dict(_ROPE_DICT)
    remembered = set(_model_to_pp_missing_layer_names)
    a, b = read_checkpoint(case.path_a), read_checkpoint(case.path_b)
    destination = VllmDestination(live, config, torch.device("cpu"))
    fragments, misc = destination.fragments(manifest_of(a))
    untouched = (
        list(context.items()) == registered
        and set(_model_to_pp_missing_layer_names) <= remembered
        and rotary == _ROPE_DICT
    )
    names = [name for name, _ in live.named_parameters()]
    as_a, as_b = _state(live), _state(loaded(case, case.path_b)[0])
    failures = _failures(destination, live, misc, b, as_a) if case.packed else {}
    without = (set(), set()) if case.family else _refused_without(destination, a)
    bare_load = _bare_load(live, b) if _fp8_methods(live) else ""
    counts = _count_processing(live)
    processed, differing = [], {}
    for version, (occasion, tensors, expected) in enumerate([("there", b, as_b), ("back", a, as_a)]):
        counts.update(dict.fromkeys(counts, 0))
        if case.family:
            _poison(live)
        refit(destination, fragments, misc, tensors, version)
        assert destination.version == version
        differing[occasion] = _unequal(live, expected)
        processed.append(set(counts.values()))
    if case.family:
        _poison(live)
        # What the trainer can't place comes this way, wherever the engine would have taken it in place.
        refit(destination, [], dict.fromkeys(b, ""), b, 2)
        differing["all through the loader"] = _unequal(live, as_b)
    bulk: dict[str, list[tuple[tuple[int, int], ...]]] = {}
    for fragment in fragments:
        bulk.setdefault(fragment.name, []).append(fragment.box)
    return RankResult(
        bulk=bulk,
        misc=misc,
        unused=sorted(a.keys() - bulk.keys() - misc.keys()),
        parameters={name: tuple(parameter.shape) for name, parameter in live.named_parameters()},
        differing=differing,
        alike=[name for name in names if as_a[name].any() and torch.equal(as_a[name], as_b[name])],
        process_state_untouched=untouched,
        failures=failures,
        processed=processed,
        bare_load=bare_load,
        without=without,
    )


def _poison(live: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in live.parameters():
            parameter.fill_(torch.nan if parameter.is_floating_point() else -1)


def _failures(
    destination: VllmDestination, live: torch.nn.Module, misc: dict[str, str], b: Tensors, as_a: Tensors
) -> dict[str, tuple[str, list[str]]]:
    """Refits that must fail; afterwards the model still computes with A."""
    from rlrefit.integration.errors import RefitError

    q_only = [name for name in misc if "layers.0.self_attn.q_proj" in name]
    found = {}
    for what, batches in {"a part": [q_only], "nothing": [], "twice": [q_only, q_only]}.items():
        told = ""
        try:
            for names in batches:
                destination.load_weights((name, b[name]) for name in names)
            destination.finish(1)
        except RefitError as error:
            told = str(error)
        found[what] = told, _unequal(live, as_a)
    return found


def left_out_in_turn(names: Iterable[str]) -> list[str]:
    """Of experts the first and the last alone: each name costs a trace, and all experts of a layer are one case."""
    found = list(names)
    expert = {name: int(at[1]) for name in found if (at := re.search(r"\.experts\.(\d+)\.", name))}
    last = max(expert.values(), default=0)
    return [name for name in found if expert.get(name, 0) in (0, last)]


def _refused_without(destination: VllmDestination, tensors: Tensors) -> tuple[set[str], set[str]]:
    from rlrefit.integration.errors import PlanError

    refused, taken = set(), set()
    names = (name for name in tensors if ".layers.0." in name or ".layers." not in name)
    for name in left_out_in_turn(names):
        try:
            destination.routes(manifest_of({n: tensor for n, tensor in tensors.items() if n != name}))
            taken.add(name)
        except PlanError:
            refused.add(name)
    return refused, taken


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


def _bare_load(live: torch.nn.Module, tensors: Tensors) -> str:
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
    from vllm.model_executor.offloader import create_offloader, set_offloader

    config = _config(path or case.path_a, case)
    set_offloader(create_offloader(config.offload_config))  # as a model runner does
    with set_current_vllm_config(config):
        return get_model(vllm_config=config), config
