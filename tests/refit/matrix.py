"""Mappings of a small Megatron trainer to small vLLM engines, and what is wrong after their refits."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from functools import cache
from itertools import product

from rlrefit.recipes.plan.catalog import GenLayout, Model, TrainLayout, gen_storage, train_storage, violations

from .mappings import Mapping, Worlds, wrong_refits
from .stored import StoredDestination, StoredRank, values_of

TRAIN = [
    TrainLayout(tp=tp, ep=ep, pp=pp, etp=etp, vocabulary_multiple=4)
    for tp, ep, pp, etp in product((1, 2, 4), (1, 2), (1, 2), (1, 2))
]
GEN = [GenLayout(tp=tp, dp=dp, ep=ep) for tp in (1, 2, 4) for ep in sorted({1, tp}) for dp in (1, 2)]


def engines_of(kind: str) -> list[GenLayout]:
    """All engines that a kind of model fits."""
    return [gen for gen in GEN if kind == "experts" or gen.ep == 1]


def covering(kind: str, train: TrainLayout) -> list[GenLayout]:
    """Engines for each change: of experts a third for each trainer, others for the next, so that any two sizes of a trainer meet every engine."""
    step, place = (3 if kind == "experts" else 1), TRAIN.index(train)
    return [gen for number, gen in enumerate(engines_of(kind)) if (place + number) % step == 0]


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


@cache
def _trainers(small: Model, layout: TrainLayout) -> list[StoredRank]:
    values = values_of(small.specs())
    return [StoredRank(train_storage(small, layout, rank), values) for rank in range(layout.world_size)]


@cache
def _engines(small: Model, layout: GenLayout) -> list[StoredDestination]:
    values = values_of(small.specs())
    return [StoredDestination(gen_storage(small, layout, rank), values) for rank in range(layout.world_size)]


def stored(
    small: Model, train: TrainLayout, gen: GenLayout, bucket_bytes: int, verify: str = "sampled"
) -> Mapping:
    """Between ranks that all mappings of the model's share: a refit leaves nothing in them that the next one does not overwrite."""
    ranks = _trainers(small, train), _engines(small, gen)
    return Mapping(small.specs(), *ranks, bucket_bytes, verify=verify)


_SMALL = {"experts": model(), "dense": model(experts=0, groups=4, per_group=2)}


def wrong_mappings(cases: Sequence[tuple[str, TrainLayout, Sequence[GenLayout]]]) -> list[str]:
    """For each kind of model and trainer what is wrong with its refits to its engines, or how they failed."""
    worlds = Worlds(timeout_s=300.0)  # in the background, where others go first
    found = []
    for kind, train, engines in cases:
        try:
            found.append(_wrong(worlds, kind, train, engines))
        except Exception:  # the other cases of this process go on, and this one's test shows it
            found.append(traceback.format_exc())
    worlds.close()
    return found


def _wrong(worlds: Worlds, kind: str, train: TrainLayout, engines: Sequence[GenLayout]) -> str:
    has_experts = kind == "experts"
    small = _SMALL[kind]
    assert violations(small, train) == []
    misc = {ROUTER.format(i) for i in range(2)} if has_experts else set()
    found = []
    for gen in engines:
        mapping = stored(small, train, gen, 4096 if has_experts else 2048)
        assert {e.spec.name for e in mapping.analysis.manifest if e.route != "bulk"} == misc
        found += [f"to {gen}: {wrong}" for wrong in wrong_refits(worlds, mapping, ("p2p", "golden"), (1, 2))]
    return "; ".join(found)
