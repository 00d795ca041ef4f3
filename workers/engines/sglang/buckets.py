"""What the workers of an SGLang engine are told around buckets, and in which formats they want the weights: steps of
:class:`~.driver.SglangRefit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....integration.errors import RefitError, RefitMismatch
from ....integration.quantize.formats import Format, from_json
from ....integration.weights.manifest import TensorSpec
from ..common.loader_trace.quantized import on_the_wire
from .engine_calls import EngineCalls


class Buckets:
    """Buckets of one engine, one refit after the other.

    Args:
        calls: of the engine.
    """

    def __init__(self, calls: EngineCalls) -> None:
        self._calls = calls
        self._version = -1
        self._placing = False

    def begin(self, version: int, specs: Sequence[TensorSpec], quantize: bool) -> dict[str, Format]:
        """Have the workers see that they can take these weights, and no less.

        Args:
            version: that comes.
            specs: as the trainer holds the weights.
            quantize: it makes codes and scales of those that the workers hold in FP8 blocks.

        Returns:
            Which these are, each with its format; none without ``quantize``.

        Raises:
            RefitMismatch: no worker holds any so, or two hold one differently. Nothing was written.
            RefitError: of the worker's kind; nothing was written.
        """
        formats: dict[str, Format] = {}
        as_asked: tuple[bool, ...] = ()
        if quantize:
            formats = merged(self._calls.ask("formats", _plain(specs)))
            if not formats:
                raise RefitMismatch(
                    "trainer_quantize_fp8 is true, but no worker of the engine holds a weight in FP8 blocks that a trainer makes of "
                    "these (BF16 or FP16 matrices, for SGLang's own Fp8LinearMethod and Fp8MoEMethod). Nothing was written; start "
                    "SGLang from a checkpoint of FP8 blocks, or set trainer_quantize_fp8 to false",
                    stage="handshake",
                )
            as_asked = (True,)
        begun = self._calls.ask("begin", version, _plain(on_the_wire(specs, formats)), *as_asked)
        self._version, self._placing = version, any(found["placing"] for found in begun)
        return formats

    def load(self, payloads: list[str]) -> None:
        """Load a bucket, one payload for each worker, whose memory may be freed afterwards.

        Raises:
            RefitError: SGLang, or a worker, says why.
        """
        if self._placing:
            self._calls.deliver(payloads)
        else:
            self._calls.update(payloads, "flattened_bucket")
        # SGLang answers once its copies are queued; the sender frees what they read.
        self._calls.ask("settle")

    def finish(self) -> None:
        """After the last bucket."""
        self._calls.ask("finish", self._version)


def merged(answers: Sequence[Mapping[str, Any]]) -> dict[str, Format]:
    """What the workers hold in blocks, all together: each may hold experts that others don't.

    Raises:
        RefitMismatch: two hold one weight differently.
        RefitError: in words that are unknown here.
    """
    found: dict[str, Format] = {}
    for rank, answer in enumerate(answers):
        try:
            kinds = [from_json(kind) for kind in answer["formats"]]
        except ValueError as error:
            raise RefitError(
                f"SGLang worker {rank} tells its weights' formats in words unknown here: {error}. Nothing was written",
                stage="handshake",
                rank=rank,
            ) from error
        for name, which in answer["weights"].items():
            if found.setdefault(name, kinds[which]) != kinds[which]:
                raise RefitMismatch(
                    f"SGLang worker {rank} holds it as {kinds[which]} and one before it as {found[name]}, but it is quantized "
                    "once for all; nothing was written. Start all workers with the same kernels",
                    stage="handshake",
                    rank=rank,
                    parameter=name,
                )
    return found


def _plain(specs: Sequence[TensorSpec]) -> list[Any]:
    return [spec.to_json() for spec in specs]
