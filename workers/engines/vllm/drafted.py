"""The MTP layers of a live vLLM worker as a destination of refits, beside the model that they draft for."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig

from ..common.drafted import BesideServed, DraftedDestination
from .destination import VllmDestination, meta_twin
from .drafters import layers_of, taken_in_parts, tell_of_stay


class DrafterDestination(BesideServed, VllmDestination):
    """What the MTP layers of one vLLM worker want, as a model beside the one that they draft for.

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

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As :meth:`VllmDestination.load_weights`, of weights that it :meth:`wants`."""
        with taken_in_parts(self._model):
            super().load_weights(weights)

    @contextmanager
    def _twin(self) -> Iterator[nn.Module]:
        config = self._vllm_config
        drafts: Any = config.speculative_config
        with (
            meta_twin(self._model, config, drafts.draft_model_config, self._is_own) as twin,
            taken_in_parts(twin),
        ):
            yield twin


def drafted_destination(
    served: VllmDestination, drafter: DrafterDestination, vllm_config: VllmConfig
) -> DraftedDestination[VllmDestination, DrafterDestination]:
    """A served model and its drafter, of one vLLM worker.

    Args:
        served: of the model that verifies drafts.
        drafter: of its MTP layers.
        vllm_config: the worker's configuration.
    """
    return DraftedDestination(served, drafter, layers_of(vllm_config), lambda: tell_of_stay(vllm_config))


def _drafting(vllm_config: VllmConfig) -> VllmConfig:
    """The worker's configuration with the kernels that drafts have of their own, as vLLM builds the drafter with."""
    drafts: Any = vllm_config.speculative_config
    found = copy.copy(vllm_config)
    found.attention_config = replace(vllm_config.attention_config, backend=drafts.attention_backend)
    if drafts.moe_backend is not None:
        found.kernel_config = replace(vllm_config.kernel_config, moe_backend=drafts.moe_backend)
    return found
