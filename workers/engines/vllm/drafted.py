"""The drafter of a live vLLM worker as a destination of refits, beside the model that it drafts for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from vllm.config import VllmConfig

from ....integration.errors import PlanError
from ...drafter_names import of_drafter
from ..common.drafted import (
    BesideServed,
    DraftedDestination,
    TrainedDrafter,
    mtp_weights,
    tell_of_left_out,
    tensor_at,
)
from ..common.loader_trace.quantized import HoldsCodes
from ..common.loader_trace.recording import StridedRegion
from ..common.loader_trace.trace import Zeros
from ..common.traced_destination import Routes, Traced
from .destination import VllmDestination, VllmRoutes, meta_twin
from .drafters import drafts_at_random, layers_of, may_follow, taken_in_parts, tell_of_stay
from .layouts import VllmLayout

# For each token of an EAGLE-3 head's vocabulary how far its number is from the model's; checkpoints call it d2t.
_MAPPING: Final = "draft_id_to_target_id"


class DrafterDestination(BesideServed, VllmDestination):
    """What the drafter of one vLLM worker wants, as a model beside the one that it drafts for.

    Args:
        drafter: the live model.
        served: the one that it drafts for, whose tensors are not the drafter's own.
        vllm_config: the worker's configuration.
        device: where the parameters live.
    """

    def __init__(
        self, drafter: nn.Module, served: nn.Module, vllm_config: VllmConfig, device: torch.device
    ) -> None:
        self._served = served
        super().__init__(drafter, _drafting(vllm_config), device)

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with taken_in_parts(self._model):
            super()._load(weights)

    @contextmanager
    def _twin(self) -> Iterator[nn.Module]:
        config = self._vllm_config
        drafts: Any = config.speculative_config
        with (
            meta_twin(self._model, config, drafts.draft_model_config, self._is_own) as twin,
            taken_in_parts(twin),
        ):
            yield twin


class EagleDestination(DrafterDestination):
    """What an EAGLE drafter wants, by the names of its own checkpoint.

    vLLM has it share the model's embedding and head where its first checkpoint has none, or the same.
    """

    def _held_by_others(self, twin: nn.Module) -> frozenset[str]:
        # Also what a module of the model's has under no name of the twin's: a quantized head, say.
        theirs = {id(module) for module in self._served.modules()}
        at = tuple(f"{path}." for path, module in self._model.named_modules() if id(module) in theirs)
        names = (name for name, _ in (*twin.named_parameters(), *twin.named_buffers()))
        self._shared = super()._held_by_others(twin) | {name for name in names if name.startswith(at)}
        return self._shared

    def _needless(self) -> frozenset[str]:
        """The mapping of a head that has all tokens: vLLM makes zeros where a checkpoint has none."""
        mapping = tensor_at(self._model, _MAPPING)
        tokens = self._vllm_config.model_config.get_vocab_size()
        return frozenset({_MAPPING} if mapping is not None and len(mapping) == tokens else ())

    def _routed(self, traced: Traced[VllmLayout, HoldsCodes], shared: Routes) -> VllmRoutes:
        absent = self._needless().difference(*traced.trace.touched.values())
        # They may be gone: a deep sleep discards parameters.
        made = [Zeros(name, StridedRegion(0, tuple(self._parameters[name].shape), (1,))) for name in absent]
        return super()._routed(traced, replace(shared, zeros=(*shared.zeros, *made)))

    def _check(self, traced: Traced[VllmLayout, HoldsCodes]) -> None:
        super()._check(traced)
        left = self._left_out(traced.trace)
        if left and drafts_at_random(self._vllm_config):
            raise PlanError(
                f"the trainer sends it ({len(left)} such weights), and this engine's drafter computes with the model's own, since it was started with "
                "load_format=dummy. Nothing was written. Start vLLM from a checkpoint of the drafter, by a draft_load_config with "
                "load_format auto in speculative_config",
                stage="trace",
                parameter=left[0],
            )
        tell_of_left_out(
            left,
            "since its first checkpoint had none or the same",
            "; start vLLM from a checkpoint of the drafter that has its own",
        )


def drafted_destination(
    served: VllmDestination, find: Callable[[], nn.Module], model: nn.Module, vllm_config: VllmConfig
) -> DraftedDestination[VllmDestination, DrafterDestination | TrainedDrafter]:
    """A served model and its drafter, of one vLLM worker.

    Args:
        served: of the model that verifies drafts.
        find: the live drafter: MTP layers of the served checkpoint, or one that trainers train beside the policy, which is looked for
            once a trainer sends it.
        model: the live one that verifies drafts.
        vllm_config: the worker's configuration.

    Raises:
        RefitError: by ``find``.
    """

    def tell() -> None:
        tell_of_stay(vllm_config)

    if may_follow(vllm_config):
        mtp_layers = DrafterDestination(find(), model, vllm_config, served.device)
        return DraftedDestination(
            served, mtp_layers, partial(mtp_weights, layers=layers_of(vllm_config)), tell
        )

    def make() -> EagleDestination:
        return EagleDestination(find(), model, vllm_config, served.device)

    return DraftedDestination(served, TrainedDrafter(make), partial(filter, of_drafter), tell)


def _drafting(vllm_config: VllmConfig) -> VllmConfig:
    """The worker's configuration with the kernels that drafts have of their own, as vLLM builds the drafter with."""
    drafts: Any = vllm_config.speculative_config
    found = copy.copy(vllm_config)
    found.attention_config = replace(vllm_config.attention_config, backend=drafts.attention_backend)
    if drafts.moe_backend is not None:
        found.kernel_config = replace(vllm_config.kernel_config, moe_backend=drafts.moe_backend)
    return found
