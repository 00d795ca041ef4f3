"""What of the misc path the trainer itself could avoid, told when the ranks have agreed on routes."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from ..quantize.formats import CUTS_BLOCKS, Format
from ..weights.manifest import Manifest, ManifestEntry

logger = logging.getLogger(__name__)

_LARGE_SHARE = 0.05
# Of weights that are exported in FP32 for an engine of another dtype.
SAY_REFIT_DTYPE = (
    "Tell the source the engine's dtype, to which shards are cast as they are packed: refit_dtype = torch.bfloat16 of "
    "FSDPRefitMixin, FSDPSource(model, torch.bfloat16)"
)


def warn_of_misc(manifest: Manifest, formats: Mapping[str, Format]) -> None:
    """Warn where more than a twentieth of the bytes are gathered and sent whole for the trainer's dtype or its layout.

    What the engine can't take in place, its own ranks tell.

    Args:
        manifest: as all ranks agreed on it.
        formats: of the weights that travel as codes and scales.
    """
    misc = [entry for entry in manifest if entry.route == "misc"]
    of_quantized = {name + end for name, format in formats.items() for end in ("", format.scale_name_end)}
    cut = [entry for entry in misc if entry.spec.name in of_quantized and CUTS_BLOCKS in entry.reason]
    wide = [
        entry for entry in misc if entry.spec.dtype == torch.float32 and entry.spec.name not in of_quantized
    ]
    _warn(
        manifest,
        cut,
        "a trainer rank's shard cuts their blocks of scales",
        "Choose a layout whose shards are whole blocks, or compare with "
        "trainer_quantize_fp8=false, which sends shards of BF16",
    )
    _warn(manifest, wide, "they are exported in float32, which the engine does not keep", SAY_REFIT_DTYPE)


def _warn(manifest: Manifest, entries: list[ManifestEntry], why: str, remedy: str) -> None:
    nbytes, total = sum(e.spec.nbytes for e in entries), sum(e.spec.nbytes for e in manifest)
    if nbytes <= _LARGE_SHARE * total:
        return
    logger.warning(
        "%.0f%% of the weights (%.1f MB of %.1f) do not go shard to shard: every refit gathers them and sends them whole to "
        "each engine rank, since %s. First %s: %s. %s",
        100 * nbytes / total,
        nbytes / 1e6,
        total / 1e6,
        why,
        entries[0].spec.name,
        entries[0].reason,
        remedy,
    )
