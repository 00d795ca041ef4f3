"""Which of SGLang's arguments keep what its weights made where a flush leaves it; drivers and recipes refuse them.

Host memory alone (``enable_hierarchical_cache``) is none of them: SGLang empties it with the prefixes on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A radix cache of another name is anybody's code: FlexKV, or what a package has registered.
STORES = ("hicache_storage_backend", "enable_lmcache", "enable_flexkv", "radix_cache_backend")
KEEPS_PREFIXES = (
    "keeps keys and values of earlier prompts where SGLang's flush after a refit leaves them, so that a later prompt would load "
    "what the old weights made"
)


def stores_of(settings: Mapping[str, Any]) -> list[str]:
    """Those that an engine with ``settings`` has, each with what follows."""
    return [f"{name} is {settings[name]!r}, which {KEEPS_PREFIXES}" for name in STORES if settings[name]]
