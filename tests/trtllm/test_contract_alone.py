"""Callers who know TensorRT-LLM's contract alone: buckets, then None. What they may leave out, and who serves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlrefit.integration.errors import EngineDirty, RefitError, RefitMismatch
from rlrefit.workers.engines.trtllm.payload import encode
from rlrefit.workers.engines.trtllm.worker_refit import WorkerRefit
from tests.spawn import run_ranks

from .engine_double import DoubleLLM, expected
from .host_memory import host_handle
from .package_double import get_device_uuid, install
from .scene import Scene
from .sources import ListSource, some_weights

NAME = "model.embed_tokens.weight"
COUNT = len(some_weights())


def _indexed(folder: Path, names: list[str], **config: Any) -> Path:
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _in_one_file(folder: Path, names: list[str]) -> Path:
    save_file({name: torch.zeros(1) for name in names}, folder / "model.safetensors")
    return folder


def _refit(scene: Scene, names: list[str] | None = None) -> None:
    scene.worker.update_weights(scene.handles(names))
    scene.worker.update_weights(None)


@pytest.mark.parametrize("made", [_indexed, _in_one_file], ids=["by the index", "by the file's header"])
def test_an_undefined_engine_serves_only_after_all_that_its_checkpoint_names(
    newest_extension: type, tmp_path: Path, made: Any
) -> None:
    scene = Scene(newest_extension, load_format="DUMMY", checkpoint=made(tmp_path, list(some_weights())))
    for _ in range(2):
        with pytest.raises(RefitMismatch, match=f"{COUNT - 1} of {COUNT} "):
            _refit(scene, [NAME])
        with pytest.raises(EngineDirty):
            scene.worker.step("a")
        with pytest.raises(EngineDirty):
            scene.driver.require_servable()
    for seed in range(2):
        scene.source.weights = some_weights(seed)
        _refit(scene)
        scene.check()
        assert scene.worker.step("a") == "tokens of a"


@pytest.mark.parametrize("folder", [None, "empty", "gone", "damaged"])
def test_an_undefined_engine_whose_weights_nobody_names_takes_no_bucket(
    newest_extension: type, tmp_path: Path, folder: str | None
) -> None:
    checkpoint = None if folder is None else tmp_path / folder
    if checkpoint is not None and folder != "gone":
        checkpoint.mkdir()
    if checkpoint is not None and folder == "damaged":
        (checkpoint / "model.safetensors.index.json").write_text("{")
    scene = Scene(newest_extension, load_format="DUMMY", checkpoint=checkpoint)
    with pytest.raises(RefitError):
        scene.worker.update_weights(scene.handles())
    assert scene.worker.counts()["buckets"] == 0
    with pytest.raises(RefitError):
        scene.worker.update_weights(None)
    with pytest.raises(EngineDirty, match="load_format=dummy"):
        scene.worker.step("a")
    scene.sender.refit(0)
    scene.check()
    assert scene.worker.step("a") == "tokens of a"


def test_what_the_engine_derives_or_does_not_load_is_not_awaited(
    newest_extension: type, tmp_path: Path
) -> None:
    never = [
        "lm_head.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.2.eh_proj.weight",
        "mtp.fc.weight",
    ]
    config = {"tie_word_embeddings": True, "num_hidden_layers": 2}
    folder = _indexed(tmp_path, [*some_weights(), *never], **config)
    scene = Scene(newest_extension, load_format="DUMMY", checkpoint=folder)
    _refit(scene)
    scene.check()
    _indexed(tmp_path, [*some_weights(), *never[:1]])
    scene = Scene(newest_extension, load_format="DUMMY", checkpoint=folder)
    with pytest.raises(RefitMismatch) as met:
        _refit(scene)
    assert met.value.parameter == "lm_head.weight"


def test_part_of_the_weights_is_enough_beside_a_loaded_checkpoint_and_not_once_that_has_slept(
    newest_extension: type, tmp_path: Path
) -> None:
    scene = Scene(newest_extension, checkpoint=_indexed(tmp_path, list(some_weights())))
    _refit(scene, [NAME])
    assert scene.worker.step("a") == "tokens of a"
    scene.driver.sleep()
    scene.driver.wake()
    with pytest.raises(RefitMismatch, match=f"{COUNT - 1} of {COUNT} "):
        _refit(scene, [NAME])
    with pytest.raises(EngineDirty):
        scene.worker.step("a")
    _refit(scene)
    scene.check()


def test_a_whole_refit_tells_what_the_next_one_has_to_bring_after_a_sleep(newest_extension: type) -> None:
    scene = Scene(newest_extension, load_format="DUMMY")
    scene.sender.refit(0)
    scene.driver.sleep()
    scene.driver.wake()
    with pytest.raises(RefitMismatch, match=f"{COUNT - 1} of {COUNT}"):
        _refit(scene, [NAME])
    _refit(scene)
    scene.check()
    assert scene.worker.step("a") == "tokens of a"


def test_buckets_that_came_before_a_sleep_are_lost_with_it(newest_extension: type) -> None:
    scene = Scene(newest_extension)
    scene.driver.begin(0, scene.source.specs())
    names = list(scene.source.weights)
    scene.driver.load(scene.handles(names[:3]))
    scene.driver.sleep()
    scene.driver.wake()
    with pytest.raises(RefitError, match="slept since refit 0"):
        scene.driver.load(scene.handles(names[3:]))
    scene.driver.begin(1, scene.source.specs())
    scene.driver.load(scene.handles())
    scene.driver.finish()
    scene.driver.sleep()
    scene.driver.wake()
    with pytest.raises(RefitError, match="slept since refit 1"):
        scene.driver.commit(1)
    scene.sender.refit(2)
    scene.check()


def serve_together(rank: int) -> list[str]:
    """What one of two workers of an engine says after each refit, some of which fail on worker 1."""
    extension = install("both")
    extension.refit_timeout_s = 20.0
    worker = DoubleLLM(extension, ListSource(some_weights()).specs(), first=rank).workers[0]
    told = []
    for turn in range(7):
        weights = some_weights(turn)
        sent = list(weights.items())
        with pytest.MonkeyPatch.context() as patched:
            if (turn, rank) == (1, 1):
                sent = sent[:-1]
            if (turn, rank) == (3, 1):
                worker.fail_at(worker.counts()["buckets"] + 1)
            if (turn, rank) == (5, 1):  # when all have agreed to serve it
                patched.setattr(WorkerRefit, "commit", _cut_off)
            told.append(_said(worker, sent))
        try:
            told.append(str(worker.step("a")))
            assert worker.held() == expected(weights)
        except EngineDirty:
            told.append("refuses")
    return told


def _cut_off(*_: object) -> None:
    raise RefitError("cut off before it could serve")


def _said(worker: Any, weights: list[tuple[str, torch.Tensor]]) -> str:
    """Of both calls of a refit; the caller goes on after the first one failed, as some workers' did not."""
    said = []
    payload = encode([(name, tensor.clone()) for name, tensor in weights], host_handle)
    for argument in ({get_device_uuid(worker.device_id): payload}, None):
        try:
            worker.update_weights(argument)
        except RuntimeError as error:
            said.append(f"{type(error).__name__}: {error}")
    return "; ".join(said)


@pytest.mark.timeout(120)
def test_a_worker_serves_only_where_all_of_its_engine_do_and_the_next_refit_heals_it() -> None:
    first, second = run_ranks(serve_together, 2)
    tokens = ["", "tokens of a"]
    for told in (first, second):
        assert told[:2] == told[4:6] == told[8:10] == told[12:] == tokens
        assert told[3] == told[7] == "refuses"
    for part in ("worker 1: RefitMismatch", f"1 of {COUNT} weights", "no worker serves it"):
        assert part in first[2]
    assert second[2].startswith(f"RefitMismatch: 1 of {COUNT} weights")
    assert re.search("no worker serves it.*worker 1: .*out of memory", first[6])
    assert "out of memory" in second[6]
    # The one that was cut off came too late for the others to hear.
    assert (first[10:12], second[11]) == (tokens, "refuses")


def serve_alone(rank: int) -> str:
    """What a worker says whose peer is never asked to serve."""
    extension = install("both")
    extension.refit_timeout_s = 1.0
    worker = DoubleLLM(extension, ListSource(some_weights()).specs(), first=rank).workers[0]
    if rank:
        return ""
    said = _said(worker, list(some_weights().items()))
    with pytest.raises(EngineDirty):
        worker.step("a")
    return said


@pytest.mark.timeout(120)
def test_a_worker_does_not_wait_for_ever_for_its_peers_and_does_not_serve_alone() -> None:
    said, _ = run_ranks(serve_alone, 2)
    assert said.startswith("PeerLost: ")
    assert "update_weights(None) on all workers" in said
