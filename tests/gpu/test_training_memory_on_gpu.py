"""Recomputed activations and an optimizer in host memory: the same training, and restarts that go on bit for bit."""

from __future__ import annotations

import hashlib
import os
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.spawn import free_port

from .needs import needs
from .spawned import spawned

pytestmark = needs("megatron", "transformer_engine", "transformers")

# Name of the case: (part of the optimizer's state that is on the host, what is computed again).
CASES: dict[str, tuple[float, dict[str, Any] | None]] = {
    "plain": (0.0, None),
    "full": (0.0, {"granularity": "full", "method": "uniform", "num_layers": 1}),
    "selective": (0.0, {"granularity": "selective", "modules": ("core_attn",)}),
    "offloaded": (1.0, None),
    "half offloaded": (0.5, None),
}


def train_and_restart(root: str, port: int, results: Any) -> None:
    """Report, for each kind of model and case, what ``run_cases`` found."""
    try:
        results.put({kind: run_cases(kind, root, port) for kind in ("qwen3", "qwen3-moe")})
    except Exception:
        results.put(traceback.format_exc())
        raise


def run_cases(kind: str, root: str, port: int) -> dict[str, Any]:
    import torch.distributed as dist

    from rlrefit.recipes.algorithms.losses import PolicyLossConfig
    from rlrefit.recipes.policy.base import AdamConfig, PolicyBatch
    from rlrefit.recipes.policy.megatron import MegatronPolicy, MegatronPolicyConfig
    from rlrefit.recipes.tiny.checkpoints import make_checkpoint
    from rlrefit.workers.trainers.megatron.model import Recompute

    if not dist.is_initialized():
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", **place)
        torch.cuda.set_device(0)
        dist.init_process_group("nccl")
    path = str(make_checkpoint(kind, Path(root) / kind))

    def make(fraction: float, recompute: dict[str, Any] | None) -> Any:
        return MegatronPolicy(
            MegatronPolicyConfig(
                path,
                loss=PolicyLossConfig(aggregation="token"),
                optimizer=AdamConfig(lr=1e-3, warmup_steps=1, cpu_offload_fraction=fraction),
                micro_batch=4,
                recompute=None if recompute is None else Recompute(**recompute),
            )
        )

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 16, (8, 32), generator=generator)
    mask = torch.zeros(8, 32)
    mask[:, 8:] = 1
    advantages = torch.randn(8, generator=generator)
    found: dict[str, Any] = {}
    for name, (fraction, recompute) in CASES.items():
        policy = make(fraction, recompute)
        old = policy.compute_logprobs(PolicyBatch(ids, mask * 0))
        batch = PolicyBatch(ids, mask, advantages=advantages, old_logprobs=old)
        metrics = [policy.train_step(batch) for _ in range(3)]
        trained = digest(policy)
        folder = Path(root) / f"{kind} {name}"
        policy.save(folder)
        through = [policy.train_step(batch) for _ in range(2)], digest(policy)
        on_host = masters_on_host(policy)
        leave_layout()
        again = make(fraction, recompute)
        again.load(folder)
        resumed = [again.train_step(batch) for _ in range(2)], digest(again)
        leave_layout()
        found[name] = (metrics, trained, resumed, through, on_host)
    return found


def leave_layout() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def digest(policy: Any) -> str:
    found = hashlib.sha256()
    for chunk in policy.model:
        for parameter in chunk.parameters():
            found.update(parameter.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def masters_on_host(policy: Any) -> float:
    from rlrefit.recipes.policy.state import _inner_optimizers, _masters

    masters = [master for inner in _inner_optimizers(policy._optimizer) for master in _masters(inner)]
    return sum(m.numel() for m in masters if m.device.type == "cpu") / sum(m.numel() for m in masters)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    arguments = str(tmp_path_factory.mktemp("memory")), free_port()
    with spawned(train_and_restart, [arguments], ends_within_s=60) as results:
        found: dict[str, Any] | str = results.get(timeout=240)
    assert not isinstance(found, str), found
    return found


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe"])
@pytest.mark.parametrize("case", ["full", "selective"])
def test_activations_that_are_computed_again_train_bit_for_bit_as_kept_ones(
    reports: dict[str, Any], kind: str, case: str
) -> None:
    assert reports[kind][case][:2] == reports[kind]["plain"][:2]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe"])
@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_bit_for_bit_after_a_restart(reports: dict[str, Any], kind: str, case: str) -> None:
    _, trained, resumed, through, _ = reports[kind][case]
    assert resumed == through
    assert resumed[1] != trained


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe"])
@pytest.mark.parametrize("case", ["offloaded", "half offloaded"])
def test_an_optimizer_in_host_memory_trains_as_the_one_on_the_gpu(
    reports: dict[str, Any], kind: str, case: str
) -> None:
    metrics, _, _, _, on_host = reports[kind][case]
    assert on_host == 1.0 if case == "offloaded" else 0.4 < on_host < 0.9
    assert reports[kind]["plain"][4] == 0.0
    for ours, wanted in zip(metrics, reports[kind]["plain"][0], strict=True):
        assert ours["loss"] == pytest.approx(wanted["loss"], rel=5e-3)
        assert ours["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=5e-3)
