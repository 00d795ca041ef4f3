"""What every engine shows, by its own loaders and workers where they can be installed; TensorRT-LLM's is a double.

A new engine comes in with a module that has ``show``, and a line in ``ENGINES``. SGLang's runs by ``make test-sglang``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache

import pytest

from tests.spawn import run_ranks
from tests.vllm_processes import vllm_processes

from . import sglang_rank, transformers_rank, trtllm_rank, vllm_rank
from .contract import JOINED, RANKS, TURNS, UNKNOWN, WHOLE, Seen

pytestmark = pytest.mark.timeout(900)  # an engine loads for a minute where its processes share two cores

ENGINES: dict[str, Callable[[list[str]], list[Seen]]] = {
    "vllm": lambda paths: run_ranks(vllm_rank.show, RANKS, paths, made_by=vllm_processes),
    "sglang": lambda paths: run_ranks(sglang_rank.show, RANKS, paths, timeout_s=850),
    "transformers": lambda paths: run_ranks(transformers_rank.show, RANKS, paths),
    "trtllm": trtllm_rank.show,
}
# Engines that may pass over weights that their models have no place for; the other ones refuse them, as later vLLMs do.
PASSING_OVER = ("vllm", "sglang", "transformers")
# Whose loaders are followed, and do what no trace can follow on the misc path; the other ones have no loader for it.
TRACED = ("vllm", "sglang")


@pytest.fixture(scope="session")
def shown(paths: list[str]) -> Callable[[str], list[Seen]]:
    return cache(lambda engine: ENGINES[engine](paths))


@pytest.fixture(params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "sglang" and importlib.util.find_spec("sglang") is None:
        pytest.skip("needs SGLang: make test-sglang")
    return name


@pytest.fixture
def ranks(engine: str, shown: Callable[[str], list[Seen]]) -> list[Seen]:
    return shown(engine)


def test_every_refit_into_poison_leaves_the_bytes_that_the_engine_loads_itself(ranks: list[Seen]) -> None:
    for seen in ranks:
        assert len(seen.versions) > len(TURNS)
        assert seen.versions == sorted(set(seen.versions))
        assert not any(seen.differing.values()), seen.differing


def test_an_engine_generates_after_what_has_committed_and_after_what_changed_nothing(
    ranks: list[Seen],
) -> None:
    for seen in ranks:
        assert {
            occasion: seen.steps[occasion] for occasion in seen.differing if seen.steps[occasion].kind
        } == {}


def test_all_weights_have_a_place_and_go_shard_to_shard(ranks: list[Seen]) -> None:
    for seen in ranks:
        assert seen.misc.get("nccl_xfer", set()) == set()
        assert seen.unused.get("nccl_xfer", 0) == 0


def test_a_manifest_that_lacks_a_weight_is_refused_by_name(ranks: list[Seen]) -> None:
    for seen in ranks:
        refused = seen.refused["lacking"]
        named = f"{refused.parameter} {refused.text}"
        # Or by that of the parameter that it would be a part of.
        assert JOINED in named or JOINED.replace("k_proj", "qkv_proj") in named


def test_a_weight_without_a_place_is_refused_by_name_or_told_as_unused(
    engine: str, ranks: list[Seen]
) -> None:
    for seen in ranks:
        if "unknown" in seen.unused:
            assert engine in PASSING_OVER
            assert seen.unused["unknown"] == 1
        else:
            refused = seen.refused["unknown"]
            assert (refused.kind, refused.parameter) == ("RefitMismatch", UNKNOWN)


def test_a_weight_that_the_engine_computes_with_takes_the_misc_path_or_is_refused_by_name(
    engine: str, ranks: list[Seen]
) -> None:
    for seen in ranks:
        if engine in TRACED:
            assert seen.misc["computed"] == {WHOLE}
        else:
            assert WHOLE in f"{seen.refused['computed'].parameter} {seen.refused['computed'].text}"


def test_the_failure_of_a_rank_is_heard_on_all_and_nothing_is_generated_until_a_refit_commits(
    engine: str, ranks: list[Seen]
) -> None:
    for seen in ranks:
        assert seen.steps["after a failure"].kind == "EngineDirty"
        assert seen.refused["failing"].kind
    if engine == "trtllm":
        assert "worker 0" in ranks[0].refused["failing"].text
        return
    failed, heard = ranks[-1].refused["failing"], [seen.refused["failing"] for seen in ranks[:-1]]
    assert (failed.kind, failed.parameter) == ("RefitError", WHOLE)
    for other in (*heard, ranks[0].trainer["failing"]):
        assert (other.kind, other.blamed) == ("PeerLost", RANKS)


def test_weights_that_a_sleep_discarded_are_not_generated_with_before_a_refit(ranks: list[Seen]) -> None:
    for seen in ranks:
        assert seen.steps["asleep"].kind == seen.steps["woken"].kind == "EngineDirty"
        if "asleep" in seen.refused:
            assert seen.refused["asleep"].stage == "handshake"
