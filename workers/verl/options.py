"""``checkpoint_engine.engine_kwargs.nccl_xfer_shards``, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...integration.config import RefitConfig
from ...integration.errors import RefitError

BACKEND = "nccl_xfer_shards"
EXTENSION = "rlrefit.workers.verl.extension.VerlRefitExtension"
_PREFIX = f"checkpoint_engine.engine_kwargs.{BACKEND}"
# Of RefitConfig; the bucket's size is verl's own key.
_OF_REFIT = ("transport", "streams", "timeout_s", "verify", "trainer_quantize_fp8", "port")
_TYPES: dict[str, tuple[type, ...]] = {
    "transport": (str,),
    "streams": (int,),
    "timeout_s": (int, float),
    "verify": (str,),
    "trainer_quantize_fp8": (bool,),
    "port": (int,),
    "records_dir": (str, type(None)),
}


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
        wrong = [
            f"{_PREFIX}.{name} is not known; there are {', '.join(_TYPES)}"
            for name in given
            if name not in _TYPES
        ]
        mistyped = {
            name: value
            for name, value in given.items()
            if name in _TYPES and (type(value) not in _TYPES[name])
        }
        wrong += [
            f"{_PREFIX}.{name}: {value!r} is no {_TYPES[name][0].__name__}"
            for name, value in mistyped.items()
        ]
        good = {name: value for name, value in given.items() if name in _OF_REFIT and name not in mistyped}
        refit = RefitConfig(bucket_mb=bucket_size >> 20, **good)
        wrong += refit.violations(_PREFIX)
        if wrong:
            raise RefitError(
                "; ".join(wrong).replace(
                    f"{_PREFIX}.bucket_mb", "checkpoint_engine.update_weights_bucket_megabytes"
                ),
                stage="settings",
            )
        return ShardOptions(refit, given.get("records_dir"))
