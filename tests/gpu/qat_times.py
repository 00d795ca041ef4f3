"""Times layers of quantization-aware training beside the same layers in BF16: one linear layer of a true shape, forward and backward.

    python -m tests.gpu.qat_times --tokens 16384 --shape 9728x2560

Weights and inputs are random. It prints a JSON line for each kind: BF16; NVFP4 weights, and with inputs; INT4 weights in groups of 32 by
either rule: medians of milliseconds, by CUDA events, and the most memory that a forward and a backward pass took beside what was there
before. ``value`` is the time of what the engine reads of a weight (or of inputs) alone, with the bytes that it reads and writes a second.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from rlrefit.integration.config import INT4_SCALES
from rlrefit.integration.quantize import nvfp4
from rlrefit.integration.quantize.formats import Int4, Nvfp4
from rlrefit.workers.trainers.qat.config import NVFP4
from rlrefit.workers.trainers.qat.functions import fake_input, fake_weight, linear

_GROUP = 32


def _timed(run: Callable[[], Any], times: int) -> float:
    found = []
    for _ in range(times + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return float(median(found[3:]))


def _peak_mb(run: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) >> 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--shape", default="9728x2560", help="of the weight: rows x columns")
    parser.add_argument("--times", type=int, default=20)
    arguments = parser.parse_args()
    rows, columns = (int(part) for part in arguments.shape.split("x"))
    torch.manual_seed(0)
    device = torch.device("cuda")
    x = torch.randn(arguments.tokens, columns, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(rows, columns, device=device, dtype=torch.bfloat16).mul_(0.02).requires_grad_()
    gradient = torch.randn(arguments.tokens, rows, device=device, dtype=torch.bfloat16)
    of_weight, of_input = (nvfp4.global_scale(part.detach().abs().amax()) for part in (weight, x))
    kinds: dict[str, tuple[Nvfp4 | Int4, torch.Tensor | None, torch.Tensor | None] | None] = {
        "bf16": None,
        "nvfp4 weights": (NVFP4, of_weight, None),
        "nvfp4 weights and inputs": (NVFP4, of_weight, of_input),
        **{f"int4 weights, {rule}": (Int4(_GROUP, scale_rule=rule), None, None) for rule in INT4_SCALES},
    }
    for kind, settings in kinds.items():

        def product(settings: tuple[Any, ...] | None = settings) -> torch.Tensor:
            if settings is None:
                return torch.nn.functional.linear(x, weight)
            format, scale, input_scale = settings
            return linear(x, weight, scale, input_scale, format)

        def step(product: Callable[[], torch.Tensor] = product) -> None:
            x.grad = weight.grad = None
            product().backward(gradient)

        with torch.no_grad():
            forward = _timed(product, arguments.times)
        line: dict[str, Any] = {
            "kind": kind,
            "forward_ms": round(forward, 3),
            "both_ms": round(_timed(step, arguments.times), 3),
        }
        step()
        line["most_mb"] = _peak_mb(step)
        if settings is not None:
            format, scale, input_scale = settings
            alone = _timed(lambda f=format, s=scale: fake_weight(weight, s, f), arguments.times)  # type: ignore[misc]
            line |= {"value_ms": round(alone, 3), "value_gb_s": round(4 * weight.numel() / alone / 1e6)}
            if input_scale is not None:
                with torch.no_grad():
                    alone = _timed(lambda s=input_scale: fake_input(x, s), arguments.times)  # type: ignore[misc]
                line |= {
                    "input_value_ms": round(alone, 3),
                    "input_value_gb_s": round(4 * x.numel() / alone / 1e6),
                }
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
