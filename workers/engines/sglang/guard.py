"""What stands between an SGLang worker's weights and a batch that would compute with them while they are not whole."""

from __future__ import annotations

import functools
from typing import Any

from ....integration.errors import EngineDirty
from ....integration.session import ServingState


class WeightsGuard:
    """Checks before each forward pass of one worker.

    The driver keeps an engine paused that may not generate, so that no batch comes. One that comes all the same (another
    caller resumed it) ends the scheduler, as every error there does: SGLang has no other answer to it, and tokens of weights
    that are no version's are worse.

    Args:
        runner: SGLang's ``ModelRunner``; its ``forward`` is wrapped on the instance.
        state: whose dirtiness forbids batches.
        undefined: why the weights are nobody's from the start on; empty if they are somebody's.
    """

    def __init__(self, runner: Any, state: ServingState, undefined: str = "") -> None:
        self._state = state
        self._undefined = undefined
        forward = runner.forward

        @functools.wraps(forward)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.require_whole()
            return forward(*args, **kwargs)

        runner.forward = guarded

    def require_whole(self) -> None:
        """To be called before anything is generated, and by who asks for the version.

        Raises:
            EngineDirty: the weights were written in part, or are no version's yet.
        """
        self._state.require_clean()
        if self._undefined:
            raise EngineDirty(
                f"{self._undefined} and no refit has brought weights since, so the engine would generate from undefined "
                "ones. Refit (after its weights woke, if it sleeps)",
                stage="generate",
            )

    def discard(self, why: str) -> None:
        """To be called as the weights lose their memory."""
        self._undefined = why

    def refitted(self) -> None:
        """To be called once a refit has committed."""
        self._undefined = ""
