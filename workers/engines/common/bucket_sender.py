"""Full tensors from a trainer's ranks to engines on the same GPUs, in buckets.

Each trainer rank that shares a GPU with an engine's worker copies a bucket of the export, makes handles of the copies, and
keeps them until the engines have answered. Rank 0, the leader, gathers the handles and calls the engines. If a rank fails,
all ranks raise its error. What a bucket's payload looks like is each engine's (``trtllm.sender``, ``sglang.sender``).
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ....integration.errors import PeerLost, RefitError, RefitMismatch
from ....integration.quantize.formats import Format
from ....integration.records.clock import StageClock
from ....integration.records.record import RefitRecord
from ....integration.weights.endpoints import TellsFormats, WeightSource, sent_formats, trained_formats
from ....integration.weights.manifest import TensorSpec, dtype_name
from ....integration.weights.quantizing import QuantizingSource
from ....integration.weights.scale_watch import ScaleWatch
from ...trainers.qat.config import require_as_trained
from ...trainers.qat.model import QAT
from .answers import answer, failure, raise_refit_errors


def own_device() -> str:
    """UUID of this process's GPU, as engines write it."""
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


class Engines(Protocol):
    """What the leader calls: an engine's driver, or a proxy of one in another process."""

    @property
    def devices(self) -> Sequence[str]:
        """UUIDs of the GPUs of all workers."""

    @property
    def loads_in_parts(self) -> bool:
        """Whether the model takes its weights in several buckets."""

    def begin(self, version: int, specs: Sequence[TensorSpec]) -> Mapping[str, Format] | None:
        """Refuse to generate until this version has committed.

        Returns:
            Weights that the trainer has to quantize, with their formats; None if there are none.
        """

    def load(self, handles: dict[str, str]) -> None:
        """Load a bucket on all workers, and return when its memory may be freed."""

    def finish(self) -> None:
        """After the last bucket."""

    def commit(self, version: int) -> None:
        """Serve the version."""


class BucketSender(ABC):
    """Sends all weights of a source to engines; one on every trainer rank.

    Args:
        source: of the weights as the engines load them, or unquantized where the engines ask for a format.
        engines: on the leader, rank 0 of ``group``; None on the others.
        device: UUID of this rank's GPU, :func:`own_device`.
        bucket_bytes: of the copies that are held at a time. Weights that have to travel together may be larger and get
            a bucket of their own. A model that takes all weights at once gets a single bucket.
        group: of all trainer ranks, on host memory (gloo), with the timeout that bounds each wait; None for one rank.
        qat: of a trainer that trains in INT4, whose ``source`` does not tell it (:class:`~rlrefit.integration.weights.endpoints.TellsFormats`). Those of FSDP2 and of
            Megatron tell what their model is trained in, so that it need not be given; a source of your own does not.

    Engines that would compute with other weights than training does are a ``RefitMismatch`` at each refit, before they begin.

    Raises:
        ValueError: ``qat`` trains in NVFP4, and the source does not tell that it packs.
        RefitError: the engines' driver was given on another rank than the leader, or not on the leader.
    """

    # Of the record.
    _engine_name: str

    def __init__(
        self,
        source: WeightSource,
        engines: Engines | None,
        device: str,
        bucket_bytes: int,
        group: dist.ProcessGroup | None = None,
        qat: QAT | None = None,
    ) -> None:
        self._source = source
        if qat is not None and qat.config.format.has_global_scale and not isinstance(source, TellsFormats):
            raise ValueError(
                "qat trains in NVFP4, whose codes the source makes, and this source does not tell whether it does. Give "
                "PackedSource(source, qat) for a source of unquantized weights; or let a source that packs them itself have trained_formats and "
                "sent_formats (TellsFormats)"
            )
        self._qat = qat
        self._engines = engines
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._group = group
        self._rank = 0 if group is None else dist.get_rank(group)
        self._clock = StageClock(source.device)
        # Memory beside the copies that the present payload refers to.
        self._flattened: torch.Tensor | None = None
        if (self._rank == 0) != (engines is not None):
            raise RefitError(
                "the engines' driver has to be given on rank 0 of the trainer's group and nowhere else",
                stage="settings",
                rank=self._rank,
            )

    @staticmethod
    @abstractmethod
    def _unit_of(name: str) -> str:
        """What a weight shares with those that have to reach the engine's loader in the same call."""

    @abstractmethod
    def _encoded(self, weights: Sequence[tuple[str, torch.Tensor]]) -> str:
        """A bucket's payload as the workers take it. The weights, and ``_flattened``, are kept until they have answered."""

    def _begun(self, engines: Any, version: int, specs: Sequence[TensorSpec]) -> Mapping[str, Format] | None:
        self._require_sent_as_trained()
        return engines.begin(version, specs)

    def _trained(self) -> Mapping[str, Format]:
        """Weights that are trained quantized, with the formats."""
        return trained_formats(self._source) if self._qat is None else self._qat.formats

    def _require_sent_as_trained(self) -> None:
        """Check what the source itself sends quantized.

        Raises:
            RefitMismatch: training computes with other weights than the engines would.
        """
        if trained := self._trained():
            require_as_trained(sent_formats(self._source), trained, self._rank)

    def refit(self, version: int) -> RefitRecord:
        """Send all weights and have the engines serve them as ``version``. A collective of all trainer ranks.

        Returns:
            This rank's record; ``bytes_misc`` are those that it handed over.

        Raises:
            RefitError: of the type that a rank or a worker raised, on all ranks. Engines that had begun refuse to
                generate until a refit succeeds.
        """
        try:
            return self._refit(version)
        finally:
            self._flattened = None
            if self._source.device.type == "cuda":
                torch.cuda.ipc_collect()

    def _refit(self, version: int) -> RefitRecord:
        clock = self._clock
        clock.restart()
        with clock.stage("handshake"):
            self._all_do(self._prepared, lambda engines, devices: _check_devices(engines.devices, devices))
            told = self._source.specs()
            needed, in_parts, formats = self._leader_does(
                lambda engines: (
                    frozenset(engines.devices),
                    engines.loads_in_parts,
                    self._begun(engines, version, told),
                )
            )
        sending = _WatchedQuantizing(self._source, formats, self._rank) if formats else self._source
        specs = sending.specs()
        buckets = lay_out(specs, self._bucket_bytes if in_parts else sys.maxsize, self._unit_of)
        export = _exported(sending)
        held: dict[str, torch.Tensor] | None = {} if self._device in needed else None
        sent = largest = drawn = 0
        for bucket in buckets:
            nbytes, peak = self._send(export, specs[drawn : bucket.drawn], bucket, held)
            sent, largest, drawn = sent + nbytes, max(largest, peak), bucket.drawn
        with clock.stage("post_load"):
            self._all_do(lambda: _check_end(export), lambda engines, _: engines.finish())
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

    def _prepared(self) -> str:
        self._source.prepare()
        return self._device

    def _send(
        self,
        export: Iterator[tuple[str, torch.Tensor]],
        specs: Sequence[TensorSpec],
        bucket: Bucket,
        held: dict[str, torch.Tensor] | None,
    ) -> tuple[int, int]:
        """Draw ``specs`` from the export, and hand the bucket over on ranks whose GPU an engine uses (``held``).

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
        flattened, self._flattened = self._flattened, None
        nbytes = sum(held.pop(name).nbytes for name in bucket.names)
        if self._source.device.type == "cuda":
            torch.cuda.ipc_collect()
        return nbytes, peak + (0 if flattened is None else flattened.nbytes)

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
                f"the export yields {got} in place of the announced {dtype_name(spec.dtype)}{list(spec.shape)}. Prepare the "
                "refit again after the model has changed",
                stage="export",
                parameter=spec.name,
            )
        if held is not None:
            # Always a copy, and on the GPU: the export may yield a live parameter, or host memory, and a handle changes
            # the storage that it is made of.
            copy = torch.empty(spec.shape, dtype=spec.dtype, device=self._source.device)
            held[name] = copy.copy_(tensor)

    def _all_do(self, call: Callable[[], Any], then: Callable[[Engines, list[Any]], None]) -> None:
        """Call ``call`` on every rank, and ``then`` on the leader with what they returned.

        Raises:
            RefitError: on all ranks, if one of them failed.
        """
        if self._group is None:
            found = [call()]
            self._leader_does(lambda engines: then(engines, found))
            return
        said = answer(lambda: {"value": call()})
        everyone: list[Any] | None = None
        if self._rank == 0:
            everyone = [None] * dist.get_world_size(self._group)
        with self._meeting():
            dist.gather_object(said, everyone, group_dst=0, group=self._group)
        self._leader_does(
            lambda engines: then(
                engines, [theirs["value"] for theirs in raise_refit_errors(everyone or (), "trainer rank")]
            )
        )

    def _leader_does(self, call: Callable[[Engines], Any]) -> Any:
        """What ``call`` returned on the leader, on all ranks; or its error."""
        said: list[Any] = [None]
        met: Exception | None = None
        if self._engines is not None:
            try:
                said[0] = {"value": call(self._engines)}
            except Exception as error:  # of any kind: the others would wait for the leader
                met, said[0] = error, failure(error)
        if self._group is not None:
            with self._meeting():
                dist.broadcast_object_list(said, group_src=0, group=self._group)
        if met is not None:
            raise met
        return raise_refit_errors(said, "trainer rank")[0]["value"]

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(
                f"a trainer rank did not come to this refit's next step: {error}. Engines that had begun refuse to "
                "generate; refit again once all ranks run, or restart the job",
                stage="misc",
                rank=self._rank,
            ) from error


class _WatchedQuantizing(QuantizingSource):
    """Ends its export with an error if a weight held a NaN or infinity, from which no scale can be computed."""

    def __init__(self, source: WeightSource, formats: Mapping[str, Format], rank: int) -> None:
        super().__init__(source, formats)
        self._watch = ScaleWatch(formats, rank)
        self._watch.bind((), self.specs(), self.device)

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._watch.passing(super().export(names))
        self._watch.look()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._watch.require_finite()


def _exported(source: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
    """The export, which begins when its first weight is drawn: then the other ranks learn of what it raises."""
    yield from source.export([spec.name for spec in source.specs()])


def _check_end(export: Iterator[tuple[str, torch.Tensor]]) -> None:
    extra = next(export, None)
    if extra is not None:
        raise RefitMismatch(
            "the export yields this weight beyond those that it announced, and the engines would not get it. Prepare the "
            "refit again after the model has changed",
            stage="export",
            parameter=extra[0],
        )


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


@dataclass(frozen=True)
class Bucket:
    """
    Attributes:
        names: of the weights that travel together.
        drawn: how many weights of the export have to be drawn before it is complete, counted from the export's begin.
    """

    names: tuple[str, ...]
    drawn: int


def lay_out(specs: Sequence[TensorSpec], bucket_bytes: int, unit_of: Callable[[str], str]) -> list[Bucket]:
    """Pack weights into buckets as their units become complete, in the order of the export.

    A unit larger than ``bucket_bytes`` gets a bucket of its own. Weights of a unit that is not complete yet wait beside
    the bucket: k, say, where an export yields k, o, q and v.

    Args:
        specs: in the order of the export.
        bucket_bytes: of the weights of a bucket.
        unit_of: from a weight's name to what it shares with the weights that have to travel with it.
    """
    left = Counter(unit_of(spec.name) for spec in specs)
    waiting: dict[str, list[TensorSpec]] = defaultdict(list)
    buckets: list[Bucket] = []
    bucket: list[TensorSpec] = []
    held = drawn = 0
    for position, spec in enumerate(specs):
        unit = unit_of(spec.name)
        waiting[unit].append(spec)
        left[unit] -= 1
        if left[unit]:
            continue
        whole = waiting.pop(unit)
        nbytes = sum(found.nbytes for found in whole)
        if bucket and held + nbytes > bucket_bytes:
            buckets.append(Bucket(tuple(found.name for found in bucket), drawn))
            bucket, held = [], 0
        bucket += whole
        held += nbytes
        drawn = position + 1
    if bucket:
        buckets.append(Bucket(tuple(found.name for found in bucket), drawn))
    return buckets
