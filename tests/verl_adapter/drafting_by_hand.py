"""verl's Megatron actors at TP2 beside a server that drafts with the MTP layer that they have, on CPUs. Run by hand, in ten minutes or more:

    pip install megatron-energon tensorboard deprecation  # of Bridge's training configuration, which verl's engine imports
    python -m tests.verl_adapter.drafting_by_hand FOLDER vllm
    python -m tests.verl_adapter.drafting_by_hand FOLDER sglang  # in an environment that has SGLang too

Three updates by verl's manager, then two by the manager for replicas on the actors' GPUs. All parameters of the model and its drafter are
NaN before each; after it they have to be what the engine's own loading of the checkpoint leaves. Of one checkpoint all drafts are right,
of the other all are wrong.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any, Protocol

from examples.verl.on_cpus import SGLANG

from .megatron_by_hand import AWAKE, ROLLOUT, folder_of, in_turns, prepare

MODEL = "actor_rollout_ref.model"
MTP = tuple(f"{MODEL}.mtp.{key}=true" for key in ("enable", "enable_train", "enable_rollout"))
PROMPTS, TOKENS = [[5, 17, 33, 60], [3, 40]], 8
# Of sizes that SGLang's kernels in Triton have, and experts that no library of vLLM's packs.
SIZES = {"head_dim": 64, "max_position_embeddings": 512, "norm_topk_prob": True}
EXPERTS = {"vllm": 24, "sglang": 64}
_PROBE = "tests.verl_adapter.probe.DraftingProbe"
_SERVED = "tests.sglang.drafting_engine.serve_digests"
# Imported by each of verl's processes.
_INTERPRETED = "tests.verl_adapter.interpreted_sglang"


class Server(Protocol):
    """What is asked of the first replica's server."""

    def load(self, path: Path) -> None:
        """The engine's own loading of a checkpoint, into model and drafter."""

    def poison(self) -> None: ...

    def held(self) -> dict[str, Any]:
        """Digests of the parameters of both."""

    def continued(self, prompt: list[int]) -> tuple[list[int], int, int]:
        """The tokens after a prompt, and how many were drafted and accepted."""


class VllmServer:
    """The settings and the server of vLLM."""

    settings = (
        *AWAKE,
        f"{ROLLOUT}.disable_log_stats=false",
        f"{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls={_PROBE}",
    )

    def __init__(self, fleet: Any) -> None:
        self._fleet, self._counted = fleet, (0, 0)

    def load(self, path: Path) -> None:
        """By verl's own hand-over."""
        self._fleet.hand_over(0, path)

    def poison(self) -> None:
        self._fleet.call(self._fleet.replicas[0], "probe_poison")

    def held(self) -> dict[str, Any]:
        found = self._fleet.held(0)
        assert len(found["drafter"]) > 5
        return {kind: found[kind] for kind in ("parameters", "drafter")}

    def continued(self, prompt: list[int]) -> tuple[list[int], int, int]:
        tokens = self._fleet.continued(0, prompt, TOKENS)
        before, self._counted = self._counted, self._fleet.told_by_server(0, _counts)
        drafted, accepted = (now - was for now, was in zip(self._counted, before, strict=True))
        return tokens, drafted, accepted


def _counts(server: Any) -> tuple[int, int]:
    """Called by Ray with verl's server: tokens that were drafted, and accepted of them."""
    from prometheus_client import REGISTRY

    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    drafted, accepted = (
        sum(int(s.value) for s in samples if s.name == f"vllm:spec_decode_num_{what}_tokens_total")
        for what in ("draft", "accepted")
    )
    return drafted, accepted


class SglangServer:
    """The settings and the server of SGLang, whose kernels run in Triton's interpreter."""

    @staticmethod
    def settings_of() -> tuple[str, ...]:
        """Overrides of verl's configuration."""
        from .sglang_run import engine_settings, settings

        engine = engine_settings(attention_backend="triton", disable_radix_cache=True, added=_SERVED)
        sizes = {"num_steps": 1, "eagle_topk": 1, "num_draft_tokens": 2}
        mtp = (f"{MODEL}.mtp.speculative_{name}={size}" for name, size in sizes.items())
        return (*settings(1, engine=engine), *mtp, f"{ROLLOUT}.free_cache_engine=false")

    def __init__(self, fleet: Any) -> None:
        import ray

        from rlrefit.workers.engines.sglang.callers import EngineCalls
        from rlrefit.workers.frameworks.verl.sglang_server import VerlServerCaller, _address

        from .sglang_run import PROBE

        self._url, _ = ray.get(fleet.replicas[0].server_handle.__ray_call__.remote(_address), timeout=120)
        self._calls = EngineCalls(VerlServerCaller(self._url))
        self._calls.update([])
        for loader in (PROBE, _SERVED):
            self._calls.extend(loader)

    def load(self, path: Path) -> None:
        self._calls.step("update_weights_from_disk", model_path=str(path), load_format="auto")

    def poison(self) -> None:
        self._calls.ask("probe_poison")

    def held(self) -> dict[str, Any]:
        [found] = self._calls.ask("digests")
        digests: dict[str, Any] = found["digests"]
        assert len([name for name in digests if name.startswith("drafter.")]) > 5
        return digests

    def continued(self, prompt: list[int]) -> tuple[list[int], int, int]:
        import requests

        sampling = {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}
        asked = {"input_ids": prompt, "sampling_params": sampling}
        found = requests.post(f"{self._url}/generate", json=asked, timeout=120).json()
        told = found["meta_info"]
        return found["output_ids"], told["spec_num_proposed_drafts"], told["spec_num_correct_drafts"]


def main(folder: Path, engine: str, overrides: tuple[str, ...]) -> None:
    """Raises AssertionError where a parameter, a version, a token or a draft is not as it has to be."""
    env = prepare(folder)
    if engine == "sglang":
        from .sglang_run import environment

        named = f"{env['VERL_USE_EXTERNAL_MODULES']},{SGLANG},{_INTERPRETED}"
        env |= environment() | {"VERL_USE_EXTERNAL_MODULES": named, "TRITON_INTERPRET": "1"}
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "0-1"  # of the one rank
        import examples.verl.cpu_sglang  # noqa: F401
    from rlrefit.recipes.tiny.checkpoints import make_checkpoint
    from tests.families.chains import successors, write_chain
    from tests.verl_adapter.fleet import shard_fleet
    from tests.verl_adapter.megatron_actor import MegatronActor

    paths = [folder / name for name in ("a", "b")]
    tokenizer, chains = make_checkpoint("qwen3", folder / "tokenizer"), []
    for seed, path in enumerate(paths):
        changes = SIZES | {"moe_intermediate_size": EXPERTS[engine]}
        chains.append(write_chain("glm4_moe", path, seed, drafts=seed == 1, changes=changes))
        for file in tokenizer.glob("token*"):
            shutil.copy(file, path)
    settings = VllmServer.settings if engine == "vllm" else SglangServer.settings_of()
    settings = (*settings, *MTP, f"{ROLLOUT}.load_format=auto", *overrides)
    with shard_fleet(folder, paths[0], env, 2, 1, settings, actor_class=MegatronActor) as fleet:
        server: Server = VllmServer(fleet) if engine == "vllm" else SglangServer(fleet)

        def check(index: int) -> None:
            for prompt in PROMPTS:
                tokens, drafted, accepted = server.continued(prompt)
                assert tokens == successors(prompt, [chains[index]] * TOKENS)
                assert drafted > 0
                assert accepted == index * drafted

        held = []
        for path in paths:  # before any pass: SGLang 0.5.17 copies a router's weights in its first one, and loads no other copy
            server.load(path)
            held.append(server.held())
        check(len(paths) - 1)
        manager: Any = fleet.manager(0)
        for version, index in enumerate((1, 0, 1, 0, 1), 1):
            if version == 4:
                manager = in_turns(fleet)
            fleet.actors.take_on(str(paths[index]))
            server.poison()
            manager.update_weights(version)
            assert server.held() == held[index]
            check(index)
        for role in ("trainer", "generation"):
            assert [record["version"] for record in fleet.records(role)] == [1, 2, 3, 4, 5]
    print("as it has to be, five times, and so are its drafts")  # noqa: T201


if __name__ == "__main__":
    main(folder_of(sys.argv[1]), sys.argv[2], tuple(sys.argv[3:]))
