"""Each step of a refit fails in each way: the driver knows that nothing would be generated, and the next refit resumes."""

from __future__ import annotations

import pickle
import sys
from base64 import b64decode
from collections.abc import Callable

import pytest

from rlrefit.integration.errors import EngineDirty, RefitError
from rlrefit.workers.engines.sglang.callers import Answer, Caller, EngineCaller, Step
from rlrefit.workers.engines.sglang.driver import SglangRefit
from rlrefit.workers.engines.sglang.loader import LOADER
from rlrefit.workers.engines.sglang.sender import SglangSender

from .engine_double import EngineDouble, Holder, equal, modules, weights
from .ways import Driven

pytestmark = pytest.mark.usefixtures("sglang")


def _kind(step: Step) -> str:
    """Name of the step, or of the command that it carries to the workers."""
    if step.fields.get("load_format") != LOADER:
        return step.name
    named = pickle.loads(b64decode(step.fields["serialized_named_tensors"][0]))
    return str(named[0][0]) if named else ""


def _refused(call: Callable[[], Answer]) -> Answer:
    return Answer(False, "no")


def _lost(call: Callable[[], Answer]) -> Answer:
    call()
    raise RefitError("the answer got lost", stage="settings")


def _foreign(call: Callable[[], Answer]) -> Answer:
    raise ConnectionResetError("gone")


def _interrupted(call: Callable[[], Answer]) -> Answer:
    call()
    raise KeyboardInterrupt


WAYS = {"refused": _refused, "lost": _lost, "foreign": _foreign, "interrupted": _interrupted}


class Failing:
    """A way to an engine on which one kind of step fails once."""

    def __init__(self, way: Caller) -> None:
        self._way = way
        self.kind = ""
        self.fail = _refused

    def call(self, step: Step) -> Answer:
        if self.kind and _kind(step) == self.kind:
            self.kind = ""
            return self.fail(lambda: self._way.call(step))
        return self._way.call(step)


@pytest.mark.parametrize("how", list(WAYS))
@pytest.mark.parametrize("kind", ["begin_weight_update", "end_weight_update", "update_weights_from_tensor"])
def test_a_session_that_a_failed_step_left_open_does_not_stop_the_next_refit(
    kind: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, module in modules(sessions=True).items():
        monkeypatch.setitem(sys.modules, name, module)
    engine = EngineDouble(sessions=True)
    way = Failing(EngineCaller(engine))
    driven = Driven(engine, lambda: SglangRefit(way, 0.2))
    sender = driven.sender
    way.kind, way.fail = kind, WAYS[how]
    with pytest.raises((RefitError, ConnectionResetError, KeyboardInterrupt)):
        sender.refit(0)
    for version, index in ((1, 2), (2, 1)):
        driven.bring(version, index)
    assert not engine.tokenizer_manager.session
    engine.loop.close()


@pytest.mark.parametrize("how", list(WAYS))
@pytest.mark.parametrize(
    "kind",
    [
        "state",
        "pause_generation",
        "begin",
        "update_weights_from_tensor",
        "synchronize",
        "finish",
        "commit",
        "flush_cache",
        "update_weight_version",
        "continue_generation",
    ],
)
def test_an_engine_is_never_taken_for_one_that_generates_while_it_is_paused(kind: str, how: str) -> None:
    engine = EngineDouble()
    manager, way = engine.tokenizer_manager, Failing(EngineCaller(engine))
    driven = Driven(engine, lambda: SglangRefit(way, 0.2))
    refit, sender = driven.refit, driven.sender
    driven.source.take_on(1)
    way.kind, way.fail = kind, WAYS[how]
    try:
        sender.refit(0)
    except (RefitError, ConnectionResetError, KeyboardInterrupt):
        pass
    else:
        # An idle engine is asked again whether it is one.
        assert (kind, how) == ("flush_cache", "refused")
    assert not way.kind
    if manager.paused:
        with pytest.raises(EngineDirty):
            refit.require_servable()
    else:
        # As it was, or all of the new version.
        assert equal(manager.holder.held, weights(refit.version + 1))
        assert not manager.stale_prefixes
    for version, index in ((1, 2), (2, 1)):
        driven.bring(version, index)
    engine.loop.close()


def test_prefixes_of_old_weights_are_not_served_after_an_answer_was_lost_nor_after_a_second_failure() -> None:
    """Workers that have committed serve whole weights, and all the same the caches are not flushed yet."""
    engine = EngineDouble()
    manager, way = engine.tokenizer_manager, Failing(EngineCaller(engine))
    refit = SglangRefit(way)
    sender = SglangSender(Holder(1), refit, "cpu", 128)
    for kind, fail in (("commit", _lost), ("begin", _refused)):
        way.kind, way.fail = kind, fail
        with pytest.raises(RefitError):
            sender.refit(0)
        assert (refit.version, manager.stale_prefixes, manager.paused) == (0, kind == "commit", True)
        with pytest.raises(EngineDirty):
            refit.require_servable()
    engine.loop.close()
