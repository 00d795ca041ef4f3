"""The arguments of ``rlrefit plan``. Declared apart from what reads them: every command's start imports them."""

from __future__ import annotations

import argparse

DTYPES = ("bf16", "fp16", "fp32")
QUANTIZE = ("off", "fp8")
# Ranks whose part is compiled unless more are asked for; all of them compute the same up to that part.
_MEASURED_RANKS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add(
        "--recipe",
        metavar="NAME|FILE.yaml",
        help="take model, layouts, buckets and streams from a recipe; options that are given take their place",
    )
    add(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="keys of the recipe to override, as rlrefit train takes them",
    )
    add("--model", help="bundled short name, path of a config.json or its folder, or hub name")
    add(
        "--train",
        metavar="tp=4,ep=8,pp=2",
        help="the Megatron trainer: tp, pp, ep, etp (1), cp, dp (the smallest that fits), vpp, first and last (layers of "
        "these pipeline stages), vocabulary_multiple (128; the vocabulary is padded to this times tp); or one under FSDP2: fsdp, and replicate (copies)",
    )
    add(
        "--gen",
        metavar="tp=8,dp=2",
        help="the vLLM engines: tp, dp (equal engines), pp, and ep = 1, tp or tp x dp (one engine with data parallelism)",
    )
    add(
        "--topology",
        default="",
        metavar="FILE|gpus_per_host=8,…",
        help="gpus_per_host=8, nic=50, nvlink=350 and host (GB/s and direction), colocated=false, shared_gpus=false (trainer "
        "rank i and engine rank i on one GPU), copy=1500 (GB/s within a GPU); or a YAML or JSON file with these keys",
    )
    add("--bucket-mb", type=int, help="policy.refit.bucket_mb: size of a staging bucket, MiB")
    add("--streams", type=int, help="policy.refit.streams: rounds of p2p that are on the wire at a time")
    add("--dtype", choices=DTYPES, help="of the weights (bf16, or the recipe's)")
    add(
        "--quantize",
        choices=QUANTIZE,
        help="fp8: engines hold linear layers in 128 by 128 blocks of FP8, and the trainers quantize as they pack (off, or "
        "the recipe's policy.refit.trainer_quantize_fp8)",
    )
    add("--json", action="store_true", help="print one JSON object")
    add(
        "--explain",
        default="",
        metavar="NAME",
        help="show who holds, wants and sends one weight; not with --json",
    )
    add(
        "--enumerate-with-bridge",
        action="store_true",
        help="hold the plan against what the installed Megatron-Bridge would export and one rank of each pipeline stage "
        "hold; takes half a minute",
    )
    add("--heat-map", default="", metavar="FILE", help="write bytes by pair of ranks as .png or .html")
    add(
        "--compile-ranks",
        default=str(_MEASURED_RANKS),
        metavar="all|N",
        help=f"how many ranks' own parts to compile and measure ({_MEASURED_RANKS})",
    )
