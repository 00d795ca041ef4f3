"""vLLM whose MTP layers or EAGLE head draft, on one GPU that the trainer shares: after each refit it drafts with the new weights.

The models give each token one successor, so that tokens and the share of accepted drafts are known. Each case starts an engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from rlrefit.workers.drafter_names import DRAFTER
from tests.families.chains import SIZE, successors, write_chain
from tests.families.eagle import write_head

from .needs import needs
from .vllm_checkpoints import read_checkpoint
from .vllm_live import CUDA_GRAPHS, EAGER, LiveEngine, engine_environment
from .vllm_trainer import CONFIG, Trainer

pytestmark = [*needs("vllm", "transformers"), pytest.mark.timeout(240)]

TOKENS = 40
# None of one token: at the first position vLLM gives MTP layers zeros in place of the embedding, so that no draft is right there.
PROMPTS = [[5, 17, 33, 60], [3, 40], [9, 21]]
_EXPERTS = {"max_position_embeddings": 512, "norm_topk_prob": True, "moe_intermediate_size": 64}
GLM = {"head_dim": 64, **_EXPERTS}
# Of the sizes that kernels of latent attention have.
DEEPSEEK = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    **_EXPERTS,
}
DRAFTING = {
    "moe_backend": "triton",
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
    "disable_log_stats": False,
}
HEAD = {"vocab_size": SIZE, "hidden_size": SIZE, "head_dim": 64, "max_position_embeddings": 512}
EAGLE = {"speculative_config": {"method": "eagle3", "num_speculative_tokens": 1}}
GRAPHS = CUDA_GRAPHS["compilation_config"] | {"cudagraph_capture_sizes": [2, 4, 8]}
# name → (family, changes of its configuration, arguments of LLM)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "eager": ("glm4_moe", GLM, EAGER),
    "CUDA graphs": ("glm4_moe", GLM, CUDA_GRAPHS | {"compilation_config": GRAPHS}),
    "sleep": ("glm4_moe", GLM, EAGER | {"enable_sleep_mode": True}),
    "latent attention": ("deepseek_v3", DEEPSEEK, EAGER),
    "EAGLE head": ("qwen3", HEAD, EAGER | EAGLE),
    "EAGLE head, CUDA graphs": ("qwen3", HEAD, CUDA_GRAPHS | {"compilation_config": GRAPHS} | EAGLE),
}


class Scene(LiveEngine):
    """An engine that was started from checkpoint 0, whose drafts are always wrong; checkpoint 1's are always right."""

    def __init__(
        self, folder: Path, trainer: Trainer, family: str, changes: dict[str, Any], arguments: dict[str, Any]
    ) -> None:
        paths = [str(folder / str(index)) for index in range(2)]
        arguments = DRAFTING | arguments
        speculative = arguments["speculative_config"]
        eagle = speculative["method"] != "mtp"
        self.chains = [
            write_chain(family, Path(path), index, drafts=index == 1 and not eagle, changes=changes)
            for index, path in enumerate(paths)
        ]
        trained = paths
        if eagle:
            heads = [
                write_head(folder / f"head_{index}", index, chain=chain, right=index == 1, sizes=changes)
                for index, chain in enumerate(self.chains)
            ]
            arguments["speculative_config"] = speculative | {"model": heads[0]}
            trained = [_joined(*both) for both in zip(paths, heads, strict=True)]
        super().__init__(paths[0], trainer, CONFIG, arguments)
        trainer.commands.put(CONFIG)
        trainer.commands.put(trained)
        self._counted = (0.0, 0.0)
        self.digests_a = self.digests()

    def check(self, index: int) -> None:
        """Tokens are those of the model, and drafts those of its MTP layer."""
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        found = self.driver.generate([{"prompt_token_ids": p} for p in PROMPTS], parameters)
        for one, prompt in zip(found, PROMPTS, strict=True):
            assert list(one.output.outputs[0].token_ids) == successors(prompt, [self.chains[index]] * TOKENS)
        counts = {m.name: m for m in self.llm.get_metrics()}
        drafted, accepted = (
            counts[f"vllm:spec_decode_num_{what}_tokens"].value for what in ("draft", "accepted")
        )
        before, self._counted = self._counted, (drafted, accepted)
        assert drafted > before[0]
        assert (accepted - before[1]) / (drafted - before[0]) == index


def _joined(model: str, head: str) -> str:
    """Both in one folder, with the names that a trainer of both exports."""
    found = read_checkpoint(model) | {DRAFTER + name: t for name, t in read_checkpoint(head).items()}
    folder = Path(f"{model}_trained")
    folder.mkdir()
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module", params=CASES)
def scene(
    request: pytest.FixtureRequest,
    trainer: Trainer,
    tmp_path_factory: pytest.TempPathFactory,
    tell: Callable[[str], None],
) -> Iterator[Scene]:
    with engine_environment({}):
        tell(f"starting vLLM: {request.param}")
        began = time.monotonic()
        started = Scene(tmp_path_factory.mktemp("engine"), trainer, *CASES[request.param])
        tell(f"vLLM runs after {time.monotonic() - began:.0f} s: {request.param}")
        yield started
        started.close()


def test_the_drafter_follows_each_refit_and_tokens_are_the_models(scene: Scene) -> None:
    scene.check(0)
    scene.meet()
    digests_b = None
    for _ in range(2):
        scene.poison()
        scene.refit(1)
        assert digests_b in (None, scene.digests())
        digests_b = scene.digests()
        scene.check(1)
        scene.poison()
        scene.refit(0)
        assert scene.digests() == scene.digests_a
        scene.check(0)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("scene", ["sleep"], indirect=True)
def test_a_drafter_that_slept_is_woken_and_refitted_with_its_model(scene: Scene, level: int) -> None:
    scene.meet()
    for index in (1, 0):
        scene.driver.sleep(level)
        scene.driver.wake_up(["weights"])
        scene.refit(index)
        scene.driver.wake_up(["kv_cache"])
        scene.check(index)
