"""GRPO by TRL's AsyncGRPOTrainer on the tiny recipes' arithmetic, with weights shard to shard into a vLLM server.

    python examples/trl/grpo.py --write-tiny /tmp/tiny        # a tiny model to try it with; or take a checkpoint of yours
    VLLM_SERVER_DEV_MODE=1 VLLM_USE_V2_MODEL_RUNNER=0 CUDA_VISIBLE_DEVICES=2 vllm serve /tmp/tiny --max-model-len 512 \
        --logprobs-mode processed_logprobs --weight-transfer-config '{"backend": "rlrefit"}'
    CUDA_VISIBLE_DEVICES=0,1 accelerate launch --config_file examples/trl/fsdp2.yaml examples/trl/grpo.py --model /tmp/tiny

The last lines have the seconds of each update, and the stages of the last one. With `--step-first` the GPU ends each optimizer step before
an update's clock begins, so that the seconds have no part of the step. `--own` trains by TRL's own trainer and its NCCL transfer, for a comparison; its server
has the backend "nccl", on a GPU of its own (compare.sh).
"""

from __future__ import annotations

import argparse
import shutil
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from rlrefit.recipes.rewards.scorer import arithmetic
from rlrefit.recipes.tiny.checkpoints import make_checkpoint
from rlrefit.recipes.tiny.make_data import records
from rlrefit.recipes.tiny.make_tokenizer import load_tokenizer

# Prompts are texts; TRL has a template for every prompt.
PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
# TRL knows how answers under published templates are read, and has to be told of others.
TEXT = {"type": "object", "properties": {"content": {"type": "string"}}}
TIMES = "perf/weight_sync_s"


def reward(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """The bundled rule-based reward; TRL does not say whether a completion ended, and one that did not is longer than its answer."""
    texts = (completion[-1]["content"].strip() for completion in completions)
    return [
        arithmetic(prompt="", completion=text, answer=wanted, finished=True).value
        for text, wanted in zip(texts, answer, strict=True)
    ]


def write_tiny(folder: Path) -> None:
    """The tiny recipes' model, with random weights."""
    shutil.rmtree(folder, ignore_errors=True)
    make_checkpoint("qwen3", folder)
    tokenizer = load_tokenizer()
    tokenizer.chat_template = PLAIN
    tokenizer.response_schema = TEXT
    tokenizer.save_pretrained(folder)


def train(arguments: argparse.Namespace) -> list[dict[str, float]]:
    """What TRL logged of each step, on the main process."""
    from transformers import TrainerCallback
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    class StepFirst(TrainerCallback):
        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()

    rows = [
        {"prompt": [{"role": "user", "content": record["prompt"]}], "answer": record["answer"]}
        for record in records()[0]
    ]
    given: dict[str, Any] = {
        "model": arguments.model,
        "reward_funcs": reward,
        "args": AsyncGRPOConfig(
            output_dir=arguments.out,
            max_steps=arguments.steps,
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=8,
            learning_rate=arguments.lr,
            dtype=arguments.dtype,
            vllm_server_base_url=arguments.server,
            use_cpu=arguments.cpu,
            bf16=not arguments.cpu,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
        ),
        "train_dataset": Dataset.from_list(rows),
        "callbacks": [StepFirst()] if arguments.step_first else None,
    }
    if arguments.own:
        trainer = AsyncGRPOTrainer(**given)
    else:
        from rlrefit.workers.engines.http_client import RefitClient
        from rlrefit.workers.frameworks.trl.trainer import RefitAsyncGRPOTrainer

        trainer = RefitAsyncGRPOTrainer(**given)
    trainer.train()
    if not trainer.is_world_process_zero():
        return []
    if not arguments.own:
        for who, record in (
            ("the trainer", trainer.refit_record),
            ("the server", RefitClient(arguments.server).records()[0]),
        ):
            parts = ", ".join(f"{stage} {1e3 * seconds:.1f}" for stage, seconds in record["seconds"].items())
            print(f"last update of {who}: {1e3 * record['seconds_total']:.1f} ms; {parts}", flush=True)
    return [entry for entry in trainer.state.log_history if TIMES in entry]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write-tiny", metavar="FOLDER", type=Path, help="write the tiny model there, and end"
    )
    parser.add_argument("--model", help="checkpoint, the server's")
    parser.add_argument("--server", default="http://localhost:8000")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3, help="for the tiny model; a checkpoint wants 1e-6")
    parser.add_argument("--dtype", default="float32", help="of the trainer's weights; the server is BF16")
    parser.add_argument("--out", default="runs/trl")
    parser.add_argument(
        "--step-first", action="store_true", help="end a step on the GPU before its update begins"
    )
    parser.add_argument("--own", action="store_true", help="by TRL's own trainer and transfer")
    parser.add_argument("--cpu", action="store_true", help="without GPUs, in one process")
    parser.add_argument(
        "--stand-ins", action="store_true", help="without the hub's FlashAttention 3 (stand_ins.py)"
    )
    arguments = parser.parse_args(argv)
    if arguments.write_tiny:
        write_tiny(arguments.write_tiny)
        return 0
    if find_spec("trl") is None:
        parser.error("this Python has no package trl; pip install trl==1.16.0 (docs/trl.md)")
    if not arguments.model:
        parser.error("--model: is missing; give the checkpoint that the server serves")
    if arguments.cpu and arguments.step_first:
        parser.error("--step-first: ends steps on a GPU; leave it out with --cpu")
    if not arguments.cpu and not torch.cuda.is_available():
        parser.error("torch finds no GPU here; give --cpu for one process without")
    if arguments.stand_ins or arguments.cpu:
        import stand_ins

        context: Any = stand_ins.put()
    else:
        context = nullcontext()
    with context:
        steps = train(arguments)
    for number, step in enumerate(steps, 1):
        print(f"step {number}: update {step[TIMES]:.3f} s; reward {step['reward']:.3f}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
