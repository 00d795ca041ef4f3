"""A live model with the one that drafts for it, as one destination of a refit: what vLLM and SGLang share.

Both engines keep a drafter in a model of its own, with a loader of its own, and share the embedding and the head with the model
that is served. So each of the two is traced by itself, and what is shared belongs to the served one. The loader of MTP layers takes
other names of the served checkpoint. A drafter of a checkpoint of its own has names that the served model has too, so they
travel with a prefix.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from ....integration.errors import PlanError, RefitError
from ....integration.layout import Fragment
from ....integration.quantize.formats import Format
from ....integration.weights.endpoints import working_on_portions
from ....integration.weights.manifest import TensorSpec
from ...drafter_names import DRAFTER, of_drafter, prefixed, prefixed_fragments
from .loader_trace.trace import LoaderTrace, Manifest
from .traced_destination import Routes, TracedDestination

logger = logging.getLogger(__name__)

STAYS: Final = "refits don't reach the drafter, which would go on with the weights of its start"
# MTP layers have a module of their own (Qwen3-Next, MiMo, LongCat, ERNIE), or follow the last layer (DeepSeek, GLM).
_MTP_MODULE: Final = re.compile(r"(?:^|\.)mtp(?:_\w+)?\.")
_LAYER: Final = re.compile(r"^(?:language_model\.)?model\.(?:language_model\.)?layers\.(\d+)\.")
# Of what the model has itself. Megatron-Bridge exports GLM-4.7-Flash's for a trainer without MTP layers, too.
_COPIES: Final = ("embed_tokens.weight", "shared_head.head.weight")


def mtp_weights(names: Iterable[str], layers: int) -> Iterator[str]:
    """Those of ``names`` that are MTP layers' own weights, by the names that checkpoints give them.

    Args:
        names: of a checkpoint.
        layers: of its model, without MTP layers.
    """
    for name in names:
        layer = _LAYER.match(name)
        if name.endswith(_COPIES):
            continue
        if _MTP_MODULE.search(name) or (layer and int(layer[1]) >= layers):
            yield name


def require_none_trained(trace: LoaderTrace, layers: int, method: str, drafter: str, remedy: str) -> None:
    """Refuse MTP layers of another checkpoint as the drafter of a policy that trains its own.

    Args:
        trace: of the whole manifest through the loader of the model that verifies drafts.
        layers: of that model, without MTP layers.
        method: of speculative decoding, as the engine calls it.
        drafter: the other checkpoint.
        remedy: what to change in the engine's settings.

    Raises:
        PlanError: names the first weight of the manifest that was meant for the drafter.
    """
    # Tensors of other ranks are left aside too, so that the name has to tell.
    aside = (n for n, touched in trace.touched.items() if not touched and n not in trace.unknown)
    trained = sorted(mtp_weights(aside, layers))
    if trained:
        raise PlanError(
            f"the engine decodes speculatively ({method}) with MTP layers of another checkpoint ({drafter}), and the policy trains MTP "
            f"layers: the manifest has {len(trained)} of their weights, and {STAYS}, however far the policy is trained. {remedy}, or "
            "train without MTP layers",
            stage="trace",
            parameter=trained[0],
        )


def words_of_stay(method: str, drafter: str, asleep: str) -> str:
    """That no refit reaches the drafter, and what becomes of it; ``asleep``: in a sleep, and what else to change."""
    return (
        f"the engine decodes speculatively ({method}) with {drafter}; {STAYS}. Texts stay those of the refitted model, which verifies "
        f"each draft; the further it is trained, the fewer tokens are accepted. {asleep}"
    )


def tell_of_left_out(left: Sequence[str], why: str, remedy: str) -> None:
    """Log a warning that a trained drafter's weights come for nothing, since the drafter shares the served model's.

    Args:
        left: their names in the drafter's checkpoint; nothing is told of none.
        why: the drafter shares them.
        remedy: what to change, with what parts it from the sentence before; empty if nothing can be.
    """
    if not left:
        return
    logger.warning(
        "%s of the drafter that the trainer sends left out: this engine's drafter computes with the model's own, %s. If the trainer "
        "trains them apart from the policy's, fewer tokens are accepted%s",
        f"{', '.join(DRAFTER + name for name in left)} {'is' if len(left) == 1 else 'are'}",
        why,
        remedy,
    )


class BesideServed(TracedDestination[Any, Any, Any]):
    """A destination of a drafter, in which tensors of the model that it drafts for are not its own.

    A class that inherits it sets ``_served``, the model that it drafts for, before it calls this one's ``__init__``.
    """

    _served: nn.Module
    # Names of its parameters and buffers that are the served model's.
    _shared: frozenset[str] = frozenset()

    def wants(self, name: str) -> bool:
        """Whether a weight goes into the drafter's own parameters.

        Its loader must not see others: it would write what is shared, or does not find it under the name that it had.
        """
        routes = self._agreed()
        return name in routes.landings or name in routes.reasons

    def _follow_parameters(self) -> None:
        held = (*self._served.parameters(), *self._served.buffers())
        self._served_storages = {tensor.untyped_storage()._cdata for tensor in held}
        super()._follow_parameters()

    def _is_own(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata not in self._served_storages

    def _held_by_others(self, twin: nn.Module) -> frozenset[str]:
        names = [name for name, _ in (*twin.named_parameters(), *twin.named_buffers())]
        live = {name: tensor_at(self._model, name) for name in names}
        self._shared = frozenset(
            name for name, tensor in live.items() if tensor is not None and not self._is_own(tensor)
        )
        return self._shared

    def _left_out(self, trace: LoaderTrace) -> list[str]:
        """Tensors that go nowhere, since the drafter shares the parameter with the served model."""
        return [
            name
            for name, at in trace.touched.items()
            if not at and any(parameter.endswith(name) for parameter in self._shared)
        ]


class TrainedDrafter:
    """The destination of a drafter of a checkpoint of its own, whose weights have a prefix in the refit.

    Args:
        make: what knows them by the names of that checkpoint. It is called with the first manifest that has such weights: an engine
            whose trainer sends none is served whatever its drafter is.
    """

    def __init__(self, make: Callable[[], BesideServed]) -> None:
        self._make = make
        self._made: BesideServed | None = None

    @property
    def _drafter(self) -> BesideServed:
        if self._made is None:
            self._made = self._make()
        return self._made

    @property
    def kept_bytes(self) -> int:
        """As :attr:`TracedDestination.kept_bytes`."""
        return self._drafter.kept_bytes

    def storage_key(self) -> Hashable:
        """As :meth:`TracedDestination.storage_key`."""
        return self._drafter.storage_key()

    def new_epoch(self) -> None:
        """As :meth:`TracedDestination.new_epoch`."""
        if self._made is not None:
            self._made.new_epoch()

    def agree(self, specs: Manifest) -> None:
        """As :meth:`TracedDestination.agree`."""
        with _named_as_sent():
            self._drafter.agree(_drafted(specs))

    def quantized(self, specs: Sequence[TensorSpec]) -> dict[str, Format]:
        """As :meth:`TracedDestination.quantized`."""
        with _named_as_sent():
            return prefixed(self._drafter.quantized(_drafted(specs)))

    def fragments(self, specs: Manifest) -> tuple[list[Fragment], dict[str, str]]:
        """As :meth:`TracedDestination.fragments`."""
        with _named_as_sent():
            found, reasons = self._drafter.fragments(_drafted(specs))
        return prefixed_fragments(found), prefixed(reasons)

    def routes(self, specs: Manifest) -> Routes:
        """As :meth:`TracedDestination.routes`."""
        with _named_as_sent():
            found = self._drafter.routes(_drafted(specs))
        return replace(found, landings=prefixed(found.landings), reasons=prefixed(found.reasons))

    def rewritten(self, specs: Sequence[TensorSpec]) -> dict[str, str]:
        """As :meth:`TracedDestination.rewritten`."""
        return prefixed(self._drafter.rewritten(_drafted(specs)))

    def wants(self, name: str) -> bool:
        """As :meth:`BesideServed.wants`."""
        return of_drafter(name) and self._drafter.wants(name.removeprefix(DRAFTER))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As :meth:`TracedDestination.load_weights`, of weights that it :meth:`wants`."""
        with _named_as_sent():
            self._drafter.load_weights((name.removeprefix(DRAFTER), tensor) for name, tensor in weights)

    def finish(self, version: int) -> None:
        """As :meth:`TracedDestination.finish`."""
        with _named_as_sent():
            self._drafter.finish(version)

    def abandon(self) -> None:
        """As :meth:`TracedDestination.abandon`."""
        if self._made is not None:
            self._made.abandon()


@contextmanager
def _named_as_sent() -> Iterator[None]:
    """Have errors name a drafter's weights as they travel: the policy has some of the same names."""
    try:
        yield
    except RefitError as error:
        text, _, _ = str(error).rpartition(" [")
        name = f"{DRAFTER}{error.parameter}" if error.parameter else ""
        raise type(error)(
            f"the drafter that is trained beside the policy: {text or error}",
            stage=error.stage,
            rank=error.rank,
            parameter=name,
        ) from error


def _drafted(specs: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> list[TensorSpec]:
    """The trained drafter's of ``specs``, by the names of its checkpoint."""
    return [
        TensorSpec(name.removeprefix(DRAFTER), shape, dtype)
        for name, shape, dtype in specs
        if of_drafter(name)
    ]


class DraftedDestination[Served: TracedDestination[Any, Any, Any], Drafter: BesideServed | TrainedDrafter]:
    """A served model and its drafter, of one worker.

    A manifest without weights of the drafter leaves it as it is, which is told once. What both hold a copy of is received once.

    Args:
        served: of the model that verifies drafts.
        drafter: of the one that drafts.
        drafted: finds the drafter's weights among names that the served model does not take.
        tell: says in the log that the drafter stays as it is.
    """

    def __init__(
        self,
        served: Served,
        drafter: Drafter,
        drafted: Callable[[Iterable[str]], Iterable[str]],
        tell: Callable[[], None],
    ) -> None:
        self._served = served
        self._drafter = drafter
        self._drafted = drafted
        self._tell_of_stay = tell
        self._follows = False
        self._told = False
        # The drafter's copies of what the served model receives.
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def version(self) -> int:
        """As :attr:`TracedDestination.version`."""
        return self._served.version

    @property
    def has_trainable_drafter(self) -> bool:
        """As :attr:`TracedDestination.has_trainable_drafter`."""
        return self._served.has_trainable_drafter

    @property
    def device(self) -> torch.device:
        """Where the live parameters are."""
        return self._served.device

    @property
    def gives_memory_back(self) -> bool:
        """As :attr:`TracedDestination.gives_memory_back`; engines have both models in one pool."""
        return self._served.gives_memory_back

    @property
    def kept_bytes(self) -> int:
        """Bytes of the live parameters of both; of the served model alone where the drafter stays as it is."""
        return self._served.kept_bytes + (self._drafter.kept_bytes if self._follows else 0)

    def storage_key(self) -> Hashable:
        """As :meth:`TracedDestination.storage_key`, of both; of the served model alone where the drafter stays as it is."""
        return self._served.storage_key(), self._drafter.storage_key() if self._follows else None

    def new_epoch(self) -> None:
        """As :meth:`TracedDestination.new_epoch`, of both."""
        self._served.new_epoch()
        self._drafter.new_epoch()

    def quantized(self, specs: Sequence[TensorSpec]) -> dict[str, Format]:
        """As :meth:`TracedDestination.quantized`, of both.

        Raises:
            RefitMismatch, PlanError: as there.
        """
        found = self._served.quantized(specs)
        if self._trains_drafter(specs, found):
            found |= self._drafter.quantized(specs)
        return found

    def fragments(self, specs: Manifest) -> tuple[list[Fragment], dict[str, str]]:
        """As :meth:`TracedDestination.fragments`, of both.

        Raises:
            RefitMismatch, PlanError: as there.
        """
        found, reasons = self._served.fragments(specs)
        self._copies = []
        self._follows = self._trains_drafter(specs, {*(f.name for f in found), *reasons})
        if not self._follows:
            self._tell()
            return found, reasons
        drafted, reasons_of_drafter = self._drafter.fragments(specs)
        reasons = reasons_of_drafter | reasons
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

    @property
    def works_on_portions(self) -> bool:
        """Whether the served model has such work. The drafter's copies are of what has landed, before it is put in order."""
        return not self._copies and working_on_portions(self._served) is not None

    def expect(self, portions: Mapping[str, int]) -> None:
        """As :meth:`~rlrefit.integration.weights.endpoints.WorksOnPortions.expect`, of the served model, which takes none of the drafter's
        names. What the drafter makes of its own weights it makes at the end."""
        if (served := working_on_portions(self._served)) is not None:
            served.expect(portions)

    def landed(self, portion: int) -> None:
        """As :meth:`~rlrefit.integration.weights.endpoints.WorksOnPortions.landed`, of the served model."""
        if (served := working_on_portions(self._served)) is not None:
            served.landed(portion)

    def routes(self, specs: Manifest) -> Routes:
        """As :meth:`TracedDestination.routes`: the drafter's parameters follow the served model's."""
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
        """As :meth:`TracedDestination.rewritten`, of both."""
        return self._served.rewritten(specs) | (self._drafter.rewritten(specs) if self._follows else {})

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As :meth:`TracedDestination.load_weights`, of both.

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
        """As :meth:`TracedDestination.finish`, of both.

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
        """As :meth:`TracedDestination.abandon`, of both."""
        self._served.abandon()
        self._drafter.abandon()

    def _trains_drafter(self, specs: Manifest, served: Collection[str]) -> bool:
        """Whether a manifest has weights of the drafter, which the served model does not take itself."""
        aside = (name for name, *_ in specs if name not in served)
        return any(True for _ in self._drafted(aside))

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            self._tell_of_stay()


def _part(fragment: Fragment) -> tuple[Any, ...]:
    return fragment.box, fragment.axes


def tensor_at(model: nn.Module, path: str) -> torch.Tensor | None:
    """The tensor of that name, also of a module that the model shares and has under several names; None if there is none."""
    found = functools.reduce(lambda holder, part: getattr(holder, part, None), path.split("."), model)
    return found if isinstance(found, torch.Tensor) else None
