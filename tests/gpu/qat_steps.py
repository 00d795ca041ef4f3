"""Times steps of a recipe's policy that trains in four bits, beside the same policy in BF16: on one GPU, with random weights.

    python -m tests.gpu.qat_steps --model qwen3-4b --layers 12 --trainer fsdp

A step is what a recipe does with a batch: forward, backward and optimizer, and in four bits all scales anew. It prints a JSON line for
each kind of training, which has a process of its own: the median of milliseconds, by the host's clock around a synchronized step, the
fastest and the slowest of them, and the most memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.quantize.formats import Int4
from rlrefit.recipes.plan.catalog import open_model
from rlrefit.recipes.policy.base import PolicyBatch
from rlrefit.recipes.policy.fsdp import FSDPPolicyConfig
from rlrefit.recipes.policy.make import TrainsInFourBits, refitting_policy
from rlrefit.recipes.policy.megatron import MegatronPolicyConfig
from rlrefit.workers.trainers.qat.config import QATConfig
from tests.spawn import free_port

_KINDS = {
    "bf16": None,
    "nvfp4 weights": QATConfig(activations=False),
    "nvfp4 weights and inputs": QATConfig(),
    "int4 weights": QATConfig(activations=False, format=Int4(32)),
}


def write_model(name: str, layers: int, folder: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    told = {key: value for key, value in open_model(name).config.items() if not key.startswith("_")}
    config = AutoConfig.for_model(**told | {"num_hidden_layers": layers, "dtype": "bfloat16"})
    with torch.device("cuda"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def measure(arguments: argparse.Namespace, folder: str, kind: str) -> None:
    """Time steps of one kind of training, and print the line."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), LOCAL_RANK="0")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1)
    generator = torch.Generator().manual_seed(0)
    shape = arguments.rows, arguments.tokens
    mask = torch.ones(shape)
    mask[:, : arguments.tokens // 4] = 0
    batch = PolicyBatch(
        torch.randint(0, 1000, shape, generator=generator),
        mask,
        advantages=torch.randn(arguments.rows, generator=generator),
        old_logprobs=torch.full(shape, -11.0) * mask,
    )
    made: Any = {"fsdp": FSDPPolicyConfig, "megatron": MegatronPolicyConfig}[arguments.trainer]
    config = made(folder, micro_batch=arguments.micro_batch, qat=_KINDS[kind])
    policy = refitting_policy(config, RefitConfig())
    if isinstance(policy, TrainsInFourBits) and config.qat.activations:
        policy.calibrate_inputs(batch)
    torch.cuda.reset_peak_memory_stats()
    found = []
    for _ in range(arguments.times + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        policy.train_step(batch)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    warm = [round(one * 1e3, 1) for one in found[2:]]
    line = {
        "kind": kind,
        "step_ms": round(median(warm), 1),
        "fastest_ms": min(warm),
        "slowest_ms": max(warm),
        "most_mb": torch.cuda.max_memory_allocated() >> 20,
    }
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-4b", help="of `rlrefit plan`'s models")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--trainer", choices=("fsdp", "megatron"), default="fsdp")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048, help="of a row")
    parser.add_argument("--micro-batch", type=int, default=4, help="rows")
    parser.add_argument("--times", type=int, default=6)
    arguments = parser.parse_args()
    processes = torch.multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder:
        for work in (
            (write_model, (arguments.model, arguments.layers, folder)),
            *((measure, (arguments, folder, kind)) for kind in _KINDS),
        ):
            process = processes.Process(target=work[0], args=work[1])
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"{work[0].__name__} ended with exit code {process.exitcode}")


if __name__ == "__main__":
    main()
