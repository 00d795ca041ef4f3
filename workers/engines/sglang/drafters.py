"""Drafters, the separate models by which SGLang decodes speculatively: which of them refits reach, and the way to them.

As with vLLM (:mod:`..vllm.drafters`), MTP layers of the served checkpoint follow the policy where it trains them, and an EAGLE head
one that is trained beside the policy (:mod:`.drafted`). Other drafters keep their weights. A worker has no reference to its
drafter, but the scheduler of its process has: :func:`know_drafter` leaves one with the worker.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch

from ....integration.colocated.stages import WEIGHTS
from ....integration.errors import RefitError
from ..common.drafted import STAYS, require_none_trained, words_of_stay

if TYPE_CHECKING:
    from ..common.loader_trace.trace import LoaderTrace

logger = logging.getLogger(__name__)

# Of SGLang's speculative algorithms, those without a drafter: drafts are looked up in the text so far.
_WITHOUT_DRAFTER: Final = frozenset({"NGRAM"})
# One and the same: MTP layers, or an EAGLE head of another checkpoint.
_MTP: Final = frozenset({"EAGLE", "NEXTN"})
# An EAGLE head always.
_EAGLE3: Final = "EAGLE3"
# What the others do with their drafters was not read.
_READ: Final = frozenset({*_MTP, _EAGLE3, "STANDALONE"})
# The settings of an engine by which :func:`drafter_problems` tells.
DRAFTER_SETTINGS: Final = (
    "model_path",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_token_map",
    "enable_multi_layer_eagle",
)
_MTP_CLASS: Final = re.compile("mtp|nextn", re.IGNORECASE)
# SGLang's worker of the drafter, and where it has the drafter's runner.
_ATTRIBUTE: Final = "_rlrefit_drafter"
_RUNNER: Final = "draft_runner"
# By which the scheduler tells rlrefit's sessions from those of others.
SESSION: Final = "rlrefit"


def has_drafter(algorithm: str | None) -> bool:
    """Whether SGLang drafts with a model by this ``speculative_algorithm``."""
    return bool(algorithm) and str(algorithm).upper() not in _WITHOUT_DRAFTER


def may_follow(settings: Mapping[str, Any]) -> bool:
    """Whether the drafter is MTP layers of the checkpoint that the engine serves, so that refits may bring its weights."""
    return str(settings["speculative_algorithm"]).upper() in _MTP and _is_served(settings)


def may_be_trained(runner: Any) -> bool:
    """Whether the drafter is one of a checkpoint of its own that trainers train beside the policy, so that refits may bring its weights.

    Args:
        runner: the worker's.
    """
    asked, drafter = settings_of(runner), live_drafter(runner)
    algorithm = str(asked["speculative_algorithm"]).upper()
    return (
        drafter is not None
        and algorithm in {*_MTP, _EAGLE3}
        and not _is_served(asked)
        and not _is_mtp(drafter)
        # The map has SGLang give the head a copy of some rows of the model's, out of any refit's reach. EAGLE3 does not read it.
        and (algorithm == _EAGLE3 or not asked["speculative_token_map"])
    )


def drafter_problems(settings: Mapping[str, Any]) -> Iterator[str]:
    """Why refits can't do with the drafter of an engine with ``settings`` (:data:`DRAFTER_SETTINGS`)."""
    algorithm = settings["speculative_algorithm"]
    if not has_drafter(algorithm):
        return
    if algorithm.upper() not in _READ:
        yield (
            f"speculative_algorithm is {algorithm!r}, and {STAYS}, or with a part of the new ones: what SGLang does with such a drafter was "
            "not read (EAGLE, NEXTN, EAGLE3, STANDALONE, and NGRAM, which has no weights, are known)"
        )
        return
    if settings["enable_multi_layer_eagle"]:
        yield "enable_multi_layer_eagle drafts with several models, of which refits would bring one"
    if not may_follow(settings):
        if _is_served(settings):
            yield (
                f"speculative_algorithm is {algorithm!r} with a drafter of the policy's own weights; {STAYS}, however far the policy is "
                "trained (MTP layers, EAGLE without speculative_draft_model_path, follow)"
            )
    elif settings["speculative_token_map"]:
        yield (
            "speculative_token_map gives the drafter a copy of some rows of the head, which would keep the weights of its start "
            "beside MTP layers with new ones"
        )


def live_drafter(runner: Any) -> Any:
    """SGLang's ``ModelRunner`` of the drafter beside the worker's own ``runner``; None if it has none, or it is not known."""
    return getattr(getattr(runner, _ATTRIBUTE, None), _RUNNER, None)


def tokens_of_drafter(runner: Any) -> torch.Tensor | None:
    """The served model's token for each one that the drafter's head knows, as the worker drafts with them; None if all are the same.

    Args:
        runner: the worker's, whose drafter is known.
    """
    found: torch.Tensor | None = getattr(runner, _ATTRIBUTE).hot_token_id
    return found


def require_drafter(runner: Any) -> Any:
    """As :func:`live_drafter`, of an engine that drafts with a model.

    Raises:
        RefitError: it is not where rlrefit looks for it.
    """
    found = live_drafter(runner)
    algorithm = runner.server_args.speculative_algorithm
    if found is None and has_drafter(algorithm):
        raise RefitError(
            f"the engine decodes speculatively ({algorithm}), but SGLang's scheduler has no drafter where rlrefit looks for it, so "
            f"{STAYS}. Start SGLang without speculative_algorithm, or install a newer rlrefit",
            stage="trace",
        )
    return found


def settings_in(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What :func:`may_follow` and :func:`drafter_problems` ask for, of an engine's arguments by name; others have SGLang's defaults."""
    return {name: arguments.get(name) for name in DRAFTER_SETTINGS}


def settings_of(runner: Any) -> dict[str, Any]:
    """The same, of a worker's engine."""
    return {name: getattr(runner.server_args, name) for name in DRAFTER_SETTINGS}


def tell_of_stay(runner: Any) -> None:
    """Log a warning that no refit reaches the drafter of a worker, and what becomes of it."""
    drafter, asked = live_drafter(runner), settings_of(runner)
    random = (
        ". It was started with load_format=dummy and holds random numbers: give speculative_draft_load_format=auto"
        if str(drafter.load_config.load_format).lower().endswith("dummy")
        else ""
    )
    asleep = f"A sleep discards the drafter for good, unless SGLang was started with enable_draft_weights_cpu_backup{random}"
    path = asked["speculative_draft_model_path"] or asked["model_path"]
    logger.warning("%s", words_of_stay(asked["speculative_algorithm"], path, asleep))


def check_follows(runner: Any, trace: LoaderTrace) -> None:
    """Refuse MTP layers of another checkpoint as the drafter of a policy that trains its own.

    Args:
        runner: the worker's.
        trace: of the whole manifest through the loader of the model that verifies drafts.

    Raises:
        PlanError: names the first weight of the manifest that was meant for the drafter.
    """
    drafter = live_drafter(runner)
    if drafter is None or not _is_mtp(drafter):
        return
    asked = settings_of(runner)
    if may_follow(asked):
        return
    require_none_trained(
        trace,
        runner.model_config.num_hidden_layers,
        asked["speculative_algorithm"],
        asked["speculative_draft_model_path"],
        "Leave speculative_draft_model_path out, so that SGLang takes those of the served checkpoint, which refits bring; or start "
        "it without speculative_algorithm",
    )


def know_drafter(scheduler: Any) -> None:
    """Have a scheduler's worker know its drafter, and the scheduler keep it over sleeps and rlrefit's sessions.

    SGLang keeps the buffers of the served model while memory sleeps, and not those of the drafter. Its sessions unpack and process
    all weights of what they are for, even those that sleep; rlrefit's are for nothing.

    Args:
        scheduler: of this process. Safe to call again.
    """
    worker = getattr(scheduler.draft_worker, "draft_worker", None)
    drafter = getattr(worker, _RUNNER, None)
    if drafter is None or live_drafter(scheduler.tp_worker.model_runner) is drafter:
        return
    setattr(scheduler.tp_worker.model_runner, _ATTRIBUTE, worker)
    from sglang.srt.managers import io_struct

    own = _Buffers(drafter.model, scheduler.tp_worker.model_runner.model)
    session = _Session(scheduler.weight_updater)
    for request, around in (
        ("ReleaseMemoryOccupationReqInput", own.kept),
        ("ResumeMemoryOccupationReqInput", own.restored),
        ("BeginWeightUpdateReqInput", session.begun),
        ("EndWeightUpdateReqInput", session.ended),
    ):
        kind = getattr(io_struct, request, None)  # sessions are of later releases
        if kind is not None:
            call_around(scheduler, kind, around)


def call_around(scheduler: Any, kind: type, around: Callable[[Any], Any]) -> None:
    """Have what a scheduler does for requests of a kind done within a context, which is given the request."""
    answers = scheduler._request_dispatcher._mapping
    original = answers[kind]

    @functools.wraps(original)
    def answered(recv_req: Any) -> Any:
        with around(recv_req):
            return original(recv_req)

    answers[kind] = answered


class _Buffers:
    """Those of a drafter alone, over a sleep of the weights."""

    def __init__(self, drafter: torch.nn.Module, served: torch.nn.Module) -> None:
        self._drafter = drafter
        self._served = served
        self._held: list[torch.Tensor] | None = None

    @contextmanager
    def kept(self, recv_req: Any) -> Iterator[None]:
        if _of_weights(recv_req):
            self._held = [buffer.to("cpu", copy=True) for buffer in self._own()]
        yield

    @contextmanager
    def restored(self, recv_req: Any) -> Iterator[None]:
        yield
        if not _of_weights(recv_req):
            return
        held, self._held = self._held, None
        if held is None:
            logger.warning(
                "the drafter fell asleep before it was known, and has lost its buffers; start SGLang anew"
            )
            return
        for buffer, kept in zip(self._own(), held, strict=True):
            buffer.data.copy_(kept)

    def _own(self) -> list[torch.Tensor]:
        shared = {id(buffer) for buffer in self._served.buffers()}
        return [buffer for buffer in self._drafter.buffers() if id(buffer) not in shared]


class _Session:
    """rlrefit's sessions of a scheduler's weight updater, which are for no model."""

    def __init__(self, updater: Any) -> None:
        self._updater = updater
        self._open = False

    def begun(self, recv_req: Any) -> Any:
        if self._updater._session is None:  # else it is refused, and the one that is open goes on
            self._open = recv_req.rid == SESSION
        return self._without_drafter() if recv_req.rid == SESSION else nullcontext()

    def ended(self, recv_req: Any) -> Any:
        # One that began before the drafter was known ends as it began.
        own, self._open = self._open, False
        return self._without_drafter() if own else nullcontext()

    @contextmanager
    def _without_drafter(self) -> Iterator[None]:
        drafter, self._updater.draft_worker = self._updater.draft_worker, None
        try:
            yield
        finally:
            self._updater.draft_worker = drafter


def _is_mtp(drafter: Any) -> bool:
    return _MTP_CLASS.search(type(drafter.model).__name__) is not None


def _is_served(settings: Mapping[str, Any]) -> bool:
    return settings["speculative_draft_model_path"] in (None, settings["model_path"])


def _of_weights(recv_req: Any) -> bool:
    """Whether a release or a resume is of the weights; one without tags is of everything."""
    return not recv_req.tags or WEIGHTS in recv_req.tags
