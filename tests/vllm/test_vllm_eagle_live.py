"""Trainers of a policy and an EAGLE-3 head beside it, and a running vLLM that drafts with the head."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_vllm_drafting import ENVIRONMENT, Drafting
from vllm_checkpoints import read_checkpoint
from vllm_eagle_trainers import FsdpWithHead, MegatronWithHead, MegatronWithWideHead
from vllm_engines import GEN_RANKS

from tests.families.chains import SIZE, write_chain
from tests.families.eagle import write_head
from tests.megatron_trainers import Trainers
from tests.vllm_processes import forked_engines

pytestmark = pytest.mark.timeout(600)

MODEL = "qwen3"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str], list[list[int]]]:
    """Two models, their heads, and which token follows which in each: the first head is always wrong, the second right."""
    root = tmp_path_factory.mktemp("checkpoints")
    sizes = {"vocab_size": SIZE, "hidden_size": SIZE, "head_dim": 64, "max_position_embeddings": 512}
    paths = [root / name for name in ("a", "b")]
    chains = [write_chain(MODEL, path, seed, drafts=False, changes=sizes) for seed, path in enumerate(paths)]
    heads = [
        write_head(Path(f"{path}-head"), seed, chain=chain, right=seed == 1, sizes=sizes)
        for seed, (path, chain) in enumerate(zip(paths, chains, strict=True))
    ]
    return [str(path) for path in paths], heads, chains


@pytest.fixture(scope="module")
def engines(written) -> Iterator[tuple[Drafting, list[list[dict[str, str]]]]]:
    """A live engine of the first model and head, and the digests of engines that vLLM itself has loaded."""
    paths, heads, chains = written
    with pytest.MonkeyPatch.context() as patch, forked_engines():
        for key, value in ENVIRONMENT.items():
            patch.setenv(key, value)
        other = Drafting(paths, 1, chains, method="eagle3", model=heads[1])
        other.check(1)
        digests_b = other.digests()
        other.engine.shutdown()
        live = Drafting(paths, 0, chains, method="eagle3", model=heads[0])
        live.check(0)
        yield live, [live.digests(), digests_b]
        live.engine.shutdown()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(MegatronWithHead, marks=pytest.mark.full),
        pytest.param(MegatronWithWideHead, marks=pytest.mark.full),
        FsdpWithHead,
    ],
)
def test_the_head_follows_its_trainer_with_the_policy_and_its_drafts_are_accepted_as_it_knows_them(
    kind, written, engines
) -> None:
    paths, heads, _ = written
    live, digests = engines
    assert len([name for name in digests[0][0] if name.startswith("drafter.")]) > 5
    trainers = Trainers({MODEL: paths}, heads, kind=kind)
    rendezvous = trainers.do("open", MODEL, GEN_RANKS)[0]
    joining = trainers.start("join", MODEL, rendezvous)
    live.engine.init(rendezvous)
    wide = [name for name, t in read_checkpoint(heads[0]).items() if t.is_floating_point()]
    loaded = {f"drafter.{name}" for name in wide} if kind is MegatronWithWideHead else set()
    for routes in joining.result():
        assert routes["misc_reasons"].keys() == loaded
        assert routes["unused"] == 1
    for version, index in enumerate((1, 0, 1)):
        live.engine.call("probe_poison")
        sending = trainers.start("refit", MODEL, index, version)
        live.engine.refit(version)
        assert all(isinstance(record, dict) for record in sending.result())
        assert live.digests() == digests[index]
        live.check(index)
    trainers.do("close", MODEL)
    trainers.close()
    live.engine.close_refit()
