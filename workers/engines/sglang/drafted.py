"""The MTP layers of a live SGLang worker as a destination of refits, beside the model that they draft for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from torch import nn

from ..common.drafted import BesideServed, DraftedDestination, mtp_weights
from ..common.loader_trace.quantized import HoldsCodes
from ..common.loader_trace.trace import Manifest
from ..common.traced_destination import Traced
from .destination import SglangDestination
from .drafters import may_follow, require_drafter, settings_of, tell_of_stay
from .layouts import SglangLayout


class SglangDrafterDestination(BesideServed, SglangDestination):
    """What the MTP layers of one SGLang worker want, as a model beside the one that they draft for.

    Args:
        drafter: its ``ModelRunner``.
        served: the model that it drafts for, whose tensors are not the drafter's own.
        device: where the parameters live.
    """

    def __init__(self, drafter: Any, served: nn.Module, device: torch.device) -> None:
        self._served = served
        self._shared: frozenset[str] = frozenset()
        super().__init__(drafter, device)

    @contextmanager
    def _twin(self) -> Iterator[nn.Module]:
        # As SGLang builds it: drafts may have kernels of their own for experts.
        with (
            speculative_moe_backend_context(),
            speculative_moe_a2a_backend_context(),
            super()._twin() as twin,
        ):
            yield twin

    def _held_by_others(self, twin: nn.Module) -> frozenset[str]:
        self._shared = super()._held_by_others(twin)
        return self._shared

    def _to_fill(self, traced: Traced[SglangLayout, HoldsCodes]) -> set[str]:
        return super()._to_fill(traced) - self._shared


class SglangDraftedDestination(DraftedDestination[SglangDestination, SglangDrafterDestination]):
    """A served model and its drafter, of one SGLang worker."""

    def loads_alone(self, specs: Manifest) -> bool:
        """As :meth:`SglangDestination.loads_alone`: what SGLang's updates load reaches the served model alone.

        Raises:
            RefitMismatch, PlanError: as :meth:`fragments`.
        """
        routes = self._served.agree(specs)
        self._follows = self._trains_drafter(specs, routes.landings.keys() | routes.reasons.keys())
        if self._follows:
            self._drafter.agree(specs)
            return False
        self._tell()
        return not routes.placed


def destination_of(runner: Any, device: torch.device) -> SglangDestination | SglangDraftedDestination:
    """The live model of a worker as the destination of refits, with a drafter that refits may reach.

    Args:
        runner: the worker's ``ModelRunner``.
        device: where the parameters live.

    Raises:
        RefitError: its drafter can't be found.
    """
    served = SglangDestination(runner, device)
    drafter = require_drafter(runner)
    if drafter is None:
        return served
    if not may_follow(settings_of(runner)):
        tell_of_stay(runner)
        return served
    return SglangDraftedDestination(
        served,
        SglangDrafterDestination(drafter, runner.model, device),
        partial(mtp_weights, layers=runner.model_config.num_hidden_layers),
        lambda: tell_of_stay(runner),
    )
