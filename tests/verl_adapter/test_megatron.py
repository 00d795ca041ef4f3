"""What verl's Megatron actors send, by the mixin that is put around their engine."""

from __future__ import annotations

from tests.ahead import FoundAhead
from tests.nemo_rl_adapter.megatron_ranks import refit_twice_by_each

AHEAD = (refit_twice_by_each,)


def test_shards_of_a_megatron_engine_reach_an_engine_bit_for_bit_twice(found_ahead: FoundAhead) -> None:
    answers, wrong = found_ahead.by(refit_twice_by_each)["verl"]
    for routes, *records in answers:
        assert (routes["misc"], routes["bulk"] > 0) == (0, True)
        assert [record["version"] for record in records] == [1, 2]
    assert wrong == [[], [], []]
