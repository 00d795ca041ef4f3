"""``checkpoint_engine.engine_kwargs.nccl_xfer_shards``, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ....integration.config import REFIT_KEYS, RefitConfig, not_a_section, read_settings, records_no_steps
from ....integration.errors import RefitError
from .contract import NO_BUCKET

BACKEND = "nccl_xfer_shards"
EXTENSION = "rlrefit.workers.frameworks.verl.extension.VerlRefitExtension"
_SECTIONS = "checkpoint_engine.engine_kwargs"
_PREFIX = f"{_SECTIONS}.{BACKEND}"
QUANTIZES = f"{_PREFIX}.trainer_quantize_fp8"
PACKS = f"{_PREFIX}.trainer_quantize_mxfp4"
MAKES_INT4 = f"{_PREFIX}.trainer_quantize_int4"
# The bucket's size is verl's own key; what the others are for is not in reach of verl's configuration.
_KEYS = tuple(key for key in REFIT_KEYS if key not in ("bucket_mb", "lora", "kv_scales"))


@dataclass(frozen=True)
class ShardOptions:
    """What all workers of one run are given.

    Attributes:
        refit: as ``policy.refit`` of a recipe.
        records_dir: folder for ``refits-<role>-<rank>.jsonl``, a line an update; None for none.
    """

    refit: RefitConfig
    records_dir: str | None = None

    @staticmethod
    def from_kwargs(bucket_size: int, given: dict[str, Any]) -> ShardOptions:
        """The options, checked.

        Args:
            bucket_size: bytes of ``update_weights_bucket_megabytes``.
            given: verl's ``engine_kwargs`` for this backend.

        Raises:
            RefitError: lists all that is wrong.
        """
        options, wrong = _read(bucket_size, given)
        if wrong:
            raise RefitError("; ".join(wrong), stage="settings")
        return options


def read_options(config: Any) -> tuple[ShardOptions, list[str]]:
    """The options that verl's ``CheckpointEngineConfig`` gives, and all that is wrong with them."""
    sections = config.engine_kwargs
    bad = "" if isinstance(sections, Mapping) else not_a_section(_SECTIONS, sections)
    given = {} if bad else sections.get(BACKEND, {})
    if given is None:  # verl hands the keys on, and null has none
        bad, given = not_a_section(_PREFIX, given), {}
    options, wrong = _read(config.update_weights_bucket_megabytes << 20, given)
    return options, [bad, *wrong] if bad else wrong


def _read(bucket_size: int, given: Any) -> tuple[ShardOptions, list[str]]:
    read = read_settings(given, _PREFIX, keys=_KEYS, own={"records_dir": str | None})
    wrong, bucket_mb = list(read.wrong), bucket_size >> 20
    if bucket_mb < 1:
        wrong.append(NO_BUCKET)
    wrong += records_no_steps(read.refit, _PREFIX, "verl's actor")
    refit = RefitConfig.unchecked(**asdict(read.refit) | {"bucket_mb": bucket_mb})
    return ShardOptions(refit, **read.own), wrong
