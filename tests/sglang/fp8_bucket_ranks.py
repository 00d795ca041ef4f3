"""Buckets into SGLang's models in FP8 blocks on two ranks: SGLang's own updater, unpickler and loaders behind the double's scheduler.

As in :mod:`.fp8_ranks` nothing is computed. The first rank has the trainer, the driver and the scheduler; what the scheduler gives to
its workers, both ranks' ``WeightUpdater`` gets, as SGLang's ``TpModelWorker`` gives it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlrefit.integration.errors import RefitError
from rlrefit.workers.engines.sglang.driver import SglangRefit
from rlrefit.workers.engines.sglang.loader import LOADER
from rlrefit.workers.engines.sglang.sender import SglangSender
from tests.fp8_refits import ENGINE_RANKS, bytes_of, differing, poison
from tests.gpu.vllm_trainer import CheckpointSource

from .engine_double import EngineDouble, ManagerDouble, ManagerWithSessions
from .fp8_ranks import CPU, Fp8Case, _expected, _held, _numbers, kernels, packed_scales
from .models import begin, load_model
from .ways import WAYS, driven_in

# Several buckets; a weight and its scale are kept together in all of them.
BUCKET_BYTES = 1 << 18


@dataclass(frozen=True)
class BucketCase:
    """
    Attributes:
        blocks: the engine, and what the trainer has.
        quantizes: the trainer makes codes and scales.
    """

    blocks: Fp8Case
    quantizes: bool = True


@dataclass(frozen=True)
class BucketResult:
    """What one rank saw.

    Attributes:
        differing: parameters, and copies of scales, with other bytes than they should have; by occasion.
        other_numbers: those weights that stand for other numbers than in a model that SGLang loaded; by occasion.
        changed: parameters that a refused refit has changed, by refusal.
        taken: formats of the updates that SGLang's updater got.
        packed: how many parameters of scales are packed.
        refused: texts of errors, by occasion; on the first rank.
        own: how many weights this rank's worker says to hold in blocks.
        versions: as the driver told them; on the first rank.
    """

    differing: dict[str, list[str]]
    other_numbers: dict[str, list[str]]
    changed: dict[str, list[str]]
    taken: set[str]
    packed: int
    refused: dict[str, str]
    own: int
    versions: list[tuple[int, str]]


def refit_in_buckets(
    rank: int, cases: Sequence[BucketCase], plain: tuple[str, str], share_experts: bool
) -> list[BucketResult]:
    """
    Args:
        rank: of the engine.
        cases: one after the other.
        plain: two checkpoints in BF16, of an engine that holds no blocks.
        share_experts: each rank holds half of the experts, whole.
    """
    # Both ranks take the same payload here, and a descriptor is handed over once.
    torch.multiprocessing.set_sharing_strategy("file_system")
    begin(rank, cases[0].blocks.served[0], ENGINE_RANKS, ENGINE_RANKS if share_experts else 1)
    results = []
    for case in cases:
        with kernels(case.blocks):
            results.append(_Scene(rank, case).seen(plain))
    return results


class Worker:
    """SGLang's updater over a model that it loaded, on one rank."""

    def __init__(self, rank: int, path: str) -> None:
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

        self.taken: set[str] = set()
        self._rank = rank
        runner = load_model(path)
        runner.device, runner.gpu_id = "cpu", rank
        runner.forward = self._never
        self.runner = runner
        self._updater = WeightUpdater(
            tp_rank=rank,
            device="cpu",
            gpu_id=rank,
            model_config=runner.model_config,
            custom_weight_loaders={LOADER: LOADER},
            get_model=lambda: runner.model,
            update_model_fields=self._never,
            recapture_cuda_graph=self._never,
            get_model_runner=lambda: runner,
        )

    def update(self, payloads: Sequence[str], load_format: str) -> tuple[bool, str]:
        from sglang.srt.utils import MultiprocessingSerializer

        named = MultiprocessingSerializer.deserialize(payloads[self._rank])
        if load_format != LOADER or isinstance(named, dict):
            self.taken.add(load_format)
        return self._updater.update_weights_from_tensor(named, load_format)

    def _never(self, *arguments: Any, **named: Any) -> None:
        raise AssertionError("nothing is computed here")


class _OverBothRanks(ManagerDouble):
    """The double's scheduler over the workers of both ranks."""

    def __init__(self, everywhere: Callable[[Any], Any]) -> None:
        super().__init__(tp_size=ENGINE_RANKS)
        self._everywhere = everywhere

    async def update_weights_from_tensor(self, obj: Any, request: Any) -> tuple[bool, str]:
        assert not obj.flush_cache
        assert getattr(self, "session", True), "an update outside of a session"
        self.attached = True
        # The real ones answer from their own processes, while this one's loop goes on.
        found: tuple[bool, str] = await asyncio.to_thread(
            self._everywhere, ("update", obj.serialized_named_tensors, obj.load_format)
        )
        return found


class _Manager(_OverBothRanks):
    """Of 0.5.17."""


class _ManagerWithSessions(_OverBothRanks, ManagerWithSessions):
    """Of later releases."""


class BucketScene:
    """One rank of an engine, of which the first drives all.

    Attributes:
        refused: texts of errors, by occasion; on the first rank.
    """

    def __init__(self, rank: int, path: str) -> None:
        self._rank = rank
        self._worker = Worker(rank, path)
        self.refused: dict[str, str] = {}

    def play(self) -> None:
        """On all ranks at once."""
        if self._rank:
            while (message := self._heard()) is not None:
                self._do(message)
        else:
            self._lead()
            self._tell(None)

    def _lead(self) -> None:
        """What the first rank has all of them do."""
        raise NotImplementedError

    def _engine(self) -> EngineDouble:
        from sglang.srt.managers.tokenizer_manager import TokenizerManager

        sessions = hasattr(TokenizerManager, "begin_weight_update")
        engine = EngineDouble(sessions)
        engine.tokenizer_manager = (_ManagerWithSessions if sessions else _Manager)(self._tell)
        return engine

    def _refusal(self, occasion: str, call: Callable[[], object]) -> None:
        self.refused[occasion] = ""
        try:
            call()
        except RefitError as error:
            self.refused[occasion] = f"{type(error).__name__}: {error}"

    def _tell(self, message: Any) -> Any:
        """Have both ranks do it."""
        dist.broadcast_object_list([message], 0)
        return None if message is None else self._do(message)

    def _heard(self) -> Any:
        told: list[Any] = [None]
        dist.broadcast_object_list(told, 0)
        return told[0]

    def _do(self, message: Any) -> Any:
        method, *arguments = message
        return getattr(self, f"_do_{method}")(*arguments)

    def _do_update(self, payloads: Sequence[str], load_format: str) -> tuple[bool, str]:
        found = self._worker.update(payloads, load_format)
        # SGLang's scheduler has all of its workers done before it answers.
        dist.barrier()
        return found


class _Scene(BucketScene):
    def __init__(self, rank: int, case: BucketCase) -> None:
        self._case = case
        blocks = case.blocks
        super().__init__(rank, blocks.served[0])
        self._loaded = [load_model(path).model for path in blocks.served]
        self._expected = _expected(blocks, self._loaded)
        self._held = blocks.served if blocks.quantized_before else blocks.trained
        self._differing: dict[str, list[str]] = {}
        self._other_numbers: dict[str, list[str]] = {}
        self._changed: dict[str, list[str]] = {}
        self._versions: list[tuple[int, str]] = []

    def seen(self, plain: tuple[str, str]) -> BucketResult:
        self._plain = plain
        self.play()
        return BucketResult(
            self._differing,
            self._other_numbers,
            self._changed,
            self._taken,
            self._packed,
            self.refused,
            self._own,
            self._versions,
        )

    def _lead(self) -> None:
        self._drive()
        self._tell(("onto", self._plain[0]))
        self._drive_plain(self._plain)

    def _drive(self) -> None:
        source, sent = CheckpointSource(self._held, CPU), 0
        for way in WAYS:
            with driven_in(way, self._engine()) as driven:
                sender = self._sender(source, driven.refit)
                for index in (1, 0, 0):
                    self._tell(("poison",))
                    source.take_on(index)
                    sender.refit(sent)
                    self._versions.append((driven.refit.version, driven.refit.weight_version()))
                    self._tell(("compare", f"{way} {sent}", index))
                    sent += 1
                self._refuse(driven.refit, source)

    def _refuse(self, refit: SglangRefit, source: CheckpointSource) -> None:
        """What an engine of blocks does not take, and that it goes on as it was."""
        if not self._case.quantizes:
            return
        for occasion, sender in {
            "not quantized": self._sender(source, refit, quantizes=False),
            "FP32": self._sender(_Widened(self._held), refit),
        }.items():
            self._refusal(occasion, lambda sender=sender: sender.refit(90))
            refit.require_servable()
            self._tell(("compare", occasion, 0))
        name = "model.layers.1.self_attn.k_proj.weight"
        source._held[name][130, 5] = torch.nan
        self._refusal("NaN", lambda: self._sender(source, refit).refit(91))
        source.take_on(0)
        self._sender(source, refit).refit(92)
        self._tell(("compare", "after NaN", 0))

    def _drive_plain(self, plain: tuple[str, str]) -> None:
        """An engine that holds no blocks."""
        source = CheckpointSource(plain, CPU)
        source.take_on(1)
        with driven_in("blocking", self._engine()) as driven:
            sender = self._sender(source, driven.refit, quantizes=True)
            self._refusal("no blocks", lambda: sender.refit(0))
            driven.refit.require_servable()
            self._tell(("unchanged", "no blocks"))

    def _sender(self, source: Any, refit: SglangRefit, quantizes: bool | None = None) -> SglangSender:
        wanted = self._case.quantizes if quantizes is None else quantizes
        return SglangSender(source, refit, "cpu", BUCKET_BYTES, trainer_quantize_fp8=wanted)

    def _do_poison(self) -> None:
        from rlrefit.workers.engines.sglang.worker_refit import WorkerRefit

        staged = WorkerRefit.of(self._worker.runner).bucketed._staged
        poison([*_held(self._worker.runner.model).values(), *staged.values()])

    def _do_compare(self, occasion: str, index: int) -> None:
        model = self._worker.runner.model
        self._differing[occasion] = differing(bytes_of(_held(model)), self._expected[index])
        self._other_numbers[occasion] = differing(_numbers(model), _numbers(self._loaded[index]))

    def _do_onto(self, path: str) -> None:
        from rlrefit.workers.engines.sglang.worker_refit import WorkerRefit

        self._packed = packed_scales(self._worker.runner.model)
        self._taken = self._worker.taken
        specs = CheckpointSource(self._case.blocks.trained, CPU).specs()
        worker = WorkerRefit.of(self._worker.runner)
        self._own = len(worker.formats([spec.to_json() for spec in specs])["weights"])
        self._worker = Worker(self._rank, path)
        self._before = bytes_of(_held(self._worker.runner.model))

    def _do_unchanged(self, occasion: str) -> None:
        self._changed[occasion] = differing(bytes_of(_held(self._worker.runner.model)), self._before)


class _Widened(CheckpointSource):
    """A trainer whose export is FP32."""

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(paths, CPU)
        self._held = {name: tensor.float() for name, tensor in self._held.items()}
