"""vLLM as the live engine."""

from __future__ import annotations

import os
from typing import Any

from .engine import MAX_MODEL_LEN, MAX_SEQUENCES, Checksums, LiveEngine
from .memory import Memory

_EXTENSION = "rlrefit.recipes.bench.live.vllm_extension.LiveExtension"
# What vLLM on a CPU reads from the environment and nowhere else. It starts no process without need: each would be
# spawned there, and import all of vLLM anew.
_CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


class VllmEngine(LiveEngine):
    """As :class:`.engine.LiveEngine`, with vLLM's own packed weight transfer."""

    def __init__(self, settings: dict[str, Any]):
        on_cpu = settings["device"] == "cpu"
        if on_cpu:
            os.environ.update(_CPU_ENVIRONMENT)
        from vllm import LLM

        transfer = {} if on_cpu else {"weight_transfer_config": {"backend": "nccl"}}
        self._llm = LLM(
            settings["model"],
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=settings["dtype"],
            tensor_parallel_size=settings["tp"],
            pipeline_parallel_size=settings["pp"],
            enable_expert_parallel=settings["ep"] > 1,
            distributed_executor_backend="mp" if settings["tp"] * settings["pp"] > 1 else None,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_SEQUENCES,
            # Captured graphs would take most of the start's time, and a refit writes below them anyway.
            enforce_eager=True,
            gpu_memory_utilization=settings["gpu_memory_utilization"],
            worker_extension_cls=_EXTENSION,
            **transfer,
        )
        self._refit = ""

    @property
    def package(self) -> tuple[str, str]:
        import vllm

        return "vllm", vllm.__version__

    def poison(self) -> list[int]:
        return list(self._llm.collective_rpc("live_poison"))

    def checksums(self) -> list[Checksums]:
        return list(self._llm.collective_rpc("live_checksums"))

    def memory(self, restart: bool) -> list[Memory]:
        return list(self._llm.collective_rpc("live_memory", args=(restart,)))

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        from vllm import SamplingParams

        self._llm.reset_prefix_cache()
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def join_refit(
        self, meeting: dict[str, Any], first_rank: int, config: dict[str, Any], engine: str
    ) -> None:
        self._answers("join_refit", meeting, first_rank, config, engine)

    def refit(self, version: int) -> list[dict[str, Any]]:
        return self._answers("refit", version)

    def close_refit(self) -> None:
        self._answers("close_refit")

    def join_transfer(self, meeting: dict[str, Any], update: dict[str, Any]) -> None:
        """Join the communicator of vLLM's weight transfer; ``update`` describes the weights of all its transfers."""
        self._update = update
        self._llm.init_weight_transfer_engine({"init_info": meeting})

    def transfer(self) -> None:
        """Receive all weights over vLLM's weight transfer."""
        self._llm.start_weight_update(is_checkpoint_format=True)
        self._llm.update_weights({"update_info": self._update})
        self._llm.finish_weight_update()
        self._llm.reset_prefix_cache()

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def _answers(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        from ....workers.engines.common.answers import raise_refit_errors

        return raise_refit_errors(self._llm.collective_rpc(method, args=arguments))
