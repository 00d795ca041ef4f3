"""Refits into a TensorRT-LLM engine in miniature, over the package's double in each generation."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from rlrefit.integration.errors import EngineDirty, RefitError, RefitMismatch
from rlrefit.workers.engines.trtllm.payload import encode
from rlrefit.workers.engines.trtllm.sender import TrtllmSender

from .engine_double import DoubleLLM, expected
from .host_memory import host_handle
from .package_double import worker_extension
from .scene import DEVICE, Scene
from .sources import ListSource, some_weights


@pytest.fixture
def scene(extension: type) -> Scene:
    return Scene(extension)


def test_two_consecutive_refits_bring_every_tensor_bit_for_bit(scene: Scene) -> None:
    """BF16, FP8 and its scales, NVFP4 and all of its scales, and what the engine derives of them."""
    for version in (0, 1):
        scene.source.weights = some_weights(seed=version)
        record = scene.sender.refit(version)
        scene.check()
        assert scene.driver.version == version
        assert scene.worker.step("a") == "tokens of a"
        assert record.bytes_misc == sum(tensor.nbytes for tensor in scene.source.weights.values())
        assert record.peak_extra_bytes == 1536, "q, k and v, which stay together"
        assert set(record.seconds) == {"handshake", "export", "misc", "post_load", "commit"}
    counts = scene.worker.counts()
    assert counts["buckets"] >= 12
    assert (counts["reloads"], counts["prefix_resets"]) == (2, 2), "once a refit, not once a bucket"
    assert scene.source.prepared == 2


def test_the_sender_holds_one_bucket_at_a_time(extension: type) -> None:
    scene = Scene(extension, bucket_bytes=2000)
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def counted(tensor: torch.Tensor) -> Any:
        nonlocal most
        alive.append(weakref.ref(tensor.untyped_storage()))  # type: ignore[arg-type]
        held = [found for found in (ref() for ref in alive) if found is not None]
        most = max(most, sum(storage.nbytes() for storage in held))
        return host_handle(tensor)

    scene.sender = TrtllmSender(scene.source, scene.driver, DEVICE, 2000, reduce=counted)
    scene.sender.refit(0)
    assert 1000 < most <= 2000
    scene.check()


def test_a_model_that_does_not_load_in_parts_gets_one_bucket(extension: type) -> None:
    scene = Scene(extension, in_parts=False)
    for version in (0, 1):
        scene.source.weights = some_weights(seed=version)
        scene.sender.refit(version)
        scene.check()
    assert scene.worker.counts()["buckets"] == 2
    names = list(scene.source.weights)
    scene.worker.update_weights(scene.handles(names[:2]))
    with pytest.raises(RefitError, match="one bucket"):
        scene.worker.update_weights(scene.handles(names[2:]))
    assert "reload" not in vars(scene.worker.engine.model_engine.model_loader), "nothing stays replaced"


def test_layers_that_do_not_load_in_parts_get_one_bucket_although_the_model_would(extension: type) -> None:
    scene = Scene(extension, quantized_in_parts=False)
    assert not scene.driver.loads_in_parts
    for version in (0, 1):
        scene.source.weights = some_weights(seed=version)
        scene.sender.refit(version)
        scene.check()
    assert scene.worker.counts()["buckets"] == 2
    names = list(scene.source.weights)
    before = scene.worker.held()
    scene.driver.begin(2, scene.source.specs())
    with pytest.raises(RefitError, match="one bucket"):
        scene.driver.load(scene.handles(names[:2]))
    assert scene.worker.held() == before


def test_callers_who_know_the_contract_alone_can_refit_too(scene: Scene) -> None:
    names = list(scene.source.weights)
    for version in (0, 1):
        scene.source.weights = some_weights(seed=version)
        for part in (names[:4], names[4:]):
            scene.worker.update_weights(scene.handles(part))
            with pytest.raises(EngineDirty, match="began to write"):
                scene.worker.step("a")
        scene.worker.update_weights(None)
        scene.check()
        assert scene.driver.version == version
        assert scene.worker.step("a") == "tokens of a"
    scene.worker.update_weights(scene.handles(names[1:]))
    with pytest.raises(RefitMismatch) as met:
        scene.worker.update_weights(None)
    assert met.value.parameter == "model.embed_tokens.weight"


def test_after_a_failure_such_a_caller_has_to_bring_again_what_was_written(scene: Scene) -> None:
    names = list(scene.source.weights)
    scene.worker.fail_at(2)
    scene.worker.update_weights(scene.handles(names[:4]))
    with pytest.raises(RuntimeError, match="out of memory"):
        scene.worker.update_weights(scene.handles(names[4:]))
    # As who sends the failed bucket again and goes on.
    scene.worker.update_weights(scene.handles(names[4:]))
    with pytest.raises(RefitMismatch, match="4 of "):
        scene.worker.update_weights(None)
    with pytest.raises(EngineDirty):
        scene.worker.step("a")
    scene.worker.update_weights(scene.handles())
    scene.worker.update_weights(None)
    scene.check()
    assert scene.worker.step("a") == "tokens of a"


def test_bf16_weights_reach_the_engines_own_extension_too() -> None:
    """Of the generation that lets through how host memory is rebuilt; on a GPU, of all."""
    source = ListSource({name: t for name, t in some_weights().items() if t.dtype == torch.bfloat16})
    worker = DoubleLLM(worker_extension("deny-list"), source.specs()).workers[0]
    for seed in range(2):
        source.weights = {name: some_weights(seed)[name] for name in source.weights}
        for name, tensor in source.weights.items():
            worker.update_weights({DEVICE: encode([(name, tensor.clone())], host_handle)})
        worker.update_weights(None)
        assert worker.held() == expected(source.weights)
