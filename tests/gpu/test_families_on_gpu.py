"""Families whose parts differ from Qwen3's, in a live vLLM under CUDA graphs, by the layouts and derived state that GPUs have.

Each case starts an engine. The trainer is a process on the last GPU, which may be the engine's.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlrefit.integration.config import RefitConfig
from tests.families.checkpoints import quantize_experts, write_pair

from .needs import needs
from .test_drafters_on_gpu import DEEPSEEK
from .vllm_live import (
    CUDA_GRAPHS,
    LiveEngine,
    engine_environment,
    require_refits_to_another_version_and_back,
)
from .vllm_trainer import CONFIG, Trainer

pytestmark = [*needs("vllm", "transformers"), pytest.mark.timeout(200)]

# Of kernels' sizes.
_SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
_EXPERTS = {"moe_intermediate_size": 128, "num_experts": 8}
_MAMBA = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "ssm_state_size": 64,
    "n_routed_experts": 8,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 128,
}
_LINEAR = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "shared_expert_intermediate_size": 128}


@dataclass(frozen=True)
class Case:
    """A family, and the engine of it.

    Attributes:
        family: of ``CONFIGS`` in :mod:`tests.families.checkpoints`.
        changes: of its configuration.
        int4: experts are packed by the trainer.
        arguments: of ``LLM``, beside CUDA graphs.
    """

    family: str
    changes: Mapping[str, Any]
    int4: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> RefitConfig:
        return replace(CONFIG, trainer_quantize_int4=self.int4)


# By kernels that no library of the build has to bring.
_TRITON = {"attention_backend": "TRITON_ATTN"}
_KIMI = DEEPSEEK | {"moe_intermediate_size": 256, "n_group": 1}
CASES = {
    "Gemma 4, heads of two sizes and experts": Case(
        "gemma4-moe",
        {**_EXPERTS, "global_head_dim": 128, "vocab_size_per_layer_input": 1024},
        arguments=_TRITON,
    ),
    "NemotronH, state spaces and experts without gates": Case("nemotron_h", _MAMBA),
    "Qwen3-Next, linear attention and experts": Case(
        "qwen3_next", _EXPERTS | _LINEAR, arguments={"gdn_prefill_backend": "triton"}
    ),
    "GPT-OSS, experts with biases and sinks": Case("gpt_oss", {"num_local_experts": 8}, arguments=_TRITON),
    "Kimi-K2, latent attention and experts": Case(
        "kimi_k2", _KIMI, arguments={"trust_remote_code": True, "moe_backend": "triton"}
    ),
    "Kimi-K2, latent attention and experts in INT4": Case(
        "kimi_k2", _KIMI, int4=True, arguments={"trust_remote_code": True, "moe_backend": "marlin"}
    ),
}


class Scene(LiveEngine):
    """An engine that was started from one of two checkpoints, and a trainer that has both."""

    def __init__(self, folder: Path, trainer: Trainer, case: Case) -> None:
        trained = [str(folder / name) for name in ("a", "b")]
        served = trained[0]
        if case.int4:
            served = str(shutil.copytree(served, folder / "served"))
            quantize_experts(Path(served))
        super().__init__(served, trainer, case.config, {**CUDA_GRAPHS, **case.arguments})
        trainer.commands.put(case.config)
        trainer.commands.put(trained)


def _make_milder(folder: Path) -> None:
    """Of matrices as large as these make no logits that are no numbers."""
    file = folder / "model.safetensors"
    tensors = {name: t * 0.05 if t.ndim > 1 else t for name, t in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """With two checkpoints of each case; all are written first, since vLLM gives transformers other classes for some families."""
    found = {}
    for name, case in CASES.items():
        found[name] = tmp_path_factory.mktemp(case.family)
        for path in write_pair(case.family, found[name], _SIZES | case.changes, router_dtype=torch.float32):
            _make_milder(Path(path))
    return found


@pytest.fixture(scope="module")
def scene(
    request: pytest.FixtureRequest, trainer: Trainer, folders: dict[str, Path], tell: Callable[[str], None]
) -> Iterator[Scene]:
    with engine_environment({}):
        tell(f"starting vLLM: {request.param}")
        began = time.monotonic()
        started = Scene(folders[request.param], trainer, CASES[request.param])
        tell(f"vLLM runs after {time.monotonic() - began:.0f} s: {request.param}")
        yield started
        started.close()


@pytest.mark.parametrize("scene", CASES, indirect=True)
def test_two_refits_give_the_engine_that_was_started_from_the_weights(
    scene: Scene, tell: Callable[[str], None]
) -> None:
    tell(f"{scene.meet()} weights on the misc path")
    # Scalars, and routers' biases.
    require_refits_to_another_version_and_back(scene, most_misc=64)
