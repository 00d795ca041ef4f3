"""The options of ``rlrefit bench``. Imports nothing heavy: the command line declares them for every command."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...integration.config import RefitConfig
from ..plan.arguments import QUANTIZE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``rlrefit bench``."""
    parser.add_argument(
        "--model", required=True, help="a catalogued name, the path of a config.json, or a hub name"
    )
    parser.add_argument(
        "--train",
        required=True,
        metavar="tp=1,ep=4",
        help="layout of the trainers: Megatron's, or FSDP2's: fsdp=4,replicate=2",
    )
    parser.add_argument("--gen", required=True, metavar="tp=4,dp=1", help="layout of the engines")
    parser.add_argument(
        "--colocated",
        action="store_true",
        help="trainer rank i and engine rank i are two processes on one GPU; as many ranks on both sides, no peers",
    )
    parser.add_argument(
        "--sleep",
        action="store_true",
        help="engines sleep between refits: the memory of their weights goes back and comes anew, as by vLLM's sleep mode",
    )
    parser.add_argument(
        "--transport",
        action="append",
        metavar="NAMES",
        help="auto (default), ipc, p2p, golden, and with --colocated buckets (of the engine "
        "colocated_ipc); repeat or set apart by commas",
    )
    parser.add_argument(
        "--quantize",
        choices=QUANTIZE,
        default=QUANTIZE[0],
        help="fp8: engines hold linear layers in 128 by 128 blocks of FP8, and the trainers quantize as they pack",
    )
    parser.add_argument(
        "--peers",
        action="append",
        metavar="NAMES",
        help="broadcast, per-tensor, vllm, m2n (default: all, and none with --colocated) or none; set apart by commas",
    )
    add_measured(parser, refits=20, warm_up=3, peer_refits=5)
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare every byte of the first three refits and of the last with its true value",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the figures there: an object for one transport, a list for several",
    )
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE.png", help="draw the stages of one refit there"
    )


def add_measured(parser: argparse.ArgumentParser, *, refits: int, warm_up: int, peer_refits: int) -> None:
    """Declare what every bench may be told: how often it refits, of what, by which settings, and where."""
    parser.add_argument("--refits", type=int, default=refits, help="timed refits for each transport")
    parser.add_argument("--warm-up", type=int, default=warm_up, help="refits before them")
    parser.add_argument("--peer-refits", type=int, default=peer_refits, help="timed refits of each peer")
    parser.add_argument("--dtype", default="bf16", help="of the weights: bf16, fp16 or fp32")
    parser.add_argument("--layers", type=int, help="keep this many decoder layers of the model")
    parser.add_argument("--bucket-mb", type=int, help="policy.refit.bucket_mb")
    parser.add_argument("--streams", type=int, help="policy.refit.streams")
    parser.add_argument(
        "--verify", default=RefitConfig().verify, help="policy.refit.verify: off, sampled (default), full"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu is for tests with small models"
    )
