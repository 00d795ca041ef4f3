"""The options of ``rlrefit bench-live``. Imports nothing heavy: the command line declares them for every command."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..arguments import add_measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``rlrefit bench-live``."""
    parser.add_argument(
        "--model", required=True, help="a catalogued name, the path of a config.json, or a hub name"
    )
    parser.add_argument(
        "--train",
        required=True,
        metavar="tp=1,ep=2",
        help="layout of the Megatron trainer, on the first GPUs",
    )
    parser.add_argument(
        "--gen",
        required=True,
        metavar="tp=2",
        help="layout of the engine, on the next GPUs: tp, ep, and pp of vLLM",
    )
    parser.add_argument(
        "--backend", choices=("vllm", "sglang"), default="vllm", help="the engine: vllm (default) or sglang"
    )
    parser.add_argument(
        "--transport",
        action="append",
        metavar="NAMES",
        help="of nccl_xfer: auto (default), p2p, ipc, golden; repeat or set apart by commas",
    )
    parser.add_argument(
        "--peers",
        action="append",
        metavar="NAMES",
        help="broadcast (Bridge's export over rlrefit's packed broadcast), vllm or sglang (the same export over the "
        "engine's own way: vLLM's packed NCCL engine, SGLang's update_weights_from_distributed in flattened buckets; "
        "default: both of the backend) or none",
    )
    add_measured(parser, refits=10, warm_up=2, peer_refits=3)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.8, help="the engine's, of its GPUs")
    parser.add_argument(
        "--engine-python", metavar="FILE", help="the engine's Python interpreter (default: this one)"
    )
    parser.add_argument(
        "--engine-pythonpath",
        metavar="PATHS",
        help="PYTHONPATH of the engine's process, with the engine and rlrefit on it (default: as it is here)",
    )
    parser.add_argument(
        "--engine-log", type=Path, metavar="FILE", help="keep what the engine's processes print"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that any wait may take")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all figures there, after each path anew"
    )
