"""Give your own PPO worker the refit: inherit one mixin, call three methods.

``PPOWorker`` stands for what you have already: a class of your trainer that builds a Megatron model
through Megatron-Bridge and updates it. It knows nothing of rlrefit. ``RefittingPPOWorker`` inherits
``MegatronRefitMixin`` beside it, and its weights travel shard to shard into an inference engine that
is sharded another way: here two Megatron ranks (TP2) and one unsharded transformers engine.

    python examples/inherit_the_mixin.py          # three processes on any machine, about a minute on two cores

The engine ends each refit with the trainer's new weights; the script checks it by comparing the
engine's log-probabilities with the trainer's loss on the same tokens, before and after.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

TRAIN_RANKS, GEN_RANKS = 2, 1
HOST = "127.0.0.1"


class PPOWorker:
    """Your worker, as it is: Megatron through Bridge, an optimizer, an update."""

    def __init__(self, model_path: str) -> None:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from rlrefit.workers.megatron.model import MegatronLayout, build_megatron

        # Any way to build works, as long as a Bridge and its model chunks come out.
        built = build_megatron(model_path, MegatronLayout(tensor_parallel=TRAIN_RANKS))
        self.bridge, self.model = built.bridge, built.model
        config = OptimizerConfig(optimizer="adam", lr=1e-2, bf16=True, use_distributed_optimizer=True)
        self.optimizer = get_megatron_optimizer(config, self.model)
        built.provider.finalize_model_grads_func = finalize_model_grads
        built.provider.grad_scale_func = self.optimizer.scale_loss

    def loss(self, tokens: Any, *, train: bool = False) -> float:
        """Mean negative log-likelihood of ``tokens``; an update on it if ``train``."""
        import torch
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward(data: Any, chunk: Any) -> Any:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            losses = chunk(tokens, positions, None, labels=tokens.roll(-1, dims=1))
            return losses, lambda output: (output[:, :-1].mean(), output[:, :-1].detach().mean())

        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        [result] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=None,
            model=self.model[0],
            num_microbatches=1,
            seq_length=tokens.shape[1],
            micro_batch_size=tokens.shape[0],
            forward_only=not train,
        )
        if train:
            self.optimizer.step()
        return float(result)


def trainer(rank: int, model_path: str, meeting: Any, results: Any) -> None:
    """A trainer rank: your loop, with three calls of the mixin in it."""
    join_trainers(rank)
    from rlrefit.integration.config import RefitConfig
    from rlrefit.workers.megatron.mixin import MegatronRefitMixin

    class RefittingPPOWorker(MegatronRefitMixin, PPOWorker):
        refit_config = RefitConfig(bucket_mb=4, timeout_s=120.0, verify="full")

    worker = RefittingPPOWorker(model_path)
    worker.prepare_nccl_xfer_refit_info()  # once: names, shapes, fragments
    if rank == 0:
        rendezvous = worker.open_refit_rendezvous(HOST, TRAIN_RANKS, GEN_RANKS)
        for _ in range(TRAIN_RANKS + GEN_RANKS):
            meeting.put(rendezvous)  # your launcher's way to hand a small dictionary around
    routes = worker.init_per_pp_refit_comm_group(meeting.get(timeout=120), rank)  # once: plan, communicators
    for version in range(3):
        record = worker.nccl_xfer_refit(version)  # every step
        results.put(("trainer", rank, version, worker.loss(sample_tokens()), {**routes, **record}))
        worker.loss(sample_tokens(), train=True)
    worker.close_refit()


def engine(model_path: str, meeting: Any, results: Any) -> None:
    """The engine's rank: the same calls on its side."""
    import torch

    torch.set_num_threads(1)
    from rlrefit.workers.transformers_engine.engine import TransformersEngine

    worker = TransformersEngine(model_path, torch.bfloat16)
    config = {"bucket_mb": 4, "timeout_s": 120.0, "verify": "full"}
    worker.init_per_pp_refit_comm_group(meeting.get(timeout=120), TRAIN_RANKS, config)
    for version in range(3):
        record = worker.nccl_xfer_refit(version)
        tokens = sample_tokens()
        logprobs = worker.model(tokens).logits[:, :-1].float().log_softmax(-1)
        loss = -logprobs.gather(2, tokens[:, 1:].unsqueeze(-1)).mean()
        results.put(("engine", 0, version, float(loss), record))
    worker.close_refit()


def join_trainers(rank: int) -> None:
    """What torchrun or Ray does for you: the trainer's own ``torch.distributed`` world."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(TRAIN_RANKS))
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo", rank=rank, world_size=TRAIN_RANKS
    )


def sample_tokens() -> Any:
    """The same tokens on every rank, ``[4, 16]``."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0)).to(device)


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
    """Start all ranks, print what each refit did, and compare the two sides."""
    from rlrefit.recipes.cluster import free_port

    os.environ.update(MASTER_ADDR=HOST, MASTER_PORT=str(free_port()))
    spawn = multiprocessing.get_context("spawn")
    meeting, results = spawn.Queue(), spawn.Queue()
    ranks = [
        spawn.Process(target=trainer, args=(r, model_path, meeting, results)) for r in range(TRAIN_RANKS)
    ]
    ranks.append(spawn.Process(target=engine, args=(model_path, meeting, results)))
    for rank in ranks:
        rank.start()
    rows = [results.get(timeout=300) for _ in range(3 * len(ranks))]
    for rank in ranks:
        rank.join(60)
    trained = {version: loss for side, rank, version, loss, _ in rows if side == "trainer" and rank == 0}
    served = {version: loss for side, _, version, loss, _ in rows if side == "engine"}
    records = {version: record for side, _, version, _, record in rows if side == "engine"}
    for version in sorted(served):
        record = records[version]
        print(
            f"refit {version}: {record['bytes_bulk']:,} bytes shard to shard, {record['bytes_misc']:,} over the misc "
            f"path, {record['seconds_total']:.3f} s; loss of the trainer {trained[version]:.5f}, of the engine "
            f"{served[version]:.5f}"
        )
    agree = all(abs(trained[v] - served[v]) < 2e-3 * trained[v] for v in served)
    learned = served[2] < served[0]
    print("the engine follows the trainer" if agree and learned else "the engine does NOT follow the trainer")
    return 0 if agree and learned and all(rank.exitcode == 0 for rank in ranks) else 1


if __name__ == "__main__":
    raise SystemExit(main())
