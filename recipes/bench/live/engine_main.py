"""The engine's process: a vLLM that obeys trainer rank 0 over a socket which it inherits.

``python -m rlrefit.recipes.bench.live.engine_main FD``. Messages are JSON: first the settings, answered once the
engine is up; then ``{"call": name, "arguments": [...]}``, each answered by ``{"result": …}`` or ``{"error": text}``.
When the other end is gone, this process and all of the engine's end.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

_EXTENSION = "rlrefit.recipes.bench.live.extension.LiveExtension"
# What vLLM on a CPU reads from the environment and nowhere else. It starts no process without need: each would be
# spawned there, and import all of vLLM anew.
_CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
_MAX_MODEL_LEN, _MAX_SEQUENCES = 256, 8


class LiveEngine:
    """What trainer rank 0 can call."""

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
            max_model_len=_MAX_MODEL_LEN,
            max_num_seqs=_MAX_SEQUENCES,
            # Captured graphs would take most of the start's time, and a refit writes below them anyway.
            enforce_eager=True,
            gpu_memory_utilization=settings["gpu_memory_utilization"],
            worker_extension_cls=_EXTENSION,
            **transfer,
        )

    def rpc(self, method: str, *arguments: Any) -> list[Any]:
        """Each worker's answer to a method of the extension.

        Raises:
            RefitError: a worker's refit failed.
        """
        from ....workers.vllm.extension import raise_refit_errors

        answers = list(self._llm.collective_rpc(method, args=arguments))
        return raise_refit_errors(answers) if all(isinstance(a, dict) for a in answers) else answers

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Greedy tokens, with nothing cached of earlier weights."""
        from vllm import SamplingParams

        self._llm.reset_prefix_cache()
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

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

    def versions(self) -> dict[str, str]:
        """Of what runs here."""
        import torch
        import vllm

        return {"vllm": vllm.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}

    def close(self) -> None:
        """Stop the engine's processes."""
        self._llm.llm_engine.engine_core.shutdown()


def serve(connection: Connection) -> None:
    """Start the engine and answer calls until it is closed."""
    inbox: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    engine: LiveEngine | None = None
    while True:
        message = inbox.get()
        try:
            if engine is None:
                engine = LiveEngine(message)
                answer: Any = engine.versions()
            else:
                answer = getattr(engine, message["call"])(*message["arguments"])
            connection.send_bytes(json.dumps({"result": answer}).encode())
        # Of any kind: trainer rank 0 has to hear of it, and decides what follows.
        except Exception as error:
            connection.send_bytes(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        if message.get("call") == "close":
            return


def _receive(connection: Connection, inbox: queue.Queue[dict[str, Any]]) -> None:
    try:
        while True:
            inbox.put(json.loads(connection.recv_bytes()))
    except (EOFError, OSError):
        # Trainer rank 0 is gone; vLLM's own processes are of this process group.
        os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
