"""Refits of real vLLM engines on GPUs: FP8, CUDA graphs, sleep, TP2. The trainer is a process on the last GPU."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.rendezvous import Rendezvous, open_rendezvous

from .vllm_checkpoints import read_checkpoint, write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs at least two CUDA devices"),
]

PROMPTS = [[5, 17, 33, 90], [101, 7, 8, 9, 10, 11], [64], [3 + i % 1000 for i in range(160)]]
CONFIG = RefitConfig(bucket_mb=4, timeout_s=120.0, verify="full")
FP8 = {"fp8": True}
# name → (checkpoint, arguments of LLM, environment)
CASES: dict[str, tuple[dict[str, bool], dict[str, Any], dict[str, str]]] = {
    "eager": ({}, {"enforce_eager": True}, {}),
    "experts": ({"experts": True}, {"enforce_eager": True}, {}),
    "CUDA graphs": (
        {},
        # cudagraph_mode FULL with async scheduling gave other tokens each time on vLLM 0.21, before any refit.
        {
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
            "async_scheduling": False,
        },
        {},
    ),
    "FP8 blocks": (FP8, {"enforce_eager": True}, {"VLLM_USE_DEEP_GEMM": "0"}),
    "FP8 blocks, DeepGEMM": (FP8, {"enforce_eager": True}, {"VLLM_USE_DEEP_GEMM": "1"}),
    "FP8 blocks, experts": (
        {**FP8, "experts": True},
        {"enforce_eager": True},
        {"VLLM_USE_DEEP_GEMM": "0"},
    ),
    "quantized online": ({}, {"enforce_eager": True, "quantization": "fp8"}, {}),
    "TP2": ({}, {"enforce_eager": True, "tensor_parallel_size": 2}, {}),
}


class CheckpointSource:
    """A trainer rank that holds all weights whole, and takes them from one checkpoint after the other."""

    def __init__(self, paths: Sequence[str], device: torch.device) -> None:
        self.device = device
        self._paths = paths
        self._held = {name: tensor.to(device) for name, tensor in read_checkpoint(paths[0]).items()}

    def take_on(self, index: int) -> None:
        for name, tensor in read_checkpoint(self._paths[index]).items():
            self._held[name].copy_(tensor)

    def specs(self) -> list[Any]:
        from rlrefit.integration.manifest import TensorSpec

        return [TensorSpec(name, tuple(t.shape), t.dtype) for name, t in self._held.items()]

    def fragments(self) -> tuple[list[Any], dict[str, str]]:
        from rlrefit.integration.layout import Fragment

        found = [
            Fragment(name, tuple(t.shape), tuple((0, n) for n in t.shape), t)
            for name, t in self._held.items()
        ]
        return found, {}

    def settle(self) -> None:
        pass

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self._held[name]) for name in names)

    def storage_key(self) -> Any:
        return tuple(t.data_ptr() for t in self._held.values())


def trainer_main(device: int, paths: Sequence[str], commands: Any, answers: Any) -> None:
    """Join (a rendezvous) or send (index, version), until told None."""
    from rlrefit.integration.session import RefitSession

    try:
        torch.cuda.set_device(device)
        source = CheckpointSource(paths, torch.device("cuda", device))
        session: RefitSession | None = None
        while (command := commands.get()) is not None:
            if isinstance(command, Rendezvous):
                if session is not None:
                    session.close()
                session = RefitSession.open(command, 0, lambda: source, CONFIG)
                answers.put(len(session.manifest.specs("misc")))
                continue
            assert session is not None
            index, version = command
            source.take_on(index)
            try:
                answers.put(session.refit(version).to_json())
            except RuntimeError as error:
                answers.put(str(error))
    except BaseException:
        answers.put(traceback.format_exc())
        raise


class Scene:
    """An engine on the first GPUs that was started from checkpoint 0, and a trainer on the last one."""

    def __init__(self, folder: Path, checkpoint: dict[str, bool], arguments: dict[str, Any]) -> None:
        kind = {"fp8": False} | checkpoint
        self.paths = [write_checkpoint(folder / f"{seed}", seed, **kind) for seed in (0, 1)]
        from vllm import LLM

        from rlrefit.workers.vllm.driver import VllmDriver

        self.llm = LLM(
            self.paths[0],
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=512,
            gpu_memory_utilization=0.3,
            worker_extension_cls="tests.gpu.vllm_extension.PoisonExtension",
            **arguments,
        )
        self.driver = VllmDriver(self.llm)
        self._ranks = arguments.get("tensor_parallel_size", 1)
        spawn = multiprocessing.get_context("spawn")
        self._commands, self.answers = spawn.Queue(), spawn.Queue()
        device = torch.cuda.device_count() - 1
        self._trainer = spawn.Process(
            target=trainer_main, args=(device, self.paths, self._commands, self.answers)
        )
        self._trainer.start()
        self._server: Any = None
        self.version = -1
        self.reference, self.digests_a = self.generate(), self.digests()

    def meet(self) -> int:
        """A new epoch; the number of weights on the misc path."""
        if self._server is not None:
            self._server.close()
        self._server = open_rendezvous("127.0.0.1", 1, self._ranks)
        self._commands.put(self._server.rendezvous)
        self.driver.init_refit(self._server.rendezvous.to_json(), 1, CONFIG)
        found = self.answers.get(timeout=120)
        assert isinstance(found, int), found
        return found

    def send(self, index: int) -> None:
        self.version += 1
        self._commands.put((index, self.version))

    def refit(self, index: int) -> list[dict[str, Any]]:
        self.send(index)
        records = self.driver.refit(self.version)
        sent = self.answers.get(timeout=120)
        assert isinstance(sent, dict), sent
        return records

    def poison(self) -> None:
        self.llm.collective_rpc("poison")

    def digests(self) -> list[dict[str, str]]:
        return self.llm.collective_rpc("refit_parameter_digests")

    def generate(self, tokens: int = 24) -> list[tuple[list[int], list[float]]]:
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0
        )
        found = self.driver.generate([{"prompt_token_ids": p} for p in PROMPTS], parameters)
        outputs = [f.output.outputs[0] for f in found]
        return [
            (list(o.token_ids), [e[t].logprob for t, e in zip(o.token_ids, o.logprobs, strict=True)])
            for o in outputs
        ]

    def close(self) -> None:
        self._commands.put(None)
        self._trainer.join(20)
        self._trainer.kill()
        if self._server is not None:
            self._server.close()
        self.llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def make_scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    scenes: list[Scene] = []

    def make(checkpoint: dict[str, bool], arguments: dict[str, Any], environment: dict[str, str]) -> Scene:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
        # The engine in a process of its own: its GPU memory goes with it.
        ours = {
            "PYTHONPATH": path,
            "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        }
        for key, value in {**ours, **environment}.items():
            monkeypatch.setenv(key, value)
        scenes.append(Scene(tmp_path, checkpoint, arguments))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.close()


@pytest.mark.parametrize("case", CASES)
def test_two_refits_give_the_engine_that_was_started_from_the_weights(case: str, make_scene: Any) -> None:
    checkpoint, arguments, environment = CASES[case]
    if torch.cuda.device_count() < arguments.get("tensor_parallel_size", 1) + 1:
        pytest.skip("needs a GPU for each rank of the engine and one for the trainer")
    scene = make_scene(checkpoint, arguments, environment)
    misc = scene.meet()
    quantized = checkpoint.get("fp8", False) or "quantization" in arguments
    assert (misc > 0) == quantized
    digests_b = None
    for _ in range(2):
        scene.poison()
        scene.refit(1)
        assert digests_b in (None, scene.digests())
        digests_b = scene.digests()
        assert scene.generate() != scene.reference
        scene.poison()
        scene.refit(0)
        assert scene.digests() == scene.digests_a
        assert scene.generate() == scene.reference
    # The same weights once more change nothing, scales that were rounded to powers of two included.
    scene.refit(0)
    assert scene.digests() == scene.digests_a
    assert scene.generate() == scene.reference


def test_running_requests_survive_a_refit_under_cuda_graphs(make_scene: Any) -> None:
    scene = make_scene(*CASES["CUDA graphs"])
    scene.meet()
    scene.refit(0)
    turned: list[int] = []

    def turn() -> None:
        if len(turned) == 4:
            scene.send(1)
            scene.driver.refit(scene.version)
            scene.answers.get(timeout=120)
        turned.append(scene.version)

    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": p} for p in PROMPTS]
    for found in scene.driver.generate(prompts, parameters, turn):
        [versions] = found.versions
        assert set(versions) == {0, 1}
        assert list(versions) == sorted(versions)
        assert len(versions) == 64


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_is_refitted_between_its_weights_and_its_kv_cache(
    level: int, make_scene: Any
) -> None:
    from rlrefit.integration.errors import EngineDirty, RefitError

    scene = make_scene({}, {"enforce_eager": True, "enable_sleep_mode": True}, {})
    scene.meet()
    scene.refit(1)
    scene.llm.sleep(level)
    scene.send(0)
    with pytest.raises(RefitError, match="asleep"):
        scene.driver.refit(scene.version)
    assert isinstance(scene.answers.get(timeout=120), str)
    scene.llm.wake_up(tags=["weights"])
    if level == 2:
        with pytest.raises(EngineDirty):
            scene.driver.serving_version()
    scene.meet()
    for _ in range(2):
        scene.refit(0)
        assert scene.digests() == scene.digests_a
        scene.llm.wake_up(tags=["kv_cache"])
        assert scene.generate() == scene.reference
        scene.refit(1)
        assert scene.generate() != scene.reference
        scene.llm.sleep(level)
        scene.llm.wake_up(tags=["weights"])


def test_an_engine_that_slept_before_the_first_refit_is_refused(make_scene: Any) -> None:
    """Nobody saw it fall asleep: the weights' addresses say that there is no memory behind them."""
    from rlrefit.integration.errors import RefitError

    scene = make_scene({}, {"enforce_eager": True, "enable_sleep_mode": True}, {})
    scene.llm.sleep(1)
    with pytest.raises((RefitError, AssertionError), match="asleep"):
        scene.meet()
