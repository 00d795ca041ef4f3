"""Hold rlrefit to TensorRT-LLM's published Python sources, without its compiled parts and without a GPU.

    python -m tests.trtllm.against_sources FOLDER

FOLDER is a checkout of TensorRT-LLM, or holds single files of one in their places (``tensorrt_llm/llmapi/rlhf_utils.py``, its
``serialization.py`` and the module of ``control_action_decorator`` at least). Those of :data:`.published.PUBLISHED` that are
there are run as they are. It is not one of pytest's tests, since the repository holds none of that code.
"""

from __future__ import annotations

import argparse
import base64
import importlib
import inspect
import logging
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from rlrefit.integration.errors import EngineDirty, RefitError, RefitMismatch
from rlrefit.workers.engines.trtllm.driver import EXTENSION, TrtllmDriver
from rlrefit.workers.engines.trtllm.payload import decode, encode
from rlrefit.workers.engines.trtllm.sender import TrtllmSender

from .engine_double import AtOnceModel, Model, TextModel, VisionModel, answered, expected, injected
from .package_double import get_device_uuid
from .published import MEMORY, NOT_RUN, TorchLlmArgs, cuda_shaped, installed, model_loader, ray_worker
from .sources import ListSource, some_weights
from .test_payloads import FORMS, hostile

DEVICE = get_device_uuid(0)
CHECKS: list[Callable[[], None]] = []


class NotHere(Exception):
    """What a check would run is not among the files of the folder, or can't run without what is compiled."""


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


class Case:
    """A trainer rank and an engine of one worker, of TensorRT-LLM's own class where the folder has it.

    It is the ``LLM`` of its driver.
    """

    def __init__(
        self,
        extension: str = EXTENSION,
        *,
        kind: type[Model] = TextModel,
        load_format: str = "AUTO",
        weights: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.source = ListSource(weights or some_weights())
        self._kept: list[torch.Tensor] = []
        model = kind(self.source.specs(), "cpu")
        llm_args = TorchLlmArgs(load_format=SimpleNamespace(name=load_format), sleep_config=object())
        module = ray_worker()
        if module is None:
            path, _, name = extension.rpartition(".")
            self.worker = injected(getattr(importlib.import_module(path), name))(0, model, load_format, None)
            self._call = lambda method, *args: getattr(self.worker, method)(*args)
        else:
            wrapper = module.RayWorkerWrapper.__ray_metadata__.modified_class
            cls = wrapper._inject_worker_extension(module.RayGPUWorker, extension)
            self.worker = cls(0, engine=model, hf_model_dir=None, llm_args=llm_args, rpc_addr="none")
            actor = object.__new__(wrapper)
            vars(actor).update(worker=self.worker, _has_setup_distributed_env_and_worker=True)
            self._call = actor.call_worker_method
        if self.worker.engine is None:
            self._call("setup_engine")
        self.engine.model_engine.model_loader = model_loader()

    @property
    def engine(self) -> Any:
        return self.worker.engine

    @property
    def loader(self) -> Any:
        return self.engine.model_engine.model_loader

    def _collective_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: Any = None, non_block: bool = False
    ) -> list[Any]:
        return [self._call(method, *args)]

    def driven(self) -> tuple[TrtllmDriver, TrtllmSender]:
        driver = TrtllmDriver(self, wait=answered)
        return driver, TrtllmSender(self.source, driver, DEVICE, 600, reduce=cuda_shaped)

    def handle(self, tensor: torch.Tensor) -> Any:
        """Of a copy, whose memory stays."""
        self._kept.append(tensor.clone())
        return cuda_shaped(self._kept[-1])

    def bucket(self, *names: str) -> dict[str, str]:
        chosen = names or tuple(self.source.weights)
        return {DEVICE: encode([(name, self.source.weights[name]) for name in chosen], self.handle)}

    def update(self, handles: Any) -> None:
        self._call("update_weights", handles)

    def step(self) -> str:
        return str(self.engine.model_engine.forward("a"))

    def require_held(self) -> None:
        model = self.engine.model_engine.model
        held = {
            name: t.view(torch.uint8).numpy().tobytes() for name, t in (model.held | model.derived).items()
        }
        assert held == expected(self.source.weights)


def refused(error: type[BaseException], call: Callable[[], object], text: str = "") -> None:
    try:
        call()
    except error as met:
        if text not in str(met):
            raise AssertionError(f"{met!r} does not say {text!r}") from met
        return
    raise AssertionError(f"no {error.__name__}")


@check
def an_engine_is_guarded_from_setup_engine_on() -> None:
    case = Case(load_format="DUMMY")
    refused(EngineDirty, case.step)
    assert Case().step() == "tokens of a"


@check
def two_refits_in_buckets_land_bit_for_bit_and_finalize_once() -> None:
    case = Case(load_format="DUMMY")
    driver, sender = case.driven()
    for version in range(2):
        case.source.weights = some_weights(version)
        sender.refit(version)
        case.require_held()
        assert (driver.version, case.step()) == (version, "tokens of a")
    model = case.engine.model_engine.model
    assert case.loader.buckets >= 12
    assert (model.reloads, case.engine.prefix_resets) == (2, 2)
    assert not hasattr(model, "first_pre_reload_weights")


@check
def buckets_and_none_alone_refit_too() -> None:
    case = Case()
    names = list(case.source.weights)
    for seed in range(2):
        case.source.weights = some_weights(seed)
        for part in (names[:4], names[4:]):
            case.update(case.bucket(*part))
            refused(EngineDirty, case.step)
        case.update(None)
        case.require_held()
        assert case.step() == "tokens of a"
    case.update(case.bucket(*names[1:]))
    refused(RefitMismatch, lambda: case.update(None))
    refused(EngineDirty, case.step)


@check
def each_form_of_a_handle_is_read() -> None:
    for form in FORMS.values():
        case = Case()
        entries = []
        for name, tensor in case.source.weights.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            raw = tensor.view(torch.uint8) if "float8" in dtype else tensor
            entries.append(form(name, case.handle(raw), dtype))
        case.update({DEVICE: base64.b64encode(pickle.dumps(entries)).decode()})
        case.update(None)
        case.require_held()
    case = Case()
    entries = [(name, case.handle(tensor)) for name, tensor in case.source.weights.items()]
    case.update({DEVICE: entries})  # float8 as it is, in a list that saw no unpickler
    case.update(None)
    case.require_held()


@check
def bf16_payloads_reach_tensorrt_llms_own_extension() -> None:
    weights = {name: t for name, t in some_weights().items() if t.dtype == torch.bfloat16}
    case = Case("tensorrt_llm.llmapi.rlhf_utils.WorkerExtension", weights=weights)
    for seed in range(2):
        case.source.weights = {name: some_weights(seed)[name] for name in weights}
        for name in weights:
            case.update(case.bucket(name))
        case.update(None)
        case.require_held()


@check
def float8_in_bytes_is_not_taken_for_numbers_by_tensorrt_llms_own_extension() -> None:
    case = Case("tensorrt_llm.llmapi.rlhf_utils.WorkerExtension")
    refused(ValueError, lambda: case.update(case.bucket()), "too many values to unpack")
    assert case.loader.buckets == 0


@check
def the_unpickler_lets_in_what_is_approved_and_nothing_else() -> None:
    for payload in hostile().values():
        encoded = base64.b64encode(payload).decode()
        refused(RefitError, lambda encoded=encoded: decode(encoded), "restricted unpickler refused")  # type: ignore[misc]


@check
def a_failed_load_is_not_served_and_the_next_refit_mends_it() -> None:
    case = Case()
    driver, sender = case.driven()
    sender.refit(0)
    case.loader.fail_at = case.loader.buckets + 2
    refused(RefitError, lambda: sender.refit(1), "out of memory")
    refused(EngineDirty, case.step)
    refused(EngineDirty, driver.require_servable)
    before = case.engine.model_engine.model.reloads
    case.source.weights = some_weights(2)
    sender.refit(2)
    case.require_held()
    assert case.engine.model_engine.model.reloads == before + 1, "the failed refit's reload went on"


@check
def a_refit_that_is_begun_again_reloads_anew() -> None:
    case = Case()
    driver, _ = case.driven()
    for version in range(2):
        driver.begin(version, case.source.specs())
        driver.load(case.bucket(*list(case.source.weights)[: 3 if version == 0 else None]))
    driver.finish()
    driver.commit(1)
    case.require_held()
    assert case.engine.model_engine.model.reloads == 2


@check
def what_fails_while_it_finalizes_is_not_served() -> None:
    case = Case()
    _, sender = case.driven()
    model = case.engine.model_engine.model

    def post_load_weights() -> None:
        raise RuntimeError("torn")

    model.post_load_weights = post_load_weights
    refused(RefitError, lambda: sender.refit(0), "torn")
    refused(EngineDirty, case.step)
    del model.post_load_weights
    sender.refit(1)
    case.require_held()


@check
def payloads_for_other_gpus_are_refused() -> None:
    case = Case()
    handles = {"GPU-of-another": case.bucket()[DEVICE]}
    refused(RefitError, lambda: case.update(handles), "GPU-of-another")
    assert case.loader.buckets == 0


@check
def a_model_or_layers_without_partial_loading_get_all_weights_at_once() -> None:
    for kind in (VisionModel, AtOnceModel):
        case = Case(kind=kind)
        driver, sender = case.driven()
        assert not driver.loads_in_parts
        for version in range(2):
            case.source.weights = some_weights(version)
            sender.refit(version)
            case.require_held()
        assert case.loader.buckets == 2
        assert "reload" not in vars(case.loader)


@check
def a_model_that_says_that_it_can_not_be_loaded_again_goes_on_serving() -> None:
    case = Case()
    _, sender = case.driven()

    def check_reload_capability() -> None:
        raise NotImplementedError("EPLB")

    case.engine.model_engine.model.check_reload_capability = check_reload_capability
    refused(RefitError, lambda: sender.refit(0), "EPLB")
    assert case.step() == "tokens of a"


@check
def weights_stands_for_all_tags_of_memory_but_the_kv_cache() -> None:
    driver, _ = Case().driven()
    assert {"model", "sampler"} <= set(driver._tags)
    assert not [tag for tag in driver._tags if tag.startswith("_") or tag == "kv_cache"]


@check
def the_engines_worker_sleeps_and_wakes_by_these_tags() -> None:
    module = ray_worker()
    if module is None:
        raise NotHere("no executor/ray/gpu_worker.py")
    if "get_memory_status" in inspect.getsource(module.RayGPUWorker):
        raise NotHere("this worker's sleep goes through states of PyExecutor, which has no stand-in")
    case = Case()
    driver, sender = case.driven()
    MEMORY.calls.clear()
    driver.sleep()
    refused(EngineDirty, case.step)
    refused(RefitError, lambda: sender.refit(0), "asleep")
    driver.wake(["weights"])
    case.source.weights = some_weights(1)
    sender.refit(1)
    refused(EngineDirty, case.step, "kv_cache")
    driver.wake(["kv_cache"])
    assert case.step() == "tokens of a"
    case.require_held()
    for kind in ("release", "materialize"):
        assert sorted(tag for call, tag in MEMORY.calls if call == kind) == sorted(
            [*driver._tags, "kv_cache"]
        )
    case.worker.llm_args.sleep_config = None
    refused(RefitError, driver.sleep, "Sleep feature is not enabled")


@check
def verls_questions_are_answered() -> None:
    case = Case()
    case._call("wait_for_engine_idle")
    case._call("reset_prefix_cache")
    assert case.engine.prefix_resets == 1


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="a checkout of TensorRT-LLM, or files of one"
    )
    folder = parser.parse_args().folder
    logging.disable(logging.CRITICAL)  # the failures are meant
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    passed, not_here, failed = 0, 0, 0
    try:
        with installed(folder) as finder:
            files = finder.files()
            if "llmapi/rlhf_utils.py" not in files:
                parser.error(f"{folder} has no tensorrt_llm/llmapi/rlhf_utils.py")
            for name, blob in files.items():
                _say(f"runs {blob} {name}")
            for name in ("gpu_worker", "model_loader", "virtual_memory"):
                if not any(name in file for file in files):
                    _say(f"has no {name}.py: rlrefit's double stands in")
            for run in CHECKS:
                told = run.__name__.replace("_", " ")
                try:
                    run()
                except NotHere as reason:
                    not_here += 1
                    _say(f"not run: {told}: {reason}")
                except Exception:
                    failed += 1
                    _say(f"FAILED: {told}\n{traceback.format_exc()}")
                else:
                    passed += 1
                    _say(f"passed: {told}")
    finally:
        dist.destroy_process_group()
    _say("\n  ".join(["Not run anywhere, and why:", *NOT_RUN]))
    _say(f"{passed} passed, {not_here} not run, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
