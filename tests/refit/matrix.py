"""Mappings of a small Megatron trainer to small vLLM engines, and what is wrong after their refits."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from itertools import product

from rlrefit.recipes.plan.catalog import GenLayout, Model, TrainLayout, gen_storage, train_storage, violations

from .mappings import Mapping, Worlds, wrong_refits

TRAIN = [
    TrainLayout(tp=tp, ep=ep, pp=pp, etp=etp, vocabulary_multiple=4)
    for tp, ep, pp, etp in product((1, 2, 4), (1, 2), (1, 2), (1, 2))
]
GEN = [GenLayout(tp=tp, dp=dp, ep=ep) for tp in (1, 2, 4) for ep in sorted({1, tp}) for dp in (1, 2)]

ROUTER = "model.layers.{}.mlp.gate.weight"


def model(
    *,
    groups: int = 4,
    per_group: int = 1,
    width: int = 3,
    experts: int = 4,
    inner: int = 8,
    vocabulary: int = 18,
    hidden: int = 12,
) -> Model:
    """Two layers, of experts or (``experts=0``) dense; sizes that leave vocabularies padded."""
    return Model(
        "small",
        {
            "model_type": "qwen3_moe" if experts else "qwen3",
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "intermediate_size": 2 * inner,
            "moe_intermediate_size": inner,
            "num_hidden_layers": 2,
            "num_attention_heads": groups * per_group,
            "num_key_value_heads": groups,
            "head_dim": width,
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "tie_word_embeddings": False,
        },
    )


def stored(
    small: Model, train: TrainLayout, gen: GenLayout, bucket_bytes: int, verify: str = "sampled"
) -> Mapping:
    return Mapping(
        small.specs(),
        [train_storage(small, train, rank) for rank in range(train.world_size)],
        [gen_storage(small, gen, rank) for rank in range(gen.world_size)],
        bucket_bytes,
        verify=verify,
    )


def wrong_mappings(cases: Sequence[tuple[str, TrainLayout]]) -> list[str]:
    """For each kind of model and trainer what is wrong with its refits to all engines, or how they failed."""
    worlds = Worlds(timeout_s=300.0)  # in the background, where others go first
    found = []
    for kind, train in cases:
        try:
            found.append(_wrong(worlds, kind, train))
        except Exception:  # the other cases of this process go on, and this one's test shows it
            found.append(traceback.format_exc())
    worlds.close()
    return found


def _wrong(worlds: Worlds, kind: str, train: TrainLayout) -> str:
    has_experts = kind == "experts"
    small = model() if has_experts else model(experts=0, groups=4, per_group=2)
    assert violations(small, train) == []
    misc = {ROUTER.format(i) for i in range(2)} if has_experts else set()
    found = []
    for gen in (gen for gen in GEN if has_experts or gen.ep == 1):
        mapping = stored(small, train, gen, 4096 if has_experts else 2048)
        assert {e.spec.name for e in mapping.analysis.manifest if e.route != "bulk"} == misc
        found += [f"to {gen}: {wrong}" for wrong in wrong_refits(worlds, mapping, ("p2p", "golden"), (1, 2))]
    return "; ".join(found)
