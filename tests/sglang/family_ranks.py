"""SGLang's models of every family on one or two ranks without an engine, refitted; SGLang does all the loading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch

from tests.fp8_refits import State, bytes_of, differing, poison, refusal
from tests.gpu.vllm_checkpoints import read_checkpoint

from .models import begin, load_model, turn_to

if TYPE_CHECKING:
    from rlrefit.integration.weights.manifest import TensorSpec
    from rlrefit.workers.engines.sglang.destination import SglangDestination

CPU = torch.device("cpu")


@dataclass(frozen=True)
class FamilyResult:
    """What one rank saw of one family.

    Attributes:
        refused: with which words the model is refused; empty if it is not.
        bulk: names of what goes in place.
        misc: names of what goes through SGLang's loader, with the reasons.
        unused: names of what SGLang takes not at all.
        differing: what is not as in a model that SGLang itself loaded; by occasion.
        alike: parameters that both checkpoints fill with the same, so that no refit of them was seen. Those of zeros are left
            out.
        moved: parameters that don't lie where they did before all refits.
        refusals: of what was tried with the model, by occasion.
    """

    refused: str = ""
    bulk: list[str] = field(default_factory=list)
    misc: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    differing: dict[str, list[str]] = field(default_factory=dict)
    alike: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)


def refit_families(
    rank: int, ranks: int, pairs: Sequence[tuple[str, str]], attention: Sequence[str]
) -> list[FamilyResult]:
    """For each pair of checkpoints load the first, refit to the second and back, and once more all through the loader.

    Args:
        rank: of the engine.
        ranks: of the engine.
        pairs: of one family each.
        attention: backend that SGLang has for it.
    """
    begin(rank, pairs[0][0], ranks)
    results = []
    for pair, backend in zip(pairs, attention, strict=True):
        turn_to(pair[0], backend)
        results.append(_one(*pair))
    return results


def _one(path_a: str, path_b: str) -> FamilyResult:
    from sglang.srt.layers.layernorm import RMSNorm

    from rlrefit.integration.errors import RefitError
    from rlrefit.integration.weights.manifest import TensorSpec
    from rlrefit.workers.engines.sglang.destination import SglangDestination

    live = load_model(path_a)
    a, b = read_checkpoint(path_a), read_checkpoint(path_b)
    as_a, as_b = (state_of(_as_computing(model)) for model in (live.model, load_model(path_b).model))
    names = [name for name, _ in live.model.named_parameters()]
    places = {name: parameter.data_ptr() for name, parameter in live.model.named_parameters()}
    # A norm as Llama 4's of queries and keys, of which no checkpoint has anything.
    live.model.weightless = ones = RMSNorm(4, has_weight=False)
    as_a["weightless.weight"] = as_b["weightless.weight"] = bytes_of({"": ones.weight})[""]
    destination = SglangDestination(live, CPU)
    specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in a.items()]
    try:
        fragments, misc = destination.fragments(specs)
    except RefitError as error:
        return FamilyResult(str(error))
    wrong = {}
    for occasion, tensors, expected in (("there", b, as_b), ("back", a, as_a)):
        poison((*live.model.parameters(), ones.weight))
        for fragment in fragments:
            fragment.view.copy_(tensors[fragment.name][tuple(slice(*side) for side in fragment.box)])
        load_by_sglang(destination, tensors, list(misc))
        wrong[occasion] = differing(state_of(live.model), expected)
    # What a trainer can't place comes this way, wherever SGLang would have taken it in place.
    poison(live.model.parameters())
    # A drafter that is trained beside the model comes with it, and has names that no loader of SGLang's knows.
    sent = b | {"drafter.midlayer.self_attn.q_proj.weight": torch.zeros(4, 4)}
    load_by_sglang(destination, sent, list(sent))
    wrong["all through the loader"] = differing(state_of(live.model), as_b)
    # As buckets are loaded, in which SGLang writes all that it can without being asked.
    poison(live.model.parameters())
    bucketed = SglangDestination(live, CPU)
    placing = bucketed.agree(specs).placed
    with torch.no_grad():
        (bucketed.load_weights if placing else live.model.load_weights)(iter(a.items()))
    bucketed.finish(0)
    wrong["in buckets"] = differing(state_of(live.model), as_a)
    bulk = list(dict.fromkeys(fragment.name for fragment in fragments))
    return FamilyResult(
        bulk=bulk,
        misc=misc,
        unused=sorted(a.keys() - misc.keys() - set(bulk)),
        differing=wrong,
        alike=[name for name in names if as_a[name].any() and torch.equal(as_a[name], as_b[name])],
        moved=[name for name, p in live.model.named_parameters() if places[name] != p.data_ptr()],
        refusals=_refusals(destination, live.model, specs),
    )


def _as_computing(model: torch.nn.Module) -> torch.nn.Module:
    """A model with what Gemma 4's routers make of their weights in the first forward pass, and keep."""
    for module in model.modules():
        if hasattr(module, "fuse_scale"):
            module.fuse_scale()
    return model


def _refusals(
    destination: SglangDestination, model: torch.nn.Module, specs: list[TensorSpec]
) -> dict[str, str]:
    found = {}
    some = next(module for name, module in model.named_modules() if name.endswith("layers.1"))
    # They come with the first step, and the ranks may have met before it.
    for attribute in ("_derived_weight_cache_error", "w_kc_qrep", "_qk_gamma_bf16"):
        vars(some)[attribute] = "as SGLang says"
        found[attribute] = refusal(destination.loads_alone, specs)
        found[f"{attribute}, later"] = refusal(lambda _: destination.storage_key(), specs)
        del vars(some)[attribute]
    wide = [s._replace(dtype=torch.float32) if s.name.endswith(".q_a_proj.weight") else s for s in specs]
    found["FP32"] = refusal(destination.routes, wide)
    norm = next(
        module
        for name, module in model.named_modules()
        if "layers.1." in name and name.endswith("norm") and "weight" in module._parameters
    )
    vars(norm)["copied"] = norm.weight.detach() + 1
    reasons = destination.routes(list(reversed(specs))).reasons
    found["a copy in a norm"] = " ".join(why for why in reasons.values() if "copied" in why)
    del vars(norm)["copied"]
    with patch.object(
        destination._runner, "load_config", SimpleNamespace(**vars(destination._runner.load_config))
    ) as made:
        made.load_format = "dummy"
        found["random buffers"] = refusal(destination.routes, [*specs[4:], *specs[:4]])
    with patch("rlrefit.workers.engines.sglang.destination.LARGEST_SHARE", 0):
        reasons = destination.routes([*specs[5:], *specs[:5]]).reasons
    found["no room to cast in"] = " ".join(name for name, why in reasons.items() if "is torch.float32" in why)
    return found


def load_by_sglang(destination: SglangDestination, tensors: State, names: Sequence[str]) -> None:
    """The misc path, and the end of a refit; through one staging buffer that is reused, as a broadcast would."""
    for start in range(0, len(names), 3):
        staged = [(name, tensors[name].clone()) for name in names[start : start + 3]]
        destination.load_weights(iter(staged))
        poison(tensor for _, tensor in staged)
    destination.finish(0)


def state_of(model: torch.nn.Module) -> State:
    """Bytes of parameters and buffers, and of tensors beside them, such as the absorbed projections of latent attention."""
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, module in model.named_modules():
        found |= {
            f"{name}.{key}": held for key, held in vars(module).items() if isinstance(held, torch.Tensor)
        }
    return bytes_of(found)
