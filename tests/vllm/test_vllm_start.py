"""What a vLLM worker says at its start and at its end: what this vLLM lacks, errors with their type, sleep."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import DPEngineCoreProc, EngineCore
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor.abstract import Executor
from vllm.v1.worker.gpu_worker import Worker

from rlrefit.integration.errors import EngineDirty, PeerLost, PlanError, RefitError, RefitTimeout
from rlrefit.integration.quantize.formats import Fp8Blockwise
from rlrefit.integration.session import ServingState
from rlrefit.workers.engines.common.answers import answer, raise_refit_errors
from rlrefit.workers.engines.vllm import plugin
from rlrefit.workers.engines.vllm.compat import (
    PAUSING,
    Needed,
    has,
    require_core,
    require_supported_runner,
    require_supported_vllm,
)
from rlrefit.workers.engines.vllm.destination import VllmRoutes
from rlrefit.workers.engines.vllm.driver import TokenVersions
from rlrefit.workers.engines.vllm.guard import guard_worker
from rlrefit.workers.engines.vllm.patches import Refitted, guard_loaded_models
from rlrefit.workers.engines.vllm.reload import ScopedReload
from rlrefit.workers.engines.vllm.worker_refit import WorkerRefit
from tests.spawn import run_alone
from tests.vllm_processes import vllm_processes


def test_processes_of_the_tests_in_which_rays_workers_may_run_begin_without_ray():
    # Or the workers would not know their job, and end as they start.
    assert not run_alone(has_ray, environment={}, made_by=vllm_processes)


def has_ray() -> bool:
    return "ray" in sys.modules


def test_all_that_a_vllm_lacks_is_told_at_once_with_its_version():
    import vllm

    reload = "vllm.model_executor.model_loader.reload"
    lacking = (
        Needed(f"{reload}.gone", "anything"),
        Needed(reload, "initialize_layerwise_reload.phase"),
        Needed(reload, "initialize_layerwise_reload", ("model", "device", "phase")),
        Needed(f"{reload}.types", "LayerReloadingInfo", ("load_numel", "loaded_bytes")),
        Needed(reload, "finalize_layerwise_reload", ("takes_any_keyword",)),
    )
    with pytest.raises(RefitError) as caught:
        require_supported_vllm(lacking)
    text = str(caught.value)
    assert vllm.__version__ in text
    for part in (
        "gone.anything",
        "initialize_layerwise_reload.phase",
        "no device and no phase",
        "loaded_bytes",
    ):
        assert part in text
    assert "takes_any_keyword" not in text


def test_an_engines_core_that_lacks_what_the_plug_in_touches_is_refused_by_name_and_asked_once():
    class _Core(EngineCore):
        def __init__(self) -> None:
            self.model_executor = SimpleNamespace()

    core = _Core()
    with pytest.raises(RefitError) as caught:
        require_core(core)
    for name in ("model_executor.is_sleeping", "scheduler.running"):
        assert name in str(caught.value)
    core.model_executor.is_sleeping, core.scheduler = False, SimpleNamespace(running=[])
    require_core(core)
    del core.scheduler
    require_core(core)


def test_a_model_runner_that_lacks_what_refits_use_is_refused_before_its_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
):
    loaded: list[Any] = []
    monkeypatch.setattr(_Worker, "load_model", loaded.append)
    guard_loaded_models(_Worker)
    worker: Any = _Worker("dummy")
    worker.model_runner = SimpleNamespace(execute_model=None, device=None)
    for start in (worker.load_model, lambda: WorkerRefit.of(worker)):
        with pytest.raises(RefitError) as caught:
            start()
        assert caught.value.stage == "start"
        for name in ("get_model", "reset_encoder_cache"):
            assert name in str(caught.value)
    assert loaded == []


@pytest.mark.parametrize("version", ["v1.worker.gpu_model_runner", "v1.worker.gpu.model_runner"])
def test_both_model_runners_are_taken(version: str):
    runner = object.__new__(import_module(f"vllm.{version}").GPUModelRunner)
    runner.device = torch.device("cpu")
    require_supported_runner(runner)


def test_steps_of_a_start_run_on_weights_of_no_version_and_steps_of_requests_do_not():
    worker: Any = _Worker("dummy")
    WorkerRefit.of(worker)
    # As Model Runner V2 measures memory, and as it warms its kernels up.
    assert worker.run(1, dummy_run=True) == "ran 1"
    assert worker.compile_or_warm_up_model() == "ran 0"
    with pytest.raises(EngineDirty):
        worker.run(2)


def _failing(error: Exception) -> dict[str, Any]:
    def fail() -> dict[str, Any]:
        raise error

    return answer(fail)


def test_a_workers_error_comes_back_with_its_type_and_place():
    assert raise_refit_errors([{"version": 1}]) == [{"version": 1}]
    failed = _failing(PlanError("a hole", stage="plan", rank=3, parameter="w"))
    with pytest.raises(PlanError, match="vLLM worker 1: a hole") as caught:
        raise_refit_errors([{}, failed])
    assert (caught.value.stage, caught.value.rank, caught.value.parameter) == ("plan", 3, "w")
    with pytest.raises(RefitError, match="ZeroDivisionError"):
        raise_refit_errors([_failing(ZeroDivisionError("by zero"))])


def test_of_several_failing_workers_the_one_with_the_cause_is_heard():
    lost = _failing(PeerLost("rank 3 gave up", rank=2, blamed=3))
    late = _failing(RefitTimeout("too late", rank=3, blamed=1))
    with pytest.raises(RefitTimeout, match="vLLM worker 1") as timeout:
        raise_refit_errors([lost, late, lost])
    assert (timeout.value.rank, timeout.value.blamed) == (3, 1)
    with pytest.raises(PeerLost, match="vLLM worker 0") as left:
        raise_refit_errors([lost, lost])
    assert (left.value.rank, left.value.blamed) == (2, 3)


def test_vllm_takes_the_backends_name_and_still_refuses_unknown_ones():
    plugin.register()
    plugin.register()
    assert plugin.transfer_config().backend == WeightTransferConfig(backend="rlrefit").backend == "rlrefit"
    assert WeightTransferConfig().backend == "nccl"
    # Where the configuration takes any string, vLLM refuses it as it makes the engine.
    with pytest.raises(ValueError, match="nonsense"):
        WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend="nonsense"), *_what_the_factory_takes()
        )
    assert {"nccl", "ipc", "rlrefit"} <= set(WeightTransferEngineFactory._registry)


def _what_the_factory_takes() -> list[None]:
    return [None] * (len(inspect.signature(WeightTransferEngineFactory.create_engine).parameters) - 1)


def test_a_vllm_that_lacks_a_name_starts_without_the_plug_in(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.delattr(EngineCore, "resume_scheduler")
    monkeypatch.setattr(plugin, "accept_backend", lambda config: {}["backend"])
    plugin.register()
    assert len(caplog.records) == 1
    _make_executor("rlrefit")
    assert len(caplog.records) == 2


def _make_executor(backend: str, extension: str = "") -> None:
    """As far as its constructor gets with no more of an engine's configuration than which engine it is."""
    config: Any = SimpleNamespace(
        weight_transfer_config=SimpleNamespace(backend=backend),
        parallel_config=SimpleNamespace(worker_extension_cls=extension),
    )
    with pytest.raises(AttributeError):
        Executor.__init__(SimpleNamespace(), config)  # type: ignore[arg-type]


def _changed_by(*made_for: tuple[str, ...]) -> set[str]:
    """What of vLLM's classes is another function than it was, once the plug-in is loaded and executors are made for these."""
    classes = (EngineCore, DPEngineCoreProc, AsyncScheduler, AsyncLLM, Executor, EngineCoreClient, Worker)
    before = {kind: dict(vars(kind)) for kind in classes}
    plugin.register()
    for engine in made_for:
        _make_executor(*engine)
    return {
        f"{kind.__name__}.{name}"
        for kind, held in before.items()
        for name, value in vars(kind).items()
        if held.get(name) is not value and not name.startswith("_abc_")
    }


def test_of_a_vllm_without_an_engine_of_ours_the_plug_in_replaces_what_tells_it_of_one_alone():
    told = {"Executor.__init__"} | ({"EngineCoreClient.make_async_mp_client"} if has(PAUSING) else set())
    processes = {"environment": {}, "made_by": vllm_processes}
    assert run_alone(_changed_by, **processes) == run_alone(_changed_by, ("nccl",), **processes) == told
    ours = run_alone(_changed_by, ("nccl",), ("nccl", "tests.Extension"), **processes)
    assert ours == run_alone(_changed_by, ("rlrefit",), **processes)
    assert {"EngineCore.collective_rpc", "EngineCore.resume_scheduler"} < ours - told


def test_a_later_vllm_whose_backend_is_a_plain_string_is_left_alone():
    from pydantic.dataclasses import dataclass

    @dataclass
    class Later:
        backend: str = "nccl"

    plugin.accept_backend(Later)
    assert Later(backend="anything").backend == "anything"


class _Runner:
    """What refits use of a model runner, without anything to run."""

    device = torch.device("cpu")

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def execute_model(self, step: Any, dummy_run: bool = False) -> str:
        return f"ran {step.number}"

    def reset_encoder_cache(self) -> None:
        pass

    def get_model(self) -> nn.Module:
        return self.model


class _Worker(Refitted):
    """What the guard touches of vLLM's worker, whose sleep leaves memory where it is."""

    def __init__(self, load_format: str = "auto") -> None:
        self.slept: list[int] = []
        self.vllm_config = SimpleNamespace(
            load_config=SimpleNamespace(load_format=load_format), weight_transfer_config=None
        )
        self.model_runner: Any = _Runner(nn.Linear(2, 2))

    def run(self, number: int, tokens: int = 1, **kind: bool) -> str:
        return self.model_runner.execute_model(
            SimpleNamespace(number=number, total_num_scheduled_tokens=tokens), **kind
        )

    def compile_or_warm_up_model(self) -> str:
        return self.run(0)

    def load_model(self) -> None:
        pass

    def reload_weights(self, weights_path: str) -> None:
        nn.init.ones_(self.model_runner.model.weight)

    def sleep(self, level: int = 1) -> None:
        self.slept.append(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        pass


@pytest.fixture
def worker() -> Any:
    worker = _Worker()
    worker.state = ServingState()
    worker.guard = guard_worker(worker, worker.state)
    return worker


def test_weights_that_were_written_in_part_are_not_run(worker: Any):
    assert worker.run(1) == "ran 1"
    worker.state.mark_dirty(4)
    with pytest.raises(EngineDirty, match="refit 4 began"):
        worker.run(2)
    # By a step without tokens vLLM tells its workers of requests that were aborted: that must not end them.
    assert worker.run(2, tokens=0) == "ran 2"
    worker.state.commit(5)
    assert worker.run(3) == "ran 3"


def test_a_refit_needs_the_weights_awake_and_a_step_all_of_it(worker: Any):
    worker.guard.require_awake()
    for tags in (["kv_cache"], ["weights"]), (["weights"], ["kv_cache"]), (None,):
        worker.sleep(level=1)
        awake: set[str] = set()
        for woken in tags:
            with pytest.raises(EngineDirty, match="asleep"):
                worker.run(1)
            assert worker.run(0, tokens=0) == "ran 0"
            if "weights" not in awake:
                with pytest.raises(RefitError, match="asleep"):
                    worker.guard.require_awake()
            worker.wake_up(woken)
            awake.update(woken or ["weights", "kv_cache"])
        worker.guard.require_awake()
        assert worker.run(1) == "ran 1"
    assert worker.slept == [1] * 3


def test_discarded_weights_are_not_run_before_a_refit(worker: Any):
    worker.sleep(2)
    worker.wake_up(tags=["weights"])
    worker.guard.require_awake()
    # A later sleep of level 1 keeps what is undefined.
    worker.sleep(1)
    worker.wake_up()
    with pytest.raises(EngineDirty, match="level 2"):
        worker.run(1)
    with pytest.raises(RefitError):  # an adapter alone leaves them undefined
        worker.guard.require_base()
    worker.guard.refitted()
    worker.guard.require_base()
    assert worker.run(2) == "ran 2"


def test_a_drafters_own_buffers_outlast_a_sleep_that_discards_where_vllm_does_not_see_to_them(worker: Any):
    served, drafter = worker.model_runner.model, nn.Linear(2, 2)
    served.register_buffer("rotary", torch.ones(3))
    drafter.register_buffer("own", torch.ones(3))
    drafter.rotary = served
    worker.model_runner.drafter = SimpleNamespace(model=drafter)

    def sleep_and_wake(level: int) -> list[float]:
        worker.sleep(level)
        for lost in (served.rotary, drafter.own):
            lost.fill_(7)
        worker.wake_up(["kv_cache"])
        assert drafter.own[0] == 7
        worker.wake_up(["weights"])
        return [float(served.rotary[0]), float(drafter.own[0])]

    # The served model's are vLLM's, which puts them back.
    assert sleep_and_wake(2) == [7, 1]
    drafter.own.fill_(2)
    assert sleep_and_wake(2) == [7, 2]
    assert sleep_and_wake(1) == [7, 7]
    worker._sleep_saved_draft_buffers = {}
    drafter.own.fill_(2)
    assert sleep_and_wake(2) == [7, 7]


def test_constants_beside_parameters_outlast_a_sleep_that_discards(worker: Any):
    """vLLM's norms without a weight compute with such ones, and its kernels of attention with slopes."""
    served = worker.model_runner.model
    served.ones, served.kv_cache, served.bias_again = torch.ones(3), torch.ones(3), served.bias.data
    served.impl = SimpleNamespace(slopes=torch.ones(3), workspace=torch.ones(1 << 23))
    worker.model_runner.kv_caches = [served.impl.__dict__.setdefault("pages", torch.ones(3))]
    impl = served.impl
    lost = served.ones, impl.slopes, served.kv_cache, served.bias_again, impl.pages, impl.workspace

    def sleep_and_wake(level: int) -> list[float]:
        worker.sleep(level)
        for tensor in lost:
            tensor.fill_(7)
        worker.wake_up(["kv_cache"])
        assert served.ones[0] == 7
        worker.wake_up(["weights"])
        return [float(tensor[0]) for tensor in lost]

    assert sleep_and_wake(2) == [1, 1, 7, 7, 7, 7]
    # Of a level 1, which keeps all of it, vLLM sees to everything itself.
    assert sleep_and_wake(1) == [7] * 6


def test_a_sleep_that_discards_is_refused_where_the_model_has_made_a_copy_of_its_weights(worker: Any):
    model = worker.model_runner.model = nn.Module()
    model.gate, model.kept = nn.Linear(24, 4), None
    guard_worker(worker, worker.state)
    worker.sleep(2)
    worker.wake_up()
    model.kept = model.gate.weight.detach().double()
    worker.sleep(1)
    worker.wake_up()
    with pytest.raises(RefitError, match="kept"):
        worker.sleep(2)
    assert worker.slept == [2, 1]


def test_dummy_weights_are_not_run_before_a_refit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_Worker, "load_model", _Worker.load_model)
    guard_loaded_models(_Worker)
    guard_loaded_models(_Worker)
    worker: Any = _Worker("dummy")
    worker.load_model()  # nobody has called a refit's method yet
    guard = WorkerRefit.of(worker).guard
    guard.require_awake()
    with pytest.raises(EngineDirty, match="load_format=dummy"):
        worker.run(1)
    guard.refitted()
    assert worker.run(2) == "ran 2"


def test_weights_that_vllm_reloads_are_no_version_s_and_do_not_make_whole_what_a_refit_left_in_part():
    worker: Any = _Worker()
    refit = WorkerRefit.of(worker)
    refit.refit_state.commit(3)
    assert refit.serving_version() == 3
    worker.reload_weights(weights_path="elsewhere")
    assert refit.serving_version() == -1
    refit.refit_state.mark_dirty(4)
    worker.reload_weights(weights_path="elsewhere")
    with pytest.raises(EngineDirty):
        refit.serving_version()


@pytest.mark.parametrize("backend", [None, "rlrefit"])
def test_workers_of_others_are_guarded_where_they_were_started_with_our_backend_alone(backend: str | None):
    class Foreign:
        __init__, load_model, run = _Worker.__init__, _Worker.load_model, _Worker.run
        sleep, wake_up = _Worker.sleep, _Worker.wake_up
        compile_or_warm_up_model, reload_weights = _Worker.compile_or_warm_up_model, _Worker.reload_weights

    guard_loaded_models(Foreign)
    foreign: Any = Foreign("dummy")
    foreign.vllm_config.weight_transfer_config = backend and SimpleNamespace(backend=backend)
    foreign.load_model()
    if backend is None:
        assert foreign.run(1) == "ran 1"
    else:
        with pytest.raises(EngineDirty, match="load_format=dummy"):
            foreign.run(1)


def test_ranks_count_over_data_parallel_replicas(monkeypatch: pytest.MonkeyPatch):
    joined: list[int] = []
    monkeypatch.setattr(WorkerRefit, "join_refit", lambda self, meeting, rank, *rest: joined.append(rank))
    for replica in range(2):
        for rank in range(2):
            worker: Any = _Worker()
            worker.rank = rank
            worker.vllm_config.parallel_config = SimpleNamespace(data_parallel_index=replica, world_size=2)
            WorkerRefit.of(worker).join({}, 3, {}, "nccl_xfer")
    assert joined == [3, 4, 5, 6]


def test_a_trace_is_outdated_by_another_manifest_parameters_of_another_layout_and_another_promise():
    manifest = (("w", (4, 2), torch.bfloat16),)
    live = {"weight": torch.zeros(4, 2)}
    layout = {"weight": ((4, 2), (2, 1), torch.float32)}
    misc = ScopedReload(nn.Module(), None, torch.device("cpu"), {}, {}, {}, lambda landing: None, {})
    promised = {"w": Fp8Blockwise()}
    routes = VllmRoutes(manifest, layout, promised, {}, (), (), {}, (), misc, {})
    assert not routes.outdated(manifest, live, {"w": Fp8Blockwise()})
    assert routes.outdated((("w", (4, 2), torch.float32),), live, promised)
    assert routes.outdated(manifest, {"weight": torch.zeros(2, 4).t()}, promised)
    assert routes.outdated(manifest, {"weight": torch.zeros(4, 2, dtype=torch.float16)}, promised)
    assert routes.outdated(manifest, live, {})
    assert routes.outdated(manifest, live, {"w": Fp8Blockwise(ue8m0=True)})


class _State:
    parent_req: ClassVar[None] = None

    def __init__(self, request: str, tokens: int) -> None:
        self.external_req_id, self.request_index = request, 0
        self.detokenizer = SimpleNamespace(num_output_tokens=lambda: tokens)


def _output(request: str, tokens: int) -> Any:
    return SimpleNamespace(
        request_id=request, outputs=[SimpleNamespace(index=0, token_ids=list(range(tokens)))]
    )


def test_each_token_has_the_version_that_was_served_when_it_came():
    versions = TokenVersions()
    versions.begin("long", 3)
    versions.begin("finished", 3)
    versions.refitted({"x": _State("long", 2), "foreign": _State("other", 1)}, 4)
    versions.begin("late", 4)
    versions.refitted({"x": _State("long", 2), "y": _State("late", 0)}, 5)
    versions.refitted({"x": _State("long", 5)}, 6)
    assert versions.of(_output("long", 6)).versions == ((3, 3, 5, 5, 5, 6),)
    assert versions.of(_output("long", 1)).versions == ((3,),)
    assert versions.of(_output("finished", 2)).versions == ((3, 3),)
    assert versions.of(_output("late", 1)).versions == ((5,),)
    versions.end("long")
    versions.begin("long", 7)
    assert versions.of(_output("long", 1)).versions == ((7,),)
