"""Ranks of an actor of verl's and of its quantized rollout, which meet by the order that verl hands over."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf

from rlrefit.integration.config import RefitConfig
from rlrefit.recipes.rollout.arguments import int4
from rlrefit.workers.frameworks.verl.options import EXTENSION
from rlrefit.workers.frameworks.verl.orders import Order
from tests.fp8_refits import bytes_of, differing, poison
from tests.meeting import meeting_in, tell_meeting, wait_for
from tests.vllm.vllm_fp8_kernels import choose_kernels

TRAIN_RANKS = 2
_READY = "the rollout has loaded its models"
_CONFIG = RefitConfig(bucket_mb=1, timeout_s=120.0, verify="full")


@dataclass(frozen=True)
class Kind:
    """A format, by what asks for it under verl.

    Attributes:
        setting: of the actors.
        quantization: ``actor_rollout_ref.rollout.quantization``.
        overrides: ``rollout.engine_kwargs.vllm.hf_overrides``, which take the place of those that verl makes.
    """

    setting: str
    quantization: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> RefitConfig:
        return replace(_CONFIG, **{self.setting: True})

    @property
    def rollout(self) -> dict[str, Any]:
        """``actor_rollout_ref.rollout``."""
        overrides = {"hf_overrides": self.overrides} if self.overrides else {}
        return {
            "name": "vllm",
            "dtype": "bfloat16",
            "quantization": self.quantization,
            "engine_kwargs": {"vllm": {"worker_extension_cls": EXTENSION, **overrides}},
        }


FP8 = Kind("trainer_quantize_fp8", quantization="fp8")
INT4 = Kind("trainer_quantize_int4", overrides={"quantization_config": int4(32)})


@dataclass(frozen=True)
class QuantizedRollout:
    """What the engine of a rollout saw.

    Attributes:
        patched: the module of the functions that process its layers' loaded weights.
        own: parameters of another dtype than BF16.
        differing: before the first refit and after each, what is not as vLLM loads it of the quantized checkpoint.
        answers: what is served after each.
    """

    patched: set[str]
    own: set[str]
    differing: list[list[str]]
    answers: list[dict[str, Any]]


def actor(rank: int, kind: Kind, trained: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """A model in FP32 under FSDP2, as verl's engine has it: the routes, then each refit's record."""
    from rlrefit.workers.frameworks.verl.source import FSDPSide, source_of
    from tests.fsdp.ranks import Layout, build, mesh_of

    layout = Layout(TRAIN_RANKS)
    mesh = mesh_of(layout)
    model, *others = (build(path, layout, mesh) for path in trained)
    engine = SimpleNamespace(module=model, is_param_offload_enabled=False)
    asked = OmegaConf.create({"actor": {"strategy": "fsdp2"}, "rollout": kind.rollout, "model": {}})
    side = source_of(SimpleNamespace(actor=SimpleNamespace(engine=engine), config=asked), kind.config)
    assert isinstance(side, FSDPSide)
    wait_for(folder / _READY)
    if rank == 0:
        tell_meeting(folder, side.open_refit_rendezvous("127.0.0.1", TRAIN_RANKS, 1, 1))
    answers = [side.join_refit(meeting_in(folder), rank)]
    for version, other in enumerate(others, start=1):
        with torch.no_grad():
            for held, new in zip(model.parameters(), other.parameters(), strict=True):
                held.to_local().copy_(new.to_local())
        answers.append(side.refit(version))
    side.close_refit()
    return answers


def rollout(
    rank: int, kind: Kind, begun: str, served: Sequence[str], folder: Path, path: str
) -> QuantizedRollout:
    """vLLM's model by the configuration that verl's server makes of its settings, in a worker with our extension.

    It begins with random weights of the shapes of ``begun``; ``path`` is where vLLM is found by the name that verl asks for.
    """
    os.environ.update(
        VERL_USE_EXTERNAL_MODULES="examples.verl.cpu_platform",
        VERL_PLATFORM="cpu",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
    )
    sys.path.insert(0, path)
    from vllm import _custom_ops
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    _custom_ops._supports_onednn = False
    choose_kernels()
    with set_current_vllm_config(_config(served[0])):
        init_distributed_environment(1, rank, "env://", rank, "gloo")
        initialize_model_parallel(1, 1)
    worker = _worker(_config(begun, **_by_verls_server(begun, kind)))
    live = worker.model_runner.model
    expected = [bytes_of(_brought(_loaded(_config(path)))) for path in served]
    wrong = [differing(bytes_of(_brought(live)), expected[-1])]
    (folder / _READY).touch()
    meeting, answers = meeting_in(folder), []
    for version, wanted in enumerate(expected, start=1):
        # But compressed-tensors' scales of a cache and its shapes, which no trainer here sends.
        poison(
            t for name, t in live.named_parameters() if ".attn._" not in name and not name.endswith("_shape")
        )
        first = meeting if version == 1 else None
        worker.refit_as_ordered(
            asdict(Order(first, TRAIN_RANKS, TRAIN_RANKS, version, asdict(kind.config), None))
        )
        answers.append(worker.refit_serving_version())
        wrong.append(differing(bytes_of(_brought(live)), wanted))
    worker.close_refit()
    methods = [getattr(module, "quant_method", None) for module in live.modules()]
    return QuantizedRollout(
        {
            type(method).process_weights_after_loading.__globals__["__name__"]
            for method in methods
            if type(method).__name__ in ("Fp8LinearMethod", "Fp8MoEMethod")
        },
        {name for name, held in _brought(live).items() if held.dtype != torch.bfloat16},
        wrong,
        answers,
    )


def _brought(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """All that refits bring: not compressed-tensors' scales of a cache and its shapes."""
    return {
        name: held
        for name, held in model.named_parameters()
        if ".attn._" not in name and not name.endswith("_shape")
    }


def _by_verls_server(model: str, kind: Kind) -> dict[str, Any]:
    """vLLM's arguments, from verl's own function of its settings, and from those that go to vLLM as they are."""
    from transformers import AutoConfig
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    settings = SimpleNamespace(quantization=kind.quantization, qat=None, quantization_config_file=None)
    of_model = SimpleNamespace(hf_config=AutoConfig.from_pretrained(model))
    asked = SimpleNamespace(config=settings, model_config=of_model)
    quantization, overrides = vLLMHttpServer._apply_quantization(asked)
    return {"quantization": quantization, "hf_overrides": kind.overrides or overrides, "load_format": "dummy"}


def _worker(config: Any) -> Any:
    """The worker's part of a vLLM worker; verl's extension patches vLLM as it is made, then the model is loaded."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from rlrefit.workers.frameworks.verl.extension import VerlRefitExtension

    class Worker(VerlRefitExtension):
        rank = 0

        def __init__(self, vllm_config: Any) -> None:
            self.vllm_config = vllm_config

        def sleep(self) -> None: ...
        def wake_up(self) -> None: ...
        def compile_or_warm_up_model(self) -> None: ...
        def reload_weights(self) -> None: ...

    class Runner(GPUModelRunner):
        def __init__(self, model: torch.nn.Module) -> None:
            self.model, self.device = model, torch.device("cpu")

        def reset_encoder_cache(self) -> None: ...

    worker = Worker(vllm_config=config)
    worker.model_runner = Runner(_loaded(config))
    return worker


def _config(model: str, **more: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "max_model_len": 256,
    }
    return EngineArgs(model=model, moe_backend="triton", **arguments, **more).create_engine_config()


def _loaded(config: Any) -> torch.nn.Module:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    with set_current_vllm_config(config):
        return get_model(vllm_config=config)
