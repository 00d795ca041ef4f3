"""Ranks of an actor of verl's and of its FP8 rollout, which meet by the order that verl hands over."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf

from rlrefit.integration.config import RefitConfig
from rlrefit.workers.frameworks.verl.options import EXTENSION
from rlrefit.workers.frameworks.verl.orders import Order
from tests.fp8_refits import bytes_of, differing, poison
from tests.meeting import meeting_in, tell_meeting, wait_for
from tests.vllm.vllm_fp8_kernels import choose_kernels

TRAIN_RANKS = 2
_READY = "the rollout has loaded its models"
CONFIG = RefitConfig(bucket_mb=1, timeout_s=120.0, verify="full", trainer_quantize_fp8=True)
_ROLLOUT = {
    "name": "vllm",
    "dtype": "bfloat16",
    "quantization": "fp8",
    "engine_kwargs": {"vllm": {"worker_extension_cls": EXTENSION}},
}


@dataclass(frozen=True)
class Fp8Rollout:
    """What the engine of a rollout saw.

    Attributes:
        patched: the module of the functions that process its layers' loaded weights.
        own: parameters of another dtype than BF16.
        differing: before the first refit and after each, what is not as vLLM loads it of the checkpoint in FP8.
        answers: what is served after each.
    """

    patched: set[str]
    own: set[str]
    differing: list[list[str]]
    answers: list[dict[str, Any]]


def actor(rank: int, trained: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """A model in FP32 under FSDP2, as verl's engine has it: the routes, then each refit's record."""
    from rlrefit.workers.frameworks.verl.source import FSDPSide, source_of
    from tests.fsdp.ranks import Layout, build, mesh_of

    layout = Layout(TRAIN_RANKS)
    mesh = mesh_of(layout)
    model, *others = (build(path, layout, mesh) for path in trained)
    engine = SimpleNamespace(module=model, is_param_offload_enabled=False)
    asked = OmegaConf.create({"actor": {"strategy": "fsdp2"}, "rollout": _ROLLOUT, "model": {}})
    side = source_of(SimpleNamespace(actor=SimpleNamespace(engine=engine), config=asked), CONFIG)
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


def rollout(rank: int, begun: str, served: Sequence[str], folder: Path, path: str) -> Fp8Rollout:
    """vLLM's model by the configuration that verl's server makes of ``quantization: fp8``, in a worker with our extension.

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
    worker = _worker(_config(begun, **_by_verls_server(begun)))
    live = worker.model_runner.model
    expected = [bytes_of(dict(_loaded(_config(path)).named_parameters())) for path in served]
    wrong = [differing(bytes_of(dict(live.named_parameters())), expected[-1])]
    (folder / _READY).touch()
    meeting, answers = meeting_in(folder), []
    for version, wanted in enumerate(expected, start=1):
        poison(live.parameters())
        first = meeting if version == 1 else None
        worker.refit_as_ordered(asdict(Order(first, TRAIN_RANKS, TRAIN_RANKS, version, asdict(CONFIG), None)))
        answers.append(worker.refit_serving_version())
        wrong.append(differing(bytes_of(dict(live.named_parameters())), wanted))
    worker.close_refit()
    methods = [getattr(module, "quant_method", None) for module in live.modules()]
    return Fp8Rollout(
        {
            type(method).process_weights_after_loading.__globals__["__name__"]
            for method in methods
            if type(method).__name__ in ("Fp8LinearMethod", "Fp8MoEMethod")
        },
        {name for name, held in live.named_parameters() if held.dtype != torch.bfloat16},
        wrong,
        answers,
    )


def _by_verls_server(model: str) -> dict[str, Any]:
    """vLLM's arguments, from verl's own function of its settings."""
    from transformers import AutoConfig
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    settings = SimpleNamespace(quantization="fp8", qat=None, quantization_config_file=None)
    of_model = SimpleNamespace(hf_config=AutoConfig.from_pretrained(model))
    asked = SimpleNamespace(config=settings, model_config=of_model)
    quantization, overrides = vLLMHttpServer._apply_quantization(asked)
    return {"quantization": quantization, "hf_overrides": overrides, "load_format": "dummy"}


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
