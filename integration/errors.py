"""Errors of a refit. Each says what happened, where, what it means for the engine, and what to do."""

from __future__ import annotations


class RefitError(RuntimeError):
    """Base of all refit errors.

    Attributes:
        stage: the part of the refit that failed (``rendezvous``, ``handshake``, ``transfer``, ``misc``, …).
        rank: the refit-world rank that reports, or -1 if it is not known.
        parameter: Hugging Face name of the parameter concerned, or an empty string.
        blamed: the refit-world rank that died, gave up or did not answer first, or -1 if it is not known.
    """

    def __init__(
        self, message: str, *, stage: str = "", rank: int = -1, parameter: str = "", blamed: int = -1
    ) -> None:
        place = ", ".join(
            part
            for part in (
                f"stage {stage}" if stage else "",
                f"rank {rank}" if rank >= 0 else "",
                f"parameter {parameter}" if parameter else "",
            )
            if part
        )
        super().__init__(f"{message} [{place}]" if place else message)
        self.stage = stage
        self.rank = rank
        self.parameter = parameter
        self.blamed = blamed


class RefitMismatch(RefitError):
    """The two sides disagree on names, shapes, dtypes, the plan or the version. Nothing was written."""


class RefitTimeout(RefitError):
    """A wait ran out. An engine that was being written is dirty and refuses to generate."""


class PeerLost(RefitError):
    """A peer closed its connection or died during a refit."""


class PlanError(RefitError):
    """Bytes that nobody sends, or that two senders would write: found while planning, before any transfer."""


class TransportUnavailable(RefitError):
    """A transport cannot carry these weights between these ranks. Nothing was written; another one can."""


class VerificationError(RefitError):
    """Checksums of sent and landed bytes differ."""


class EngineDirty(RefitError):
    """The engine holds partly written weights and must not generate before a refit commits."""
