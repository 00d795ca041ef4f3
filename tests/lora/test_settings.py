"""What the sides tell each other of an adapter, and the engines that one may not come to alone."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlrefit.integration.colocated.stages import StageRefused
from rlrefit.integration.control import open_rendezvous
from rlrefit.integration.errors import RefitError
from rlrefit.workers.engines.common.destination_mixin import DestinationRefitMixin
from rlrefit.workers.engines.transformers.colocated import TransformersSleeper
from rlrefit.workers.lora import AdapterSettings, split_name


@pytest.fixture
def rendezvous() -> Iterator[dict[str, Any]]:
    server = open_rendezvous("127.0.0.1", 1, 1)
    yield server.rendezvous.to_json()
    server.close()


def test_settings_and_names_survive_the_wire() -> None:
    settings = AdapterSettings({"a.b": 4, "c": 3}, {"a.b": 12 / 4, "c": 7 / 3})
    assert AdapterSettings.from_tensor(settings.to_tensor()) == settings
    prefix = "base_model.model."
    assert split_name(f"{prefix}model.q_proj.lora_A.weight") == ("model.q_proj", "A")
    assert split_name(f"{prefix}model.embed_tokens.lora_embedding_B") == ("model.embed_tokens", "B")
    assert split_name(f"{prefix}lm_head.weight") is None


def test_no_adapter_is_to_come_alone_to_base_weights_that_a_refit_or_a_sleep_has_changed(
    rendezvous: dict[str, Any],
) -> None:
    worker = DestinationRefitMixin()
    worker.refit_state.mark_dirty(3)
    with pytest.raises(RefitError) as error:
        worker.join_refit(rendezvous, 1, {"lora": "adapter"})
    assert (error.value.stage, worker.refit_state.dirty) == ("settings", True)

    # Into what an earlier refit has brought the adapter may be merged already.
    worker = DestinationRefitMixin()
    worker._refit_session = SimpleNamespace(  # type: ignore[assignment]
        refit=lambda version, before: SimpleNamespace(to_json=dict), close=lambda: None
    )
    worker.refit(0)
    with pytest.raises(RefitError, match="refit 0") as error:
        worker.join_refit(rendezvous, 1, {"lora": "adapter"})
    assert (error.value.stage, worker.brings_adapter) == ("settings", False)

    model = torch.nn.Linear(2, 2)
    held = model.weight.detach().clone()
    model.device = torch.device("cpu")
    sleeper = TransformersSleeper(SimpleNamespace(model=model, brings_adapter=True))  # type: ignore[arg-type]
    with pytest.raises(StageRefused):
        sleeper.sleep(2)
    assert model.weight.equal(held)
