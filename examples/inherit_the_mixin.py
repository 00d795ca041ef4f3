"""Give your own PPO worker the refit: inherit one mixin, call two methods.

``ppo_worker.py`` stands for what you have already: a hierarchy of Megatron workers that build, score, update, offload
and load, and know nothing of rlrefit. ``RefittingActor`` inherits ``MegatronRefitMixin`` beside it, and after each
update its weights travel shard to shard into an inference engine that is sharded another way: here two Megatron
ranks (TP2) and one unsharded transformers engine.

    python examples/inherit_the_mixin.py          # three processes on any machine, under a minute on two cores

The engine samples, the actor learns from the samples and offloads, and the refit reads the offloaded parameters from
host memory, so that the engine has the device to itself. Each step compares the engine's log-probabilities of its
samples with the actor's: they agree to rounding only if the engine holds the actor's weights.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle
import tempfile
import time
from pathlib import Path
from queue import Empty
from typing import Any

TRAIN_RANKS, GEN_RANKS = 2, 1
HOST = "127.0.0.1"
STEPS = 6
PATIENCE_S = 300
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 4, 12
# The same on both sides.
REFIT: dict[str, Any] = {"bucket_mb": 4, "timeout_s": 120.0, "verify": "full"}


def trainer(rank: int, model_path: str, meeting: Any, samples: Any, results: Any) -> None:
    """A trainer rank: your loop, with the mixin's calls in it."""
    from ppo_worker import ActorConfig, PPOActorWorker

    from rlrefit.integration.config import RefitConfig
    from rlrefit.workers.trainers.megatron.mixin import MegatronRefitMixin

    class RefittingActor(MegatronRefitMixin, PPOActorWorker):
        refit_config = RefitConfig(**REFIT)

    actor = RefittingActor(rank, TRAIN_RANKS, ActorConfig(lambda: build(model_path)))
    actor.init_model()
    if rank == 0:
        rendezvous = actor.open_refit_rendezvous(HOST, TRAIN_RANKS, GEN_RANKS)
        for _ in range(TRAIN_RANKS + GEN_RANKS):
            meeting.put(rendezvous)  # your launcher's way to hand a small dictionary around
    actor.join_refit(meeting.get(timeout=120), rank)  # once: fragments, plan, communicators
    for version in range(STEPS):
        actor.offload()
        record = actor.refit(version)  # every step, from the device or from host memory
        actor.load()
        rollouts, theirs = pickle.loads(samples.get(timeout=120))
        apart = (actor.log_probs(rollouts).cpu() - theirs).abs() * rollouts.mask
        difference = apart.sum() / rollouts.mask.sum()
        actor.update_policy(rollouts)
        results.put(("trainer", rank, version, float(difference), record))
    actor.close_refit()


def engine(model_path: str, meeting: Any, samples: list[Any], results: Any) -> None:
    """The engine's rank: the same calls on its side."""
    import torch

    torch.set_num_threads(1)
    from rlrefit.workers.engines.transformers.engine import TransformersEngine

    worker = TransformersEngine(model_path, torch.bfloat16)
    worker.join_refit(meeting.get(timeout=120), TRAIN_RANKS, REFIT)
    for version in range(STEPS):
        record = worker.refit(version)
        rollouts, log_probs, reward = sample(worker, version)
        for queue in samples:
            # By value: a queue would pass tensors on as files of this process, which may have ended by then.
            queue.put(pickle.dumps((rollouts, log_probs)))
        results.put(("engine", 0, version, reward, record))
    worker.close_refit()


def sample(worker: Any, seed: int) -> tuple[Any, Any, float]:
    """Rollouts with advantages, the engine's log-probabilities of them, and the mean reward.

    The reward is the share of tokens with an even number, which any policy can learn.
    """
    import torch
    from ppo_worker import Rollouts

    prompts = torch.randint(0, 16, (PROMPTS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(seed))
    completions = worker.generate(
        prompts.tolist(),
        max_new_tokens=NEW_TOKENS,
        temperature=1.0,
        seed=seed,
        stop_token_ids=[],
        pad_token_id=0,
    )
    sampled = torch.tensor([completion.token_ids for completion in completions])
    log_probs = torch.tensor([completion.logprobs for completion in completions])
    rewards = (sampled % 2 == 0).float().mean(1)
    before = torch.zeros(PROMPTS, PROMPT_TOKENS)
    return Rollouts.of(prompts, sampled, rewards), torch.cat((before, log_probs), 1), float(rewards.mean())


def build(model_path: str) -> tuple[Any, Any, list[Any]]:
    """Any way to build works, as long as a Bridge and its model chunks come out; this one also runs without a GPU."""
    from rlrefit.workers.trainers.megatron.model import MegatronLayout, build_megatron

    built = build_megatron(model_path, MegatronLayout(tensor_parallel=TRAIN_RANKS))
    return built.bridge, built.provider, built.model


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="Hugging Face checkpoint folder; without it a tiny Qwen3 is made")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        from rlrefit.recipes.tiny.checkpoints import make_checkpoint

        model_path = arguments.model or str(make_checkpoint("qwen3", Path(scratch) / "qwen3"))
        return run(model_path)


def run(model_path: str) -> int:
    """Start all ranks, print what each step did, and say whether the engine followed and the actor learned."""
    from rlrefit.recipes.run.cluster import free_port

    os.environ.update(MASTER_ADDR=HOST, MASTER_PORT=str(free_port()))
    spawn = multiprocessing.get_context("spawn")
    meeting, results = spawn.Queue(), spawn.Queue()
    samples = [spawn.Queue() for _ in range(TRAIN_RANKS)]
    ranks = [
        spawn.Process(
            target=trainer, args=(r, model_path, meeting, samples[r], results), name=f"trainer rank {r}"
        )
        for r in range(TRAIN_RANKS)
    ]
    ranks.append(
        spawn.Process(target=engine, args=(model_path, meeting, samples, results), name="the engine")
    )
    try:
        for rank in ranks:
            rank.start()
        rows = collect(ranks, results)
    finally:
        # Whoever is left would wait for the others for ever.
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
                rank.join()
    differences = {v: value for side, rank, v, value, _ in rows if side == "trainer" and rank == 0}
    rewards = {v: value for side, _, v, value, _ in rows if side == "engine"}
    records = {v: record for side, _, v, _, record in rows if side == "engine"}
    for version, record in sorted(records.items()):
        # In the handshake the engine waits for the actor's update.
        seconds = record["seconds_total"] - record["seconds"]["handshake"]
        print(
            f"refit {version}: {record['bytes_bulk']:,} bytes shard to shard, {record['bytes_misc']:,} over the misc "
            f"path, {seconds:.3f} s; reward {rewards[version]:.3f}, log-probabilities of actor and "
            f"engine {differences[version]:.4f} apart"
        )
    agree = all(difference < 0.02 for difference in differences.values())
    learned = rewards[STEPS - 1] > rewards[0] + 0.1
    print("the engine follows the actor" if agree else "the engine does NOT follow the actor")
    print("the actor learns" if learned else "the actor does NOT learn")
    return 0 if agree and learned else 1


def collect(ranks: list[Any], results: Any) -> list[Any]:
    """What all ranks tell of all steps, once all have ended.

    Raises:
        SystemExit: a rank failed, or none has told anything for ``PATIENCE_S``.
    """
    rows: list[Any] = []
    until = time.monotonic() + PATIENCE_S
    while len(rows) < STEPS * len(ranks) or any(rank.is_alive() for rank in ranks):
        failed = [f"{rank.name} (exit code {rank.exitcode})" for rank in ranks if rank.exitcode]
        if failed:
            raise SystemExit(f"{', '.join(failed)} failed; what went wrong is told above")
        if time.monotonic() > until:
            raise SystemExit(f"no rank has told of a step for {PATIENCE_S} s")
        try:
            rows.append(results.get(timeout=0.5))
            until = time.monotonic() + PATIENCE_S
        except Empty:
            continue
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
