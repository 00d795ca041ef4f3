"""A trainer and vLLM's ``AsyncLLM`` take turns on one GPU, awaited: weights, generation, memory and refusals.

One scene serves all tests (:mod:`.awaited_scene`), since the engine's start takes longest.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
from collections.abc import Callable

import pytest

from .awaited_scene import AT_ONCE, IN_STAGES, KV_CACHE, TOKENS, Found, scene_main
from .needs import needs
from .test_colocated_stages_on_gpu import SAME
from .vllm_live import PROMPTS

pytestmark = [
    *needs("vllm", "transformers"),
    pytest.mark.timeout(180),
]

# Of the scene, in seconds.
LIMIT = 150
# What allocators round up, and what kernels and workspaces of both processes take by and by.
SLACK = 256 << 20


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    # The engine starts in a child of this process's child, each with a CUDA context of its own.
    spawn = multiprocessing.get_context("spawn")
    results, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=scene_main, args=(str(tmp_path_factory.mktemp("models")), theirs))
    process.start()
    # So that the end of that process is the end of what it sends.
    theirs.close()
    try:
        told = results.recv() if results.poll(LIMIT) else f"nothing came within {LIMIT} s"
    finally:
        process.join(15)
        process.kill()
        process.join()
    assert isinstance(told, Found), told
    return told


def test_each_refit_gives_the_engine_all_weights_of_the_trainer_bit_for_bit(found: Found) -> None:
    assert len(found.turns) == len(IN_STAGES + AT_ONCE)
    for turn in found.turns:
        assert turn.held == turn.trained
    for before, after in itertools.pairwise(turn.held for turn in found.turns):
        # Norms are ones in both checkpoints.
        assert all(before[name] != after[name] for name in before if "norm" not in name)
    assert found.turns[0].held != found.held
    assert all(turn.held == found.held for turn in found.turns[1::2])


def test_generation_after_a_turn_is_that_of_an_engine_started_from_its_weights(found: Found) -> None:
    started = [one.values() for one in found.said]
    first, *others = ([one.values() for one in turn.said] for turn in found.turns)
    assert all(ours[0] != theirs[0] for ours, theirs in zip(first, started, strict=True))
    assert others == [started, first, started]
    # Of the weights that the engine was not started from, transformers is the witness.
    assert len(found.apart) == len(found.turns) - 1
    assert max(found.apart) < SAME
    for version, turn in enumerate(found.turns):
        assert all(one.versions == {version} for one in (*turn.said, *turn.together))
        assert [len(one.tokens) for one in turn.together] == [TOKENS] * len(PROMPTS)


def test_a_request_that_came_while_the_engine_slept_runs_on_the_weights_of_the_turn(found: Found) -> None:
    [(version, turn)] = [(v, turn) for v, turn in enumerate(found.turns) if turn.late is not None]
    assert turn.late is not None
    assert turn.late.versions == {version}
    assert turn.late.values() == turn.said[0].values()


def test_a_sleeping_engine_gives_all_its_memory_back_and_each_stage_takes_its_own(
    found: Found, tell: Callable[[str], None]
) -> None:
    memory, weights = found.used, found.weight_bytes
    tell(json.dumps({name: round(value / 2**30, 2) for name, value in memory.items()} | found.seconds))
    # Allocators round up, and tensors that come later fill the holes.
    half = weights // 2
    assert memory["awake"] - memory["asleep"] > KV_CACHE + half
    # Weights, gradients and momenta; then the weights alone.
    assert memory["training"] - memory["asleep"] > 2 * weights + half
    assert memory["training"] - memory["trainer offloaded"] > weights + half
    assert half < memory["weights awake"] - memory["trainer offloaded"] < weights + SLACK
    assert memory["refitted"] - memory["trainer freed"] > half
    assert memory["awake again"] - memory["trainer freed"] > KV_CACHE - half


def test_turns_go_through_every_stage_with_flat_memory(found: Found, tell: Callable[[str], None]) -> None:
    made = [record for record in found.stages if not record.failed]
    comes, goes = ("sleep", "load_trainer"), ("offload_trainer",)
    in_stages = ("wake_weights", "refit", "free_trainer", "wake_kv_cache")
    looks = ("generate", "generate")
    assert [record.move for record in made] == [
        *(*comes, "train", *goes, *in_stages, *looks),
        *(*comes, "train", "train", *goes, *in_stages, *looks),
        *2 * (*comes, "train", "train", *goes, "wake_all", "refit", "free_trainer", *looks),
    ]
    assert all({p.process for p in r.processes} >= {"engine rank 0"} for r in made)
    used_after: dict[str, list[int]] = {}
    seconds: dict[str, list[float]] = {}
    for record in made:
        at_end = max(process.device_used for process in record.processes)
        used_after.setdefault(record.move, []).append(at_end)
        seconds.setdefault(record.move, []).append(round(record.seconds, 3))
    tell(json.dumps(seconds))
    # The first turn makes what is kept: momenta, pinned copies, buckets, workspaces.
    slept, generated = used_after["sleep"][1:], used_after["generate"][len(looks) :]
    assert max(slept) - min(slept) < SLACK
    assert max(generated) - min(generated) < SLACK
    assert min(generated) - max(slept) > KV_CACHE + found.weight_bytes // 2


def test_the_records_of_refits_tell_of_both_sides(found: Found, tell: Callable[[str], None]) -> None:
    for version, turn in enumerate(found.turns):
        sent, received = turn.records
        assert (sent.role, received.role) == ("trainer", "generation")
        assert {sent.version, received.version} == {version}
        # Written from outside if vLLM's pool can export its memory, which depends on the host.
        assert received.transport in ("ipc", "pull")
        assert received.bytes_bulk == received.bytes_verified == found.weight_bytes
        assert received.bytes_misc == 0
    tell(f"{received.transport}: {received.seconds_total:.3f} s, {received.seconds}")
    for turn, last in zip(found.turns[1:], ("wake_kv_cache", "wake_all", "wake_all"), strict=True):
        assert all(record.stage_peaks[last] > KV_CACHE for record in turn.records)


def test_what_is_asked_for_out_of_turn_is_refused_and_changes_nothing(found: Found) -> None:
    expected = {
        "refit, of an engine awake": ("StageError", "refit was asked for at stage 'awake'"),
        "the version, of one asleep": ("EngineDirty", "a level 2 sleep discarded the weights"),
        "generate, in training": ("StageError", "generate was asked for at stage 'training'"),
        "wake_kv_cache, before the trainer has left": (
            "StageError",
            "wake_kv_cache was asked for at stage 'refitted'",
        ),
        "generate, without a KV cache": ("StageError", "generate was asked for at stage 'trainer freed'"),
        "to_training, beside a rollout": (
            "StageBusy",
            "to_training was asked for while generate is under way",
        ),
        "to_training, beside a request": ("StageRefused", "engine 0 has unfinished requests"),
    }
    assert found.refused.keys() == expected.keys()
    for what, (kind, text) in expected.items():
        assert found.refused[what][0] == kind, (what, found.refused[what])
        assert text in found.refused[what][1], what
    # Neither a rollout that was cancelled nor a sleep that was refused has led to another stage.
    failed = [(record.move, record.stage) for record in found.stages if record.failed]
    assert failed == [("generate", "awake"), ("sleep", "awake")]
