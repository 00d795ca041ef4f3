"""LoRA layers that peft put into a model: which of its tensors are base weights, and which are their adapters' factors.

A layer under LoRA holds the base weight as ``….base_layer.weight`` and each adapter's factors as
``….lora_A.NAME.weight`` and ``….lora_B.NAME.weight`` (``….lora_embedding_A.NAME`` of an embedding). A module of
``modules_to_save`` stands twice, as ``original_module`` and as the copy that is trained.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ....integration.errors import RefitError
from .checkpoint import unwrapped_modules

_FACTOR_HOLDERS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


@dataclass(frozen=True)
class Factors:
    """One adapter's two factors of one weight, by their names in the base model's state dict.

    Attributes:
        a: ``[r, in]`` (of an embedding ``[r, vocabulary]``).
        b: ``[out, r]`` (of an embedding ``[dimension, r]``).
    """

    a: str
    b: str


@dataclass(frozen=True)
class LoraTarget:
    """A base weight that adapters change.

    Attributes:
        name: of the weight, as the model without adapters has it.
        path: of the layer in the base model.
        layer: peft's layer.
        factors: by the adapter's name.
        transposed: whether the weight is stored ``[in, out]``.
        rounded: whether peft rounds the delta to the weight's dtype before it adds it.
    """

    name: str
    path: str
    layer: Any
    factors: Mapping[str, Factors]
    transposed: bool
    rounded: bool

    def applied(self) -> list[str]:
        """The adapters that the forward pass adds at the moment, in peft's order, less those that are merged in.

        Raises:
            RefitError: merged and disabled: what the layer computes is not what it holds.
        """
        if self.layer.disable_adapters:
            if self.layer.merged_adapters:
                raise RefitError(
                    f"the adapters {', '.join(self.layer.merged_adapters)} of {self.path} are merged into the weight and "
                    "disabled at once, so that the weight is not what the layer computes with. Nothing was sent. Call "
                    "unmerge_adapter(), or enable the adapters, before the refit",
                    stage="export",
                    parameter=self.name,
                )
            return []
        added = self.layer._get_available_adapters() - self.factors.keys()
        if added:
            raise RefitError(
                f"{self.path} has an adapter {min(added)!r} that it had not when the refit was prepared; the engine would "
                "not get it. Nothing was sent. Prepare the refit again, with a new source",
                stage="export",
                parameter=self.name,
            )
        merged = self.layer.merged_adapters
        return [a for a in self.layer.active_adapters if a in self.factors and a not in merged]


def base_model(model: torch.nn.Module) -> torch.nn.Module:
    """The model that was compiled, and that adapters were put into: ``model`` itself, unless torch or peft is around it."""
    model = getattr(model, "_orig_mod", model)  # under torch.compile
    peft = sys.modules.get("peft")  # nothing is peft's before it was imported
    return model.get_base_model() if peft is not None and isinstance(model, peft.PeftModel) else model


def adapter_layers(model: torch.nn.Module) -> list[Any]:
    """The layers that peft put into the base model ``model``."""
    peft = sys.modules.get("peft.tuners.tuners_utils")
    return [] if peft is None else [each for each in model.modules() if isinstance(each, peft.BaseTunerLayer)]


def has_adapters(model: torch.nn.Module) -> bool:
    """Whether there are any."""
    return bool(adapter_layers(model))


class Adapters:
    """The LoRA layers of a base model.

    Args:
        model: as :func:`base_model` gives it.

    Attributes:
        targets: by the name of the weight.
        copies: by the path of each module of ``modules_to_save`` the adapter whose copy it computes with; None if it
            computes with the original.

    Raises:
        RefitError: layers whose merged weights are not known here; lists all reasons.
    """

    def __init__(self, model: torch.nn.Module):
        self._wrappers: dict[str, Any] = {}  # of modules_to_save, by their paths
        self.copies: dict[str, str | None] = {}
        self.targets: dict[str, LoraTarget] = {}
        problems: dict[str, None] = {}
        for path, module in unwrapped_modules(model):
            for problem in self._take(path, module):
                problems[problem] = None
        problems |= dict.fromkeys(self._shared(model))
        if getattr(model, "_tp_size", None) and model._tp_size > 1:
            problems[
                "transformers' own tensor parallelism says nothing of its factors' parts; use DTensors"
            ] = None
        if problems:
            raise RefitError(
                f"the adapters of {type(model).__name__} can't be refitted; the engine would compute something else than "
                "the trainer. Nothing was sent. Train plain LoRA on linear layers and embeddings:\n  "
                + "\n  ".join(problems),
                stage="prepare",
            )

    def base_name(self, name: str) -> str | None:
        """The name that a tensor of the base model's state dict has without adapters; None if it is not part of it."""
        if self.factor_name(name) is not None:
            return None
        for path, active in self.copies.items():
            if not name.startswith(f"{path}."):
                continue
            rest = name.removeprefix(f"{path}.")
            kept = "original_module." if active is None else f"modules_to_save.{active}."
            return f"{path}.{rest.removeprefix(kept)}" if rest.startswith(kept) else None
        return name.replace(".base_layer.", ".")

    def factor_name(self, name: str) -> str | None:
        """``name`` if it is a factor's in the base model's state dict; else None."""
        return name if any(f".{holder}." in name for holder in _FACTOR_HOLDERS) else None

    def require_same_modules(self) -> None:
        """Check that the trained copies are those that were found.

        Raises:
            RefitError: another adapter was activated, or all were disabled, and with it another copy.
        """
        for path, active in self.copies.items():
            now = _active_copy(self._wrappers[path])
            if now != active:
                raise RefitError(
                    f"{path} is computed by {now or 'its original module'!r} now and was by {active or 'that'!r} when the "
                    "refit was prepared; the engine would get the other's weights. Nothing was sent. Prepare the refit "
                    "again, with a new source, or activate the same adapter",
                    stage="export",
                    parameter=path,
                )

    def _take(self, path: str, module: Any) -> list[str]:
        from peft.tuners.lora import layer as lora
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

        if isinstance(module, ModulesToSaveWrapper):
            self._wrappers[path], self.copies[path] = module, _active_copy(module)
            return []
        if isinstance(module, AuxiliaryTrainingWrapper):
            return [f"{type(module).__name__} (trainable_token_indices) has no rule for its merged rows"]
        if not isinstance(module, BaseTunerLayer):
            return []
        kind = type(module)
        if kind is lora.Linear:
            transposed, holders, suffix = module.fan_in_fan_out, ("lora_A", "lora_B"), ".weight"
        elif kind is lora.Embedding:
            transposed, holders, suffix = True, ("lora_embedding_A", "lora_embedding_B"), ""
        else:
            what = "target_parameters" if kind is lora.ParamWrapper else kind.__module__
            return [f"{kind.__name__} ({what}) has no rule for its merged weight"]
        problems = [
            f"adapter {name!r} is no plain LoRA ({type(variant).__name__})"
            for name, variant in module.lora_variant.items()
        ]
        problems += [
            f"adapter {name!r} was made with lora_bias=True" for name, on in module.lora_bias.items() if on
        ]
        if isinstance(module.base_layer, BaseTunerLayer):
            problems.append("a layer is under two adapters of different kinds")
        a, b = holders
        names = getattr(module, b).keys()
        factors = {n: Factors(f"{path}.{a}.{n}{suffix}", f"{path}.{b}.{n}{suffix}") for n in names}
        name, rounded = f"{path}.weight", kind is lora.Embedding
        self.targets[name] = LoraTarget(name, path, module, factors, transposed, rounded)
        return problems

    def _shared(self, model: torch.nn.Module) -> list[str]:
        """Weights under adapters, or trained as a copy, that another module computes with as well."""
        names_of: dict[int, list[str]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            names_of.setdefault(id(tensor), []).append(name)
        return [
            f"{name} is tied to {', '.join(other for other in names if other != name)}, which computes without its "
            "adapter; set tie_word_embeddings to false, or leave it out of target_modules and modules_to_save"
            for names in names_of.values()
            for name in names
            if len(names) > 1 and (".base_layer." in name or ".original_module." in name)
        ]


def _active_copy(wrapper: Any) -> str | None:
    """The trained copy that a module of ``modules_to_save`` computes with; None if it is the original."""
    if wrapper.disable_adapters or not wrapper.active_adapters:
        return None
    active: str = wrapper.active_adapters[0]
    return active
