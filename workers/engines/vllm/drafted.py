"""A live vLLM model with the MTP layers that draft for it, as one destination of a refit.

vLLM keeps MTP layers in a model of their own, with a loader of its own, which takes other names of the checkpoint and shares the
embedding and the head with the model that it serves. So each of the two is traced by itself, and what is shared belongs to
the served one.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig

from ....integration.layout import Fragment
from ....integration.quantize.formats import Format
from ....integration.weights.manifest import TensorSpec
from ..common.loader_trace.trace import Manifest
from ..common.traced_destination import Routes
from .destination import VllmDestination, meta_twin
from .drafters import mtp_weights, taken_in_parts, tell_of_stay


class DrafterDestination(VllmDestination):
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

    def wants(self, name: str) -> bool:
        """Whether a weight goes into the drafter's own parameters.

        Its loader must not see others: it would write what is shared, or does not find it under the name that it had.
        """
        routes = self._agreed()
        return name in routes.landings or name in routes.reasons

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

    def _follow_parameters(self) -> None:
        held = (*self._served.parameters(), *self._served.buffers())
        self._served_storages = {tensor.untyped_storage()._cdata for tensor in held}
        super()._follow_parameters()

    def _is_own(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata not in self._served_storages

    def _held_by_others(self, twin: nn.Module) -> frozenset[str]:
        names = [name for name, _ in (*twin.named_parameters(), *twin.named_buffers())]
        live = {name: _at(self._model, name) for name in names}
        return frozenset(
            name for name, tensor in live.items() if tensor is not None and not self._is_own(tensor)
        )


class DraftedDestination:
    """A served model and its drafter, of one vLLM worker.

    A manifest without weights of MTP layers leaves the drafter as it is, which is told once. What both hold a copy of is received
    once.

    Args:
        served: of the model that verifies drafts.
        drafter: of its MTP layers.
        vllm_config: the worker's configuration.
    """

    def __init__(self, served: VllmDestination, drafter: DrafterDestination, vllm_config: VllmConfig) -> None:
        self._served = served
        self._drafter = drafter
        self._vllm_config = vllm_config
        self._follows = False
        self._told = False
        # The drafter's copies of what the served model receives.
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def version(self) -> int:
        """As :attr:`VllmDestination.version`."""
        return self._served.version

    @property
    def device(self) -> torch.device:
        """Where the live parameters are."""
        return self._served.device

    @property
    def gives_memory_back(self) -> bool:
        """As :attr:`VllmDestination.gives_memory_back`; vLLM has both models in one pool."""
        return self._served.gives_memory_back

    @property
    def kept_bytes(self) -> int:
        """Bytes of the live parameters of both; of the served model alone where the drafter stays as it is."""
        return self._served.kept_bytes + (self._drafter.kept_bytes if self._follows else 0)

    def storage_key(self) -> Hashable:
        """As :meth:`VllmDestination.storage_key`, of both."""
        return self._served.storage_key(), self._drafter.storage_key()

    def new_epoch(self) -> None:
        """As :meth:`VllmDestination.new_epoch`, of both."""
        self._served.new_epoch()
        self._drafter.new_epoch()

    def quantized(self, specs: Sequence[TensorSpec]) -> dict[str, Format]:
        """As :meth:`VllmDestination.quantized`, of both.

        Raises:
            RefitMismatch, PlanError: as there.
        """
        found = self._served.quantized(specs)
        if self._trains_drafter(specs, found):
            found |= self._drafter.quantized(specs)
        return found

    def fragments(self, specs: Manifest) -> tuple[list[Fragment], dict[str, str]]:
        """As :meth:`VllmDestination.fragments`, of both.

        Raises:
            RefitMismatch, PlanError: as there.
        """
        found, reasons = self._served.fragments(specs)
        self._copies = []
        self._follows = self._trains_drafter(specs, {*(f.name for f in found), *reasons})
        if not self._follows:
            self._tell()
            return found, reasons
        drafted, of_drafter = self._drafter.fragments(specs)
        reasons = of_drafter | reasons
        held: dict[str, dict[Any, torch.Tensor]] = {}
        for fragment in found:
            held.setdefault(fragment.name, {})[_part(fragment)] = fragment.view
        for fragment in drafted:
            parts = held.get(fragment.name)
            if parts is None:
                found.append(fragment)
            elif _part(fragment) in parts:
                self._copies.append((fragment.view, parts[_part(fragment)]))
            else:
                reasons.setdefault(
                    fragment.name, "the drafter holds another part of it than the model that it drafts for"
                )
        return [fragment for fragment in found if fragment.name not in reasons], reasons

    def routes(self, specs: Manifest) -> Routes:
        """As :meth:`VllmDestination.routes`: the drafter's parameters follow the served model's."""
        served = self._served.routes(specs)
        if not self._trains_drafter(specs, served.landings.keys() | served.reasons.keys()):
            return served
        drafter = self._drafter.routes(specs)
        reasons = drafter.reasons | served.reasons
        names = dict.fromkeys((*served.landings, *drafter.landings))
        return replace(
            served,
            landings={
                name: served.landings.get(name, ()) + drafter.landings.get(name, ())
                for name in names
                if name not in reasons
            },
            reasons=reasons,
        )

    def rewritten(self, specs: Sequence[TensorSpec]) -> dict[str, str]:
        """As :meth:`VllmDestination.rewritten`, of both."""
        return self._served.rewritten(specs) | (self._drafter.rewritten(specs) if self._follows else {})

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As :meth:`VllmDestination.load_weights`, of both.

        Raises:
            RefitError: as there.
        """
        self._served.load_weights(self._for_both(weights) if self._follows else weights)

    def _for_both(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        # One at a time: memory that is reused for the next one may hold it.
        for name, tensor in weights:
            if self._drafter.wants(name):
                self._drafter.load_weights([(name, tensor)])
            yield name, tensor

    def finish(self, version: int) -> None:
        """As :meth:`VllmDestination.finish`, of both.

        Raises:
            RefitError: as there.
        """
        if self._follows:
            # Before the served model's are put in a kernel's order.
            with torch.no_grad():
                for copy_of, view in self._copies:
                    copy_of.copy_(view)
        self._served.finish(version)
        if self._follows:
            self._drafter.finish(version)

    def abandon(self) -> None:
        """As :meth:`VllmDestination.abandon`, of both."""
        self._served.abandon()
        self._drafter.abandon()

    def _trains_drafter(self, specs: Manifest, served: Collection[str]) -> bool:
        """Whether a manifest has weights of MTP layers, which the served model does not take itself."""
        aside = (name for name, *_ in specs if name not in served)
        return next(mtp_weights(aside, self._vllm_config), None) is not None

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            tell_of_stay(self._vllm_config)


def _part(fragment: Fragment) -> tuple[Any, ...]:
    return fragment.box, fragment.axes


def _at(model: nn.Module, path: str) -> torch.Tensor | None:
    """The tensor of that name, also of a module that the model shares and has under several names; None if there is none."""
    found = functools.reduce(lambda holder, part: getattr(holder, part, None), path.split("."), model)
    return found if isinstance(found, torch.Tensor) else None


def _drafting(vllm_config: VllmConfig) -> VllmConfig:
    """The worker's configuration with the kernels that drafts have of their own, as vLLM builds the drafter with."""
    drafts: Any = vllm_config.speculative_config
    found = copy.copy(vllm_config)
    found.attention_config = replace(vllm_config.attention_config, backend=drafts.attention_backend)
    if drafts.moe_backend is not None:
        found.kernel_config = replace(vllm_config.kernel_config, moe_backend=drafts.moe_backend)
    return found
