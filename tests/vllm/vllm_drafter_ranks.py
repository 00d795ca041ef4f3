"""A drafter of one rank beside the model that it drafts for, as vLLM's own proposer loads it, without an engine around them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm_checkpoints import manifest_of, read_checkpoint
from vllm_ranks import (
    Case,
    Tensors,
    _know_class,
    _poison,
    _state,
    _unequal,
    accept_family,
    groups_of,
    left_out_in_turn,
    loaded,
)
from vllm_refit import refit

from rlrefit.integration.errors import PlanError, RefitError
from tests.vllm_cpu import accept_experts_without_gates

if TYPE_CHECKING:
    from rlrefit.workers.engines.common.drafted import DraftedDestination

# Family → vLLM's class of its MTP layers.
DRAFTERS = {
    "deepseek_v3": "DeepSeekMTPModel",
    "glm4_moe": "Glm4MoeMTPModel",
    "glm4_moe_lite": "Glm4MoeLiteMTPModel",
    "nemotron_h-latent": "NemotronHMTPModel",
    "qwen3_next": "Qwen3NextMTP",
}
# Method → vLLM's class of its heads.
HEADS = {"eagle3": "LlamaForCausalLMEagle3", "eagle": "EagleLlamaForCausalLM"}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}


@dataclass(frozen=True)
class Drafted:
    """A case of an engine with a drafter.

    Attributes:
        case: whose checkpoints have MTP layers, if there are no heads.
        apart: the drafter keeps the embedding and the head that it has loaded itself, as it does in a pipeline.
        heads: checkpoints of EAGLE heads, one for each of the case's.
        method: of speculative decoding, with heads.
    """

    case: Case
    apart: bool = False
    heads: tuple[str, str] | None = None
    method: str = "eagle3"

    def paths(self, index: int) -> tuple[Case, str]:
        """The case with arguments of an engine of its first or second checkpoints, and the model's."""
        path = (self.case.path_a, self.case.path_b)[index]
        if self.heads is None:
            return self.case, path
        drafting = {"method": self.method, "model": self.heads[index], "num_speculative_tokens": 1}
        return replace(self.case, more={**self.case.more, "speculative_config": drafting}), path

    def random(self) -> Drafted:
        """The same, started with random weights in model and drafter."""
        return replace(self, case=replace(self.case, more={"load_format": "dummy"}))

    def tensors(self, index: int) -> Tensors:
        """What a trainer of the first or second checkpoints sends."""
        found = read_checkpoint(self.paths(index)[1])
        if self.heads is None:
            return found
        drafted = read_checkpoint(self.heads[index])
        return found | {f"drafter.{name}": tensor for name, tensor in drafted.items()}


@dataclass
class DraftedRank:
    """What one rank saw; names are the checkpoint's.

    Attributes:
        bulk: what goes in place, with the number of its places.
        misc: what takes the misc path, and why.
        aside: weights that neither model wants.
        shared: parameters of the drafter that are the served model's.
        differing: parts of either model that are not as vLLM itself loads them; by occasion.
        refused: weights of the drafter without which a manifest is refused, by the one rank that tried it.
        taken: and those without which it is not.
        stayed: what a manifest without weights of the drafter left in the drafter is what was there before.
        told: what the log says of that manifest.
        copying: with which words a drafter is refused that computes with a copy of a norm.
        process_state_untouched: tracing left vLLM's registries as they were.
        left: what an engine without the drafter wants of the same trainer, and how often the log tells of a trained drafter.
        random: the weight by which an engine that was started with random weights is refused, of a trained drafter.
    """

    bulk: dict[str, int]
    misc: dict[str, str]
    aside: set[str]
    shared: set[str]
    differing: dict[str, list[str]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)
    stayed: bool = False
    told: list[str] = field(default_factory=list)
    copying: str = ""
    process_state_untouched: bool = False
    left: tuple[set[str], int] = (set(), 0)
    random: str = ""


@dataclass
class _Pair:
    """A served model and the one that drafts for it."""

    served: torch.nn.Module
    drafter: torch.nn.Module

    def state(self) -> dict[str, Tensors]:
        return {"served": _state(self.served), "drafter": _state(self.drafter)}

    def differing(self, expected: dict[str, Tensors]) -> list[str]:
        return [
            f"{which} {name}"
            for which, model in (("served", self.served), ("drafter", self.drafter))
            for name in _unequal(model, expected[which])
        ]

    def poison(self) -> None:
        _poison(self.served)
        _poison(self.drafter)


def draft_there_and_back(rank: int, cases: Sequence[Drafted]) -> list[DraftedRank]:
    """For each case load A and its drafter, refit to B, compare with what vLLM itself loads from B; back to A."""
    accept_experts_without_gates()
    found = []
    for drafted in cases:
        case = drafted.case
        accept_family(case.path_a)
        _know_class(
            DRAFTERS[Path(case.path_a).parent.name] if drafted.heads is None else HEADS[drafted.method]
        )
        with groups_of(rank, case):
            found.append(_one_case(drafted))
    return found


def _loaded_pair(drafted: Drafted, index: int) -> tuple[_Pair, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.v1.spec_decode.eagle import EagleProposer

    served, config = loaded(*drafted.paths(index))
    with set_current_vllm_config(config):
        proposer = EagleProposer(config, torch.device("cpu"))
        if drafted.apart:
            return _Pair(served, proposer._get_model()), config
        proposer.load_model(served)
    return _Pair(served, proposer.model), config


def _one_case(drafted: Drafted) -> DraftedRank:
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    from rlrefit.workers.engines.vllm.destination import VllmDestination
    from rlrefit.workers.engines.vllm.drafted import drafted_destination

    pair, config = _loaded_pair(drafted, 0)
    a, b = drafted.tensors(0), drafted.tensors(1)
    device = torch.device("cpu")
    destination = drafted_destination(
        VllmDestination(pair.served, config, device), lambda: pair.drafter, pair.served, config
    )
    registered, rotary = list(config.compilation_config.static_forward_context.items()), dict(_ROPE_DICT)
    fragments, misc = destination.fragments(manifest_of(a))
    bulk: dict[str, int] = {}
    for fragment in fragments:
        bulk[fragment.name] = bulk.get(fragment.name, 0) + 1
    of_served = {id(p) for p in pair.served.parameters()}
    found = DraftedRank(
        bulk,
        misc,
        a.keys() - bulk.keys() - misc.keys(),
        {name for name, p in pair.drafter.named_parameters(remove_duplicate=False) if id(p) in of_served},
    )
    found.process_state_untouched = (
        list(config.compilation_config.static_forward_context.items()) == registered and rotary == _ROPE_DICT
    )
    as_a, as_b = pair.state(), _loaded_pair(drafted, 1)[0].state()
    for version, (occasion, tensors, expected) in enumerate([("there", b, as_b), ("back", a, as_a)]):
        pair.poison()
        refit(destination, fragments, misc, tensors, version)
        found.differing[occasion] = pair.differing(expected)
    pair.poison()
    # What the trainer can't place comes this way, wherever the engine would have taken it in place.
    refit(destination, [], dict.fromkeys(b, ""), b, 2)
    found.differing["all through the loader"] = pair.differing(as_b)
    _without(destination, pair, a, found)
    norm = next(m for m in pair.drafter.modules() if type(m).__name__.endswith("RMSNorm"))
    vars(norm)["copied"] = norm.weight.detach().float()
    # As of ranks that meet after a first step.
    served = VllmDestination(pair.served, config, device)
    later = drafted_destination(served, lambda: pair.drafter, pair.served, config)
    try:
        later.fragments(manifest_of(a))
    except RefitError as error:
        found.copying = str(error)
    if drafted.heads is not None:
        found.left = _without_drafter(pair, config, a)
        found.random = _refused_random(drafted, a)
    return found


def _without_drafter(pair: _Pair, config: Any, tensors: Tensors) -> tuple[set[str], int]:
    """The names that an engine wants which has the model alone, and how many warnings two meetings give."""
    from rlrefit.workers.engines.vllm.destination import VllmDestination

    alone = copy.copy(config)
    alone.speculative_config = None
    destination = VllmDestination(pair.served, alone, torch.device("cpu"))
    wanted: set[str] = set()
    with _told_by("rlrefit.workers.engines.common.traced_destination") as told:
        for _ in range(2):
            fragments, misc = destination.fragments(manifest_of(tensors))
            wanted |= {fragment.name for fragment in fragments} | misc.keys()
    return wanted, len([message for message in told if "drafter." in message])


def _refused_random(drafted: Drafted, tensors: Tensors) -> str:
    from rlrefit.workers.engines.vllm.destination import VllmDestination
    from rlrefit.workers.engines.vllm.drafted import drafted_destination

    pair, config = _loaded_pair(drafted.random(), 0)
    served = VllmDestination(pair.served, config, torch.device("cpu"))
    try:
        drafted_destination(served, lambda: pair.drafter, pair.served, config).fragments(manifest_of(tensors))
    except PlanError as error:
        return error.parameter
    return "taken"


@contextmanager
def _told_by(name: str) -> Iterator[list[str]]:
    """Warnings of a module's log meanwhile."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger(name)
    log.addHandler(handler)
    yield told
    log.removeHandler(handler)


def _without(destination: DraftedDestination, pair: _Pair, tensors: Tensors, found: DraftedRank) -> None:
    """Manifests without one weight of the drafter, and without any."""
    drafted = set(destination._drafted(tensors))
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    # All ranks have parts of the same weights, and each tries its share of them.
    for name in left_out_in_turn(sorted(drafted))[rank::size]:
        try:
            destination.routes(manifest_of({n: t for n, t in tensors.items() if n != name}))
            found.taken.add(name)
        except PlanError:
            found.refused.add(name)
    answers: list[Any] = [None] * size
    torch.distributed.all_gather_object(answers, (found.refused, found.taken))
    found.refused, found.taken = (set.union(*of_ranks) for of_ranks in zip(*answers, strict=True))
    rest = {name: tensor for name, tensor in tensors.items() if name not in drafted}
    before = {name: p.detach().clone() for name, p in pair.drafter.named_parameters()}
    with _told_by("rlrefit.workers.engines.vllm.drafters") as told:
        for version in (3, 4):
            fragments, misc = destination.fragments(manifest_of(rest))
            refit(destination, fragments, misc, rest, version)
    found.told = told
    found.stayed = all(
        torch.equal(p, before[name])
        for name, p in pair.drafter.named_parameters()
        if name not in found.shared
    )
