"""Megatron learns and vLLM samples: the mixin beside your PPO worker, the extension in vLLM's workers, on one host.

    torchrun --nproc-per-node 2 examples/megatron_to_vllm.py --tp 2 --engine-tp 1
    torchrun --nproc-per-node 4 examples/megatron_to_vllm.py --tp 4 --engine-tp 2 --model /models/Qwen3-8B  # 6 GPUs

torchrun starts the trainer's ranks, and rank 0 starts vLLM in a process of its own, on the GPUs after the trainer's;
without GPUs both compute on the CPU. vLLM starts with random weights: all that it knows comes by refit. Each step prints
the KL divergence of the engine's tokens between engine and trainer, which is rounding alone if the refit was right, and
what it is once the trainer has learned and the engine has not been refitted yet.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from ppo_worker import ActorConfig, PPOActorWorker, Rollouts

from rlrefit.integration.config import RefitConfig
from rlrefit.recipes.algorithms.divergence import generation_kl
from rlrefit.recipes.tiny.checkpoints import resolve_model_path
from rlrefit.workers.trainers.megatron.mixin import MegatronRefitMixin
from rlrefit.workers.trainers.megatron.model import MegatronLayout, build_megatron

HOST = "127.0.0.1"
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 4, 12
# The same on both sides.
REFIT = RefitConfig(bucket_mb=64, timeout_s=120.0, verify="full")
# In nats, of BF16 kernels that differ.
SAME = 1e-3
# vLLM comes up as if nothing of Megatron had been loaded.
SPAWN = multiprocessing.get_context("spawn")


class RefittingActor(MegatronRefitMixin, PPOActorWorker):
    """Your worker, unchanged, and the refit: it needs ``self.model`` and ``self.bridge``, which yours has."""

    refit_config = REFIT


def serve(connection: Connection, model_path: str, tensor_parallel: int, first_gpu: int) -> None:
    """vLLM's process: does what trainer rank 0 asks for, until that hangs up."""
    for name in [*os.environ]:
        # Of the trainer's world: vLLM would take it for its own.
        if name.startswith("TORCHELASTIC_") or name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
            del os.environ[name]
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if torch.cuda.device_count():
        last = first_gpu + tensor_parallel
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(last)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first_gpu:last])
    else:
        os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    from vllm import LLM

    from rlrefit.workers.engines.vllm.driver import EXTENSION, VllmDriver

    llm = LLM(
        model_path,
        worker_extension_cls=EXTENSION,
        tensor_parallel_size=tensor_parallel,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=256,
        enforce_eager=True,
        skip_tokenizer_init=True,
        moe_backend="triton",  # most others rearrange experts, which then can't be written in place
    )
    driver = VllmDriver(llm)
    with suppress(EOFError, BrokenPipeError):
        connection.send(None)
        while True:
            method, arguments = connection.recv()
            work = partial(sample, driver) if method == "sample" else getattr(driver, method)
            connection.send(work(*arguments))
    llm.llm_engine.engine_core.shutdown()


def sample(driver: Any, seed: int) -> tuple[list[list[int]], list[list[int]], list[list[float]]]:
    """Prompts, sampled tokens, and the log-probability of each of them."""
    from vllm import SamplingParams

    numbers = torch.Generator().manual_seed(seed)
    prompts = torch.randint(0, 16, (PROMPTS, PROMPT_TOKENS), generator=numbers).tolist()
    sampling = [
        SamplingParams(
            max_tokens=NEW_TOKENS, seed=seed * PROMPTS + i, ignore_eos=True, logprobs=0, detokenize=False
        )
        for i in range(PROMPTS)
    ]
    found = driver.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling)
    outputs = [generated.output.outputs[0] for generated in found]
    log_probs = [[e[t].logprob for t, e in zip(o.token_ids, o.logprobs, strict=True)] for o in outputs]
    return prompts, [list(o.token_ids) for o in outputs], log_probs


class EngineProcess:
    """vLLM as trainer rank 0 sees it: ask, do your own part, and take the answer."""

    def __init__(self, *arguments: Any):
        self._connection, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=serve, args=(theirs, *arguments))
        self._process.start()
        theirs.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join(60)
        self._process.kill()

    def ask(self, method: str, *arguments: Any) -> None:
        self._connection.send((method, arguments))

    def answer(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join()
            raise SystemExit(
                f"vLLM's process ended with exit code {self._process.exitcode}; its error is told above"
            ) from None


@contextmanager
def beside(engine: EngineProcess | None, method: str, *arguments: Any) -> Iterator[None]:
    """What the engine does at the same time as all trainer ranks; rank 0 asks for it."""
    if engine is not None:
        engine.ask(method, *arguments)
    yield
    if engine is not None:
        engine.answer()


def from_rank_0(value: Any) -> Any:
    held = [value]
    dist.broadcast_object_list(held)
    return held[0]


def kl(actor: PPOActorWorker, rollouts: Rollouts, theirs: torch.Tensor) -> float:
    ours = actor.log_probs(rollouts)[:, PROMPT_TOKENS:].cpu()
    return generation_kl(ours, theirs, torch.ones_like(theirs))


def train(actor: RefittingActor, engine: EngineProcess | None, engine_ranks: int, steps: int) -> bool:
    """Meet the engine, then refit, sample and learn; whether the engine always had the trainer's weights."""
    rank, trainers = dist.get_rank(), dist.get_world_size()
    rendezvous = None
    if engine is not None:
        engine.answer()  # it is up
        rendezvous = actor.open_refit_rendezvous(HOST, trainers, engine_ranks)
    rendezvous = from_rank_0(rendezvous)
    with beside(engine, "join_refit", rendezvous, trainers, REFIT):  # once: plan, communicators
        actor.join_refit(rendezvous, rank)
    followed = True
    for version in range(steps):
        with beside(engine, "refit", version):  # every step
            record = actor.refit(version)
        if engine is not None:
            engine.ask("sample", version)
        prompts, sampled, theirs = map(torch.tensor, from_rank_0(engine and engine.answer()))
        rewards = (sampled % 2 == 0).float().mean(1)  # the share of even tokens, which any policy can learn
        rollouts = Rollouts.of(prompts, sampled, rewards)
        before = kl(actor, rollouts, theirs)
        actor.update_policy(rollouts)
        followed &= before < SAME
        stale = kl(actor, rollouts, theirs)
        if rank == 0:
            print(
                f"refit {version}: {record['bytes_bulk']:,} bytes of rank 0 shard to shard, {record['bytes_misc']:,} over "
                f"the misc path, {record['seconds_total']:.3f} s; reward {rewards.mean():.3f}; generation KL {before:.1e}, "
                f"{stale:.1e} when the trainer has learned",
                flush=True,
            )
    with beside(engine, "close_refit"):
        actor.close_refit()
    return followed


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="tiny:qwen3", help="Hugging Face checkpoint folder, or tiny:qwen3[-moe]"
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor parallelism of the trainer; the rest is DP")
    parser.add_argument("--engine-tp", type=int, default=1, help="tensor parallelism of vLLM")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-2, help="1e-6 suits real models")
    arguments = parser.parse_args(given)
    if "RANK" not in os.environ:
        parser.error(
            "it is not started by torchrun: torchrun --nproc-per-node 2 examples/megatron_to_vllm.py …"
        )
    rank, trainers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpus, wanted = torch.cuda.device_count(), trainers + arguments.engine_tp
    if 0 < gpus < wanted:
        parser.error(
            f"trainer and engine want {wanted} GPUs and see {gpus}; start fewer ranks or give more GPUs"
        )
    path = resolve_model_path(arguments.model, "runs/models")

    def build() -> tuple[Any, Any, list[Any]]:
        """Any way to build works, as long as a Bridge and its model chunks come out."""
        built = build_megatron(path, MegatronLayout(tensor_parallel=arguments.tp))
        return built.bridge, built.provider, built.model

    with EngineProcess(path, arguments.engine_tp, trainers) if rank == 0 else nullcontext() as engine:
        actor = RefittingActor(rank, trainers, ActorConfig(build, lr=arguments.lr))
        actor.init_model()
        followed = train(actor, engine, arguments.engine_tp, arguments.steps)
    if rank == 0:
        print("the engine follows the trainer" if followed else "the engine does NOT follow the trainer")
    dist.destroy_process_group()
    return 0 if followed else 1


if __name__ == "__main__":
    raise SystemExit(main())
