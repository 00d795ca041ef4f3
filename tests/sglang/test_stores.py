"""Stores that SGLang's flush leaves: an engine that has one is not refitted, however it came by it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control import open_rendezvous
from rlrefit.integration.errors import RefitError
from rlrefit.integration.session import RefitSession
from rlrefit.workers.engines.sglang.driver import SglangRefit

from .engine_double import EngineDouble, Holder, equal, weights

CONFIG = RefitConfig(bucket_mb=1, timeout_s=20.0, verify="full")
ATTACHED = r"hicache_storage_backend is 'file'.*the old weights made.*DELETE /hicache/storage-backend"


pytestmark = pytest.mark.usefixtures("sglang")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hicache_storage_backend", "file"),
        ("enable_lmcache", True),
        ("enable_flexkv", True),
        ("radix_cache_backend", "flexkv"),
    ],
)
def test_an_engine_that_was_started_with_a_store_is_refused_before_anything_is_asked(
    through: Any, name: str, value: Any
) -> None:
    engine = EngineDouble(**{name: value})
    with closing(engine.loop), pytest.raises(RefitError, match=f"{name} is {value!r}"):
        through(engine, lambda refit: None)
    assert not engine.tokenizer_manager.attached


def test_a_store_that_was_attached_to_a_running_engine_is_refused_until_it_is_detached(through: Any) -> None:
    """SGLang attaches one to an engine with host memory for its cache, which alone is no such store."""
    engine = EngineDouble(enable_hierarchical_cache=True)
    manager = engine.tokenizer_manager

    def work(refit: SglangRefit) -> None:
        source, server = Holder(0), open_rendezvous("127.0.0.1", 1, 1)
        manager.updates["hicache_storage_backend"] = "file"
        with pytest.raises(RefitError, match=ATTACHED):
            refit.init_refit(server.rendezvous.to_json(), 1, CONFIG)
        manager.updates["hicache_storage_backend"] = None
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(RefitSession.open, server.rendezvous, 0, lambda: source, CONFIG)
            refit.init_refit(server.rendezvous.to_json(), 1, CONFIG)
            session = joining.result()
            for version, index in enumerate((1, 2)):
                manager.updates["hicache_storage_backend"] = "file"
                before = list(manager.calls)
                for refused in (lambda v=version: refit.refit(v), lambda v=version: refit.begin(v, [])):
                    with pytest.raises(RefitError, match=ATTACHED):
                        refused()
                assert manager.calls == before
                manager.updates["hicache_storage_backend"] = None
                source.take_on(index)
                manager.holder.poison()
                sending = pool.submit(session.refit, version)
                refit.refit(version)
                sending.result()
                assert equal(manager.holder.held, weights(index))
                refit.require_servable()
            refit.close_refit()
            session.close()

    with closing(engine.loop):
        through(engine, work)
