"""What both drivers know of an engine: its trainer, its version, and whether anything may be generated with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from ....integration.errors import EngineDirty, RefitError
from ...trainers.source_mixin import REFIT_CALLS
from .connectors import require_droppable_caches
from .patches import may_be_refitted
from .token_versions import TokenVersions

EXTENSION = "rlrefit.workers.engines.vllm.extension.VllmRefitExtension"
# keep: requests go on with the new weights; wait: they end with the old ones first; abort: they end as they are.
PauseMode = Literal["keep", "wait", "abort"]
# What vLLM's answer means where it does not raise.
KEPT = "a part of its cache was not reset"
_REMEDY = (
    f'Start the engine with worker_extension_cls="{EXTENSION}" (driver.EXTENSION), or with '
    "weight_transfer_config=plugin.transfer_config()"
)


class DriverState:
    """Of the engine that has ``vllm_config``.

    Attributes:
        version: of the weights that the engine holds as far as the driver knows, or -1 before the first refit.

    Raises:
        RefitError: the engine was started without rlrefit's workers, or keeps what its weights made where no refit drops it.
    """

    def __init__(self, vllm_config: Any) -> None:
        if not may_be_refitted(vllm_config):
            raise RefitError(
                f"the engine was started without rlrefit's workers, so nothing could receive weights. {_REMEDY}",
                stage="start",
            )
        require_droppable_caches(vllm_config)
        self.version = -1
        self._engine = ""
        # Whether the refits bring an adapter, which a request has to ask for.
        self._adapter = False
        self._versions = TokenVersions()
        # What a refit left that did not succeed: until one does, nothing is generated.
        self._unusable: BaseException | None = None

    def _require_usable(self) -> None:
        if self._unusable is not None:
            raise EngineDirty(
                f"the last refit failed and left the engine paused, so that nothing would be generated: "
                f"{described(self._unusable)}. Refit again, which resumes it, or start the engine anew",
                stage="generate",
            )

    def _asked(self, lora_request: Any) -> Any:
        """The adapter of a request: the trainer's where refits bring one and the caller names none."""
        if lora_request is not None or not self._adapter:
            return lora_request
        from .lora import lora_request as trainers

        return trainers(self.version)

    @property
    def _method(self) -> str:
        if not self._engine:
            raise RefitError(
                "no trainer has been met: call init_refit with the rendezvous that trainer rank 0 opened",
                stage="handshake",
            )
        return REFIT_CALLS[self._engine].receive

    @staticmethod
    def _checked(engine: str) -> str:
        if engine not in REFIT_CALLS:
            raise RefitError(f"engine: {engine!r} is not one of {', '.join(REFIT_CALLS)}", stage="settings")
        return engine


def described(error: BaseException) -> str:
    """What happened; of errors that are not rlrefit's also their kind, since their text may be empty."""
    return str(error) if isinstance(error, RefitError) else f"{type(error).__name__}: {error}"


def cut_off(version: int) -> RefitError:
    """What an engine is left with by a refit that neither succeeds nor raises an ordinary error."""
    return RefitError(
        f"refit {version} was cut off, so the engine may hold the weights before it, or its own, beside cached "
        "prefixes of the others",
        stage="commit",
    )


def others_workers(error: Exception) -> RefitError:
    """The workers don't know the refit's methods: an extension of somebody else's, or an engine that ended."""
    return RefitError(
        f"the engine's workers do not answer the refit's first question, refit_asleep ({described(error)}). If their "
        f"worker_extension_cls does not inherit rlrefit's: {_REMEDY}",
        stage="start",
    )


def stale_prefixes(cause: str) -> RefitError:
    """Why an engine may not serve the weights that it holds."""
    return RefitError(
        f"vLLM keeps cached prefixes of the old weights ({cause}), so new requests would mix both; the engine is "
        "paused and generate() refuses. End what holds them (a KV connector's transfers) and refit again",
        stage="post_load",
    )


def one_version(answers: Sequence[dict[str, Any]]) -> int:
    """The version that all workers answered.

    Raises:
        RefitError: they hold different ones.
    """
    found = [answer["version"] for answer in answers]
    if len(set(found)) != 1:
        raise RefitError(
            f"the workers of one engine hold different versions: {found}; what it generates is no version's. "
            "Refit again",
            stage="commit",
        )
    return int(found[0])
