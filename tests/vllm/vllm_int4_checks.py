"""What the tests of INT4 engines share: the check of what each rank saw of a case's refits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm_fp8_ranks import Fp8Result

# Of a checkpoint, beside each weight's name.
CODES_AND_SCALES = ("packed", "scale")
# What the trainer brings → the end of what the refusal names; of one layer's codes, or scales, behind its name.
REFUSED = {
    "BF16": "trainer_quantize_int4=true",
    "no scales": "weight_scale",
    "no codes": "weight_packed",
}


def by_case(cases: Sequence[str], by_rank: Iterable[Sequence[Fp8Result]]) -> dict[str, list[Fp8Result]]:
    """What each rank of a case saw, from what each rank saw of all cases."""
    return dict(zip(cases, map(list, zip(*by_rank, strict=True)), strict=True))


def check_bytes(ranks: Sequence[Fp8Result]) -> None:
    """After each refit the engine held what vLLM loads, and its formats are those that the worker extension tells."""
    for rank in ranks:
        assert not any(rank.differing.values()), rank.differing
        assert len(rank.differing) == 16
        assert rank.told == rank.own


def check_in_place(ranks: Sequence[Fp8Result]) -> None:
    """All codes and scales went shard to shard."""
    for rank in ranks:
        assert rank.misc == {}
        assert codes_of(rank) < {*rank.bulk}
    assert ranks[0].routes["nccl_xfer"]["misc"] == 0


def check_refusals(ranks: Sequence[Fp8Result], left_out: str) -> None:
    """Weights without scales, scales without codes and BF16 were refused by name; ``left_out`` begins the name of the first two."""
    for brought, told in REFUSED.items():
        named = told if brought == "BF16" else left_out + told
        assert all(named in rank.refused[brought] for rank in ranks), brought


def check_sparse(ranks: Sequence[Fp8Result], sparse: bool) -> None:
    """Of the refits that could be sparse, which the first could not, all were, or none."""
    assert [rank.sparse for rank in ranks] == [[False, *[sparse] * 3]] * 2


def codes_of(rank: Fp8Result) -> set[str]:
    """Names of codes and scales of what a rank holds in INT4."""
    return {f"{name}_{part}" for name in rank.own for part in CODES_AND_SCALES}
