"""What NeMo-RL's vLLM workers answer beside its own worker extension, under names that it has not."""

from __future__ import annotations

from typing import Any

from ....integration.errors import RefitError
from ...engines.common.answers import answer
from ...engines.common.destination_mixin import DestinationRefitMixin
from .settings import FULL_TENSORS, TAKING_TURNS

# As NeMo-RL's generation workers pass them on to each worker of their engine.
JOIN, REFIT, CLOSE, VERSION = "rlrefit_join", "rlrefit_refit", "rlrefit_close", "rlrefit_serving_version"


class EngineCalls:
    """One rank of an engine; its class says what is refitted, and which rank of the engine it is.

    A worker that fails answers with its error and does not raise: at TP above 1, vLLM's executor reads the first
    worker's exception only.
    """

    def _rlrefit_side(self) -> DestinationRefitMixin:
        raise TypeError(f"{type(self).__name__} does not say what is refitted; inherit RefitWorker")

    def _rlrefit_rank(self) -> int:
        raise TypeError(f"{type(self).__name__} does not say its rank in the engine; inherit RefitWorker")

    def rlrefit_join(
        self, rendezvous: dict[str, Any], first_rank: int, refit_config: dict[str, Any], engine: str
    ) -> dict[str, Any]:
        """Meet the policy's ranks; ``first_rank`` is the refit rank of this engine's first worker."""

        def meet() -> dict[str, Any]:
            self._rlrefit_require_supported()
            rank = first_rank + self._rlrefit_rank()
            side = self._rlrefit_side()
            # NeMo-RL starts every vLLM with its sleep mode, and uses it where policy and engine take turns alone.
            side.stays_awake = engine != TAKING_TURNS
            return side.join_refit(rendezvous, rank, refit_config, engine)

        return answer(meet)

    def rlrefit_refit(self, version: int) -> dict[str, Any]:
        """Receive all weights once into the live parameters; this rank's record."""
        return answer(lambda: self._rlrefit_side().refit(version))

    def rlrefit_close(self) -> dict[str, Any]:
        """End the epoch on this rank."""

        def end() -> dict[str, Any]:
            self._rlrefit_side().close_refit()
            return {}

        return answer(end)

    def rlrefit_serving_version(self) -> dict[str, Any]:
        """``{"version": …}`` of the weights that may be served; an error if they are not whole."""

        def version() -> dict[str, Any]:
            state = self._rlrefit_side().refit_state
            state.require_clean()
            return {"version": state.version}

        return answer(version)

    def _rlrefit_require_supported(self) -> None:
        """Raise if a refit would leave a part of this engine behind."""


def require_text_only(model_config: Any) -> None:
    """Refuse engines whose scheduler would count on encoder outputs of the old weights.

    Raises:
        RefitError: the model is multimodal.
    """
    if model_config.is_multimodal_model:
        raise RefitError(
            f"{model_config.model} is multimodal: a refit drops its workers' encoder outputs, and NeMo-RL has no call by which "
            "vLLM's scheduler forgets them too. Nothing has moved. Set policy.generation.refit_transport to "
            f"{FULL_TENSORS}, or vllm_kwargs.language_model_only=true",
            stage="settings",
        )
