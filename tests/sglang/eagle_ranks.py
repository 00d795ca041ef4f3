"""EAGLE heads beside the models that they draft for on one or two ranks without an engine, refitted; SGLang does all the loading."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from tests.fp8_refits import State, differing, poison
from tests.gpu.vllm_checkpoints import read_checkpoint

from .family_ranks import CPU, load_by_sglang, state_of
from .models import begin, load_model, turn_to

if TYPE_CHECKING:
    from rlrefit.integration.weights.manifest import TensorSpec
    from rlrefit.workers.engines.sglang.drafted import SglangDraftedDestination

DRAFTER = "drafter."
DRAFTING = {
    "speculative_num_steps": 1,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 2,
}


@dataclass(frozen=True)
class Heads:
    """A case: a model and its head, in two versions.

    Attributes:
        models: checkpoints of the model.
        heads: of the head.
        algorithm: ``speculative_algorithm``.
    """

    models: tuple[str, str]
    heads: tuple[str, str]
    algorithm: str

    def tensors(self, index: int) -> State:
        """What a trainer of the first or second version sends."""
        head = read_checkpoint(self.heads[index])
        return read_checkpoint(self.models[index]) | {DRAFTER + name: t for name, t in head.items()}


@dataclass
class HeadsResult:
    """What one rank saw of one case; names are the trainer's.

    Attributes:
        bulk: what goes in place.
        misc: what takes the misc path, and why.
        unused: what SGLang takes not at all.
        shared: parameters of the head that are the model's.
        differing: what is in neither model as SGLang itself loads it; by occasion.
        left_out: how often the log told of weights that the head has of the model.
        refused: names without which a manifest is refused, and the parameter that the error names.
        taken: names without which it is not.
        mapping: by which name another ``d2t`` was refused; empty if it was not.
        unread: by which name an engine that read no mapping refused a manifest without any; empty if it did not.
        same_mapping: whether a ``d2t`` of zeros was taken by a head without any.
        stayed: a manifest without weights of the head left it as it was.
        told: how often the log told of that, of two such manifests.
        alone: what an engine without the head wants of the same trainer.
        alike: tensors that both versions fill with the same, so that no refit of them was seen; zeros are left out.
    """

    bulk: set[str]
    misc: dict[str, str]
    unused: set[str]
    shared: set[str]
    differing: dict[str, list[str]] = field(default_factory=dict)
    left_out: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    mapping: str = ""
    unread: str = ""
    same_mapping: bool = False
    stayed: bool = False
    told: int = 0
    alone: set[str] = field(default_factory=set)
    alike: set[str] = field(default_factory=set)


@dataclass
class Pair:
    """What a refit uses of the runners of a model and of its head."""

    served: Any
    drafter: Any

    def state(self) -> State:
        models = {"served": self.served.model, "drafter": self.drafter.model}
        return {
            f"{which} {name}": t for which, model in models.items() for name, t in state_of(model).items()
        }

    def poison(self) -> None:
        poison((*self.served.model.parameters(), *self.drafter.model.parameters()))


def refit_heads(rank: int, ranks: int, cases: Sequence[Heads]) -> list[HeadsResult]:
    """For each case load the first version, refit to the second and back, all through the loader, and in buckets.

    Args:
        rank: of the engine.
        ranks: of the engine.
        cases: to be gone through.
    """
    begin(rank, cases[0].models[0], ranks)
    return [_one(case) for case in cases]


def loaded_pair(case: Heads, index: int, **asked: Any) -> Pair:
    """As SGLang's worker of a drafter loads it, and shares the model's weights with it; ``asked``: of both, as of :func:`load_model`."""
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from rlrefit.workers.engines.sglang.drafters import know_drafter

    path, head = case.models[index], case.heads[index]
    turn_to(
        path,
        speculative_algorithm=case.algorithm,
        speculative_draft_model_path=head,
        **DRAFTING,
    )
    served, drafter = load_model(path, **asked), load_model(path, head, **asked)
    worker = object.__new__(EagleDraftWorker)
    worker.speculative_algorithm = SpeculativeAlgorithm.from_string(case.algorithm)
    worker.target_worker = SimpleNamespace(model_runner=served)
    worker.draft_runner = drafter
    worker.init_token_map()
    worker.init_lm_head()
    scheduler = SimpleNamespace(
        draft_worker=SimpleNamespace(draft_worker=worker),
        tp_worker=SimpleNamespace(model_runner=served),
        weight_updater=None,
        _request_dispatcher=SimpleNamespace(_mapping=defaultdict(lambda: print)),
    )
    know_drafter(scheduler)
    return Pair(served, drafter)


def _specs(tensors: State) -> list[TensorSpec]:
    from rlrefit.integration.weights.manifest import TensorSpec

    return [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]


def _one(case: Heads) -> HeadsResult:
    from rlrefit.workers.engines.sglang.destination import SglangDestination
    from rlrefit.workers.engines.sglang.drafted import SglangDraftedDestination, destination_of

    pair = loaded_pair(case, 0)
    as_a, as_b = pair.state(), loaded_pair(case, 1).state()
    a, b = case.tensors(0), case.tensors(1)
    destination = destination_of(pair.served, CPU)
    assert isinstance(destination, SglangDraftedDestination)
    with patch("rlrefit.workers.engines.common.drafted.logger") as log:
        fragments, misc = destination.fragments(_specs(a))
    bulk = {fragment.name for fragment in fragments}
    of_served = {id(parameter) for parameter in pair.served.model.parameters()}
    found = HeadsResult(
        bulk,
        misc,
        a.keys() - bulk - misc.keys(),
        {name for name, p in pair.drafter.model.named_parameters() if id(p) in of_served},
        left_out=log.warning.call_count,
    )
    for occasion, tensors, expected in (("there", b, as_b), ("back", a, as_a)):
        pair.poison()
        for fragment in fragments:
            fragment.view.copy_(fragment.part_of(tensors[fragment.name]))
        load_by_sglang(destination, tensors, list(misc))
        found.differing[occasion] = differing(pair.state(), expected)
    # What a trainer can't place comes this way, wherever SGLang would have taken it in place.
    pair.poison()
    load_by_sglang(destination, b, list(b))
    found.differing["all through the loader"] = differing(pair.state(), as_b)
    pair.poison()
    bucketed = destination_of(pair.served, CPU)
    assert not bucketed.loads_alone(_specs(a))
    load_by_sglang(bucketed, a, list(a))
    found.differing["in buckets"] = differing(pair.state(), as_a)
    _other_mappings(destination, a, found)
    _without(destination, pair, a, found)
    found.alike = {name for name in as_a if as_a[name].any() and torch.equal(as_a[name], as_b[name])}
    _without_any_mapping(case, a, found)
    turn_to(case.models[0])
    fragments, misc = SglangDestination(load_model(case.models[0]), CPU).fragments(_specs(a))
    found.alone = {fragment.name for fragment in fragments} | misc.keys()
    return found


def _other_mappings(destination: SglangDraftedDestination, tensors: State, found: HeadsResult) -> None:
    from rlrefit.integration.errors import RefitError

    name = f"{DRAFTER}d2t"
    own = tensors.get(name, torch.zeros(64, dtype=torch.int64))
    destination.fragments(_specs(tensors | {name: own}))
    destination.load_weights([(name, own.clone())])
    found.same_mapping = True
    try:
        destination.load_weights([(name, own + 1)])
    except RefitError as error:
        found.mapping = str(error.parameter)


def _without_any_mapping(case: Heads, tensors: State, found: HeadsResult) -> None:
    """Neither the engine, which starts without weights of the head, nor the trainer has one."""
    from rlrefit.integration.errors import PlanError
    from rlrefit.workers.engines.sglang.drafted import destination_of

    destination = destination_of(loaded_pair(case, 0, load_format="dummy").served, CPU)
    try:
        destination.fragments(_specs({name: t for name, t in tensors.items() if name != f"{DRAFTER}d2t"}))
    except PlanError as error:
        found.unread = str(error.parameter)


def _without(destination: SglangDraftedDestination, pair: Pair, tensors: State, found: HeadsResult) -> None:
    """Manifests without one weight of the head, and without any."""
    from rlrefit.integration.errors import PlanError

    drafted = [name for name in tensors if name.startswith(DRAFTER)]
    for name in drafted:
        try:
            destination.routes(_specs({n: t for n, t in tensors.items() if n != name}))
            found.taken.add(name)
        except PlanError as error:
            found.refused[name] = str(error.parameter)
    rest = {name: tensor for name, tensor in tensors.items() if name not in drafted}
    before = state_of(pair.drafter.model)
    with patch("rlrefit.workers.engines.sglang.drafters.logger") as log:
        for _ in range(2):
            _, misc = destination.fragments(_specs(rest))
            load_by_sglang(destination, rest, list(misc))
    found.stayed = differing(state_of(pair.drafter.model), before) == []
    found.told = log.warning.call_count
