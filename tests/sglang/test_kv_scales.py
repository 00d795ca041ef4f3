"""Scales of an FP8 KV cache in SGLang's models: what layers hold after refits is what SGLang makes of a checkpoint with these scales.

``make test-sglang`` runs them (docs/sglang.md).
"""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control import open_rendezvous
from rlrefit.integration.errors import PeerLost, RefitError
from rlrefit.integration.session import RefitSession
from rlrefit.workers.engines.sglang.callers import EngineCaller
from rlrefit.workers.engines.sglang.driver import SglangRefit
from rlrefit.workers.kv_scales.endpoints import KvScaleSource
from tests.gpu.vllm_checkpoints import write_checkpoint
from tests.gpu.vllm_trainer import CheckpointSource
from tests.spawn import run_ranks

from .kv_scale_ranks import CASES, GIVEN, ScaledResult, refit_scales, write_case
from .real_engine import PROMPTS, SAMPLING, start

pytestmark = [
    pytest.mark.timeout(900),  # SGLang loads for a minute where its processes share two cores
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang"),
]
REFITS = {f"{engine} {refit}" for engine in ("nccl_xfer", "packed_broadcast") for refit in range(3)}
# SGLang's Qwen3 and Qwen3-MoE hand no quantization to their attention.
MADE = {"Qwen3": 0, "Qwen3-MoE": 0, "Llama": 2, "Qwen2 in FP8 blocks": 2}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[ScaledResult]]:
    """All cases in one pair of processes."""
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    cases = [write_case(folder / name.replace(" ", "_"), name) for name in CASES]
    by_rank = run_ranks(refit_scales, 2, cases, timeout_s=850)
    return {name: [found[i] for found in by_rank] for i, name in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES)
def test_refits_leave_the_weights_and_scales_that_sglang_loads_where_they_were(
    results: dict[str, list[ScaledResult]], case: str
) -> None:
    for rank in results[case]:
        assert rank.made == MADE[case]
        assert rank.weights.keys() == REFITS
        assert rank.scales.keys() == {*REFITS, "woken"}
        assert not any(rank.weights.values()), rank.weights
        assert not any(rank.scales.values()), rank.scales
        assert rank.moved == []
        for name, (on_device, on_host) in rank.told.items():
            assert on_device == on_host == torch.tensor(GIVEN[0][name]).item()


@pytest.mark.parametrize("case", CASES)
def test_sglangs_memory_pool_stores_by_them(results: dict[str, list[ScaledResult]], case: str) -> None:
    for rank in results[case]:
        assert rank.stored == []
        # Half a step of E4M3's three bits behind the first one.
        assert rank.error <= 1 / 16
        # As torch converts. So recipes calibrate for SGLang with a wider margin than for vLLM, which clips.
        assert rank.nan == bool(torch.tensor(500.0).to(torch.float8_e4m3fn).isnan())


# By case of a refusal, a word of its text.
REFUSED = {
    "torch_native": "attention backend torch_native",
    "flashinfer": "attention backend flashinfer",
    "trtllm_mha": "attention backend trtllm_mha",
    "auto": "KV cache is 'auto'",
    "fp8_e5m2": "KV cache is 'fp8_e5m2'",
    "latent": "latent attention",
    "triton, graphs of decoding": "CUDA graphs keep for ever",
    "triton, graphs of prefill": "CUDA graphs keep for ever",
    "wide heads": "wider than 256",
    "two layers of one cache": "share a cache",
    "bidirectional": "no causal self-attention",
    "AMD": "AMD's",
    "unknown release": "0.5.99",
    "fa3, large queries": "queries of model.layers.0.self_attn",
    "triton, large queries": "queries of model.layers.0.self_attn",
}


@pytest.mark.parametrize("case", CASES)
def test_an_engine_that_would_not_use_all_scales_is_refused_by_name(
    results: dict[str, list[ScaledResult]], case: str
) -> None:
    for rank in results[case]:
        for occasion, word in REFUSED.items():
            assert word in rank.refused[occasion], occasion
        for taken in ("wide heads, triton", "fa3", "fa3, graphs with scales"):
            assert rank.refused[taken] == "", taken
        assert ("captured without any" in rank.refused["fa3, graphs"]) == (MADE[case] == 0)
        assert ("quantization_param_path" in rank.refused["numbers"]) == (MADE[case] == 0)
        for word in ("KV cache is 'auto'", "attention backend flashinfer"):
            assert word in rank.refused["all at once"]


def test_a_real_engine_whose_attention_reads_no_scales_refuses_them_and_goes_on(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 1, fp8=False)
    engine = start(path, "cpu", kv_cache_dtype="fp8_e4m3")
    try:
        refit = SglangRefit(EngineCaller(engine))

        def generated() -> list[Any]:
            outputs = engine.generate(input_ids=PROMPTS, sampling_params=SAMPLING)
            return [output["output_ids"] for output in outputs]

        before = generated()
        trainer = KvScaleSource(CheckpointSource([path], torch.device("cpu")))
        config = RefitConfig(bucket_mb=1, timeout_s=60.0, kv_scales=True)
        with pytest.raises(RefitError, match="don't travel in buckets") as in_buckets:
            refit.begin(0, trainer.specs())
        assert in_buckets.value.parameter in GIVEN[0]
        server = open_rendezvous("127.0.0.1", 1, 1)
        with ThreadPoolExecutor(1) as thread:
            joining = thread.submit(RefitSession.open, server.rendezvous, 0, lambda: trainer, config)
            with pytest.raises(RefitError, match="attention backend torch_native does not read scales"):
                refit.join_refit(server.rendezvous.to_json(), 1, config)
            with pytest.raises(PeerLost):
                joining.result()
        server.close()
        with pytest.raises(RefitError, match="no trainer has been met"):
            refit.calls.ask("kv_scales")
        assert generated() == before
    finally:
        engine.shutdown()
