"""A trainer rank as the sender of weights to TensorRT-LLM engines on the trainer's own GPUs.

Full tensors go bucket by bucket: each rank that shares a GPU with a worker copies a bucket of the export, makes handles
of the copies, and keeps them until the engines have answered. One rank, the leader, gathers the handles and calls the
engines. What any rank fails with, all ranks raise.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ....integration import errors
from ....integration.errors import PeerLost, RefitError, RefitMismatch
from ....integration.quantize.formats import Format
from ....integration.records.record import RefitRecord, StageClock
from ....integration.weights.endpoints import WeightSource
from ....integration.weights.manifest import TensorSpec, dtype_name
from .buckets import Bucket, lay_out, unit_of
from .payload import Reduce, cuda_handle, encode

logger = logging.getLogger(__name__)

_KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, RefitError)
}


class Engines(Protocol):
    """What the leader calls; :class:`~.driver.TrtllmDriver`, or a proxy of one in another process."""

    @property
    def devices(self) -> Sequence[str]:
        """UUIDs of the GPUs of all workers."""

    @property
    def loads_in_parts(self) -> bool:
        """Whether the model takes its weights in several buckets."""

    def begin(self, version: int, specs: Sequence[TensorSpec]) -> Mapping[str, Format] | None:
        """Refuse to generate until this version has committed.

        Returns:
            Formats in which some weights have to come, if not all as they are.
        """

    def load(self, handles: dict[str, str]) -> None:
        """Load a bucket on all workers, and return when its memory may be freed."""

    def finish(self) -> None:
        """After the last bucket."""

    def commit(self, version: int) -> None:
        """Serve the version."""


@dataclass(frozen=True)
class _Said:
    """What a rank tells the others: a value, or the error that it met."""

    value: Any = None
    kind: str = ""
    text: str = ""

    @staticmethod
    def of(call: Callable[[], Any]) -> _Said:
        try:
            return _Said(call())
        except Exception as error:  # of any kind: the others would wait for this rank
            logger.exception("the refit failed on this trainer rank")
            return _Said.failed(error)

    @staticmethod
    def failed(error: Exception) -> _Said:
        if type(error).__name__ in _KINDS:
            return _Said(None, type(error).__name__, str(error))
        return _Said(None, RefitError.__name__, f"{type(error).__name__}: {error}")

    def heard(self, who: str) -> Any:
        """The value.

        Raises:
            RefitError: of the kind that the rank met.
        """
        if self.kind:
            raise _KINDS[self.kind](f"{who}: {self.text}")
        return self.value


def own_device() -> str:
    """UUID of this process's GPU as TensorRT-LLM writes it."""
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


class TrtllmSender:
    """Sends all weights of a source to TensorRT-LLM engines; on every trainer rank.

    Args:
        source: of the weights as the engines load them: a trainer's own, a
            :class:`~...integration.quantize.source.QuantizingSource` around it for engines that hold block-scaled FP8, or
            :class:`~...trainers.qat.source.PackedSource` for NVFP4.
        engines: on the leader, rank 0 of ``group``; None on the others.
        device: UUID of this rank's GPU, :func:`own_device`.
        bucket_bytes: of the copies that are held at a time. What :func:`~.buckets.unit_of` keeps together may be larger
            and gets a bucket of its own, and a model that loads all at once a single one.
        group: of all trainer ranks, on host memory (gloo), with the timeout that bounds each wait; None for one rank.
        reduce: makes handles.

    Raises:
        RefitError: the engines' driver is not where it has to be.
    """

    _engine_name = "trtllm"
    _unit_of = staticmethod(unit_of)

    def __init__(
        self,
        source: WeightSource,
        engines: Engines | None,
        device: str,
        bucket_bytes: int,
        group: dist.ProcessGroup | None = None,
        reduce: Reduce = cuda_handle,
    ) -> None:
        self._source = source
        self._engines = engines
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._group = group
        self._reduce = reduce
        self._rank = 0 if group is None else dist.get_rank(group)
        self._clock = StageClock(source.device)
        if (self._rank == 0) != (engines is not None):
            raise RefitError(
                "the engines' driver has to be given on rank 0 of the trainer's group and nowhere else",
                stage="settings",
                rank=self._rank,
            )

    def refit(self, version: int) -> RefitRecord:
        """Send all weights and have the engines serve them as ``version``. A collective of all trainer ranks.

        Returns:
            This rank's record; ``bytes_misc`` are those that it handed over.

        Raises:
            RefitError: of the kind that a rank or a worker met, on all ranks. Engines that had begun refuse to generate
                until a refit succeeds.
        """
        clock = self._clock
        clock.restart()
        with clock.stage("handshake"):
            self._all_do(self._settled, lambda engines, devices: _check_devices(engines.devices, devices))
            told = self._source.specs()
            needed, in_parts, formats = self._leader_does(
                lambda engines: (
                    frozenset(engines.devices),
                    engines.loads_in_parts,
                    self._begun(engines, version, told),
                )
            )
        sending = self._sending(formats)
        specs = sending.specs()
        buckets = lay_out(specs, self._bucket_bytes if in_parts else sys.maxsize, self._unit_of)
        export = self._exported(sending)
        held: dict[str, torch.Tensor] | None = {} if self._device in needed else None
        sent = largest = drawn = 0
        for bucket in buckets:
            nbytes, peak = self._send(export, specs[drawn : bucket.drawn], bucket, held)
            sent, largest, drawn = sent + nbytes, max(largest, peak), bucket.drawn
        with clock.stage("post_load"):
            self._all_do(lambda: self._check_end(export), lambda engines, _: engines.finish())
        with clock.stage("commit"):
            self._leader_does(lambda engines: engines.commit(version))
        return RefitRecord(
            version=version,
            epoch=0,
            rank=self._rank,
            role="trainer",
            engine=self._engine_name,
            transport="cuda_ipc",
            bytes_bulk=0,
            bytes_misc=sent,
            bytes_kept=0,
            bytes_verified=0,
            seconds_total=clock.wall_seconds,
            seconds=clock.seconds,
            host_seconds=clock.host_seconds,
            peak_extra_bytes=largest,
        )

    def _settled(self) -> str:
        self._source.settle()
        return self._device

    def _exported(self, source: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
        """The export, which begins when its first weight is drawn: then the other ranks hear of what it raises."""
        yield from source.export([spec.name for spec in source.specs()])

    def _begun(self, engines: Engines, version: int, specs: Sequence[TensorSpec]) -> Mapping[str, Format]:
        """Formats in which the engines want weights that the source holds unquantized."""
        return engines.begin(version, specs) or {}

    def _sending(self, formats: Mapping[str, Format]) -> WeightSource:
        """What brings the weights so."""
        return self._source

    def _send(
        self,
        export: Iterator[tuple[str, torch.Tensor]],
        specs: Sequence[TensorSpec],
        bucket: Bucket,
        held: dict[str, torch.Tensor] | None,
    ) -> tuple[int, int]:
        """Draw ``specs`` from the export and hand the bucket over, on ranks whose GPU an engine uses (``held``).

        Returns:
            Bytes handed over, and bytes of all that was held for them.
        """

        def payload() -> tuple[str, str] | None:
            with self._clock.stage("export"):
                for spec in specs:
                    self._draw(export, spec, held)
            if held is None:
                return None
            return self._device, self._encoded([(name, held[name]) for name in bucket.names])

        def load(engines: Engines, payloads: Sequence[tuple[str, str] | None]) -> None:
            with self._clock.stage("misc"):
                engines.load(dict(found for found in payloads if found is not None))

        self._all_do(payload, load)
        if held is None:
            return 0, 0
        peak = sum(tensor.nbytes for tensor in held.values())
        # The engines have answered, so nobody reads the copies any more.
        nbytes = sum(held.pop(name).nbytes for name in bucket.names)
        if self._source.device.type == "cuda":
            torch.cuda.ipc_collect()
        return nbytes, peak

    def _encoded(self, weights: Sequence[tuple[str, torch.Tensor]]) -> str:
        """A bucket as the engine's workers take it; what it refers to is kept until they have answered."""
        return encode(weights, self._reduce)

    def _draw(
        self,
        export: Iterator[tuple[str, torch.Tensor]],
        spec: TensorSpec,
        held: dict[str, torch.Tensor] | None,
    ) -> None:
        name, tensor = next(export, ("", None))
        if tensor is None or (name, tuple(tensor.shape), tensor.dtype) != tuple(spec):
            got = (
                "nothing more" if tensor is None else f"{name} {dtype_name(tensor.dtype)}{list(tensor.shape)}"
            )
            raise RefitMismatch(
                f"the export yields {got} where it told of {dtype_name(spec.dtype)}{list(spec.shape)}. Prepare the refit "
                "again after the model has changed",
                stage="export",
                parameter=spec.name,
            )
        if held is not None:
            # Always a copy, and on the GPU: the export may yield a live parameter, or host memory, and a handle changes
            # the storage that it is made of.
            copy = torch.empty(spec.shape, dtype=spec.dtype, device=self._source.device)
            held[name] = copy.copy_(tensor)

    def _check_end(self, export: Iterator[tuple[str, torch.Tensor]]) -> None:
        extra = next(export, None)
        if extra is not None:
            raise RefitMismatch(
                "the export yields this weight beyond those that it told of; the engines would not get it. Prepare the "
                "refit again after the model has changed",
                stage="export",
                parameter=extra[0],
            )

    def _all_do(self, call: Callable[[], Any], then: Callable[[Engines, list[Any]], None]) -> None:
        """Have every rank do something, and the leader something with what they return.

        Raises:
            RefitError: on all ranks, what the first of them met.
        """
        if self._group is None:
            found = [call()]
            self._leader_does(lambda engines: then(engines, found))
            return
        said = _Said.of(call)
        everyone: list[Any] | None = None
        if self._rank == 0:
            everyone = [None] * dist.get_world_size(self._group)
        with self._meeting():
            dist.gather_object(said, everyone, group_dst=0, group=self._group)
        self._leader_does(
            lambda engines: then(
                engines, [theirs.heard(f"trainer rank {rank}") for rank, theirs in enumerate(everyone or ())]
            )
        )

    def _leader_does(self, call: Callable[[Engines], Any]) -> Any:
        """What ``call`` returned on the leader, on all ranks; or its error."""
        said: list[Any] = [None]
        met: Exception | None = None
        if self._engines is not None:
            try:
                said[0] = _Said(call(self._engines))
            except Exception as error:
                met, said[0] = error, _Said.failed(error)
        if self._group is not None:
            with self._meeting():
                dist.broadcast_object_list(said, group_src=0, group=self._group)
        if met is not None:
            raise met
        return said[0].heard("the leader")

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(
                f"a trainer rank did not come to this refit's next step: {error}. Engines that had begun refuse to "
                "generate; refit again once all ranks run, or start the job anew",
                stage="misc",
                rank=self._rank,
            ) from error


def _check_devices(needed: Sequence[str], there: Sequence[str]) -> None:
    missing = sorted(set(needed) - set(there))
    shared = sorted({device for device in there if there.count(device) > 1} & set(needed))
    problems = []
    if missing:
        problems.append(
            f"no trainer rank runs on {', '.join(missing)}, where workers of the engines do; memory is handed over "
            "inside a GPU only, so place a trainer rank on each of the engines' GPUs"
        )
    if shared:
        problems.append(f"several trainer ranks run on {', '.join(shared)}; give each one a GPU of its own")
    if problems:
        raise RefitError("; ".join(problems) + ". Nothing was written", stage="handshake")
