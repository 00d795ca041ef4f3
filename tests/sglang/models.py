"""SGLang's models on two ranks without an engine, loaded by its own loaders.

SGLang's CPU build computes with FP8 by AMX alone, so the branches of GPUs are taken, whose loading and processing is Python and
torch, and nothing is computed.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any


def begin(rank: int, path: str) -> None:
    """Groups of two ranks, and the branches of GPUs."""
    # SGLang takes a NCCL that it finds for a sign of GPUs.
    os.environ["SGLANG_NCCL_SO_PATH"] = os.devnull
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers import linear
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe.fused_moe_triton import layer
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.layers.quantization import fp8
    from sglang.srt.server_args import set_global_server_args_for_scheduler

    for module in (fp8, linear, layer):
        module._is_cpu = False
    arguments = _arguments(path)
    set_global_server_args_for_scheduler(arguments)
    initialize_moe_config(arguments)
    init_distributed_environment(2, rank, "env://", rank, "gloo")
    initialize_model_parallel(2)
    initialize_dp_attention(arguments, _model_config(path))


def load_model(path: str) -> Any:
    """What a refit uses of a ``ModelRunner``, its model loaded from a checkpoint by SGLang."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader import get_model

    config, load_config = _model_config(path), LoadConfig(load_format="auto")
    model = get_model(model_config=config, load_config=load_config, device_config=DeviceConfig("cpu"))
    return SimpleNamespace(
        model=model, model_config=config, load_config=load_config, server_args=_arguments(path)
    )


def _model_config(path: str) -> Any:
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig.from_server_args(_arguments(path))


def _arguments(path: str) -> Any:
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(
        model_path=path,
        device="cpu",
        dtype="bfloat16",
        tp_size=2,
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        moe_runner_backend="triton",
    )
