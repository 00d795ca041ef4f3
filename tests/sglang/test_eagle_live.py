"""An SGLang engine whose EAGLE-3 head drafts, as a real one on a CPU: the head follows each refit, bit for bit as SGLang loads it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlrefit.integration.errors import EngineDirty, RefitError
from rlrefit.workers.engines.sglang.sender import SglangSender
from rlrefit.workers.trainers.drafted import DraftedSource
from tests.families.chains import SIZE, write_chain
from tests.families.eagle import write_head
from tests.gpu.vllm_trainer import CheckpointSource

from .drafting_engine import Drafting
from .test_real_engine import CONFIG, Trainer

pytestmark = [
    # An engine's processes each load for many seconds.
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang"),
]
CPU = torch.device("cpu")
# As many layers as the head joins the inputs of, and no size that SGLang pads on CPUs.
SIZES = {
    "vocab_size": SIZE,
    "hidden_size": SIZE,
    "head_dim": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
}
JOINED = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}}


class _Source(DraftedSource):
    """A trainer of a policy and a head, whole, which takes both from one pair of checkpoints after the other."""

    def __init__(self, paths: list[str], heads: list[str]) -> None:
        self._sources = CheckpointSource(paths, CPU), CheckpointSource(heads, CPU)
        super().__init__(*self._sources)

    def take_on(self, index: int) -> None:
        for source in self._sources:
            source.take_on(index)


class _WithOtherTokens(_Source):
    """Whose head has the model's tokens in another order than the engine's."""

    def take_on(self, index: int) -> None:
        super().take_on(index)
        self._sources[1]._held["d2t"] += 1


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str], list[list[int]]]:
    """Two models, their heads, and which token follows which in each: the first head is always wrong, the second right."""
    folder = tmp_path_factory.mktemp("heads")
    paths = [folder / str(index) for index in (0, 1)]
    chains = [
        write_chain("qwen3", path, seed, drafts=False, changes=SIZES) for seed, path in enumerate(paths)
    ]
    written = [
        write_head(
            Path(f"{path}-head"), seed, chain=chain, right=seed == 1, sizes=SIZES, mapping=0, changes=JOINED
        )
        for seed, (path, chain) in enumerate(zip(paths, chains, strict=True))
    ]
    return [str(path) for path in paths], written, chains


@pytest.fixture(scope="module")
def scene(heads: tuple[list[str], list[str], list[list[int]]]) -> Iterator[Drafting]:
    paths, written, chains = heads
    found = Drafting(paths, chains, heads=written, speculative_algorithm="EAGLE3")
    yield found
    found.engine.shutdown()


@pytest.fixture
def source(heads: tuple[list[str], list[str], list[list[int]]]) -> _Source:
    paths, written, _ = heads
    return _Source(paths, written)


def test_both_heads_differ_in_all_that_a_refit_brings(scene: Drafting) -> None:
    first, second = scene.expected
    same = {name for name in first if first[name] == second[name]}
    # What is zero or one in both, and no weight.
    alike = ("o_proj.weight", "down_proj.weight", "embed_tokens.weight", "cos_sin_cache")
    assert [name for name in same if not name.endswith(alike)] == []
    assert len([name for name in first if name.startswith("drafter.") and name not in same]) > 6
    assert "model.embed_tokens.weight" in scene.shared()
    assert "lm_head.weight" not in scene.shared()


def test_the_head_follows_shard_to_shard_as_sglang_loads_it_and_its_drafts_are_right(
    scene: Drafting, source: _Source
) -> None:
    assert scene.drafts(0) == 0
    trainer = Trainer(scene.paths, 1)
    trainer.source = source
    meeting, joining = trainer.begin_to_meet()
    [found] = scene.refit.join_refit(meeting, 1, CONFIG)
    joining.result()
    assert (found["misc"], found["unused"]) == (1, 1)
    for version, index in enumerate((1, 0, 1)):
        scene.poison()
        sending = trainer.send(index, version)
        [record] = scene.refit.refit(version)
        sending.result()
        assert record["bytes_bulk"] > 20 * record["bytes_misc"]
        assert scene.digests() == scene.expected[index]
        assert scene.drafts(index) == index
        assert scene.refit.version == version
    trainer.close()


def test_the_head_follows_in_buckets_also_after_a_sleep(scene: Drafting, source: _Source) -> None:
    sender = SglangSender(source, scene.refit, "cpu", 1 << 16)
    for version, index in enumerate((0, 1), 10):
        source.take_on(index)
        scene.poison()
        sender.refit(version)
        assert scene.digests() == scene.expected[index]
        assert scene.drafts(index) == index
    scene.require_refit_after_a_sleep(sender, source)


def test_a_head_of_other_tokens_is_refused_by_name_and_the_next_refit_serves_again(
    scene: Drafting, source: _Source, heads: tuple[list[str], list[str], list[list[int]]]
) -> None:
    other = _WithOtherTokens(*heads[:2])
    other.take_on(0)
    with pytest.raises(RefitError) as caught:
        SglangSender(other, scene.refit, "cpu", 1 << 16).refit(20)
    assert caught.value.parameter == "drafter.d2t"
    trainer = Trainer(scene.paths, 1)
    trainer.source = other
    meeting, joining = trainer.begin_to_meet()
    scene.refit.join_refit(meeting, 1, CONFIG)
    joining.result()
    sending = trainer.send(0, 21)
    with pytest.raises(RefitError) as caught:
        scene.refit.refit(21)
    assert caught.value.parameter == "drafter.d2t"
    with pytest.raises(RefitError):
        sending.result()
    trainer.close()
    with pytest.raises(EngineDirty):
        scene.refit.require_servable()
    source.take_on(1)
    SglangSender(source, scene.refit, "cpu", 1 << 16).refit(22)
    assert scene.digests() == scene.expected[1]
    assert scene.drafts(1) == 1


def test_a_policy_without_a_head_leaves_the_engines(scene: Drafting) -> None:
    before = scene.digests()
    policy = CheckpointSource(scene.paths, CPU)
    policy.take_on(0)
    SglangSender(policy, scene.refit, "cpu", 1 << 16).refit(30)
    scene.require_the_drafters_own_kept(before, 0)
    # What the second head drafts is of no chain that the first model follows.
    assert scene.drafts(0) < 1
