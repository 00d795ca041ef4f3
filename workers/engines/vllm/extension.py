"""Worker extension: what rlrefit adds to each vLLM worker (``worker_extension_cls``).

Start vLLM with ``worker_extension_cls="rlrefit.workers.engines.vllm.extension.VllmRefitExtension"`` and reach the
methods with ``llm.collective_rpc(name, args=…)``, or through :mod:`.driver`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ....integration.errors import RefitError
from ....integration.quantize.formats import to_json
from ....integration.session import ServingState
from ....integration.weights.manifest import TensorSpec, dtype_of
from ..common.answers import answered
from ..common.seeding import seed_process
from .compat import require_supported_vllm
from .drafters import live_drafter
from .patches import Refitted, prepare_worker_process

if TYPE_CHECKING:
    from ..common.drafted import DraftedDestination
    from .destination import VllmDestination
    from .worker_refit import WorkerRefit


class VllmRefitExtension(Refitted):
    """Mixed into vLLM's ``Worker``: the refit's methods, callable through ``collective_rpc``.

    A worker that fails answers ``{"refit_error": …}`` and does not raise: at TP above 1, vLLM's
    executor reads the first worker's exception only, and the next call would meet the others'. Pass the
    answers through :func:`~..common.answers.raise_refit_errors`.
    """

    # Of vLLM's Worker.
    vllm_config: Any
    model_runner: Any
    rank: int

    @answered
    def join_refit(
        self, rendezvous: dict[str, Any], rank: int, refit_config: dict[str, Any], engine: str = "nccl_xfer"
    ) -> dict[str, Any]:
        """Meet the trainer's ranks and agree on weights and plan; ``rank`` is that of the deployment's first worker.

        Workers count on from it: the tensor and pipeline ranks of the first data-parallel replica, then the next's.
        """
        return self._refit.join(rendezvous, rank, refit_config, engine)

    @answered
    def refit(self, version: int) -> dict[str, Any]:
        """Receive all weights once; the driver resets the prefix cache afterwards."""
        return self._refit.refit(version)

    @answered
    def close_refit(self) -> dict[str, Any]:
        """End the epoch on this rank."""
        self._refit.close_refit()
        return {}

    @answered
    def refit_serving_version(self) -> dict[str, Any]:
        """``{"version": …}`` of the weights that may be served; an error if they are not whole."""
        return {"version": self._refit.serving_version()}

    @answered
    def refit_record(self) -> dict[str, Any]:
        """This rank's record of the last refit that committed, and ``failed_attempt`` if a later one failed
        (:meth:`~..common.destination_mixin.DestinationRefitMixin.refit_record`)."""
        return self._refit.refit_record()

    @answered
    def refit_caches_dropped(self, version: int) -> dict[str, Any]:
        """Told by a driver that has dropped what older weights made; an error if ``version`` is not the one in place.

        The engine's core reads the answer too: it may resume, where it kept such things before
        (:func:`~.patches.watch_weight_updates`).
        """
        found = self._refit.serving_version()
        if found != version:
            raise RefitError(
                f"refit {version} has committed on the driver, and this worker serves version {found}, which something "
                "else has brought meanwhile. Refit again, and let nothing else change the weights",
                stage="commit",
                rank=self.rank,
            )
        return {}

    @answered
    def refit_require_servable(self) -> dict[str, Any]:
        """An error if a step would compute with weights that are not whole, or with memory that is asleep."""
        self._refit.guard.require_servable()
        return {}

    @answered
    def refit_asleep(self) -> dict[str, Any]:
        """``{"asleep": …}``: what of ``weights`` and ``kv_cache`` has no memory at the moment."""
        return {"asleep": sorted(self._refit.guard.asleep)}

    @answered
    def refit_empty_cache(self) -> dict[str, Any]:
        """Have this worker's allocator give back what it caches."""
        return self._refit.empty_cache()

    @answered
    def refit_seed(self, seed: int) -> dict[str, Any]:
        """Draw from here on as a worker that was started with ``seed``."""
        return seed_process(seed)

    @answered
    def refit_memory(self, restart: bool = False) -> dict[str, Any]:
        """Memory of this worker and its device; ``restart`` lets the peaks count anew from here."""
        return self._refit.memory(restart)

    @answered
    def refit_kv_scales(self) -> dict[str, Any]:
        """Scales of the FP8 KV cache in use, ``{"model.layers.0.self_attn.k_scale": [on the device, on the host]}``."""
        return self._refit.kv_scales()

    @answered
    def refit_trace(self, manifest: Sequence[tuple[str, Sequence[int], str]]) -> dict[str, Any]:
        """How this worker takes each tensor of ``manifest`` (name, full shape, dtype name such as ``bfloat16``).

        Returns:
            ``{"bulk": {name: its boxes as text}, "misc": {name: reason}}``; a tensor in neither is not
            loaded on this rank.
        """
        routes = self.refit_destination.routes(_read(manifest))
        bulk = {name: " ".join(str(found.bounds) for found in at) for name, at in routes.landings.items()}
        return {"bulk": bulk, "misc": routes.reasons}

    @answered
    def refit_formats(self, manifest: Sequence[tuple[str, Sequence[int], str]]) -> dict[str, Any]:
        """In which formats this worker holds weights that a trainer can quantize for it, for whoever sends full tensors.

        Refits ask for themselves. The answers of all workers together are the ``formats`` of
        :func:`~rlrefit.integration.weights.quantizing.quant_weights_by_name`, each by ``from_json`` of
        ``integration.quantize.formats``.

        Args:
            manifest: as of :meth:`refit_trace`, of unquantized weights.

        Returns:
            Hugging Face name to the format as plain data; only of weights that this worker loads.
        """
        # One of its own: what is asked here must not become a promise to the epoch that may be open.
        asked = self._refit.new_destination()
        return {name: to_json(format) for name, format in asked.quantized(_read(manifest)).items()}

    @answered
    def refit_parameter_bytes(self, names: Sequence[str] = ()) -> dict[str, Any]:
        """Raw bytes of live parameters, contiguous, by the engine's names; of all of them without names.

        Those of a drafter alone have ``drafter.`` before vLLM's name.
        """
        return {name: _bytes_of(found) for name, found in self._refit_selected(names).items()}

    @answered
    def refit_parameter_digests(self, names: Sequence[str] = ()) -> dict[str, Any]:
        """SHA-256 of what :meth:`refit_parameter_bytes` returns, with shape and dtype, for large models."""
        return {name: _digest_of(found) for name, found in self._refit_selected(names).items()}

    @property
    def _refit(self) -> WorkerRefit:
        from .worker_refit import WorkerRefit

        return WorkerRefit.of(self)

    @property
    def refit_state(self) -> ServingState:
        """Version and dirtiness of this worker's weights."""
        return self._refit.refit_state

    @property
    def refit_destination(self) -> VllmDestination | DraftedDestination:
        """This worker's live model as the destination of refits."""
        return self._refit.destination

    def _refit_selected(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        served = self.model_runner.get_model()
        parameters: dict[str, torch.Tensor] = dict(served.named_parameters())
        drafter = live_drafter(self.model_runner)
        if drafter is not None:
            shared = {id(parameter) for parameter in parameters.values()}
            parameters |= {f"drafter.{n}": p for n, p in drafter.named_parameters() if id(p) not in shared}
        if not names:
            return parameters
        absent = sorted(set(names) - parameters.keys())
        if absent:
            raise RefitError(
                f"this worker's model has no parameter {absent[0]} ({len(absent)} of the names are unknown); use "
                "vLLM's own names, e.g. model.layers.0.self_attn.qkv_proj.weight",
                parameter=absent[0],
            )
        return {name: parameters[name] for name in names}


def _read(manifest: Sequence[tuple[str, Sequence[int], str]]) -> list[TensorSpec]:
    return [TensorSpec(name, tuple(shape), dtype_of(dtype)) for name, shape, dtype in manifest]


def _digest_of(parameter: torch.Tensor) -> str:
    header = f"{tuple(parameter.shape)} {parameter.dtype} ".encode()
    return hashlib.sha256(header + _bytes_of(parameter)).hexdigest()


def _bytes_of(parameter: torch.Tensor) -> bytes:
    flat = parameter.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.cpu().numpy().tobytes()


# vLLM imports this module once, when a worker starts and before its model is loaded: the moment to say what this vLLM
# lacks, all of it at once. The modules that use vLLM's internals are imported after it, on first use.
require_supported_vllm()
prepare_worker_process()
