"""Engines that keep keys and values, or encoder outputs, where no refit can drop them are refused before the first refit.

vLLM hands blocks to a connector, which finds them again by the hash of their tokens: the weights are no part of it. When
prefixes are dropped with ``reset_connector=True``, the scheduler calls the connector's ``reset_cache()`` and takes all but
False for success, and most connectors inherit the one of their base class, which does nothing and returns None. The next
request with the same prompt would then load what the old weights made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ....integration.errors import RefitError

# vLLM's own connectors without a cache: what they carry belongs to one request and is addressed by its id, from the engine
# that prefills it to the one that decodes it. The last one only writes, for the caller.
_PER_REQUEST = frozenset(
    {
        "NixlConnector",
        "P2pNcclConnector",
        "MooncakeConnector",
        "MoRIIOConnector",
        "ExampleHiddenStatesConnector",
    }
)
# They have the method. The first one's raises in some releases, so that every refit would leave the engine paused; the second
# one's drops what is in host memory, and what its further tiers (files, a network) keep is found again.
_NOT_WHOLLY = frozenset({"SimpleCPUOffloadConnector", "OffloadingConnector"})


def require_droppable_caches(vllm_config: Any) -> None:
    """Check that an engine can drop all that its weights made.

    Raises:
        RefitError: names every connector that would keep it.
    """
    kept = []
    if vllm_config.kv_transfer_config is not None:
        kept = [
            f"kv_transfer_config: {name} does not drop its keys and values (KVConnectorBase_V1.reset_cache)"
            for name in _keeping(vllm_config.kv_transfer_config)
        ]
    encoder = vllm_config.ec_transfer_config
    if encoder is not None and encoder.ec_connector is not None:
        kept.append(
            f"ec_transfer_config: {encoder.ec_connector} keeps encoder outputs, and vLLM has no call that drops them"
        )
    if kept:
        raise RefitError(
            f"{'; '.join(kept)}. After a refit, requests with an earlier prompt would load what the old weights made. Nothing "
            "has moved. Start the engine without it (kv_offloading_size sets kv_transfer_config too), or with a connector "
            "whose reset_cache() drops all that it keeps",
            stage="start",
        )


def _keeping(transfer: Any) -> Iterator[str]:
    """Names of the connectors of one ``KVTransferConfig`` that keep blocks through a reset."""
    name, of_vllm = transfer.kv_connector, not transfer.kv_connector_module_path
    if name is None or (of_vllm and name in _PER_REQUEST):
        return
    if of_vllm and name in _NOT_WHOLLY:
        yield name
        return
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    connector = KVConnectorFactory.get_connector_class(transfer)
    if issubclass(connector, MultiConnector):
        # Its own method asks those that it holds, and takes their None for success as well.
        for held in transfer.kv_connector_extra_config["connectors"]:
            yield from (f"{inner} in {name}" for inner in _keeping(KVTransferConfig(**held)))
    elif connector.reset_cache is KVConnectorBase_V1.reset_cache:
        yield name
