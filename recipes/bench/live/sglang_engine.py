"""SGLang as the live engine."""

from __future__ import annotations

import os
from typing import Any

from .engine import MAX_MODEL_LEN, MAX_SEQUENCES, Checksums, LiveEngine
from .memory import Memory
from .update_group import GROUP

# What its workers are asked beside the refit.
_CHECKS = "rlrefit.recipes.bench.live.sglang_worker.load"
# For the last batch of requests that have ended.
_IDLE_S = 10.0


class SglangEngine(LiveEngine):
    """As :class:`.engine.LiveEngine`, with SGLang's own ``update_weights_from_distributed``."""

    def __init__(self, settings: dict[str, Any]):
        on_cpu = settings["device"] == "cpu"
        if on_cpu and settings["tp"] > 1:
            # SGLang puts each rank of a CPU on a NUMA node of its own unless it is told the cores, and takes a NCCL that it
            # finds for a sign of GPUs.
            cores = "|".join(str(rank) for rank in range(settings["tp"]))
            os.environ.update(SGLANG_CPU_OMP_THREADS_BIND=cores, SGLANG_NCCL_SO_PATH=os.devnull)
        import sglang

        from ....workers.engines.sglang.callers import EngineCaller
        from ....workers.engines.sglang.driver import SglangRefit
        from ....workers.engines.sglang.loader import LOADER

        self._engine = sglang.Engine(
            model_path=settings["model"],
            device=settings["device"],
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=settings["dtype"],
            tp_size=settings["tp"],
            ep_size=settings["ep"],
            context_length=MAX_MODEL_LEN,
            max_running_requests=MAX_SEQUENCES,
            max_total_tokens=2 * MAX_SEQUENCES * MAX_MODEL_LEN,
            mem_fraction_static=settings["gpu_memory_utilization"],
            # As with vLLM: captured graphs would take most of the start's time.
            disable_cuda_graph=True,
            disable_custom_all_reduce=True,
            # Kernels that need nothing but SGLang itself, and experts that stay as they were loaded.
            attention_backend="torch_native" if on_cpu else "triton",
            moe_runner_backend="auto" if on_cpu else "triton",
            sampling_backend="pytorch",
            grammar_backend="none",
            random_seed=0,
            log_level="warning",
            skip_server_warmup=True,
            custom_weight_loader=[LOADER, _CHECKS],
        )
        self._refit = SglangRefit(EngineCaller(self._engine))
        self._refit.calls.extend(_CHECKS)
        # Whether a session of SGLang's own update is open.
        self._updating = False

    @property
    def package(self) -> tuple[str, str]:
        import sglang

        return "sglang", sglang.__version__

    def poison(self) -> list[int]:
        return [found["bytes"] for found in self._refit.calls.ask("live_poison")]

    def checksums(self) -> list[Checksums]:
        return self._refit.calls.ask("live_checksums")

    def memory(self, restart: bool) -> list[Memory]:
        return self._refit.calls.ask("live_memory", restart)

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        outputs = self._engine.generate(
            input_ids=prompts,
            sampling_params={"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True},
        )
        # For the next weights; and SGLang's own update has its scheduler end where a batch is left.
        self._flush()
        return [list(output["output_ids"]) for output in outputs]

    def join_refit(
        self, meeting: dict[str, Any], first_rank: int, config: dict[str, Any], engine: str
    ) -> None:
        from ....integration.config import RefitConfig

        self._refit.join_refit(meeting, first_rank, RefitConfig(**config), engine)

    def refit(self, version: int) -> list[dict[str, Any]]:
        return self._refit.refit(version)

    def close_refit(self) -> None:
        self._refit.close_refit()

    def join_update_group(self, host: str, port: int, members: int, backend: str) -> None:
        """Join the group of SGLang's own update, whose rank 0 is the trainer's.

        Raises:
            RefitError: SGLang says why not.
        """
        group = (host, port, 1, members, GROUP, backend)
        self._require("init_weights_update_group", self._engine.init_weights_update_group(*group))

    def update(self, names: list[str], dtypes: list[str], shapes: list[list[int]], last: bool) -> None:
        """Receive a flattened bucket; caches are flushed after the last one. Raises as :meth:`join_update_group`.

        An SGLang that takes updates in sessions alone gets one from the first bucket to the last.
        """
        if self._refit.calls.settings["has_sessions"] and not self._updating:
            self._require("begin_weight_update", self._engine.begin_weight_update())
            self._updating = True
        answer = self._engine.update_weights_from_distributed(
            names, dtypes, shapes, GROUP, flush_cache=last, load_format="flattened_bucket"
        )
        self._require("update_weights_from_distributed", answer)
        if self._updating and last:
            self._require("end_weight_update", self._engine.end_weight_update())
            self._updating = False

    def leave_update_group(self) -> None:
        """Undo :meth:`join_update_group`; raises as it."""
        self._require("destroy_weights_update_group", self._engine.destroy_weights_update_group(GROUP))

    def close(self) -> None:
        self._engine.shutdown()

    def _flush(self) -> None:
        manager = self._engine.tokenizer_manager
        found = self._engine.loop.run_until_complete(manager.flush_cache(timeout_s=_IDLE_S))
        self._require("flush_cache", (found.success, found.message))

    def _require(self, call: str, answer: tuple[bool, str]) -> None:
        from ....integration.errors import RefitError

        success, message = answer[:2]
        if not success:
            raise RefitError(f"SGLang refused {call}: {message}", stage="transfer")
