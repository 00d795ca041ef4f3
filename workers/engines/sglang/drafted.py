"""The drafter of a live SGLang worker as a destination of refits, beside the model that it drafts for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from torch import nn

from ....integration.errors import PlanError, RefitError
from ...drafter_names import of_drafter
from ..common.drafted import BesideServed, DraftedDestination, TrainedDrafter, mtp_weights, tell_of_left_out
from ..common.loader_trace.quantized import HoldsCodes
from ..common.loader_trace.trace import LoaderTrace, Manifest
from ..common.traced_destination import Traced
from .destination import SglangDestination
from .drafters import (
    may_be_trained,
    may_follow,
    require_drafter,
    settings_of,
    tell_of_stay,
    tokens_of_drafter,
)
from .layouts import SglangLayout

# For each token of an EAGLE-3 head's vocabulary how far its number is from the model's.
_MAPPING: Final = "d2t"
# Where configurations of EAGLE-3 and of EAGLE say how many logits a head gives.
_LOGITS: Final = ("draft_vocab_size", "hot_vocab_size")


class SglangDrafterDestination(BesideServed, SglangDestination):
    """What the drafter of one SGLang worker wants, as a model beside the one that it drafts for.

    Args:
        drafter: its ``ModelRunner``.
        served: the model that it drafts for, whose tensors are not the drafter's own.
        device: where the parameters live.
    """

    def __init__(self, drafter: Any, served: nn.Module, device: torch.device) -> None:
        self._served = served
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

    def _to_fill(self, traced: Traced[SglangLayout, HoldsCodes]) -> set[str]:
        return super()._to_fill(traced) - self._shared


class SglangEagleDestination(SglangDrafterDestination):
    """What an EAGLE head wants, by the names of its own checkpoint.

    SGLang has it compute with the model's embedding, and reads once, at its start, which of the model's tokens it knows. So a trainer's
    mapping has to be that one.

    Args:
        drafter: its ``ModelRunner``.
        served: the model that it drafts for, whose tensors are not the drafter's own.
        tokens: as of :func:`~.drafters.tokens_of_drafter`.
        vocabulary: how many tokens the model has.
        device: where the parameters live.

    Raises:
        PlanError: the head is quantized.
    """

    def __init__(
        self,
        drafter: Any,
        served: nn.Module,
        tokens: torch.Tensor | None,
        vocabulary: int,
        device: torch.device,
    ) -> None:
        self._vocabulary = vocabulary
        mapping = None if tokens is None else tokens.cpu() - torch.arange(len(tokens))
        # None is that of a head whose tokens are the model's first ones in the model's order: zeros.
        self._mapping = mapping if mapping is not None and mapping.any() else None
        super().__init__(drafter, served, device)
        if quantized := self._blocks():
            raise PlanError(
                f"this engine's head holds it quantized ({len(quantized)} such modules), and refits bring heads as they are trained, of which "
                "no codes are made. SGLang applies a quantization_config of json_model_override_args to the head too. Nothing was written; "
                "start SGLang from a checkpoint that is quantized itself, without that one, and from a head that is not",
                stage="trace",
                parameter=min(quantized),
            )

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super()._load(self._but_mapping(weights))

    def _but_mapping(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if _MAPPING not in name:
                yield name, tensor
            elif not self._drafts_by(tensor):
                raise RefitError(
                    "it maps the head's tokens to others of the model than this engine's worker does, which reads the mapping once, at its "
                    "start: the head would draft by one and be trained by another. The engine generates again after a refit that "
                    "succeeds; train the head with the mapping of the checkpoint at speculative_draft_model_path, or start SGLang from one "
                    "that has the trainer's (where load_format is dummy, with speculative_draft_load_format=auto)",
                    stage="misc",
                    parameter=name,
                )

    def _drafts_by(self, mapping: torch.Tensor) -> bool:
        if self._mapping is None:
            return not mapping.any()
        return torch.equal(mapping.cpu().to(self._mapping.dtype), self._mapping)

    def _trace(self, twin: nn.Module, manifest: Manifest) -> LoaderTrace:
        # SGLang's loader computes with the mapping, and no parameter has it.
        others = [spec for spec in manifest if _MAPPING not in spec[0]]
        mappings = [name for name, *_ in manifest if _MAPPING in name]
        trace = super()._trace(twin, others)
        return replace(
            trace,
            landings=trace.landings | dict.fromkeys(mappings, ()),
            touched=trace.touched | dict.fromkeys(mappings, frozenset[str]()),
            misc_reasons=trace.misc_reasons
            | dict.fromkeys(
                mappings, "SGLang reads it once, at its start, and it is compared with what was read"
            ),
        )

    def _check(self, traced: Traced[SglangLayout, HoldsCodes]) -> None:
        super()._check(traced)
        own_tokens = self._mapping is not None or self._knows_fewer_tokens
        if own_tokens and not any(_MAPPING in name for name, *_ in traced.manifest):
            raise PlanError(
                "the trainer does not send it, and this engine's head knows fewer tokens than the model, or has them in an order of its "
                "own, so that nothing tells whether the trainer's head has the same. Nothing was written; keep d2t in the head's state "
                "dict (a persistent buffer)",
                stage="trace",
                parameter=_MAPPING,
            )
        tell_of_left_out(
            self._left_out(traced.trace), "as SGLang has it whatever the drafter's checkpoint has", ""
        )

    @property
    def _knows_fewer_tokens(self) -> bool:
        """Whether the head gives fewer logits than the model has tokens. One that is tied does so, too: SGLang cuts its logits off."""
        config = self._runner.model_config.hf_config
        told = (getattr(config, key, None) for key in _LOGITS)
        return any(logits is not None and logits < self._vocabulary for logits in told)


class SglangDraftedDestination(
    DraftedDestination[SglangDestination, SglangDrafterDestination | TrainedDrafter]
):
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

    def tell() -> None:
        tell_of_stay(runner)

    served = SglangDestination(runner, device)
    drafter = require_drafter(runner)
    if drafter is None:
        return served
    if may_follow(settings_of(runner)):
        mtp_layers = SglangDrafterDestination(drafter, runner.model, device)
        return SglangDraftedDestination(
            served, mtp_layers, partial(mtp_weights, layers=runner.model_config.num_hidden_layers), tell
        )
    if may_be_trained(runner):

        def make() -> SglangEagleDestination:
            tokens, vocabulary = tokens_of_drafter(runner), runner.model_config.vocab_size
            return SglangEagleDestination(drafter, runner.model, tokens, vocabulary, device)

        return SglangDraftedDestination(served, TrainedDrafter(make), partial(filter, of_drafter), tell)
    tell()
    return served
