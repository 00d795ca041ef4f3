"""Every family's model as vLLM's own loader builds it, on one rank of a layout, refitted from one checkpoint to another."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from vllm_checkpoints import PLAIN_EXPERTS, manifest_of, read_checkpoint
from vllm_ranks import Case, groups_of, loaded, raw
from vllm_refit import refit

from tests.families.checkpoints import write_checkpoint

_EXPERTS = {"moe_intermediate_size": PLAIN_EXPERTS}
# Family → what its configuration has in published checkpoints, and vLLM goes by; and experts of a size that stays as it is loaded.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3-tied": {},
    "qwen3_moe": _EXPERTS,
    "mistral": {},
    "mixtral": {"intermediate_size": PLAIN_EXPERTS},
    "gemma2": {},
    "gemma3": {},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1, **_EXPERTS},
    "gpt_oss": {"intermediate_size": PLAIN_EXPERTS},
    "nemotron_h": {},
    "qwen3_next": _EXPERTS,
    "qwen3_5_moe": _EXPERTS,
    "qwen3_5_moe-stacked": _EXPERTS,
}
# The class inside of the one with an image encoder, by which alone vLLM's registry knows the family.
_INNER = {"Qwen3_5MoeForCausalLM": "vllm.model_executor.models.qwen3_5"}
# A vocabulary that vLLM does not pad on two ranks: a refit leaves padding alone, and here all of a model is poisoned.
_COMMON = {"vocab_size": 64, "max_position_embeddings": 256}


@dataclass(frozen=True)
class FamilyResult:
    """What one rank saw.

    Attributes:
        bulk: names that it wants in place.
        misc: names that it takes through vLLM's loader, with the reason.
        unused: names that it takes not at all.
        differing: parameters, buffers and tensors derived from them that are not as vLLM loads them; by occasion.
        alike: parameters that both checkpoints fill with the same, so that no refit of them was seen. Those of zeros are
            left out: so has vLLM biases of what all ranks add up, on all but the first.
    """

    bulk: list[str]
    misc: dict[str, str]
    unused: list[str]
    differing: dict[str, list[str]]
    alike: list[str]


def write_pair(folder: Path, family: str) -> tuple[str, str]:
    """Two checkpoints of a family; every tensor of them has other values, norms and biases too.

    All is in BF16 but for biases of routers, whose values are FP32 wherever they are published.
    """
    first = write_checkpoint(family, folder / "a", short=True, changes=_COMMON | FAMILIES[family])
    second = str(shutil.copytree(first, folder / "b"))
    for seed, path in enumerate((first, second)):
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            name: torch.randn(tensor.shape, generator=generator).to(
                torch.float32 if name.endswith("e_score_correction_bias") else tensor.dtype
            )
            for name, tensor in read_checkpoint(path).items()
        }
        save_file(tensors, Path(path) / "model.safetensors", {"format": "pt"})
    return first, second


def refit_families(rank: int, cases: Sequence[Case]) -> list[FamilyResult]:
    _accept_latent_attention()
    _accept_experts_without_gates()
    results = []
    for case in cases:
        _know_architecture(case.path_a)
        with groups_of(rank, case):
            results.append(_one_family(case))
    return results


def _accept_latent_attention() -> None:
    """The CPU platform has no kernels for it. All else of the layer is vLLM's, with what it derives from weights."""
    from vllm.model_executor.layers.attention import mla_attention

    class Kernels:
        def __init__(self, **_: Any) -> None:
            pass

    backend = SimpleNamespace(get_name=lambda: "none", get_impl_cls=lambda: Kernels)
    mla_attention.get_attn_backend = lambda *_, **__: backend
    mla_attention.get_mla_prefill_backend = lambda config: Kernels


def _accept_experts_without_gates() -> None:
    """vLLM refuses them on CPUs for want of kernels; how their weights are held and loaded is Python."""
    from vllm.model_executor.layers.fused_moe import layer

    layer.current_platform = SimpleNamespace(is_cuda_alike=lambda: True)


def _know_architecture(path: str) -> None:
    """vLLM would start a process to learn what a class can do, for ten seconds where it has never asked before."""
    from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel, _RegisteredModel

    [name] = json.loads((Path(path) / "config.json").read_text())["architectures"]
    known = ModelRegistry.models.get(name) or _LazyRegisteredModel(_INNER[name], name)
    ModelRegistry.models[name] = _RegisteredModel.from_model_cls(known.load_model_cls())


def _one_family(case: Case) -> FamilyResult:
    from rlrefit.workers.engines.vllm.destination import VllmDestination

    live, config = loaded(case)
    names = [name for name, _ in live.named_parameters()]
    as_a, as_b = _state(live), _state(loaded(case, case.path_b)[0])
    a, b = read_checkpoint(case.path_a), read_checkpoint(case.path_b)
    destination = VllmDestination(live, config, torch.device("cpu"))
    fragments, misc = destination.fragments(manifest_of(a))
    differing = {}
    for version, (occasion, tensors, expected) in enumerate([("there", b, as_b), ("back", a, as_a)]):
        _poison(live)
        refit(destination, fragments, misc, tensors, version)
        differing[occasion] = _differing(live, expected)
    _poison(live)
    # What the trainer can't place comes this way, wherever the engine would have taken it in place.
    refit(destination, [], dict.fromkeys(b, ""), b, 2)
    differing["all through the loader"] = _differing(live, as_b)
    bulk = {fragment.name for fragment in fragments}
    return FamilyResult(
        bulk=sorted(bulk),
        misc=misc,
        unused=sorted(a.keys() - bulk - misc.keys()),
        differing=differing,
        alike=[name for name in names if as_a[name].any() and torch.equal(as_a[name], as_b[name])],
    )


def _poison(live: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in live.parameters():
            parameter.fill_(torch.nan)


def _state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Bytes of parameters and buffers, and of tensors beside them, such as the absorbed projections of latent attention."""
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, module in model.named_modules():
        found |= {
            f"{name}.{key}": held for key, held in vars(module).items() if isinstance(held, torch.Tensor)
        }
    return {name: raw(tensor).clone() for name, tensor in found.items()}


def _differing(live: torch.nn.Module, expected: dict[str, torch.Tensor]) -> list[str]:
    found = _state(live)
    assert found.keys() == expected.keys()
    return [name for name, held in found.items() if not torch.equal(held, expected[name])]
