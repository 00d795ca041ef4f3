"""The worker extension with a way to spoil the weights, loaded in vLLM's workers only."""

from __future__ import annotations

import hashlib

import torch

from rlrefit.integration.quantize.fp8_blockwise import dequantize
from rlrefit.workers.engines.vllm.drafters import live_drafter
from rlrefit.workers.engines.vllm.extension import VllmRefitExtension
from rlrefit.workers.engines.vllm.int4 import _backend


class PoisonExtension(VllmRefitExtension):
    def poison(self) -> None:
        """Fill every parameter, a drafter's too, with its dtype's NaN, or with bytes of 0xFF if it has none; but not
        compressed-tensors' scales of a cache and its shapes, which no trainer here sends."""
        drafter = live_drafter(self.model_runner)
        models = [self.model_runner.get_model(), *([] if drafter is None else [drafter])]
        with torch.no_grad():
            for name, parameter in (named for model in models for named in model.named_parameters()):
                if ".attn._" in name or name.endswith("_shape"):
                    continue
                if parameter.dtype.is_floating_point:
                    parameter.copy_(torch.full((), torch.nan, device=parameter.device).to(parameter.dtype))
                else:
                    parameter.data.view(torch.uint8).fill_(0xFF)

    def value_digests(self) -> dict[str, str]:
        """SHA-256 of every parameter; of FP8 blocks with the numbers that codes and scales stand for, in FP32."""
        parameters = dict(self.model_runner.get_model().named_parameters())
        found = {}
        for name, parameter in parameters.items():
            scales = parameters.get(f"{name}_scale_inv")
            if name.endswith("_scale_inv"):
                continue
            values = parameter.detach() if scales is None else dequantize(parameter.detach(), scales.detach())
            flat = values.contiguous().reshape(-1).view(torch.uint8).cpu()
            found[name] = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
        return found

    def mxfp4_backends(self) -> list[str]:
        """What computes with packed experts in MXFP4 in this worker."""
        methods = [
            getattr(module, "quant_method", None) for module in self.model_runner.get_model().modules()
        ]
        return sorted({m.mxfp4_backend.name for m in methods if hasattr(m, "mxfp4_backend")})

    def nvfp4_kernels(self) -> list[str]:
        """What computes with packed NVFP4 weights in this worker: kernels of linear layers, and backends of experts."""
        found = set()
        for module in self.model_runner.get_model().modules():
            method = getattr(module, "quant_method", None)
            if type(method).__name__.startswith("ModelOptNvFp4"):
                kernel = getattr(method, "kernel", None)
                found.add(method.nvfp4_backend.value if kernel is None else type(kernel).__name__)
        return sorted(found)

    def mxfp8_kernels(self) -> list[str]:
        """The same of weights in MXFP8."""
        found = set()
        for module in self.model_runner.get_model().modules():
            for holder in (getattr(module, "quant_method", None), getattr(module, "scheme", None)):
                if "mxfp8" in type(holder).__name__.lower():
                    kernel = getattr(holder, "kernel", None)
                    found.add(holder.fp8_backend.value if kernel is None else type(kernel).__name__)
        return sorted(found)

    def int4_kernels(self) -> list[str]:
        """The same of weights in INT4."""
        found = set()
        for module in self.model_runner.get_model().modules():
            for holder in (getattr(module, "quant_method", None), getattr(module, "scheme", None)):
                if "WNA16" in type(holder).__name__:
                    kernel = getattr(holder, "kernel", None)
                    found.add(_backend(holder) if kernel is None else type(kernel).__name__)
        return sorted(found)
