"""A trainer and vLLM on the same GPU, in two processes, that take turns: memory stage by memory stage.

A small model learns a few sentences; after each turn vLLM gets its weights and completes the prompts, and the trainer
checks that both give the sampled tokens the same probabilities. Each move is printed with the most memory that was in
use on the GPU meanwhile, and lands in stages.jsonl; the records of refits hold the peaks as stage_peaks.

    python examples/colocated_vllm.py                        # a tiny model; on a CPU vLLM keeps its memory as it sleeps
    python examples/colocated_vllm.py --model Qwen/Qwen3-4B  # one GPU of 80 GB
    python examples/colocated_vllm.py --one-stage            # all of the engine wakes before the refit, to compare
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlrefit.integration.colocated.cycle import ColocatedCycle
from rlrefit.integration.colocated.memory import StageRecord
from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control import open_rendezvous
from rlrefit.integration.records.record import RefitRecord
from rlrefit.integration.session import RefitSession
from rlrefit.recipes.tiny.checkpoints import make_checkpoint
from rlrefit.workers.checkpoint_folder import checkpoint_folder
from rlrefit.workers.engines.vllm.colocated import VllmSleeper
from rlrefit.workers.engines.vllm.driver import EXTENSION, VllmDriver
from rlrefit.workers.trainers.colocated import TorchRank
from rlrefit.workers.trainers.fsdp.source import FSDPSource

TEXTS = [f"max({a},{b})={max(a, b)}" for a in range(4) for b in range(4)]
PROMPTS = [text[: text.index("=") + 1] for text in TEXTS]
REFIT = RefitConfig(bucket_mb=64, timeout_s=120.0)
# For ranks of one GPU, which NCCL would refuse to join.
ENGINE = "colocated_ipc"
STEPS_PER_TURN = 10
# Between log-probabilities of a token by vLLM's kernels and by transformers', in BF16.
SAME = 0.2


class Refits:
    """Moves the weights from this process into vLLM's."""

    def __init__(self, model: torch.nn.Module, driver: VllmDriver) -> None:
        self._source, self._driver = FSDPSource(model, torch.bfloat16), driver
        self._server = open_rendezvous("127.0.0.1", 1, 1)
        self._pool = ThreadPoolExecutor(1)
        self._session: RefitSession | None = None

    def __call__(self, version: int) -> list[RefitRecord]:
        if self._session is None:
            # Here, and not at the start: both must have their weights.
            self._session = self._meet()
        receiving = self._pool.submit(self._driver.refit, version)
        sent = self._session.refit(version)
        return [sent, *(RefitRecord(**record) for record in receiving.result())]

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._server.close()

    def _meet(self) -> RefitSession:
        meeting = self._server.rendezvous
        joining = self._pool.submit(self._driver.join_refit, meeting.to_json(), 1, REFIT, ENGINE)
        session = RefitSession.open(meeting, 0, lambda: self._source, REFIT, engine=ENGINE)
        joining.result()
        return session


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="checkpoint folder or hub name; without it a tiny one is made")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--one-stage", action="store_true", help="multi_stage_wake_up: false")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument(
        "--out", type=Path, default=Path("stages.jsonl"), help="records of all moves and refits"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = (
            checkpoint_folder(arguments.model)
            if arguments.model
            else make_checkpoint("qwen3", Path(scratch) / "m")
        )
        return run(str(path), arguments)


def run(path: str, arguments: argparse.Namespace) -> int:
    # The engine first: it measures what the GPU has, before the trainer takes any of it.
    llm = start_engine(path, arguments.gpu_memory_utilization)
    driver = VllmDriver(llm)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    # On the host at first; the trainer's first turn brings it to the GPU.
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5 if arguments.model else 1e-3)
    refits = Refits(model, driver)

    def tell(record: StageRecord) -> None:
        print(
            f"  {record.move:16} {record.seconds:7.3f} s  at most {record.device_peak / 2**30:6.2f} GiB in use"
        )
        append(arguments.out, record.to_json())

    cycle = ColocatedCycle(
        VllmSleeper([driver]),
        TorchRank([model], optimizer, device),
        refits,
        multi_stage_wake_up=not arguments.one_stage,
        on_stage=tell,
    )
    ids, starts = tokens_of(path)
    prompts = [{"prompt_token_ids": row[:start]} for row, start in zip(ids, starts, strict=True)]
    sampled: list[tuple[list[int], list[float]]] = []
    apart = 0.0
    try:
        for turn in range(arguments.turns):
            print(f"turn {turn}")
            cycle.to_training()
            if sampled:
                apart = cycle.train(lambda found=sampled: difference(model, prompts, found, device))
                print(f"  log-probabilities of trainer and engine {apart:.4f} apart")
            loss = cycle.train(lambda: learn(model, optimizer, ids, device))
            records = cycle.to_generation(turn)
            for record in records:
                append(arguments.out, record.to_json())
            sampled = cycle.generate(lambda: generate(driver, prompts))
            right = sum(
                found[0][:1] == row[start : start + 1]
                for found, row, start in zip(sampled, ids, starts, strict=True)
            )
            print(
                f"  loss {loss:.3f}; vLLM, version {driver.version}: {right} of {len(prompts)} answers right"
            )
    finally:
        refits.close()
        llm.llm_engine.engine_core.shutdown()
    print(
        "the engine follows the trainer" if apart < SAME else f"the engine does not follow: {apart:.3f} apart"
    )
    return 0 if apart < SAME else 1


def start_engine(path: str, utilization: float) -> Any:
    """vLLM in a process of its own."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    own: dict[str, Any] = {"enable_sleep_mode": True, "gpu_memory_utilization": utilization}
    if not torch.cuda.is_available():
        os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
        own = {}
    from vllm import LLM

    return LLM(
        path,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=256,
        enforce_eager=True,
        worker_extension_cls=EXTENSION,
        **own,
    )


def tokens_of(path: str) -> tuple[list[list[int]], list[int]]:
    """Tokens of each text, and where its answer begins."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    return ids, [len(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]


def learn(model: Any, optimizer: torch.optim.Optimizer, ids: list[list[int]], device: torch.device) -> float:
    """A few steps on the texts; the last loss."""
    batch = torch.tensor(ids, device=device)
    for _ in range(STEPS_PER_TURN):
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def generate(driver: VllmDriver, prompts: list[Any]) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens, and their log-probabilities."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = [found.output.outputs[0] for found in driver.generate(prompts, parameters)]
    return [
        (list(o.token_ids), [e[t].logprob for t, e in zip(o.token_ids, o.logprobs, strict=True)])
        for o in outputs
    ]


@torch.no_grad()
def difference(
    model: Any, prompts: list[Any], sampled: list[tuple[list[int], list[float]]], device: torch.device
) -> float:
    """The largest between the engine's log-probabilities and the trainer's, for the sampled tokens."""
    largest = 0.0
    for prompt, (tokens, logprobs) in zip(prompts, sampled, strict=True):
        context = [*prompt["prompt_token_ids"], *tokens]
        logits = model(input_ids=torch.tensor([context], device=device)).logits[0, -len(tokens) - 1 : -1]
        ours = logits.float().log_softmax(-1).gather(1, torch.tensor(tokens, device=device)[:, None])[:, 0]
        largest = max(largest, float((ours.cpu() - torch.tensor(logprobs)).abs().max()))
    return largest


def append(file: Path, row: dict[str, Any]) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
