"""An FP8 KV cache in a real SGLang engine on one GPU, whose scales come with refits from a trainer in this process.

Values are so small that a cache without scales loses nearly all of them. Log-probabilities of given tokens, behind a prefix that is
read from the cache, are compared with those of an engine whose cache is BF16.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control import open_rendezvous
from rlrefit.integration.errors import RefitError
from rlrefit.integration.session import RefitSession
from rlrefit.workers.engines.sglang.callers import EngineCaller
from rlrefit.workers.engines.sglang.driver import SglangRefit
from rlrefit.workers.kv_scales.endpoints import KvScaleSource
from tests.sglang.real_engine import start

from .needs import needs
from .vllm_checkpoints import read_checkpoint, write_checkpoint
from .vllm_trainer import CheckpointSource

pytestmark = [
    *needs("sglang"),
    # SGLang compiles kernels for its first batch, in two engines.
    pytest.mark.timeout(500),
]
CONFIG = RefitConfig(bucket_mb=16, timeout_s=120.0, verify="full", kv_scales=True)
LAYERS = [f"model.layers.{i}.self_attn" for i in range(2)]
# By a power of two, so that attention in BF16 is what it was.
SMALL = 2.0**-10
PREFIX, REST = [5 + 7 * i % 1000 for i in range(96)], [11 + 13 * i % 1000 for i in range(32)]


def write_small_values(path: Path, seed: int) -> str:
    """A Qwen3 whose values are small and whose output projections are as much larger.

    Keys stay as they are: queries would have to be larger by as much, and become FP8 without a scale.
    """
    write_checkpoint(path, seed, fp8=False)
    tensors = read_checkpoint(str(path))
    for name in tensors:
        if name.endswith("v_proj.weight"):
            tensors[name] *= SMALL
        elif name.endswith("o_proj.weight"):
            tensors[name] /= SMALL
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


def scales(keys: float, values: float) -> dict[str, float]:
    """For keys and values of these magnitudes."""
    return {
        f"{layer}.{kind}_scale": amax / 448 for layer in LAYERS for kind, amax in (("k", keys), ("v", values))
    }


# A normed head of 64 numbers has none above 8, and its weights few above 1.5.
CALIBRATED = (scales(12.0, 16 * SMALL), scales(16.0, 24 * SMALL))
ONES = scales(448.0, 448.0)


def told(engine: Any) -> torch.Tensor:
    """Log-probabilities of REST behind PREFIX, whose keys and values are in the cache."""
    engine.generate(input_ids=PREFIX, sampling_params={"temperature": 0.0, "max_new_tokens": 1})
    found = engine.generate(
        input_ids=PREFIX + REST,
        sampling_params={"temperature": 0.0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=len(PREFIX),
    )["meta_info"]
    assert found["cached_tokens"] >= len(PREFIX) - 1
    return torch.tensor([value for value, *_ in found["input_token_logprobs"][1:]])


def apart(found: torch.Tensor, true: torch.Tensor) -> float:
    """The mean distance of log-probabilities; what is not a number is far away."""
    return (found - true).abs().nan_to_num(nan=100.0).mean().item()


class Trainer(KvScaleSource):
    """One rank in this process, on the engine's GPU."""

    def __init__(self, paths: list[str], device: torch.device) -> None:
        self.checkpoints = CheckpointSource(paths, device)
        super().__init__(self.checkpoints)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("small values")
    return [write_small_values(folder / f"{seed}", seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def true(paths: list[str]) -> list[torch.Tensor]:
    """Of both checkpoints, with a cache in BF16."""
    found = []
    for path in paths:
        engine = start(path, "cuda")
        found.append(told(engine))
        engine.shutdown()
    return found


@pytest.fixture
def engine(paths: list[str], true: list[torch.Tensor]) -> Iterator[Any]:
    started = start(paths[0], "cuda", kv_cache_dtype="fp8_e4m3")
    yield started
    started.shutdown()


def test_refits_bring_scales_with_which_the_cache_keeps_what_bf16_does(
    paths: list[str], true: list[torch.Tensor], engine: Any, tell: Callable[[str], None]
) -> None:
    refit = SglangRefit(EngineCaller(engine))
    with pytest.raises(RefitError, match="no trainer has been met"):
        refit.calls.ask("kv_scales")
    without = told(engine)
    trainer = Trainer(paths, torch.device("cuda", 0))
    with ThreadPoolExecutor(1) as thread:
        server = open_rendezvous("127.0.0.1", 1, 1)
        meeting = server.rendezvous
        joining = thread.submit(
            RefitSession.open, meeting, 0, lambda: trainer, CONFIG, engine="colocated_ipc"
        )
        refit.join_refit(meeting.to_json(), 1, CONFIG, "colocated_ipc")
        session = joining.result()

        def bring(version: int, index: int, given: dict[str, float] | None) -> torch.Tensor:
            trainer.checkpoints.take_on(index)
            if given is not None:
                trainer.give(given)
            sending = thread.submit(session.refit, version)
            refit.refit(version)
            sending.result()
            return told(engine)

        # Before any calibration the layers have scales of 1, which are as good as none.
        lost = apart(without, true[0])
        assert apart(bring(1, 0, None), without) < lost / 10
        for version, index in enumerate((1, 0, 1, 0), 2):
            error = apart(bring(version, index, CALIBRATED[index]), true[index])
            tell(json.dumps({"version": version, "error": error, "without": lost}))
            assert error < lost / 4
            [worker] = refit.calls.ask("kv_scales")
            for name, held in worker["scales"].items():
                assert held == [torch.tensor(CALIBRATED[index][name]).item()] * 2
        assert apart(bring(6, 0, ONES), without) < lost / 10
        closing = thread.submit(session.close)
        refit.close_refit()
        closing.result()
        server.close()


def test_graphs_that_would_keep_the_scales_are_refused(paths: list[str], true: list[torch.Tensor]) -> None:
    engine = start(
        paths[0],
        "cuda",
        kv_cache_dtype="fp8_e4m3",
        disable_cuda_graph=False,
        disable_prefill_cuda_graph=True,
        cuda_graph_max_bs_decode=2,
    )
    try:
        refit = SglangRefit(EngineCaller(engine))
        before = told(engine)
        trainer = Trainer(paths, torch.device("cuda", 0))
        with ThreadPoolExecutor(1) as thread:
            server = open_rendezvous("127.0.0.1", 1, 1)
            joining = thread.submit(
                RefitSession.open, server.rendezvous, 0, lambda: trainer, CONFIG, engine="colocated_ipc"
            )
            with pytest.raises(RefitError, match="CUDA graphs keep for ever"):
                refit.join_refit(server.rendezvous.to_json(), 1, CONFIG, "colocated_ipc")
            with pytest.raises(RefitError):
                joining.result()
            server.close()
        assert torch.equal(told(engine), before)
    finally:
        engine.shutdown()
