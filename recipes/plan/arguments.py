"""The arguments of ``rlrefit plan``. Declared apart from what reads them: every command's start imports them."""

from __future__ import annotations

import argparse

from ...integration.config import DELTA_BASES

DTYPES = ("bf16", "fp16", "fp32")
# Of `rlrefit bench`, too, which has run with these.
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
        help="recipe=NAME, and keys of the recipe to override, as rlrefit train takes them",
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
        "rank i and engine rank i on one GPU), copy=1500 (GB/s within a GPU), pcie=50 (GB/s from host memory); or a YAML or "
        "JSON file with these keys",
    )
    add("--bucket-mb", type=int, help="policy.refit.bucket_mb: size of a staging bucket, MiB")
    add("--streams", type=int, help="policy.refit.streams: rounds of p2p that are on the wire at a time")
    add("--dtype", choices=DTYPES, help="of the weights (bf16, or the recipe's)")
    add(
        "--quantize",
        choices=(*QUANTIZE, "int4", "w4a4", "w4a16"),
        help="fp8: engines hold linear layers in 128 by 128 blocks of FP8, and the trainers quantize as they pack; int4: in INT4, in "
        "groups of 32 or the recipe's generation.weight_group; w4a4 and w4a16: in NVFP4 with inputs or without, as policy.qat trains (off, or "
        "the recipe's policy.refit.trainer_quantize_fp8 or …_int4, or policy.qat)",
    )
    add(
        "--changed",
        type=shares,
        metavar="0,0.1%,1%",
        help="predict sparse refits too (policy.refit.delta), before each of which such a share of what travels changes: of all "
        "elements, or with --quantize fp8 of codes and scales",
    )
    add(
        "--delta-base",
        choices=DELTA_BASES,
        help="policy.refit.delta_base of the sparse refits (gpu, or the recipe's)",
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


def shares(text: str) -> tuple[float, ...]:
    """Of ``0,0.001,1%``.

    Raises:
        ArgumentTypeError: names what is no share.
    """
    found = []
    for part in text.split(","):
        number, per_cent, rest = part.strip().partition("%")
        try:
            found.append(float(number) / (100 if per_cent else 1))
        except ValueError:
            rest = part
        if rest or not 0 <= found[-1] <= 1:
            raise argparse.ArgumentTypeError(
                f"{part!r} is no share; give numbers from 0 to 1, or per cents such as 0.1%"
            )
    return tuple(found)
