"""What the trainer's ranks do: train a little under FSDP, and refit TensorRT-LLM engines in other processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from rlrefit.integration.errors import RefitError
from rlrefit.integration.quantize.formats import Fp8Blockwise
from rlrefit.integration.weights.quantizing import QuantizingSource
from rlrefit.workers.engines.trtllm.driver import TrtllmDriver
from rlrefit.workers.engines.trtllm.sender import TrtllmSender
from rlrefit.workers.trainers.fsdp.source import FSDPSource
from rlrefit.workers.trainers.qat.config import QATConfig
from rlrefit.workers.trainers.qat.fsdp import quantize_module
from rlrefit.workers.trainers.qat.source import PackedSource

from .engine_double import expected
from .engine_process import RemoteLLM, answers_of
from .host_memory import host_handle
from .package_double import get_device_uuid

# What the weights become, by the generation of the engine that takes them.
KINDS = {"allow-list": "nvfp4", "deny-list": "fp8", "both": "bf16"}
BUCKET_BYTES = 8 << 10


def refit(rank: int, checkpoint: str, sockets: dict[str, Path]) -> dict[str, Any]:
    """Two refits into the engine of each generation, with other weights each time."""
    return {generation: _refits(rank, checkpoint, generation, path) for generation, path in sockets.items()}


def _refits(rank: int, checkpoint: str, generation: str, socket: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    source: Any
    qat = None
    if KINDS[generation] == "nvfp4":
        qat = quantize_module(model, QATConfig())
        fully_shard(model)
        with torch.no_grad(), qat.calibrating():
            model(torch.arange(32).view(2, 16))
        qat.refresh()
        source = PackedSource(FSDPSource(model, torch.bfloat16), qat)
    else:
        fully_shard(model)
        source = FSDPSource(model, torch.bfloat16)
        if KINDS[generation] == "fp8":
            matrices = [spec.name for spec in source.specs() if "_proj" in spec.name]
            source = QuantizingSource(source, dict.fromkeys(matrices, Fp8Blockwise()))
    engines = None
    if rank == 0:
        engines = TrtllmDriver(RemoteLLM(socket, source.specs()), wait=answers_of)
    group: Any = dist.group.WORLD
    sender = TrtllmSender(source, engines, get_device_uuid(rank), BUCKET_BYTES, group, host_handle)
    report: dict[str, Any] = {"seen": [], "dtypes": {str(spec.dtype) for spec in source.specs()}}
    for version in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.125)
        if qat is not None:
            qat.refresh()
        record = sender.refit(version)
        source.prepare()
        whole = {name: tensor.clone() for name, tensor in source.export([s.name for s in source.specs()])}
        report["seen"].append(
            (record.bytes_misc, record.peak_extra_bytes, sum(t.nbytes for t in whole.values()))
        )
        if engines is not None:
            held = _ask(engines, "held")
            assert [found == expected(whole) for found in held] == [True, True], (generation, version)
            assert engines.version == version
            report["counts"] = _ask(engines, "counts")
            report.setdefault("weights", []).append(hash(frozenset(held[0].items())))
    report["failures"] = _failures(rank, sender, source, engines)
    return report


def _failures(rank: int, sender: TrtllmSender, source: Any, engines: TrtllmDriver | None) -> list[str]:
    """What each rank says of an engine that fails, and of a trainer rank that does."""
    told = []
    if engines is not None:
        _ask(engines, "fail_at", _ask(engines, "counts")[0]["buckets"] + 2)
    told.append(_told(sender, 2))
    if rank == 1:
        sender._reduce = _out_of_descriptors
    told.append(_told(sender, 3))
    sender._reduce = host_handle
    sender.refit(4)
    if engines is not None:
        told.append(f"serves {engines.version}")
    return told


def _ask(engines: TrtllmDriver, method: str, *args: Any) -> list[Any]:
    """The workers' answers to a question that only their double knows."""
    (llm,) = engines._llms
    return answers_of(llm._collective_rpc(method, args, non_block=True), 60)


def _told(sender: TrtllmSender, version: int) -> str:
    try:
        sender.refit(version)
    except RefitError as error:
        return str(error)
    return "nothing"


def _out_of_descriptors(tensor: torch.Tensor) -> Any:
    raise OSError("Too many open files")
