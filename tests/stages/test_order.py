"""Which memory stage may follow which, against a model of what lies in memory, over move sequences of any length."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import pytest

from rlrefit.integration.colocated.stages import Move, Stage, StageError, StageState

# What a move changes of it.
AFTER: dict[Move, dict[str, Any]] = {
    Move.GENERATE: {},
    Move.TRAIN: {},
    Move.SLEEP: {"weights": False, "kv_cache": False, "fresh": False, "left": False},
    Move.LOAD_TRAINER: {"trainer": "whole"},
    Move.OFFLOAD_TRAINER: {"trainer": "weights"},
    Move.WAKE_WEIGHTS: {"weights": True},
    Move.WAKE_ALL: {"weights": True, "kv_cache": True},
    Move.REFIT: {"fresh": True},
    Move.FREE_TRAINER: {"trainer": "away", "left": True},
    Move.WAKE_KV_CACHE: {"kv_cache": True},
}


@dataclass(frozen=True)
class Memory:
    """What is where, without a notion of stages."""

    multi: bool
    weights: bool = True
    kv_cache: bool = True
    # Of the trainer: away, weights, whole, partly (weights too), or leaving (weights whole); and whether it has left the GPU to the engine.
    trainer: str = "away"
    left: bool = True
    # Whether the engine's weights are whole, and of one version.
    fresh: bool = True
    lost: bool = False

    def allows(self, move: Move) -> bool:
        if self.lost:
            return False
        awake = self.weights and self.kv_cache
        asleep = not self.weights and not self.kv_cache
        match move:
            case Move.GENERATE:
                return awake and self.fresh and self.left
            case Move.SLEEP:
                # Nothing is lost that is still to be generated from.
                return self.weights and self.fresh is self.left and (awake or not self.fresh)
            case Move.LOAD_TRAINER:
                return asleep and self.trainer != "whole"
            case Move.TRAIN:
                return self.trainer == "whole"
            case Move.OFFLOAD_TRAINER:
                return self.trainer in ("whole", "leaving")
            case Move.WAKE_WEIGHTS | Move.WAKE_ALL:
                mine = self.multi == (move is Move.WAKE_WEIGHTS)
                return mine and asleep and self.trainer in ("away", "weights")
            case Move.REFIT:
                return self.weights and self.kv_cache != self.multi and not self.left
            case Move.FREE_TRAINER:
                return self.weights and self.fresh and not self.left
            case Move.WAKE_KV_CACHE:
                return self.multi and self.weights and self.fresh and self.left and not self.kv_cache

    def after(self, move: Move) -> Memory:
        return replace(self, **AFTER[move])

    def after_failure(self, move: Move) -> Memory:
        if move in (Move.SLEEP, Move.WAKE_WEIGHTS, Move.WAKE_ALL, Move.WAKE_KV_CACHE):
            return replace(self, lost=True)
        if move in (Move.LOAD_TRAINER, Move.OFFLOAD_TRAINER):
            return replace(self, trainer="partly" if move is Move.LOAD_TRAINER else "leaving")
        return replace(self, fresh=False) if move is Move.REFIT else self


def reachable(multi: bool) -> list[tuple[StageState, Memory]]:
    """All pairs that any sequence of moves leads to, those that fail among them."""
    first = (StageState(multi), Memory(multi))
    found, queue = {first}, deque([first])
    while queue:
        state, memory = queue.popleft()
        for move in state.legal:
            plain = replace(state.after_failure(move, OSError("gone")), failed="")
            for pair in ((state.after(move), memory.after(move)), (plain, memory.after_failure(move))):
                if pair not in found:
                    found.add(pair)
                    queue.append(pair)
    return sorted(found, key=str)


@pytest.mark.parametrize("multi", [True, False])
def test_a_move_is_legal_exactly_where_memory_allows_it(multi: bool) -> None:
    pairs = reachable(multi)
    stages = {state.stage for state, _ in pairs}
    assert len(pairs) > len(stages) > 7
    for state, memory in pairs:
        assert set(state.legal) == {move for move in Move if memory.allows(move)}, (state, memory)
        for move in set(Move) - set(state.legal):
            with pytest.raises(StageError):
                state.after(move)
            with pytest.raises(StageError):
                state.after_failure(move, OSError("gone"))


@pytest.mark.parametrize("multi", [True, False])
def test_kv_cache_and_trainer_meet_only_without_stages(multi: bool) -> None:
    met = [m for _, m in reachable(multi) if m.kv_cache and m.trainer != "away" and not m.lost]
    assert bool(met) is not multi
    # And the trainer's gradients never meet the engine's weights.
    assert not any(m.weights and m.trainer == "whole" for _, m in reachable(multi) if not m.lost)


@pytest.mark.parametrize("multi", [True, False])
def test_an_illegal_move_names_the_stage_what_is_legal_and_the_way(multi: bool) -> None:
    for state, _ in reachable(multi):
        for move in set(Move) - set(state.legal):
            with pytest.raises(StageError) as caught:
                state.require(move)
            assert caught.value.stage == state.stage
            text = str(caught.value)
            assert f"{move} was asked for at stage '{state.stage}'" in text
            assert "Nothing has changed" in text
            way = state.way_to(move)
            if way is None:
                assert state.stage is Stage.LOST or move in (
                    Move.WAKE_ALL,
                    Move.WAKE_WEIGHTS,
                    Move.WAKE_KV_CACHE,
                )
                continue
            assert f"The way to {move}: {', '.join(way)}" in text
            there = state
            for step in way:
                there = there.after(step)
            there.require(move)


def test_a_failure_is_remembered_with_its_remedy_until_a_move_succeeds() -> None:
    state = StageState(True, Stage.WEIGHTS_AWAKE).after_failure(Move.REFIT, ValueError("no bytes"))
    assert state.stage is Stage.WEIGHTS_AWAKE
    assert state.failed == "refit failed: ValueError: no bytes"
    with pytest.raises(StageError, match=r"Before, refit failed: ValueError: no bytes\. Refit again"):
        state.require(Move.FREE_TRAINER)
    assert not state.after(Move.REFIT).failed
