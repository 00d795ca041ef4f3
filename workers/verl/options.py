"""``checkpoint_engine.engine_kwargs.nccl_xfer_shards``, checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...integration.adapters.verl_epochs import NO_BUCKET
from ...integration.config import RefitConfig
from ...integration.errors import RefitError
from ...integration.settings import REFIT_KEYS, read_settings

BACKEND = "nccl_xfer_shards"
EXTENSION = "rlrefit.workers.verl.extension.VerlRefitExtension"
_PREFIX = f"checkpoint_engine.engine_kwargs.{BACKEND}"
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
        read = read_settings(given, _PREFIX, keys=_KEYS, own={"records_dir": str | None})
        wrong, bucket_mb = list(read.wrong), bucket_size >> 20
        if bucket_mb < 1:
            wrong.append(NO_BUCKET)
        if wrong:
            raise RefitError("; ".join(wrong), stage="settings")
        return ShardOptions(replace(read.refit, bucket_mb=bucket_mb), **read.own)
