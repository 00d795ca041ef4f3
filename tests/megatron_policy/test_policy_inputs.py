"""What needs no ranks: batches and their split, configurations, layouts, and the refusal of stand-ins."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrefit.recipes.policy.base import AdamConfig
from rlrefit.recipes.policy.batch import BatchSplit, PolicyBatch
from rlrefit.recipes.policy.megatron import MegatronPolicy, MegatronPolicyConfig
from rlrefit.recipes.rollout.experience import Rollout, minibatches, policy_batch
from rlrefit.workers.engines.common.completion import Completion
from rlrefit.workers.trainers.megatron import cpu_standins
from rlrefit.workers.trainers.megatron.model import MegatronLayout, build_megatron


def make_batch(rows: int, tokens: int) -> PolicyBatch:
    ids = torch.arange(rows * tokens).view(rows, tokens)
    mask = torch.ones(rows, tokens)
    mask[:, 0] = 0
    return PolicyBatch(ids, mask, advantages=torch.arange(rows).float(), old_logprobs=ids * -0.5)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.tuples(*[st.integers(1, 9)] * 4))
def test_all_tokens_before_the_rows_lengths_are_computed_and_come_back_in_their_places(
    lengths: list[int], counts: tuple[int, int, int, int]
) -> None:
    tokens, (ranks, micro, token_multiple, multiple) = 9, counts
    within = torch.arange(tokens) < torch.tensor(lengths).unsqueeze(1)
    batch = make_batch(len(lengths), tokens)
    cut = {"loss_mask": batch.loss_mask * within, "old_logprobs": batch.old_logprobs * within}
    batch = dataclasses.replace(batch, **cut, lengths=torch.tensor(lengths))
    split = BatchSplit.of(
        batch,
        data_parallel=ranks,
        micro_batch=micro,
        token_multiple=token_multiple,
        micro_batch_multiple=multiple,
    )
    parts = [list(split.parts(split.local(batch, rank))) for rank in range(ranks)]
    assert split.micro_batches % multiple == 0
    assert split.micro_batch <= micro
    for of_rank in parts:
        assert [tuple(part.input_ids.shape) for part in of_rank] == [
            (split.micro_batch, width) for width in split.widths
        ]
    assert list(split.widths) == sorted(split.widths, reverse=True)
    for number, width in enumerate(split.widths):
        assert width % token_multiple == 0
        # No wider than the longest row of the ranks' micro-batches asks for.
        longest = max(int(rank[number].loss_mask.sum(1).max()) for rank in parts) + 1
        assert width < max(longest, 2) + token_multiple
    for name in ("loss_mask", "old_logprobs", "advantages"):
        found = sum(float(getattr(part, name).sum()) for of_rank in parts for part in of_rank)
        assert found == float(getattr(batch, name).sum())
    computed = torch.stack([split.joined([part.old_logprobs for part in of_rank]) for of_rank in parts])
    assert torch.equal(split.restored(computed), batch.old_logprobs)


def split_of(*lengths: int, tokens: int = 16, micro_batch: int = 2) -> BatchSplit:
    batch = dataclasses.replace(make_batch(len(lengths), tokens), loss_mask=torch.zeros(len(lengths), tokens))
    batch = dataclasses.replace(batch, lengths=torch.tensor(lengths))
    return BatchSplit.of(
        batch, data_parallel=2, micro_batch=micro_batch, token_multiple=4, micro_batch_multiple=1
    )


def test_one_long_row_widens_no_other_micro_batch_than_its_own() -> None:
    assert split_of(*[3] * 8, 16, 5).widths == (16, 4, 4)
    split = split_of(*[16] * 9)
    assert (split.widths, split.local_rows) == ((16, 16, 16), 6)
    # A micro-batch larger than the batch is not filled up with padding.
    split = split_of(*[16] * 9, micro_batch=512)
    assert (split.micro_batches, split.local_rows) == (1, 5)


def test_minibatches_of_rollouts_keep_the_lengths_of_their_rows() -> None:
    rollouts = [
        Rollout([1] * prompt, Completion([2] * count, [-1.0] * count, True, 0), 0.0, 0.0)
        for prompt, count in ((2, 3), (1, 1), (4, 2), (3, 0))
    ]
    whole = policy_batch(rollouts, pad_token_id=0)
    assert whole.lengths is not None
    assert whole.lengths.tolist() == [5, 2, 6, 3]
    for part in minibatches(whole, 2, 2, torch.Generator().manual_seed(0)):
        assert torch.equal((part.input_ids != 0).sum(1), part.lengths)


SHIFTED = torch.zeros(3, 4)
MALFORMED: dict[str, dict[str, Any]] = {
    "loss_mask": {"loss_mask": SHIFTED},
    "old_logprobs": {"old_logprobs": SHIFTED},
    "rollout_logprobs": {"rollout_logprobs": SHIFTED},
    "ref_logprobs": {"ref_logprobs": SHIFTED},
    "advantages": {"advantages": torch.zeros(3, 5)},
    "lengths": {"lengths": torch.tensor([5, 4, 5])},  # of rows that would lose trained tokens
    "column 0": {"loss_mask": torch.ones(3, 5)},
    "int64": {"input_ids": torch.zeros(3, 5)},
}


@pytest.mark.parametrize("named", MALFORMED)
def test_a_batch_that_is_not_what_it_says_is_refused(named: str) -> None:
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(make_batch(3, 5), **MALFORMED[named])


def test_all_that_is_wrong_with_a_policy_is_said_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        MegatronPolicyConfig(
            "model",
            micro_batch=0,
            temperature=0.0,
            optimizer=AdamConfig(cpu_offload_fraction=1.0),
            distributed_optimizer=False,
        )
    wrong = ["micro_batch is 0", "temperature is 0.0", "needs distributed_optimizer"]
    if not torch.cuda.is_available():
        wrong.append("this process has none; give 0")
    for part in wrong:
        assert part in str(caught.value)


OF_ITS_OWN = MegatronLayout(
    pipeline_parallel=2, num_layers_in_last_pipeline_stage=1, pipeline_model_parallel_layout="Et|tL"
)


@pytest.mark.parametrize(
    ("layout", "ranks", "text"),
    [
        (MegatronLayout(tensor_parallel=2, pipeline_parallel=2), 6, "pipeline_parallel = 4"),
        (MegatronLayout(expert_parallel=4), 2, "expert_parallel x pipeline_parallel = 4"),
        (MegatronLayout(virtual_pipeline=2), 2, "virtual_pipeline needs pipeline_parallel above 1"),
        (MegatronLayout(tensor_parallel=0), 2, "tensor_parallel is 0"),
        (MegatronLayout(pipeline_parallel=2, pipeline_model_parallel_layout="Et|t|tL"), 2, "3 stages"),
        (OF_ITS_OWN, 2, "pipeline_model_parallel_layout tells all stages"),
        (MegatronLayout(num_layers_in_first_pipeline_stage=3), 1, "need pipeline_parallel above 1"),
    ],
)
def test_an_impossible_layout_is_explained(layout: MegatronLayout, ranks: int, text: str) -> None:
    assert text in "; ".join(layout.violations(ranks))
    possible = MegatronLayout(tensor_parallel=2, pipeline_parallel=2, virtual_pipeline=2, expert_parallel=4)
    assert possible.violations(8) == []


def test_building_without_process_groups_says_what_to_call() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        build_megatron("model", MegatronLayout())
    with pytest.raises(RuntimeError, match="init_process_group"):
        MegatronPolicy(MegatronPolicyConfig("model"))


def test_stand_ins_are_refused_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(RuntimeError, match=r"torch sees 8 GPU.*CUDA_VISIBLE_DEVICES"):
        cpu_standins.install()
