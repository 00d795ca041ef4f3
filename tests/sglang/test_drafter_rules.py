"""Which drafters of SGLang refits may reach, and what a scheduler does for one beside its own code, with doubles of SGLang's parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlrefit.workers.engines.sglang.drafters import SESSION, _Buffers, _Session, know_drafter, may_be_trained

SLEEP = SimpleNamespace(tags=["weights"])


class Drafter(torch.nn.Module):
    def __init__(self, shared: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("own", torch.arange(4.0))
        self.register_buffer("shared", shared)


class LlamaForCausalLMEagle3:
    pass


class Glm4MoeForCausalLMNextN:
    pass


def _engine(drafter: Any, **settings: Any) -> Any:
    """The runner of an engine's model, whose drafter is known."""
    arguments = {
        "model_path": "served",
        "speculative_algorithm": None,
        "speculative_draft_model_path": None,
        "speculative_token_map": None,
        "enable_multi_layer_eagle": False,
    }
    runner = SimpleNamespace(server_args=SimpleNamespace(**(arguments | settings)))
    runner._rlrefit_drafter = SimpleNamespace(draft_runner=SimpleNamespace(model=drafter))
    return runner


@pytest.mark.parametrize(
    ("algorithm", "path", "more", "expected"),
    [
        ("EAGLE3", "head", {}, True),
        ("eagle", "head", {}, True),
        ("NEXTN", "head", {}, True),
        ("STANDALONE", "head", {}, False),
        ("EAGLE3", "served", {}, False),
        ("EAGLE", None, {}, False),
        # A copy of some rows of the model's head, which EAGLE3 does not make.
        ("EAGLE", "head", {"speculative_token_map": "hot.pt"}, False),
        ("EAGLE3", "head", {"speculative_token_map": "hot.pt"}, True),
    ],
)
def test_heads_of_a_checkpoint_of_their_own_may_be_trained(
    algorithm: str, path: str | None, more: dict[str, Any], expected: bool
) -> None:
    settings = {"speculative_algorithm": algorithm, "speculative_draft_model_path": path, **more}
    assert may_be_trained(_engine(LlamaForCausalLMEagle3(), **settings)) is expected
    assert not may_be_trained(_engine(Glm4MoeForCausalLMNextN(), **settings))


def test_an_engine_without_a_drafter_takes_no_trained_one() -> None:
    runner = _engine(None)
    del runner._rlrefit_drafter
    assert not may_be_trained(runner)
    know_drafter(SimpleNamespace(draft_worker=None, tp_worker=SimpleNamespace(model_runner=runner)))
    assert not may_be_trained(runner)


def test_a_drafter_that_fell_asleep_before_it_was_known_wakes_up_without_its_buffers() -> None:
    served = Drafter(torch.zeros(1))
    drafter = Drafter(served.shared)
    buffers = _Buffers(drafter, served)
    with buffers.restored(SLEEP):
        drafter.own.zero_()
    assert not drafter.own.any()
    for _ in range(2):
        drafter.own.copy_(torch.arange(4.0))
        with buffers.kept(SLEEP):
            drafter.own.fill_(torch.nan)
        with buffers.restored(SLEEP):
            pass
        assert drafter.own.tolist() == [0, 1, 2, 3]


def test_a_session_stays_without_the_drafter_though_another_one_is_refused_meanwhile() -> None:
    updater: Any = SimpleNamespace(_session=None, draft_worker="drafter")
    session = _Session(updater)
    begin, end = SimpleNamespace(rid=SESSION), SimpleNamespace(rid=None)
    with session.begun(begin):
        assert updater.draft_worker is None
        updater._session = "open"
    with session.begun(begin):
        assert updater.draft_worker is None  # SGLang refuses it: one is open
    with session.ended(end):
        assert updater.draft_worker is None
        updater._session = None
    with session.begun(SimpleNamespace(rid="another's")):
        assert updater.draft_worker == "drafter"
