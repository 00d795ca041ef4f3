"""Worker extension: what rlrefit adds to each vLLM worker (``worker_extension_cls``).

Start vLLM with ``worker_extension_cls="rlrefit.workers.vllm.extension.VllmRefitExtension"`` and reach the
methods with ``llm.collective_rpc(name, args=…)``.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from ...integration.errors import RefitError
from ..destination_mixin import DestinationRefitMixin
from .destination import VllmDestination

# The key under which a worker answers with an error instead of raising it.
REFIT_ERROR = "refit_error"


class VllmRefitExtension(DestinationRefitMixin):
    """Mixed into vLLM's ``Worker``: the refit's methods, callable through ``collective_rpc``.

    A worker whose refit fails answers ``{"refit_error": text}`` and does not raise: at TP above 1, vLLM's
    executor reads the first worker's exception only, and the next call would meet the others'. Pass the
    answers through :func:`raise_refit_errors`.
    """

    # Of vLLM's Worker.
    vllm_config: Any
    model_runner: Any
    rank: int

    def init_per_pp_refit_comm_group(
        self, rendezvous: dict[str, Any], rank: int, refit_config: dict[str, Any], engine: str = "nccl_xfer"
    ) -> dict[str, Any]:
        """As :meth:`DestinationRefitMixin.init_per_pp_refit_comm_group`; ``rank`` is the engine's first rank."""
        # Named class: vLLM puts this class among the bases of its worker, where a bare super() is not ours.
        self._refuse_to_run_dirty()
        join = DestinationRefitMixin.init_per_pp_refit_comm_group
        return _answer(lambda: join(self, rendezvous, rank + self.rank, refit_config, engine))

    def nccl_xfer_refit(self, version: int) -> dict[str, Any]:
        """As :meth:`DestinationRefitMixin.nccl_xfer_refit`. The driver resets the prefix cache afterwards."""
        return _answer(lambda: DestinationRefitMixin.nccl_xfer_refit(self, version))

    def update_weights_from_collective(self, version: int) -> dict[str, Any]:
        """As :meth:`DestinationRefitMixin.update_weights_from_collective`."""
        return _answer(lambda: DestinationRefitMixin.update_weights_from_collective(self, version))

    def refit_serving_version(self) -> dict[str, Any]:
        """``{"version": …}`` of the weights that may be served; an error if they were written in part."""

        def version() -> dict[str, Any]:
            self.refit_state.require_clean()
            return {"version": self.refit_state.version}

        return _answer(version)

    def _refuse_to_run_dirty(self) -> None:
        """Put a check before the model runner's steps: weights that were written in part are never served.

        The error ends vLLM's engine core, which can't go on after any error in a step.
        """
        if getattr(self, "_refit_guarded", False):
            return
        execute = self.model_runner.execute_model

        @functools.wraps(execute)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.refit_state.require_clean()
            return execute(*args, **kwargs)

        self.model_runner.execute_model = guarded
        self._refit_guarded = True

    def _make_refit_destination(self) -> VllmDestination:
        return self.refit_destination

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


def raise_refit_errors(answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The workers' answers, if none is an error.

    Raises:
        RefitError: a worker failed; the first worker's text.
    """
    for index, answer in enumerate(answers):
        if REFIT_ERROR in answer:
            raise RefitError(f"vLLM worker {index}: {answer[REFIT_ERROR]}")
    return list(answers)


def _answer(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return call()
    # Of any kind: the loader may raise whatever vLLM raises, and the driver has to hear of it.
    except Exception as error:
        return {REFIT_ERROR: f"{type(error).__name__}: {error}"}


def _bytes_of(parameter: torch.Tensor) -> bytes:
    flat = parameter.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.cpu().numpy().tobytes()
