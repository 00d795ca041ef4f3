"""What a worker refuses, what it serves afterwards, and what the driver and the sender say."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch

from rlrefit.integration.colocated.stages import StageRefused
from rlrefit.integration.errors import EngineDirty, RefitError, RefitMismatch, RefitTimeout
from rlrefit.workers.engines.trtllm import compat
from rlrefit.workers.engines.trtllm.driver import TrtllmDriver
from rlrefit.workers.engines.trtllm.payload import restricted_loads
from rlrefit.workers.engines.trtllm.sender import TrtllmSender

from .engine_double import DoubleLLM, answered
from .host_memory import host_handle
from .scene import DEVICE, Scene
from .sources import ListSource, some_weights


@pytest.fixture
def scene(newest_extension: type) -> Scene:
    return Scene(newest_extension)


@pytest.fixture
def two(newest_extension: type) -> Scene:
    return Scene(newest_extension, engines=2)


def _refuses_to_step(scene: Scene) -> None:
    for worker in scene.workers:
        with pytest.raises(EngineDirty):
            worker.step("a")
    with pytest.raises(EngineDirty, match="TensorRT-LLM worker 0"):
        scene.driver.require_servable()


def _by_hand(scene: Scene, version: int, driver: TrtllmDriver | None = None) -> None:
    driver = driver or scene.driver
    driver.begin(version, scene.source.specs())
    driver.load(scene.handles())
    driver.finish()
    driver.commit(version)


def test_nothing_runs_from_the_begin_to_the_commit(two: Scene) -> None:
    names = list(two.source.weights)
    two.driver.begin(4, two.source.specs())
    _refuses_to_step(two)
    for part in (names[:3], names[3:]):
        two.driver.load(two.handles(part))
        _refuses_to_step(two)
    two.driver.finish()
    _refuses_to_step(two)
    two.driver.commit(4)
    two.driver.require_servable()
    assert two.driver.version == 4
    two.check()


def test_where_loading_fails_nobody_serves_and_the_next_refit_mends_it(two: Scene) -> None:
    _by_hand(two, 0)
    two.source.weights = some_weights(seed=1)
    two.workers[1].fail_at(2)
    two.driver.begin(1, two.source.specs())
    for step in (lambda: two.driver.load(two.handles()), two.driver.finish, lambda: two.driver.commit(1)):
        with pytest.raises(RefitError, match="worker 1"):
            step()
    # The first one took all, and must not be alone in serving it.
    with pytest.raises(EngineDirty):
        two.driver.require_servable()
    with pytest.raises(EngineDirty):
        two.driver.version  # noqa: B018
    _by_hand(two, 2)
    two.check()
    assert two.driver.version == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"model.embed_tokens.weight": torch.zeros(32, 8).bfloat16()},
        {"model.layers.1.mlp.up_proj.weight": torch.zeros(16, 16, dtype=torch.uint8)},
    ],
    ids=["another shape", "codes without their dtype"],
)
def test_what_was_not_announced_is_refused_before_its_bucket_is_loaded(
    scene: Scene, changed: dict[str, torch.Tensor]
) -> None:
    _by_hand(scene, 0)
    before = scene.worker.counts()["buckets"], scene.worker.held()
    scene.driver.begin(1, scene.source.specs())
    with pytest.raises(RefitMismatch) as met:
        scene.driver.load(scene.handles(changed=changed))
    assert met.value.parameter == next(iter(changed))
    assert (scene.worker.counts()["buckets"], scene.worker.held()) == before
    _refuses_to_step(scene)


def test_a_weight_that_comes_twice_is_refused(scene: Scene) -> None:
    name = "model.embed_tokens.weight"
    scene.driver.begin(0, scene.source.specs())
    scene.driver.load(scene.handles([name]))
    with pytest.raises(RefitMismatch) as met:
        scene.driver.load(scene.handles([name]))
    assert met.value.parameter == name
    # The engine has begun a reload that never ends, and must not take the next one's buckets for its own.
    scene.sender.refit(1)
    scene.check()


def test_steps_out_of_order_are_refused(scene: Scene) -> None:
    driver = scene.driver
    for expected, step in (
        (False, lambda: driver.load(scene.handles())),
        (False, lambda: driver.commit(0)),
        (True, lambda: driver.begin(0, scene.source.specs())),
        (False, lambda: driver.commit(0)),
        (True, lambda: driver.load(scene.handles())),
        (True, driver.finish),
        (False, lambda: driver.commit(1)),
        (True, lambda: driver.commit(0)),
    ):
        with nullcontext() if expected else pytest.raises(RefitError):
            step()


def test_gpus_without_a_payload_or_a_trainer_rank_are_named(two: Scene) -> None:
    with pytest.raises(RefitError, match="GPU-00000001"):
        two.sender.refit(0)
    two.driver.require_servable()
    two.driver.begin(0, two.source.specs())
    with pytest.raises(RefitError, match="GPU-00000001"):
        two.driver.load({DEVICE: two.handles()[DEVICE]})


def test_weights_are_guarded_before_anybody_calls_the_worker(extension: type) -> None:
    """From its own start on: neither a driver nor a caller of TensorRT-LLM's contract has to come first."""
    specs = ListSource(some_weights()).specs()
    for worker in DoubleLLM(extension, specs, workers=2, load_format="DUMMY").workers:
        with pytest.raises(EngineDirty):
            worker.step("a")
    (loaded,) = DoubleLLM(extension, specs).workers
    assert loaded.step("a") == "tokens of a"
    loaded.sleep(["model"])
    loaded.wakeup(["model"])
    with pytest.raises(EngineDirty):
        loaded.step("a")


@pytest.mark.parametrize("step", ["forward", "forward_encoder", "forward_multimodal_encoder_items"])
def test_no_step_computes_with_half_loaded_weights(scene: Scene, step: str) -> None:
    """What an encoder makes of them would be kept, and used once the refit has committed."""
    run = getattr(scene.worker.engine.model_engine, step)
    run("a")
    scene.driver.begin(0, scene.source.specs())
    with pytest.raises(EngineDirty):
        run("a")


def test_a_model_that_can_not_be_loaded_again_goes_on_serving(scene: Scene) -> None:
    _by_hand(scene, 0)
    before = scene.worker.held()

    def check_reload_capability() -> None:
        raise NotImplementedError("EPLB")

    scene.worker.engine.model_engine.model.check_reload_capability = check_reload_capability
    with pytest.raises(RefitError, match="NotImplementedError: EPLB"):
        scene.sender.refit(1)
    scene.driver.require_servable()
    assert (scene.driver.version, scene.worker.held()) == (0, before)
    assert scene.worker.step("a") == "tokens of a"


def test_an_engine_that_keeps_what_an_encoder_made_is_not_refitted(scene: Scene) -> None:
    model = scene.worker.engine.model_engine.model
    model.encoder_cache_active = True
    with pytest.raises(RefitError, match="encoder_cache_max_bytes"):
        scene.sender.refit(0)
    scene.driver.require_servable()
    model.encoder_cache_active = False
    scene.sender.refit(0)
    scene.check()


def test_what_verls_server_asks_of_a_worker_is_there_in_all_versions(extension: type) -> None:
    worker = Scene(extension).worker
    worker.wait_for_engine_idle()
    worker.reset_prefix_cache()
    assert worker.counts()["prefix_resets"] == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.sleep(1),
        lambda engine: engine.wake(["weights"]),
        lambda engine: engine.wake(["optimizer"]),
    ],
    ids=["level 1", "awake", "unknown"],
)
def test_what_a_sleep_or_wake_up_would_not_do_is_refused(scene: Scene, call: Any) -> None:
    with pytest.raises(StageRefused):
        call(scene.driver)
    scene.driver.require_servable()


def test_an_engine_without_its_sleep_feature_says_so(scene: Scene) -> None:
    scene.worker.can_sleep = False
    with pytest.raises(RefitError, match="worker 0: ValueError"):
        scene.driver.sleep()
    scene.driver.require_servable()


def _recreates(scene: Scene) -> None:
    """From here on, loading gives a parameter of the model other memory, as for quantized layers."""
    model = scene.worker.engine.model_engine.model
    model.register_parameter("recreated", torch.nn.Parameter(torch.zeros(1)))
    kept = []

    def post_load_weights() -> None:
        kept.append(model.recreated)  # so that its address is not given again
        model.recreated = torch.nn.Parameter(torch.zeros(1))

    model.post_load_weights = post_load_weights


def _assigns_a_number(scene: Scene) -> None:
    model = scene.worker.engine.model_engine.model
    model.scalar_alpha = 0.0

    def post_load_weights() -> None:
        model.scalar_alpha += 0.5

    model.post_load_weights = post_load_weights


@pytest.mark.parametrize("changes", [_recreates, _assigns_a_number])
def test_graphs_that_captured_what_a_refit_changes_are_released(scene: Scene, changes: Any) -> None:
    for version in range(2):
        scene.sender.refit(version)
    assert scene.worker.counts()["graph_releases"] == 0, "all was written in place"
    changes(scene)
    for version in range(2, 4):
        scene.sender.refit(version)
    assert scene.worker.counts()["graph_releases"] == 2


def test_graphs_that_can_not_be_released_are_not_served(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    _recreates(scene)
    monkeypatch.delattr(type(scene.worker.engine.model_engine), "_release_cuda_graphs")
    scene.sender.refit(0)
    assert scene.driver.version == 0, "an engine without graphs needs no way to release them"
    scene.worker.llm_args.cuda_graph_config = object()
    with pytest.raises(RefitError, match="graphs"):
        scene.sender.refit(1)
    _refuses_to_step(scene)


def test_refitted_weights_are_not_computed_with_while_the_kv_cache_sleeps(scene: Scene) -> None:
    scene.driver.sleep(2)
    scene.driver.wake(["weights"])
    assert scene.driver.asleep() == {"kv_cache"}
    scene.sender.refit(0)
    with pytest.raises(EngineDirty, match="kv_cache"):
        scene.worker.step("a")
    scene.driver.wake(["kv_cache"])
    assert scene.worker.step("a") == "tokens of a"
    scene.check()


def test_a_kv_cache_that_slept_alone_needs_no_refit(scene: Scene) -> None:
    scene.worker.sleep(["kv_cache"])
    scene.driver.wake(["kv_cache"])
    assert scene.worker.step("a") == "tokens of a"


def test_workers_tell_of_their_memory(two: Scene) -> None:
    two.driver.empty_cache()
    two.driver.memory(restart=True)
    found = two.driver.memory()
    assert [memory.process for memory in found] == ["engine rank 0", "engine rank 1"]
    assert all(0 < memory.allocated <= memory.peak_allocated < memory.device_total for memory in found)


@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        (lambda found: found[:-1], lambda names: names[-1]),
        (lambda found: [*found, ("lm_head.weight", found[0][1])], lambda names: "lm_head.weight"),
        (lambda found: [found[1], found[0], *found[2:]], lambda names: names[0]),
    ],
    ids=["fewer", "more", "another order"],
)
def test_an_export_that_is_not_as_announced_is_an_error(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, change: Any, parameter: Any
) -> None:
    export = scene.source.export
    monkeypatch.setattr(scene.source, "export", lambda names: iter(change(list(export(names)))))
    with pytest.raises(RefitMismatch) as met:
        TrtllmSender(scene.source, scene.driver, DEVICE, 600, reduce=host_handle).refit(0)
    names = list(scene.source.weights)
    assert (met.value.stage, met.value.parameter) == ("export", parameter(names))
    _refuses_to_step(scene)


def test_workers_that_do_not_answer_end_the_refit(scene: Scene) -> None:
    def never(futures: Sequence[Any], timeout_s: float) -> list[Any]:
        raise TimeoutError

    scene.driver._wait = never
    with pytest.raises(RefitTimeout, match="refit_begin"):
        scene.sender.refit(0)


def test_a_control_action_that_fails_is_a_refit_error_and_the_next_refit_goes_through(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an executor whose loop does not come to the action in time, or has ended."""
    scene.sender.refit(0)

    def control_action(drain: bool = True) -> Any:
        raise RuntimeError("timed out waiting for the executor loop")

    with monkeypatch.context() as patch:
        patch.setattr(scene.worker.engine, "control_action", control_action)
        with pytest.raises(RefitError, match="refit_begin: RuntimeError: timed out"):
            scene.sender.refit(1)
    scene.source.weights = some_weights(seed=2)
    scene.sender.refit(2)
    scene.check()


def test_engines_that_can_not_be_told_apart_or_are_none_have_no_driver(scene: Scene) -> None:
    for llms in ((scene.llms[0], scene.llms[0]), ()):
        with pytest.raises(RefitError):
            TrtllmDriver(*llms, wait=answered)
    with pytest.raises(RefitError, match="rank 0"):
        TrtllmSender(scene.source, None, DEVICE, 600)


def test_workers_with_different_versions_are_told(two: Scene) -> None:
    for llm, version in zip(two.llms, (1, 2), strict=True):
        _by_hand(two, version, TrtllmDriver(llm, wait=answered))
    with pytest.raises(RefitMismatch, match=r"versions \[1, 2\]"):
        two.driver.version  # noqa: B018


def test_an_undecorated_update_weights_is_not_called() -> None:
    """It would be called inside the control action that it opens itself, and wait for ever."""

    def update_weights() -> None: ...

    with pytest.raises(RefitError, match="decorated"):
        compat.uncontrolled(update_weights)


def test_a_package_whose_modules_have_moved_again_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("tensorrt_llm")
    package.__path__ = []
    monkeypatch.setitem(__import__("sys").modules, "tensorrt_llm", package)
    with pytest.raises(RefitError, match=r"tensorrt_llm\.llmapi\.serialization"):
        restricted_loads(b"", {})
