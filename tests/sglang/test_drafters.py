"""SGLang engines whose MTP layers draft, as real ones on a CPU: they follow each refit, bit for bit as SGLang loads them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import PlanError, RefitError
from rlrefit.recipes.config.drafting import MTP
from rlrefit.recipes.config.load import load_config
from rlrefit.recipes.rollout.arguments import sglang_arguments
from rlrefit.recipes.rollout.base import Sampling
from rlrefit.workers.engines.common.drafted import mtp_weights
from rlrefit.workers.engines.sglang.sender import SglangSender
from tests import megatron_trainers
from tests.families.chains import SIZE, successors, write_chain
from tests.gpu.vllm_checkpoints import read_checkpoint
from tests.gpu.vllm_trainer import CheckpointSource

from .drafting_engine import DIGESTS, DRAFTING, PROMPTS, TOKENS, Drafting
from .test_real_engine import CONFIG, Trainer

pytestmark = [
    # An engine's processes each load for many seconds.
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang"),
]
CPU = torch.device("cpu")
MODEL, LAYERS = "glm4_moe", 2
# Of sizes that its kernels in Triton have.
GLM = {"head_dim": 64, "max_position_embeddings": 512, "norm_topk_prob": True, "moe_intermediate_size": 64}


def arguments_of_a_recipe(path: Path) -> dict[str, Any]:
    """With which a recipe starts an engine without GPUs, and the tests' own loader."""
    server = {name: value for name, value in DRAFTING.items() if name.startswith("speculative_")}
    server |= {"disable_radix_cache": True, "max_total_tokens": 4096, "skip_server_warmup": True}
    config = load_config(
        "grpo_tiny_sglang",
        [
            f"model.path={path}",
            f"{MTP}=0.1",
            "generation.sglang.attention_backend=triton",
            f"+generation.sglang.server_args={json.dumps(server).replace('"', '')}",
            "ray.address=of_a_cluster_with_gpus",
        ],
    )
    found = sglang_arguments(config, json.loads((path / "config.json").read_text()), 0, 0)
    return found | {"custom_weight_loader": [*found["custom_weight_loader"], DIGESTS]}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafting]:
    folder = tmp_path_factory.mktemp("drafting")
    paths = [folder / str(index) for index in (0, 1)]
    chains = [
        write_chain(MODEL, path, index, drafts=index == 1, changes=GLM) for index, path in enumerate(paths)
    ]
    found = Drafting([str(path) for path in paths], chains, **arguments_of_a_recipe(paths[0]))
    yield found
    found.engine.shutdown()


class _Chosen(CheckpointSource):
    """A trainer without some of the weights."""

    def __init__(self, paths: list[str], without: set[str]) -> None:
        super().__init__(paths, CPU)
        self._without = without

    def specs(self) -> list[Any]:
        return [spec for spec in super().specs() if spec.name not in self._without]


class _WithHead(CheckpointSource):
    """A trainer that trains a drafter of a checkpoint of its own, too."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__(paths, CPU)
        self._held["drafter.fc.weight"] = torch.ones(4, 4, dtype=torch.bfloat16)


def _trained(scene: Drafting) -> set[str]:
    return set(mtp_weights((spec.name for spec in CheckpointSource(scene.paths, CPU).specs()), LAYERS))


def test_both_checkpoints_differ_in_all_that_a_refit_brings(scene: Drafting) -> None:
    first, second = scene.expected
    same = {name for name in first if first[name] == second[name]}
    # What is zero or one in both, and no weight.
    alike = ("o_proj.weight", "down_proj.weight", "w2_weight", "embed_tokens.weight", "cos_sin_cache")
    assert [name for name in same if not name.endswith(alike)] == []
    assert len([name for name in first if name.startswith("drafter.") and name not in same]) > 8
    assert scene.shared() >= {"model.embed_tokens.weight", "lm_head.weight"}


def test_the_drafter_follows_shard_to_shard_as_sglang_loads_it_and_its_drafts_are_right(
    scene: Drafting,
) -> None:
    assert scene.drafts(0) == 0
    trainer = Trainer(scene.paths, 1)
    meeting, joining = trainer.begin_to_meet()
    [found] = scene.refit.join_refit(meeting, 1, CONFIG)
    joining.result()
    assert found["unused"] == 0
    for version, index in enumerate((1, 0, 1)):
        scene.poison()
        sending = trainer.send(index, version)
        [record] = scene.refit.refit(version)
        sending.result()
        assert record["bytes_bulk"] > 20 * record["bytes_misc"]
        assert scene.digests() == scene.expected[index]
        assert scene.refit.version == version
    assert scene.drafts(1) == 1
    trainer.close()


def test_the_drafter_follows_in_buckets_also_after_a_sleep(scene: Drafting) -> None:
    source = CheckpointSource(scene.paths, CPU)
    sender = SglangSender(source, scene.refit, "cpu", 1 << 16)
    for version, index in enumerate((0, 1), 10):
        source.take_on(index)
        scene.poison()
        sender.refit(version)
        assert scene.digests() == scene.expected[index]
    scene.require_refit_after_a_sleep(sender, source)


def test_a_trainer_without_a_part_of_the_mtp_layers_is_refused_and_one_without_any_leaves_them(
    scene: Drafting,
) -> None:
    scene.load(0)
    before = scene.digests()
    trained = _trained(scene)
    missing = "model.layers.2.eh_proj.weight"
    assert missing in trained
    source = _Chosen(scene.paths, {missing})
    with pytest.raises(PlanError) as caught:
        SglangSender(source, scene.refit, "cpu", 1 << 20).refit(20)
    assert "eh_proj" in str(caught.value.parameter)
    assert scene.digests() == before
    source = _Chosen(scene.paths, trained)
    source.take_on(1)
    SglangSender(source, scene.refit, "cpu", 1 << 20).refit(21)
    scene.require_the_drafters_own_kept(before, 1)
    # What it drafts with the old layers is of no chain that the model follows.
    assert scene.drafts(1) < 1


def test_a_drafter_that_is_trained_beside_the_policy_is_left_out_shard_to_shard_and_refused_in_buckets(
    scene: Drafting,
) -> None:
    trainer = Trainer(scene.paths, 1)
    trainer.source = _WithHead(scene.paths)
    meeting, joining = trainer.begin_to_meet()
    [found] = scene.refit.join_refit(meeting, 1, CONFIG)
    joining.result()
    assert found["unused"] == 1
    scene.poison()
    sending = trainer.send(1, 30)
    scene.refit.refit(30)
    sending.result()
    trainer.close()
    assert scene.digests() == scene.expected[1]
    with pytest.raises(RefitError) as caught:
        SglangSender(_WithHead(scene.paths), scene.refit, "cpu", 1 << 20).refit(31)
    assert caught.value.parameter == "drafter.fc.weight"
    assert scene.drafts(1) == 1


@pytest.fixture(scope="module")
def trainers(scene: Drafting) -> Iterator[megatron_trainers.Trainers]:
    found = megatron_trainers.Trainers({MODEL: scene.paths}, mtp_loss_scaling_factor=0.1)
    yield found
    found.close()


def test_a_recipes_engine_drafts_with_what_a_megatron_trainer_sends_and_tells_the_policys_probabilities(
    scene: Drafting, trainers: megatron_trainers.Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.load(0)
    meeting = trainers.do("open", MODEL, 1)[0]
    joining = trainers.start("join", MODEL, meeting)
    config = RefitConfig(**megatron_trainers.CONFIG)
    [found] = scene.actor.join_refit(meeting, megatron_trainers.RANKS, config, "nccl_xfer")
    joining.result()
    assert found["unused"] == 0
    norms = [read_checkpoint(path)["model.norm.weight"].double() for path in scene.paths]
    for version, index in enumerate((1, 0, 1), 40):
        scene.poison()
        sending = trainers.start("refit", MODEL, index, version)
        [record] = scene.actor.refit(version)
        assert all(isinstance(sent, dict) for sent in sending.result())
        assert record["version"] == version
        assert scene.digests() == scene.expected[index]
        assert scene.drafts(index) == index
        chain, norm = scene.chains[index], norms[index]
        # On CPUs SGLang takes the most probable token of drafts at each temperature, and tells its probability at that one.
        for temperature in (0.0, 4.0):
            told = scene.actor.generate(PROMPTS, Sampling(TOKENS, temperature, 0))
            for one, prompt in zip(told, PROMPTS, strict=True):
                assert (len(one.token_ids), one.finished, one.version) == (TOKENS, False, version)
                last = prompt[-1]
                for token, logprob in zip(one.token_ids, one.logprobs, strict=True):
                    # The token's own direction alone is left before the head.
                    logits = torch.zeros(SIZE, dtype=torch.float64)
                    logits[chain[last]] = norm[last] * SIZE**0.5 / (temperature or 1)
                    assert abs(logprob - float(logits.log_softmax(0)[token])) < 0.05
                    last = token
    # A token that ends a completion leaves nothing of what was drafted behind it.
    for length in range(1, TOKENS):
        follow = successors(PROMPTS[0], [scene.chains[1]] * length)
        with monkeypatch.context() as patch:
            patch.setattr(scene.actor, "_stop", (follow[-1],))
            [ended] = scene.actor.generate(PROMPTS[:1], Sampling(TOKENS, 0.0, 0))
        assert ended.token_ids == follow[: follow.index(follow[-1]) + 1]
        assert ended.finished
    trainers.do("close", MODEL)
