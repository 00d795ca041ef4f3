"""The run's course on one trainer rank, and what comes of it."""

from __future__ import annotations

import logging
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch._C._distributed_c10d import TCPStore

from ..options import DTYPES, LiveOptions
from ..render import live_record, write_record
from ..scene import open_shortened
from .checkpoint import write_weightless
from .engine_process import EngineProcess
from .measure import LiveResult, Oracle, PathResult, measure
from .paths import Stage
from .trainer import LiveTrainer, TrainerRanks

logger = logging.getLogger(__name__)


def run_rank(rank: int, options: LiveOptions, store: TCPStore) -> LiveResult:
    """Everything on one rank; all ranks of the run call it and get the same.

    Raises:
        RefitError, CatalogError: what went wrong.
    """
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    # Deprecations and the like of a model that is built once and never trained.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if rank == 0:
        logging.getLogger(__package__).setLevel(logging.INFO)
    with tempfile.TemporaryDirectory(prefix="rlrefit-bench-") as scratch:
        return _run(rank, options, store, Path(scratch))


def _run(rank: int, options: LiveOptions, store: TCPStore, scratch: Path) -> LiveResult:
    start = time.monotonic()
    ranks = TrainerRanks(rank, options, store)
    engine: EngineProcess | None = None
    folder = scratch
    if ranks.leads:
        model = open_shortened(options.model, DTYPES[options.dtype], options.layers)
        folder = write_weightless(scratch / "model", model, DTYPES[options.dtype])
        engine = EngineProcess(options, folder, options.engine_log or scratch / "engine.log")
        logger.info("the engine is starting")
    try:
        folder = ranks.share(folder)
        trainer = LiveTrainer(folder, options)
        startup = {"trainer": time.monotonic() - start}
        logger.info("the trainer's model is built after %.0f s", startup["trainer"])
        trainer.prepare_nccl_xfer_refit_info()
        startup["enumeration"] = time.monotonic() - start - startup["trainer"]
        logger.info("its weights are known after %.0f s", time.monotonic() - start)
        versions: dict[str, str] = ranks.share(engine.result() if engine is not None else None)
        startup["engine"] = time.monotonic() - start
        logger.info("the engine is up after %.0f s: %s", startup["engine"], versions)
        stage = Stage(options, ranks, trainer, engine)
        kept = ranks.share(max(engine.call("poison")) if engine is not None else None)
        result = LiveResult(_device_name(ranks.device), versions, kept, startup, [])
        oracle = Oracle()
        for name in (*options.transports, *options.peers):
            result = replace(result, paths=[*result.paths, _path(stage, name, oracle)])
            if ranks.leads and options.json is not None:
                # Now, and not at the end: what was measured stays, whatever comes after it.
                write_record(options.json, live_record(options, result))
    finally:
        if engine is not None:
            engine.close()
    ranks.close()
    return result


def _path(stage: Stage, name: str, oracle: Oracle) -> PathResult:
    options = stage.options
    ours = name in options.transports
    result = measure(
        stage,
        name,
        options.refits if ours else options.peer_refits,
        options.warm_up if ours else 1,
        oracle,
    )
    if result.timing is None:
        logger.info("%s did not run: %s", name, result.not_run)
    else:
        logger.info("%s: %.1f ms, faults: %s", name, result.timing.median * 1e3, result.faults or "none")
    return result


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
