"""Which connectors of vLLM's would serve, after a refit, what the old weights made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ECTransferConfig, KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from rlrefit.integration.errors import RefitError
from rlrefit.workers.engines.vllm.connectors import require_droppable_caches
from rlrefit.workers.engines.vllm.patches import _require_rest


class _OwnConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)


class DroppingConnector(_OwnConnector):
    """Of a caller's own."""

    def reset_cache(self) -> bool:
        return True


class NixlConnector(_OwnConnector):
    """Of a caller's own too, with a name of vLLM's, and without the method."""


def _kv(connector: str, **more: Any) -> dict[str, Any]:
    return {"kv_connector": connector, "kv_role": "kv_both", **more}


def _multi(*held: dict[str, Any]) -> dict[str, Any]:
    return _kv("MultiConnector", kv_connector_extra_config={"connectors": list(held)})


def _own(kind: type[KVConnectorBase_V1]) -> dict[str, Any]:
    return _kv(kind.__name__, kv_connector_module_path=__name__)


def _config(transfer: dict[str, Any] | None, encoder: ECTransferConfig | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        kv_transfer_config=None if transfer is None else KVTransferConfig(**transfer),
        ec_transfer_config=encoder,
    )


@pytest.mark.parametrize(
    ("transfer", "named"),
    [
        (_kv("OffloadingConnector"), "OffloadingConnector"),
        (_kv("LMCacheConnectorV1"), "LMCacheConnectorV1"),
        (_kv("SimpleCPUOffloadConnector"), "SimpleCPUOffloadConnector"),
        (_own(NixlConnector), "NixlConnector"),
        (
            _multi(_kv("NixlConnector"), _own(DroppingConnector), _multi(_kv("OffloadingConnector"))),
            "OffloadingConnector in MultiConnector in MultiConnector",
        ),
    ],
)
def test_a_connector_that_would_serve_blocks_of_old_weights_is_refused_by_name(
    transfer: dict[str, Any], named: str
):
    with pytest.raises(RefitError, match=f"kv_transfer_config: {named}"):
        require_droppable_caches(_config(transfer))


@pytest.mark.parametrize(
    "transfer",
    [
        None,
        _kv("NixlConnector"),
        _own(DroppingConnector),
        _multi(_kv("P2pNcclConnector"), _own(DroppingConnector)),
    ],
)
def test_a_connector_that_drops_its_blocks_or_keeps_none_is_taken(transfer: dict[str, Any] | None):
    require_droppable_caches(_config(transfer))


def test_all_that_would_be_kept_is_told_at_once_by_vllms_own_calls_too():
    encoder = ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_both")
    with pytest.raises(RefitError, match=r"OffloadingConnector.*ec_transfer_config: ECExampleConnector"):
        require_droppable_caches(_config(_kv("OffloadingConnector"), encoder))
    for method in ("start_weight_update", "update_weights"):
        with pytest.raises(RefitError, match="ec_transfer_config: ECExampleConnector"):
            _require_rest(SimpleNamespace(vllm_config=_config(None, encoder)), method)
