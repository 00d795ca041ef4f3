"""What verl's Megatron actors send, by the mixin that is put around their engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.ahead import FoundAhead, keeping_time
from tests.nemo_rl_adapter import megatron_ranks
from tests.refit.models import make_model
from tests.spawn import run_ranks, run_together
from tests.verl_adapter import megatron_actor


@keeping_time  # each side waits only so long for the other
def update_twice(folder: Path) -> list[list[Any]]:
    """What the actors and the engine answer."""
    models = [make_model("qwen3", folder / f"model{seed}", seed) for seed in range(3)]
    return run_together(
        lambda: run_ranks(megatron_actor.actor, 2, models, folder, timeout_s=250.0),
        lambda: run_ranks(megatron_ranks.engine, 1, models, folder, timeout_s=250.0),
    )


AHEAD = (update_twice,)


def test_shards_of_a_megatron_engine_reach_an_engine_bit_for_bit_twice(found_ahead: FoundAhead) -> None:
    answers, [wrong] = found_ahead.by(update_twice)
    for routes, *records in answers:
        assert (routes["misc"], routes["bulk"] > 0) == (0, True)
        assert [record["version"] for record in records] == [1, 2]
    assert wrong == [[], [], []]
