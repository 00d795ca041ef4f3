"""Every mapping of a small Megatron trainer to small vLLM engines, bit for bit, over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.session import RefitSession
from rlrefit.workers.catalog import GenLayout, Model, TrainLayout, gen_storage, train_storage, violations

from .mappings import Mapping, Worlds, wrong_refits
from .synthetic import refit_changed, run_world

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


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    made = Worlds()
    yield made
    made.close()


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


def name_of(layout: TrainLayout | GenLayout) -> str:
    sizes = {key: getattr(layout, key, None) for key in ("tp", "ep", "pp", "etp", "dp")}
    return "-".join(f"{key}{size}" for key, size in sizes.items() if size is not None)


@pytest.mark.parametrize("train", TRAIN, ids=name_of)
def test_every_mapping_of_experts_lands_bit_for_bit_by_p2p_and_by_golden(
    worlds: Worlds, train: TrainLayout
) -> None:
    small = model()
    assert violations(small, train) == []
    for gen in GEN:
        mapping = stored(small, train, gen, 4096)
        routes = {entry.spec.name: entry.route for entry in mapping.analysis.manifest}
        assert {n for n, route in routes.items() if route != "bulk"} == {ROUTER.format(i) for i in range(2)}
        assert wrong_refits(worlds, mapping, ("p2p", "golden"), (1, 2, 3)) == [], f"to {name_of(gen)}"


@pytest.mark.parametrize("train", [t for t in TRAIN if t.ep == t.etp == 1], ids=name_of)
def test_every_mapping_of_a_dense_model_lands_bit_for_bit(worlds: Worlds, train: TrainLayout) -> None:
    small = model(experts=0, groups=4, per_group=2)
    for gen in (g for g in GEN if g.ep == 1):
        mapping = stored(small, train, gen, 2048)
        assert {entry.route for entry in mapping.analysis.manifest} == {"bulk"}
        assert wrong_refits(worlds, mapping, ("p2p", "golden"), (1, 2)) == [], f"to {name_of(gen)}"


@given(
    train=st.sampled_from(TRAIN),
    gen=st.sampled_from(GEN),
    groups=st.sampled_from([1, 2, 4]),
    per_group=st.sampled_from([1, 3]),
    width=st.integers(1, 5),
    experts=st.sampled_from([4, 8]),
    inner=st.sampled_from([4, 8, 12]),
    vocabulary=st.integers(1, 40),
    hidden=st.integers(1, 17),
    bucket=st.integers(1 << 10, 1 << 15),
)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_mappings_land_bit_for_bit_whatever_the_sizes(
    worlds: Worlds, train: TrainLayout, gen: GenLayout, bucket: int, **sizes: int
) -> None:
    small = model(**sizes)
    assume(not violations(small, train) and not violations(small, gen))
    mapping = stored(small, train, gen, bucket, "full")
    assert wrong_refits(worlds, mapping, ("p2p", "golden"), (1, 2)) == []


@pytest.mark.parametrize("transport", ["p2p", "golden"])
@pytest.mark.parametrize(
    ("train", "gen"),
    [
        (TrainLayout(tp=2, ep=2, etp=1), GenLayout(tp=4)),
        (TrainLayout(tp=1, ep=2, pp=2, etp=2), GenLayout(tp=2, ep=2, dp=2)),
        (TrainLayout(tp=4, ep=1, etp=2), GenLayout(tp=1, dp=2)),
    ],
    ids=name_of,
)
def test_a_session_brings_bulk_and_misc_weights_of_three_changed_refits(
    train: TrainLayout, gen: GenLayout, transport: str
) -> None:
    mapping = stored(model(), train, gen, 1 << 20)

    def body(rank: int, session: RefitSession, endpoint: Any) -> list[Any]:
        assert {s.name for s in session.manifest.specs("misc")} == {ROUTER.format(i) for i in range(2)}
        return [refit_changed(session, endpoint, version)[1] for version in (1, 2, 3)]

    config = RefitConfig(transport=transport, bucket_mb=1, timeout_s=20.0, verify="full")
    for result in run_world(mapping.sources, mapping.destinations, body, config):
        assert result == [[], [], []]
