"""A trainer and SGLang on the same GPU, in two processes, that take turns: memory stage by memory stage.

A small model learns a few sentences; after each turn SGLang gets its weights in flattened buckets and completes the prompts, and
the trainer checks that both give the sampled tokens the same probabilities. Each move is printed with the most memory that was
in use on the GPU meanwhile, and lands in stages.jsonl. SGLang 0.5.17 has to be installed (docs/sglang.md).

    python examples/colocated_sglang.py                        # a tiny model; on a CPU SGLang keeps its memory as it sleeps
    python examples/colocated_sglang.py --model Qwen/Qwen3-4B  # one GPU of 80 GB
    python examples/colocated_sglang.py --one-stage            # all of the engine wakes before the refit, to compare
"""

from __future__ import annotations

import argparse
import json
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlrefit.integration.colocated.cycle import ColocatedCycle
from rlrefit.integration.colocated.memory import StageRecord
from rlrefit.recipes.tiny.checkpoints import make_checkpoint
from rlrefit.workers.checkpoint_folder import checkpoint_folder
from rlrefit.workers.engines.common.bucket_sender import own_device
from rlrefit.workers.engines.sglang.callers import EngineCaller
from rlrefit.workers.engines.sglang.driver import SglangRefit
from rlrefit.workers.engines.sglang.loader import LOADER
from rlrefit.workers.engines.sglang.sender import SglangSender
from rlrefit.workers.trainers.colocated import TorchRank
from rlrefit.workers.trainers.fsdp.source import FSDPSource

TEXTS = [f"max({a},{b})={max(a, b)}" for a in range(4) for b in range(4)]
PROMPTS = [text[: text.index("=") + 1] for text in TEXTS]
BUCKET_BYTES = 64 << 20
STEPS_PER_TURN = 10
# Between log-probabilities of a token by SGLang's kernels and by transformers', in BF16.
SAME = 0.2
Sampled = list[tuple[list[int], list[float]]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="checkpoint folder or hub name; without it a tiny one is made")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--one-stage", action="store_true", help="multi_stage_wake_up: false")
    parser.add_argument("--mem-fraction-static", type=float, default=0.8)
    parser.add_argument("--out", type=Path, default=Path("stages.jsonl"), help="records of all moves")
    arguments = parser.parse_args()
    if find_spec("sglang") is None:
        parser.error("this Python has no package sglang; pip install 'rlrefit[sglang]' (docs/sglang.md)")
    with tempfile.TemporaryDirectory() as scratch:
        path = (
            checkpoint_folder(arguments.model)
            if arguments.model
            else make_checkpoint("qwen3", Path(scratch) / "m")
        )
        return run(str(path), arguments)


def run(path: str, arguments: argparse.Namespace) -> int:
    # The engine first: it measures what the GPU has, before the trainer takes any of it.
    engine = start_engine(path, arguments.mem_fraction_static)
    try:
        refit = SglangRefit(EngineCaller(engine))
        return take_turns(path, arguments, engine, refit)
    finally:
        engine.shutdown()


def take_turns(path: str, arguments: argparse.Namespace, engine: Any, refit: SglangRefit) -> int:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    # On the host at first; the trainer's first turn brings it to the GPU.
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5 if arguments.model else 1e-3)
    sender = SglangSender(
        FSDPSource(model, torch.bfloat16), refit, own_device() if cuda else "cpu", BUCKET_BYTES
    )

    def tell(record: StageRecord) -> None:
        print(
            f"  {record.move:16} {record.seconds:7.3f} s  at most {record.device_peak / 2**30:6.2f} GiB in use"
        )
        with arguments.out.open("a") as lines:
            lines.write(json.dumps(record.to_json()) + "\n")

    cycle = ColocatedCycle(
        refit,
        TorchRank([model], optimizer, device),
        lambda version: [sender.refit(version)],
        multi_stage_wake_up=not arguments.one_stage,
        on_stage=tell,
    )
    ids, starts = tokens_of(path)
    prompts = [row[:start] for row, start in zip(ids, starts, strict=True)]
    sampled: Sampled = []
    apart = 0.0
    for turn in range(arguments.turns):
        print(f"turn {turn}")
        cycle.to_training()
        if sampled:
            apart = cycle.train(lambda found=sampled: difference(model, prompts, found, device))
            print(f"  log-probabilities of trainer and engine {apart:.4f} apart")
        loss = cycle.train(lambda: learn(model, optimizer, ids, device))
        cycle.to_generation(turn)
        sampled = cycle.generate(lambda: generate(engine, prompts))
        right = sum(
            found[0][:1] == row[start : start + 1]
            for found, row, start in zip(sampled, ids, starts, strict=True)
        )
        print(f"  loss {loss:.3f}; SGLang, version {refit.version}: {right} of {len(prompts)} answers right")
    print(
        "the engine follows the trainer" if apart < SAME else f"the engine does not follow: {apart:.3f} apart"
    )
    return 0 if apart < SAME else 1


def start_engine(path: str, fraction: float) -> Any:
    """SGLang, its scheduler in a process of its own."""
    import sglang

    own: dict[str, Any] = {"enable_memory_saver": True, "mem_fraction_static": fraction}
    if not torch.cuda.is_available():
        own = {"device": "cpu", "attention_backend": "torch_native", "max_total_tokens": 4096}
    return sglang.Engine(
        model_path=path,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        disable_cuda_graph=True,
        log_level="warning",
        custom_weight_loader=[LOADER],
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


def generate(engine: Any, prompts: list[list[int]]) -> Sampled:
    """Greedy tokens, and their log-probabilities."""
    parameters = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
    outputs = engine.generate(input_ids=prompts, sampling_params=parameters, return_logprob=True)
    return [
        (o["output_ids"], [found[0] for found in o["meta_info"]["output_token_logprobs"]]) for o in outputs
    ]


@torch.no_grad()
def difference(model: Any, prompts: list[list[int]], sampled: Sampled, device: torch.device) -> float:
    """The largest between the engine's log-probabilities and the trainer's, for the sampled tokens."""
    largest = 0.0
    for prompt, (tokens, logprobs) in zip(prompts, sampled, strict=True):
        context = torch.tensor([[*prompt, *tokens]], device=device)
        logits = model(input_ids=context).logits[0, -len(tokens) - 1 : -1]
        ours = logits.float().log_softmax(-1).gather(1, torch.tensor(tokens, device=device)[:, None])[:, 0]
        largest = max(largest, float((ours.cpu() - torch.tensor(logprobs)).abs().max()))
    return largest


if __name__ == "__main__":
    raise SystemExit(main())
