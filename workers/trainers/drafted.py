"""A policy and the drafter that is trained beside it, as one source of refits."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch

from ...integration.layout import Fragment
from ...integration.quantize.formats import Format
from ...integration.weights.endpoints import (
    HoldsQuantized,
    Look,
    WeightSource,
    Writes,
    gives_memory_back,
    prepare_ahead,
    prepares_alone,
    sent_formats,
    trained_formats,
    writes_by,
)
from ...integration.weights.manifest import TensorSpec
from ..drafter_names import DRAFTER, of_drafter, prefixed, prefixed_fragments


class DraftedSource:
    """Implements :class:`rlrefit.integration.weights.endpoints.WeightSource`: the policy's weights, and behind them those of a drafter.

    The drafter's names are those of its own checkpoint (``fc.weight``, ``midlayer.…``), with ``drafter.`` in front. Both travel in one
    refit, so that a version has both or none.

    Args:
        policy: the trainer's own source.
        drafter: of a model beside it, on all trainer ranks.
    """

    def __init__(self, policy: WeightSource, drafter: WeightSource) -> None:
        self.policy = policy
        self._drafter = drafter
        drafted = [spec._replace(name=DRAFTER + spec.name) for spec in drafter.specs()]
        self._specs = [*policy.specs(), *drafted]

    @property
    def device(self) -> torch.device:
        return self.policy.device

    def specs(self) -> list[TensorSpec]:
        return self._specs

    def fragments(self) -> tuple[list[Fragment], dict[str, str]]:
        held, refused = self.policy.fragments()
        drafted, refused_of_drafter = self._drafter.fragments()
        return [*held, *prefixed_fragments(drafted)], refused | prefixed(refused_of_drafter)

    def quantized_fragments(
        self, formats: Mapping[str, Format]
    ) -> tuple[list[Fragment], dict[str, str], frozenset[str]]:
        """As :meth:`rlrefit.integration.weights.endpoints.HoldsQuantized.quantized_fragments`, of those of the two that keep any."""
        of_policy = {name: kind for name, kind in formats.items() if not of_drafter(name)}
        drafted = {name.removeprefix(DRAFTER): kind for name, kind in formats.items() if of_drafter(name)}
        held, refused, names = _quantized(self.policy, of_policy)
        held_of_drafter, refused_of_drafter, drafted_names = _quantized(self._drafter, drafted)
        return (
            [*held, *prefixed_fragments(held_of_drafter)],
            refused | prefixed(refused_of_drafter),
            names | {DRAFTER + name for name in drafted_names},
        )

    def prepare(self) -> None:
        self.policy.prepare()
        self._drafter.prepare()

    def prepare_ahead(self, encoded: frozenset[str]) -> Look | None:
        """As :meth:`rlrefit.integration.weights.endpoints.PreparesAhead.prepare_ahead`, of the policy; the drafter is prepared now."""
        self._drafter.prepare()
        return prepare_ahead(self.policy, encoded)

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        of_policy = [name for name in names if not of_drafter(name)]
        if of_policy:
            yield from self.policy.export(of_policy)
        drafted = [name.removeprefix(DRAFTER) for name in names if of_drafter(name)]
        if drafted:
            yield from ((DRAFTER + name, tensor) for name, tensor in self._drafter.export(drafted))

    def storage_key(self) -> Hashable:
        return self.policy.storage_key(), self._drafter.storage_key()

    @property
    def gives_memory_back(self) -> bool | None:
        """Of either; None if one does not say and the other doesn't."""
        answers = {gives_memory_back(self.policy), gives_memory_back(self._drafter)}
        return True if True in answers else None if None in answers else False

    @property
    def prepares_alone(self) -> bool:
        return prepares_alone(self.policy) and prepares_alone(self._drafter)

    @property
    def trained_formats(self) -> Mapping[str, Format]:
        return _of_both(trained_formats(self.policy), trained_formats(self._drafter))

    @property
    def sent_formats(self) -> Mapping[str, Format]:
        return _of_both(sent_formats(self.policy), sent_formats(self._drafter))

    def writes(self) -> Writes:
        """As :meth:`rlrefit.integration.weights.endpoints.CountsWrites.writes`, of those of the two that count."""
        of_policy, drafted = writes_by(self.policy), writes_by(self._drafter)
        names = tuple([DRAFTER + name for name in drafted.names])
        return Writes(
            of_policy.names + names, of_policy.counts + drafted.counts, of_policy.places + drafted.places
        )


def _of_both(policy: Mapping[str, Format], drafter: Mapping[str, Format]) -> dict[str, Format]:
    return {**policy, **{DRAFTER + name: format for name, format in drafter.items()}}


def _quantized(
    source: object, formats: Mapping[str, Format]
) -> tuple[list[Fragment], dict[str, str], frozenset[str]]:
    if isinstance(source, HoldsQuantized):
        return source.quantized_fragments(formats)
    return [], {}, frozenset()
