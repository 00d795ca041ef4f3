"""The options of ``rlrefit bench``. Imports nothing heavy: the command line declares them for every command."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...integration.config import DELTA_BASES, RefitConfig
from ..plan.arguments import QUANTIZE, shares

# What one kind of run alone reads, with the value that says that it was not given.
_LIVE_ONLY = {
    "backend": None,
    "gpu_memory_utilization": None,
    "engine_python": None,
    "engine_pythonpath": None,
    "engine_log": None,
}
_SHAPES_ONLY = {
    "colocated": False,
    "sleep": False,
    "leave": False,
    "quantize": None,
    "check": None,
    "timeline": None,
    "changed": None,
    "delta_base": None,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``rlrefit bench``."""
    add = parser.add_argument
    add("--model", required=True, help="a catalogued name, the path of a config.json, or a hub name")
    add(
        "--train",
        required=True,
        metavar="tp=1,ep=4",
        help="layout of the trainers: Megatron's, or FSDP2's: fsdp=4,replicate=2 (not with --live)",
    )
    add("--gen", required=True, metavar="tp=4,dp=1", help="layout of the engines (with --live of one engine)")
    add(
        "--transport",
        action="append",
        metavar="NAMES",
        help="auto (default), ipc, pull, p2p, m2n, golden, and with --colocated buckets (of the engine "
        "colocated_ipc); repeat or set apart by commas",
    )
    add(
        "--peers",
        action="append",
        metavar="NAMES",
        help="other ways to move the same weights: broadcast, per-tensor, vllm (default: all, and none with "
        "--colocated); with --live broadcast (Bridge's export over rlrefit's packed broadcast), and vllm or sglang (the same "
        "export over the engine's own transfer); or none; set apart by commas",
    )
    add("--refits", type=int, help="timed refits for each transport (20; with --live 10)")
    add("--warm-up", type=int, help="refits before them (3; with --live 2)")
    add("--peer-refits", type=int, help="timed refits of each peer (5; with --live 3)")
    add("--dtype", default="bf16", help="of the weights: bf16, fp16 or fp32")
    add("--layers", type=int, help="keep only the first decoder layers of the model, this many")
    add("--bucket-mb", type=int, help="policy.refit.bucket_mb")
    add("--streams", type=int, help="policy.refit.streams")
    add("--verify", default=RefitConfig().verify, help="policy.refit.verify: off, sampled (default), full")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is for tests with small models")
    add(
        "--timeout",
        dest="timeout_s",
        type=float,
        metavar="S",
        help="seconds that any wait may take (300; with --live 600)",
    )
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the figures there: an object for one transport, a list for several; with --live an object, after each "
        "path anew",
    )
    shapes = parser.add_argument_group("without --live")
    add = shapes.add_argument
    add(
        "--colocated",
        action="store_true",
        help="trainer rank i and engine rank i are two processes on one GPU; as many ranks on both sides, no peers",
    )
    add(
        "--sleep",
        action="store_true",
        help="engines sleep between refits: the memory of their weights goes back and comes anew, as by vLLM's sleep mode",
    )
    add(
        "--leave",
        action="store_true",
        help="trainers leave their GPUs between refits: the memory of their weights goes back and comes anew, as where they take "
        "turns with engines",
    )
    add(
        "--quantize",
        choices=QUANTIZE,
        help="fp8: engines hold linear layers in 128 by 128 blocks of FP8, and the trainers quantize as they pack",
    )
    add(
        "--check",
        action=argparse.BooleanOptionalAction,
        help="compare every byte of the first three refits and of the last with its true value (default)",
    )
    add(
        "--changed",
        type=shares,
        metavar="0,0.1%,1%",
        help="time sparse refits too (policy.refit.delta), before each of which such a share of all elements changes",
    )
    add("--delta-base", choices=DELTA_BASES, help="policy.refit.delta_base of the sparse refits (gpu)")
    add("--timeline", type=Path, metavar="FILE.png", help="draw the stages of one refit there")
    live = parser.add_argument_group("with --live")
    add = live.add_argument
    add(
        "--live",
        action="store_true",
        help="a live Megatron-core model with random weights on the first GPUs, and a live vLLM or SGLang on the next; "
        "compares what all paths leave, byte for byte",
    )
    add("--backend", choices=("vllm", "sglang"), help="the engine: vllm (default) or sglang")
    add("--gpu-memory-utilization", type=float, help="the engine's, of its GPUs (0.8)")
    add("--engine-python", metavar="FILE", help="the engine's Python interpreter (default: this one)")
    add(
        "--engine-pythonpath",
        metavar="PATHS",
        help="PYTHONPATH of the engine's process, with the engine and rlrefit on it (default: as it is here)",
    )
    add("--engine-log", type=Path, metavar="FILE", help="keep what the engine's processes print")


def foreign_options(arguments: argparse.Namespace) -> list[str]:
    """A complaint for each option that the asked kind of run does not read."""
    foreign, remedy = (
        (_SHAPES_ONLY, "leave it out, or --live")
        if arguments.live
        else (_LIVE_ONLY, "give --live too, or leave it out")
    )
    if arguments.delta_base is not None and arguments.changed is None and not arguments.live:
        return ["--delta-base: has no effect without --changed; give --changed too, or leave it out"]
    return [
        f"--{name.replace('_', '-')}: has no effect {'with' if arguments.live else 'without'} --live; {remedy}"
        for name, absent in foreign.items()
        if getattr(arguments, name) != absent
    ]
