"""Which version of the weights generated each token.

vLLM 0.21 has no place for it in a response: neither its outputs nor its server's answers carry a field that a worker or
a driver may fill. So the driver notes, at every refit, how far each running request has come. Of a server, whose requests
no driver sees, ``refit_serving_version`` tells what it serves now (``POST /collective_rpc`` in its development mode).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Generated:
    """What vLLM returned for one prompt.

    Attributes:
        output: vLLM's ``RequestOutput``.
        versions: for each of its completions the version that generated each token.
    """

    output: Any
    versions: tuple[tuple[int, ...], ...]


class TokenVersions:
    """Follows the requests of one engine."""

    def __init__(self) -> None:
        self._first: dict[str, int] = {}
        # By request and completion: (tokens there were, version from there on).
        self._turns: dict[tuple[str, int], list[tuple[int, int]]] = {}

    def begin(self, request: str, version: int) -> None:
        """``request`` has been queued, and ``version`` is served."""
        self._first[request] = version

    def refitted(self, states: Mapping[str, Any], version: int) -> None:
        """``version`` is served from here on; ``states`` are the output processor's states of all live requests.

        To be called while the engine is paused and all that it generated before has been processed.
        """
        for state in states.values():
            request = state.external_req_id if state.parent_req is None else state.parent_req.external_req_id
            if request in self._first:
                turn = (state.detokenizer.num_output_tokens(), version)
                self._turns.setdefault((request, state.request_index), []).append(turn)

    def of(self, output: Any) -> Generated:
        """Versions of the tokens that ``output`` holds (all since the request's beginning)."""
        found = tuple(self._completion(output.request_id, c) for c in output.outputs)
        return Generated(output, found)

    def end(self, request: str) -> None:
        """``request`` is over."""
        self._first.pop(request, None)
        for key in [key for key in self._turns if key[0] == request]:
            del self._turns[key]

    def _completion(self, request: str, completion: Any) -> tuple[int, ...]:
        versions = [self._first[request]] * len(completion.token_ids)
        for start, version in self._turns.get((request, completion.index), []):
            versions[start:] = [version] * (len(versions) - start)
        return tuple(versions)
