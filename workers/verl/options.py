"""``checkpoint_engine.engine_kwargs.nccl_xfer_shards``, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...integration.config import RefitConfig
from ...integration.errors import RefitError
from ...integration.settings import read_settings

BACKEND = "nccl_xfer_shards"
EXTENSION = "rlrefit.workers.verl.extension.VerlRefitExtension"
_PREFIX = f"checkpoint_engine.engine_kwargs.{BACKEND}"
# The bucket's size is verl's own key; what the others are for is not in reach of verl's configuration.
_ELSEWHERE = ("bucket_mb", "lora", "kv_scales")


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
        refit, wrong = read_settings(
            given, _PREFIX, also=("records_dir",), without=_ELSEWHERE, bucket_mb=bucket_size >> 20
        )
        records_dir = given.get("records_dir")
        if records_dir is not None and not isinstance(records_dir, str):
            wrong.append(
                f"{_PREFIX}.records_dir: {records_dir!r} is not the path of a folder; give one, or null"
            )
        if wrong:
            raise RefitError(
                "; ".join(wrong).replace(
                    f"{_PREFIX}.bucket_mb", "checkpoint_engine.update_weights_bucket_megabytes"
                ),
                stage="settings",
            )
        return ShardOptions(refit, records_dir)
