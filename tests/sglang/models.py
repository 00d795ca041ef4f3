"""SGLang's models on a few ranks without an engine, loaded by its own loaders.

SGLang's CPU build computes with FP8 by AMX alone, so the branches of GPUs are taken, whose loading and processing is Python and
torch, and nothing is computed.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

# Ranks among which the models of this process are shared.
_SHARED = {"tp_size": 2, "ep_size": 1}
_PLACE = {"rank": 0}
# What models of some kinds insist on.
_LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_CHOSEN: dict[str, Any] = {"attention_backend": "torch_native"}


def begin(rank: int, path: str, ranks: int = 2, expert_ranks: int = 1) -> None:
    """Groups of ranks, and the branches of GPUs.

    Args:
        rank: of these.
        path: of a checkpoint of the model's kind.
        ranks: of tensor parallelism.
        expert_ranks: among which the experts are shared, each of them whole on one.
    """
    # SGLang takes a NCCL that it finds for a sign of GPUs.
    os.environ["SGLANG_NCCL_SO_PATH"] = os.devnull
    from sglang.srt import runtime_context
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers import linear
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe.fused_moe_triton import layer
    from sglang.srt.layers.quantization import fp8

    for module in (fp8, linear, layer):
        module._is_cpu = False
    # From 2.14 on torch gives that of the GPUs that it was built for, and some models ask that one for its device.
    torch.get_device_module = lambda device=None: torch.cpu
    _SHARED.update(tp_size=ranks, ep_size=expert_ranks)
    _PLACE["rank"] = rank
    arguments = turn_to(path)
    init_distributed_environment(ranks, rank, "env://", rank, "gloo")
    if hasattr(runtime_context, "SpawnRanks"):  # later releases: whatever is set up reads what was published
        initialize_model_parallel()
        initialize_dp_attention(arguments)
    else:
        initialize_model_parallel(ranks, expert_model_parallel_size=expert_ranks)
        initialize_dp_attention(arguments, _model_config(path))


def turn_to(path: str, attention_backend: str = "torch_native", **others: Any) -> Any:
    """Settings for a model of another kind, in processes that have begun, and these settings."""
    from sglang.srt import runtime_context
    from sglang.srt.layers.moe.utils import initialize_moe_config

    _CHOSEN.clear()
    _CHOSEN.update(attention_backend=attention_backend, **others)
    arguments = _arguments(path)
    if hasattr(runtime_context, "SpawnRanks"):
        places = runtime_context.SpawnRanks(world_rank=_PLACE["rank"], gpu_id=_PLACE["rank"])
        with _as_on_hopper():
            runtime_context.publish(arguments, role="scheduler", ranks=places)
        initialize_moe_config()
    else:
        from sglang.srt.server_args import set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(arguments)
        initialize_moe_config(arguments)
    return arguments


def matrices(experts: bool) -> set[str]:
    """Names of the weights of all matrices in the two decoder layers of a tiny Qwen3, which has 8 experts or none."""
    mlp = [f"mlp.experts.{expert}." for expert in range(8)] if experts else ["mlp."]
    modules = [
        *_LINEAR,
        *(f"{where}{part}" for where in mlp for part in ("gate_proj", "up_proj", "down_proj")),
    ]
    return {f"model.layers.{layer}.{module}.weight" for layer in range(2) for module in modules}


def load_model(path: str, head: str | None = None, load_format: str = "auto", **arguments: Any) -> Any:
    """What a refit uses of a ``ModelRunner``, its model loaded from a checkpoint by SGLang.

    Args:
        path: of the checkpoint.
        head: of one that drafts for the model at ``path``, which is loaded in its place; None for the model itself.
        load_format: as SGLang's.
        arguments: others of a server.
    """
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader import get_model

    config, load_config = _model_config(path, head, **arguments), LoadConfig(load_format=load_format)
    model = get_model(model_config=config, load_config=load_config, device_config=DeviceConfig("cpu"))
    return SimpleNamespace(
        model=model, model_config=config, load_config=load_config, server_args=_arguments(path, **arguments)
    )


def _model_config(path: str, head: str | None = None, **arguments: Any) -> Any:
    from sglang.srt.configs.model_config import ModelConfig

    asked = _arguments(path, **arguments)
    return ModelConfig.from_server_args(asked, model_path=head, is_draft_model=head is not None)


def _as_on_hopper() -> AbstractContextManager[Any]:
    """Sparse attention has SGLang's settings ask for the GPU, whatever the device: for kernels that compute nothing here."""
    return patch("torch.cuda.get_device_capability", return_value=(9, 0))


def _arguments(path: str, **arguments: Any) -> Any:
    from sglang.srt.server_args import ServerArgs

    with _as_on_hopper():
        return ServerArgs(
            model_path=path,
            device="cpu",
            dtype="bfloat16",
            **_SHARED,
            skip_tokenizer_init=True,
            **_CHOSEN,
            disable_radix_cache=True,
            sampling_backend="pytorch",
            grammar_backend="none",
            moe_runner_backend="triton",
            **arguments,
        )
