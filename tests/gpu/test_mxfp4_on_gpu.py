"""GPT-OSS in MXFP4 in a live vLLM on a GPU before Blackwell, by Marlin, and refits of a trainer that holds its experts in BF16.

The trainer is a process on the last GPU, which may be the engine's. The oracle is another engine, which vLLM started from a checkpoint in
MXFP4 of the weights that are sent. Three engines start, in half a minute each.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.oss_checkpoints import unpacked, write_oss

from .needs import needs
from .vllm_live import CUDA_GRAPHS, EAGER, LiveEngine, engine_environment
from .vllm_trainer import CONFIG, Trainer

pytestmark = [*needs("vllm", "transformers"), pytest.mark.timeout(300)]

MXFP4 = replace(CONFIG, trainer_quantize_mxfp4=True)
# Marlin pads both.
SIZES = (320, 160)
_MODEL = {
    "vocab_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Attention with sinks, by a kernel that no library of the build has to bring.
_MARLIN = {"moe_backend": "marlin", "attention_backend": "TRITON_ATTN"}
CASES = {"eager": EAGER, "CUDA graphs": CUDA_GRAPHS}


@dataclass(frozen=True)
class Loaded:
    """Checkpoints A and B, and what an engine is and says that vLLM started from B."""

    paths: list[Path]
    digests: list[dict[str, str]]
    said: Any


@pytest.fixture(scope="module")
def loaded(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory, tell: Callable[[str], None]) -> Loaded:
    importlib.import_module("vllm")
    folder = tmp_path_factory.mktemp("mxfp4")
    paths = [write_oss(folder, SIZES, seed, **_MODEL) for seed in (0, 1)]
    with engine_environment({}):
        tell("starting vLLM from the weights that will be sent")
        engine = LiveEngine(str(paths[1]), trainer, MXFP4, EAGER | _MARLIN)
        found = Loaded(paths, engine.digests(), engine.generate())
        engine.close()
    return found


@pytest.fixture(scope="module", params=CASES)
def engine(
    request: pytest.FixtureRequest, trainer: Trainer, loaded: Loaded, tell: Callable[[str], None]
) -> Iterator[LiveEngine]:
    with engine_environment({}):
        tell(f"starting vLLM: {request.param}")
        trainer.commands.put(MXFP4)
        trainer.commands.put([str(unpacked(path)) for path in loaded.paths])
        started = LiveEngine(str(loaded.paths[0]), trainer, MXFP4, CASES[request.param] | _MARLIN)
        yield started
        started.close()


def test_refits_give_the_engine_that_vllm_starts_from_the_packed_checkpoint(
    engine: LiveEngine, loaded: Loaded
) -> None:
    assert engine.llm.collective_rpc("mxfp4_backends") == [["MARLIN"]]
    digests_a, said_a = engine.digests(), engine.generate()
    assert digests_a != loaded.digests
    # Nothing goes through vLLM's loader: packed experts land as they are, and are put in Marlin's order where they are.
    assert engine.meet() == 0
    for _ in range(2):
        engine.poison()
        records = engine.refit(1)
        assert [record["bytes_misc"] for record in records] == [0]
        assert engine.digests() == loaded.digests
        tokens = [tokens for tokens, _ in engine.generate()]
        assert tokens == [tokens for tokens, _ in loaded.said]
        engine.poison()
        engine.refit(0)
        assert engine.digests() == digests_a
        assert engine.generate() == said_a
