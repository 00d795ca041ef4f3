"""How much of a model changes from step to step, and what a sparse refit makes of it: a trainer and an engine, each in a process.

A model of true shapes with random weights is trained by Adam as Megatron does it: BF16 weights, FP32 masters and states.
Tokens and advantages are drawn, so that gradients are as noisy as in RL. After each step the weights go shard to shard to a
transformers model on the second GPU, with ``policy.refit.delta``; then some refits without it, to compare. Each line tells the
share of elements whose bits changed, in BF16 as the refit counted them, and of the codes that FP8 blocks of 128 by 128 would hold.

    python examples/changed_share.py                                # Qwen3-0.6B at 1e-6 and at 1e-5, 50 steps each; 2 GPUs
    python examples/changed_share.py --shapes qwen3-4b --rates 1e-6
    python examples/changed_share.py --layers 1 --steps 3 --tokens 8   # on CPUs, where sparse refits are slower than dense ones
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from rlrefit.integration.config import DELTA_BASES, RefitConfig
from rlrefit.integration.control import Rendezvous, open_rendezvous
from rlrefit.integration.quantize import fp8_blockwise
from rlrefit.integration.records.record import RefitRecord
from rlrefit.integration.session import RefitSession
from rlrefit.recipes.plan.catalog import bundled_models, open_model
from rlrefit.workers.engines.transformers.destination import TransformersDestination
from rlrefit.workers.trainers.fsdp.source import FSDPSource

SEQUENCES = 4
DENSE_REFITS = 6


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="qwen3-0.6b", help="of a Qwen3: as --model of rlrefit plan")
    parser.add_argument("--layers", type=int, help="keep this many decoder layers")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5], help="learning rates")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=256, help="of each of the four sequences of a step")
    parser.add_argument("--base", choices=DELTA_BASES, default="gpu", help="policy.refit.delta_base")
    parser.add_argument("--out", type=Path, help="write a line of JSON for each refit there")
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    whole = arguments.shapes in bundled_models() and not arguments.layers
    if gpus == 1 or (gpus == 0 and whole):
        parser.error(
            f"trainer and engine take a GPU each, and this host has {gpus}; on CPUs (CUDA_VISIBLE_DEVICES=) a whole model takes "
            "minutes a step: give --layers 1 --steps 3 --tokens 8"
        )
    shapes = dict(open_model(arguments.shapes).config)
    if arguments.layers:
        shapes |= {"num_hidden_layers": arguments.layers, "layer_types": None}
    config = Qwen3Config(**shapes)
    here, there = multiprocessing.Pipe()
    engine = multiprocessing.get_context("spawn").Process(target=serve, args=(config, there), daemon=True)
    engine.start()
    for rate in arguments.rates:
        measure(config, rate, here, arguments)
    here.send(None)
    engine.join()
    return engine.exitcode or 0


def device_of(rank: int) -> torch.device:
    return torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")


def made(config: Qwen3Config, rank: int) -> Any:
    torch.manual_seed(rank)
    with device_of(rank):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def refit_config(delta: str, base: str) -> RefitConfig:
    return RefitConfig(delta=delta, delta_base=base, timeout_s=120.0)


def serve(config: Qwen3Config, trainer: Connection) -> None:
    """The engine's process: sessions and refits as it is told, and the sum of its weights' bits after each session."""
    model = made(config, 1)
    endpoint = TransformersDestination(model, 0, 1)
    while (told := trainer.recv()) is not None:
        meeting, settings, refits = told
        session = RefitSession.open(Rendezvous.from_json(meeting), 1, lambda: endpoint, settings)
        for version in range(refits):
            session.refit(version)
        session.close()
        trainer.send(sum_of_bits(model))


def measure(config: Qwen3Config, rate: float, engine: Connection, arguments: argparse.Namespace) -> None:
    trainer = Trainer(config, rate, arguments.tokens)
    sparse, codes = refits(trainer, "always", arguments.steps + 1, engine, arguments.base)
    dense, _ = refits(trainer, "off", DENSE_REFITS, engine, arguments.base)
    print(f"{arguments.shapes}, learning rate {rate:g}, delta_base {arguments.base}")
    print("  step  changed  FP8 codes  wire of dense      ms")
    for step, (record, share) in enumerate(zip(sparse, codes, strict=True)):
        changed = 1.0 if record.changed_share is None else record.changed_share
        wire = record.bytes_wire / (record.bytes_bulk + record.bytes_misc)
        took = 1e3 * record.seconds_total
        if step in (0, 1, 2, 5) or step % 10 == 0:
            print(f"  {step:4} {changed:8.3%} {share:10.3%} {wire:14.2%} {took:7.1f}")
        if arguments.out:
            with arguments.out.open("a") as lines:
                row = {
                    "rate": rate,
                    "step": step,
                    "changed": changed,
                    "codes": share,
                    "wire": wire,
                    "ms": took,
                    "stages": record.seconds,
                }
                lines.write(json.dumps(row) + "\n")
    warm = [r for r in sparse if r.changed_share is not None]
    print(
        f"  median: {median(r.changed_share or 0.0 for r in warm):.3%} changed, "
        f"{1e3 * median(r.seconds_total for r in warm):.1f} ms sparse, "
        f"{1e3 * median(r.seconds_total for r in dense[1:]):.1f} ms dense"
    )


def refits(
    trainer: Trainer, delta: str, count: int, engine: Connection, base: str
) -> tuple[list[RefitRecord], list[float]]:
    """Records of refits with a training step before each, and the shares of FP8 codes that changed."""
    settings = refit_config(delta, base)
    server = open_rendezvous("127.0.0.1", 1, 1)
    engine.send((server.rendezvous.to_json(), settings, count))
    session = RefitSession.open(server.rendezvous, 0, lambda: trainer.source, settings)
    records, shares = [], []
    for version in range(count):
        trainer.step(session)
        shares.append(trainer.changed_codes() if delta != "off" else 0.0)
        records.append(session.refit(version))
    session.close()
    server.close()
    if engine.recv() != sum_of_bits(trainer.model):
        raise RuntimeError(f"the engine's weights are not the trainer's after {count} refits, delta {delta}")
    return records, shares


class Trainer:
    """BF16 weights, and Adam over FP32 masters that are copied to them."""

    def __init__(self, config: Qwen3Config, rate: float, tokens: int):
        self.model = made(config, 0)
        self.source = FSDPSource(self.model, torch.bfloat16)
        self._weights = list(self.model.parameters())
        self._masters = [weight.detach().float().clone() for weight in self._weights]
        self._adam = torch.optim.AdamW(self._masters, lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
        self._drawn = torch.Generator(device_of(0)).manual_seed(1)
        self._tokens = tokens
        self._codes: list[torch.Tensor] = []

    def step(self, session: RefitSession) -> None:
        vocabulary, where = self.model.config.vocab_size, device_of(0)
        tokens = torch.randint(vocabulary, (SEQUENCES, self._tokens), device=where, generator=self._drawn)
        advantages = torch.randn(SEQUENCES, 1, device=where, generator=self._drawn)
        logits = self.model(tokens[:, :-1]).logits.float()
        chosen = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        (-(advantages * chosen).mean()).backward()
        for weight, master in zip(self._weights, self._masters, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._adam.step()
        with session.recording_changes():
            for weight, master in zip(self._weights, self._masters, strict=True):
                weight.detach().copy_(master)
                master.grad = None
        if torch.cuda.is_available():  # or the refit's time would hold the rest of this step
            torch.cuda.synchronize()

    def changed_codes(self) -> float:
        """Share of the codes of all linear layers that differ from those of the step before."""
        linear = [
            m.weight for n, m in self.model.named_modules() if type(m) is torch.nn.Linear and n != "lm_head"
        ]
        before = self._codes
        self._codes = [fp8_blockwise.quantize(weight)[0].view(torch.uint8) for weight in linear]
        differ = sum(int((a != b).sum()) for a, b in zip(before, self._codes, strict=False))
        return differ / sum(codes.numel() for codes in self._codes) if before else 1.0


def sum_of_bits(model: torch.nn.Module) -> int:
    """Alike for equal weights, and hardly for others: each weight's bits, times its place in the model."""
    found = 0
    for place, weight in enumerate(model.parameters(), 1):
        bits = weight.detach().reshape(-1).view(torch.int16).long()
        found += place * int((bits * torch.arange(1, bits.numel() + 1, device=bits.device)).sum())
    return found


if __name__ == "__main__":
    raise SystemExit(main())
