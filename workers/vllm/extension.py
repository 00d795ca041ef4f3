"""Worker extension: what rlrefit adds to each vLLM worker (``worker_extension_cls``).

Start vLLM with ``worker_extension_cls="rlrefit.workers.vllm.extension.VllmRefitExtension"`` and reach the
methods with ``llm.collective_rpc(name, args=…)``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from .destination import VllmDestination


class VllmRefitExtension:
    """Mixed into vLLM's ``Worker``; every public name starts with ``refit_`` so that none can clash."""

    # Of vLLM's Worker.
    vllm_config: Any
    model_runner: Any

    @cached_property
    def refit_destination(self) -> VllmDestination:
        """This worker's live model as the destination of refits."""
        return VllmDestination(
            self.model_runner.get_model(),
            self.vllm_config,
            self.model_runner.device,  # the CPU worker leaves its own device unset
            reset_caches=(self.model_runner.reset_encoder_cache,),
        )

    def refit_trace(self, manifest: Sequence[tuple[str, Sequence[int], str]]) -> dict[str, dict[str, str]]:
        """How this worker takes each tensor of ``manifest`` (name, full shape, dtype name such as ``bfloat16``).

        Returns:
            ``{"bulk": {name: its boxes as text}, "misc": {name: reason}}``; a tensor in neither is not
            loaded on this rank.
        """
        fragments, misc = self.refit_destination.fragments(
            [(name, tuple(shape), getattr(torch, dtype)) for name, shape, dtype in manifest]
        )
        bulk: dict[str, list[str]] = {}
        for fragment in fragments:
            bulk.setdefault(fragment.name, []).append(str(fragment.box))
        return {"bulk": {name: " ".join(boxes) for name, boxes in bulk.items()}, "misc": misc}

    def refit_parameter_bytes(self, names: Sequence[str] = ()) -> dict[str, bytes]:
        """Raw bytes of live parameters, contiguous, by the engine's names; of all of them without names."""
        return {name: _bytes_of(parameter) for name, parameter in self._refit_selected(names).items()}

    def refit_parameter_digests(self, names: Sequence[str] = ()) -> dict[str, str]:
        """SHA-256 of what :meth:`refit_parameter_bytes` returns, with shape and dtype, for large models."""
        digests = {}
        for name, parameter in self._refit_selected(names).items():
            header = f"{tuple(parameter.shape)} {parameter.dtype} ".encode()
            digests[name] = hashlib.sha256(header + _bytes_of(parameter)).hexdigest()
        return digests

    def _refit_selected(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        parameters = dict(self.model_runner.get_model().named_parameters())
        if not names:
            return parameters
        absent = sorted(set(names) - parameters.keys())
        if absent:
            raise KeyError(
                f"this worker's model has no parameter {absent[0]} ({len(absent)} of the names are unknown); use "
                "vLLM's own names, e.g. model.layers.0.self_attn.qkv_proj.weight"
            )
        return {name: parameters[name] for name in names}


def _bytes_of(parameter: torch.Tensor) -> bytes:
    flat = parameter.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.cpu().numpy().tobytes()
