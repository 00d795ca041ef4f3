"""A Megatron trainer of MTP layers, and a running vLLM that drafts with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_checkpoints import PLAIN_EXPERTS, read_checkpoint
from vllm_engines import GEN_RANKS, ScriptEngine

from tests.families.chains import SIZE, successors, write_chain
from tests.megatron_trainers import Trainers
from tests.vllm_processes import forked_engines

# Its parts: Megatron's ranks send MTP layers in tests/families, vLLM's models take them in test_vllm_drafters, and a live engine drafts
# with what an FSDP2 trainer sent, of EAGLE's heads, in test_vllm_eagle_live.
pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

MODEL, TOKENS = "glm4_moe", 24
# At which a successor is likely, and other tokens are too.
TEMPERATURE = 4.0
# None of one token: at the first position vLLM gives MTP layers zeros in place of the embedding, so that no draft is right there.
PROMPTS = [[5, 17, 33, 60], [3, 40], [9, 21]]
SIZES = {
    "head_dim": 64,
    "max_position_embeddings": 512,
    "norm_topk_prob": True,
    "moe_intermediate_size": PLAIN_EXPERTS,
}
DRAFTING: dict[str, Any] = {
    "disable_log_stats": False,
    "worker_extension_cls": "vllm_drafting_probe.DraftingProbe",
    "logprobs_mode": "processed_logprobs",
    # Eight drafts at once take Triton's kernels at the start, where vLLM's processes were forked without a look at drivers.
    "max_num_seqs": 4,
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class Drafting:
    """An engine, and the models of two checkpoints: drafts of the first are always wrong, of the second always right.

    ``drafter`` is of vLLM's ``speculative_config``.
    """

    def __init__(self, paths: list[str], index: int, chains: list[list[int]], **drafter: Any) -> None:
        speculative = {"num_speculative_tokens": 1, **(drafter or {"method": "mtp"})}
        self.engine = ScriptEngine(paths[index], speculative_config=speculative, **DRAFTING)
        self._norms = [read_checkpoint(path)["model.norm.weight"].double() for path in paths]
        self._chains = chains
        self._counted = (0.0, 0.0)

    def digests(self) -> list[dict[str, str]]:
        return self.engine.call("refit_parameter_digests")

    def check(self, index: int) -> None:
        """Greedy tokens are those of the model, and drafts those of its MTP layer."""
        for found, prompt in zip(self.engine.generate(PROMPTS, TOKENS), PROMPTS, strict=True):
            assert found.tokens == successors(prompt, [self._chains[index]] * TOKENS)
        drafted, accepted = self._since_last()
        assert drafted > 0
        assert accepted == index * drafted

    def _since_last(self) -> tuple[float, float]:
        """Tokens that were drafted, and accepted of them."""
        counts = {m.name: m for m in self.engine.llm.get_metrics()}
        before = self._counted
        self._counted = tuple(
            counts[f"vllm:spec_decode_num_{what}_tokens"].value for what in ("draft", "accepted")
        )
        return self._counted[0] - before[0], self._counted[1] - before[1]

    def check_sampled(self, index: int) -> None:
        """Log-probabilities of sampled tokens are those of the model at the temperature, drafted or not."""
        from vllm import SamplingParams

        chain, norm = self._chains[index], self._norms[index]
        parameters = SamplingParams(
            temperature=TEMPERATURE, max_tokens=80, ignore_eos=True, detokenize=False, logprobs=0
        )
        found = self.engine.driver.generate([{"prompt_token_ids": p} for p in PROMPTS], parameters)
        followed = []
        for one, prompt in zip(found, PROMPTS, strict=True):
            last, [output] = prompt[-1], one.output.outputs
            for token, entry in zip(output.token_ids, output.logprobs, strict=True):
                # The token's own direction alone is left before the head.
                logits = torch.zeros(SIZE, dtype=torch.float64)
                logits[chain[last]] = norm[last] * SIZE**0.5 / TEMPERATURE
                assert abs(entry[token].logprob - float(logits.log_softmax(0)[token])) < 0.05
                followed.append(token == chain[last])
                last = token
        drafted, accepted = self._since_last()
        assert drafted > 0
        assert accepted < drafted
        assert 0.05 < sum(followed) / len(followed) < 0.95


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Trainers, list[str], list[list[int]]]]:
    """A trainer at TP2, and the checkpoints as Bridge exports them of it."""
    root = tmp_path_factory.mktemp("checkpoints")
    paths = [str(root / name) for name in ("a", "b")]
    chains = [
        write_chain(MODEL, Path(path), seed, drafts=seed == 1, changes=SIZES)
        for seed, path in enumerate(paths)
    ]
    trainers = Trainers({MODEL: paths}, mtp_loss_scaling_factor=0.1)
    for index, path in enumerate(paths):
        given = read_checkpoint(path)
        trainers.do("export", MODEL, index, path)
        assert read_checkpoint(path).keys() == given.keys()
    yield trainers, paths, chains
    trainers.close()


def test_the_drafter_follows_a_megatron_trainer_and_is_what_vllm_itself_loads(trained) -> None:
    trainers, paths, chains = trained
    with pytest.MonkeyPatch.context() as patch, forked_engines():
        for key, value in ENVIRONMENT.items():
            patch.setenv(key, value)
        other = Drafting(paths, 1, chains)
        other.check(1)
        digests_b = other.digests()
        other.engine.shutdown()
        live = Drafting(paths, 0, chains)
        live.check(0)
        digests_a = live.digests()
        own = [name for name in digests_a[0] if name.startswith("drafter.")]
        assert len(own) > 5
        rendezvous = trainers.do("open", MODEL, GEN_RANKS)[0]
        joining = trainers.start("join", MODEL, rendezvous)
        live.engine.init(rendezvous)
        # Routers and their biases, of the layer with experts and of the MTP layer.
        assert {routes["misc"] for routes in joining.result()} == {4}
        for version, index in enumerate((1, 0, 1)):
            live.engine.call("probe_poison")
            sending = trainers.start("refit", MODEL, index, version)
            live.engine.refit(version)
            assert all(isinstance(record, dict) for record in sending.result())
            assert live.digests() == (digests_b if index else digests_a)
            live.check(index)
            live.check_sampled(index)
        live.engine.shutdown()
        trainers.do("close", MODEL)
