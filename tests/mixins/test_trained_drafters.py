"""A drafter that is trained beside the policy: its weights come in the same refit, or none do."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import RefitError
from rlrefit.integration.layout import Fragment, box_of
from rlrefit.integration.session import RefitSession
from rlrefit.integration.weights.endpoints import storage_key
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.workers.trainers.fsdp.mixin import FSDPRefitMixin
from rlrefit.workers.trainers.fsdp.source import FSDPSource
from rlrefit.workers.trainers.source_mixin import SourceRefitMixin
from tests.refit.synthetic import SyntheticSource, run_world, whole

CONFIG = RefitConfig(bucket_mb=1, timeout_s=20.0, verify="full", transport="p2p")
ATTENTION = "model.layers.0.self_attn"


class Head(nn.Module):
    """With a name that the policy has too, and numbers of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4, bias=False)
        self.lm_head = nn.Linear(4, 8, bias=False)
        self.register_buffer("d2t", torch.arange(8))


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(4, 16, bias=False)


class Worker(FSDPRefitMixin):
    refit_config = CONFIG
    refit_dtype = torch.bfloat16

    def __init__(self) -> None:
        self.model, self.refit_drafter = Policy(), Head()

    def change(self, version: int) -> None:
        with torch.no_grad():
            for seed, tensor in enumerate((*self.model.parameters(), *self.refit_drafter.parameters())):
                tensor.normal_(generator=torch.Generator().manual_seed(10 * version + seed))
            self.refit_drafter.d2t.add_(version)

    def sent(self) -> dict[str, torch.Tensor]:
        drafted = {f"drafter.{name}": tensor for name, tensor in self.refit_drafter.state_dict().items()}
        found = self.model.state_dict() | drafted
        return {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in found.items()}


class Engine:
    """Takes all weights in place but one, which its loader takes."""

    device = torch.device("cpu")
    kept_bytes = 0
    loaded = "drafter.fc.weight"

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.held = {spec.name: torch.empty(spec.shape, dtype=spec.dtype) for spec in specs}

    def poison(self) -> None:
        for tensor in self.held.values():
            tensor.fill_(torch.nan if tensor.is_floating_point() else -1)

    def fragments(self, specs: Sequence[TensorSpec]) -> tuple[list[Fragment], dict[str, str]]:
        found = [
            Fragment(spec.name, spec.shape, box_of(spec.shape), self.held[spec.name])
            for spec in specs
            if spec.name != self.loaded
        ]
        return found, {self.loaded: "its loader takes it"}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.held[name].copy_(tensor)

    def finish(self, version: int) -> None:
        pass

    def abandon(self) -> None:
        pass

    def storage_key(self) -> Hashable:
        return storage_key(self.held.values())


@pytest.mark.parametrize(
    ("engine", "delta"), [("nccl_xfer", "off"), ("nccl_xfer", "always"), ("packed_broadcast", "off")]
)
def test_policy_and_drafter_arrive_in_each_version_over_every_path(engine, delta) -> None:
    worker = Worker()
    source = worker._prepared_source()
    assert [spec.name for spec in source.specs()] == list(worker.sent())
    live = Engine(source.specs())
    seen = threading.Barrier(2)

    def refits(rank: int, session: RefitSession, endpoint: Any) -> list[list[str]]:
        wrong = []
        for version in range(3):
            if rank == 0:
                worker.change(version)
            elif delta == "off":
                live.poison()
            session.refit(version)
            if rank == 1:
                expected = worker.sent()
                wrong.append([n for n, held in live.held.items() if not torch.equal(held, expected[n])])
            seen.wait(20)
        return wrong

    found = run_world([source], [live], refits, replace(CONFIG, delta=delta), engine)
    assert found == [[], [[], [], []]]


def test_nothing_of_the_policy_is_written_where_the_drafter_can_not_be_sent() -> None:
    worker = Worker()
    source = worker._prepared_source()
    live = Engine(source.specs())
    live.poison()

    def refuse() -> None:
        raise RefitError("no drafter today", stage="export")

    source._drafter.prepare = refuse
    found = run_world([source], [live], lambda rank, session, endpoint: session.refit(0), CONFIG)
    assert all(isinstance(error, RefitError) for error in found)
    assert all(t.isnan().all() if t.is_floating_point() else (t == -1).all() for t in live.held.values())


def test_a_drafter_that_is_another_object_needs_a_new_epoch_and_none_is_none() -> None:
    worker = Worker()
    first = worker._prepared_source()
    assert worker._prepared_source() is first
    worker.refit_drafter = Head()
    assert worker._prepared_source() is not first
    worker.refit_drafter = None
    assert [spec.name for spec in worker._prepared_source().specs()] == ["lm_head.weight"]


def test_a_drafter_beside_an_adapter_that_comes_alone_is_refused() -> None:
    worker = Worker()
    worker.refit_config = replace(CONFIG, lora="adapter")
    worker._make_refit_source = lambda: FSDPSource(worker.model)  # type: ignore[method-assign]
    with pytest.raises(RefitError) as caught:
        worker._prepared_source()
    assert caught.value.stage == "settings"


def test_scales_of_the_kv_cache_are_of_the_policys_layers_alone() -> None:
    specs = [TensorSpec(f"{ATTENTION}.k_proj.weight", (8, 4), torch.float32)]

    class Scaled(SourceRefitMixin):
        refit_config = replace(CONFIG, kv_scales=True)
        # A source in the place of a module, as a trainer gives it whose drafter is no plain module.
        refit_drafter = SyntheticSource(specs, whole(specs))

        def _make_refit_source(self) -> SyntheticSource:
            return SyntheticSource(specs, whole(specs))

    worker = Scaled()
    names = [spec.name for spec in worker._prepared_source().specs()]
    scales = [f"{ATTENTION}.{kind}_scale" for kind in "kvq"]
    assert names == [f"{ATTENTION}.k_proj.weight", *scales, f"drafter.{ATTENTION}.k_proj.weight"]
    assert worker._scaled_source().layers == [ATTENTION]
