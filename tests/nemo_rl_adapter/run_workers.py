"""Workers of a NeMo-RL run on CPUs: real models behind the methods that NeMo-RL's actors and groups have."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import torch.distributed as dist

from rlrefit.integration.errors import RefitError
from rlrefit.workers.frameworks.nemo_rl import policy_worker
from rlrefit.workers.frameworks.nemo_rl.engine_calls import EngineCalls
from tests.fsdp.ranks import Layout, build, gathered, mesh_of
from tests.nemo_rl_adapter.recorded import VllmInternalWorkerExtension

EXTENSION = "tests.nemo_rl_adapter.run_workers.Extension"
LAYOUT = Layout(shard=2)


class PolicyWorker:
    """What of ``DTensorPolicyWorkerV2`` a refit meets: ``rank``, ``model`` under FSDP2 with FP32 weights, ``dtype``."""

    def __init__(self, checkpoint: str, rank: int, port: int) -> None:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        self.rank, self.dtype, self.cfg = rank, torch.bfloat16, {}
        self._mesh = mesh_of(LAYOUT)
        self.model = build(checkpoint, LAYOUT, self._mesh)

    async def checkpoint_engine_rpc(self, checkpoint_method: str, method_kwargs: Any = None) -> Any:
        """Being a coroutine it makes this an asyncio actor, as NeMo-RL's are."""
        await asyncio.sleep(0)

    def offload_before_refit(self) -> None:
        """It has nothing beside its weights."""

    offload_after_refit = offload_before_refit

    def stick_in_refit(self, until: Path) -> None:
        """Answer nobody from where the next refit begins until the file is there."""
        side = policy_worker._open(self)

        def stuck(*_: Any) -> Any:
            del side.refit
            while not until.exists():
                time.sleep(0.05)
            raise RefitError("this worker was stuck")

        side.refit = stuck

    def train(self, version: int, share: float = 1.0) -> None:
        """Change a share of all weights; ahead of the cast to BF16 in most bits."""
        generator = torch.Generator().manual_seed(version * 2 + self.rank)
        with torch.no_grad():
            for parameter in self.model.parameters():
                local = parameter.to_local()
                step = torch.randn(local.shape, generator=generator) * 0.05
                local.add_(step * (torch.rand(local.shape, generator=generator) < share))

    def exported(self) -> dict[str, torch.Tensor]:
        """As NeMo-RL's own export makes it: whole tensors, cast; a collective."""
        whole = gathered(self.model, LAYOUT, self._mesh)
        return {name: tensor.to(self.dtype).contiguous() for name, tensor in whole.items()}


class Probe:
    """What tests want to know of a vLLM worker and do to it."""

    def probe_poison(self) -> None:
        with torch.no_grad():
            for parameter in self.model_runner.get_model().parameters():
                parameter.fill_(torch.nan)

    def probe_wrong(self, weights: dict[str, torch.Tensor]) -> list[str]:
        """Parameters that are not, bit for bit, as vLLM's own loader leaves them; NaN stands in what it leaves alone."""
        model = self.model_runner.get_model()
        held = {name: parameter.clone() for name, parameter in model.named_parameters()}
        self.probe_poison()
        model.load_weights(iter(weights.items()))
        return [
            name
            for name, parameter in model.named_parameters()
            if not torch.equal(parameter.view(torch.int16), held[name].view(torch.int16))
        ]


class Extension(Probe, VllmInternalWorkerExtension):
    """NeMo-RL's extension of vLLM's worker by its names, and the probe."""


class TransformersRank(EngineCalls):
    """One rank of an engine that is not vLLM's, behind the calls of :class:`~...RefitWorker`; it holds the whole model."""

    def __init__(self, checkpoint: str, rank: int = 0) -> None:
        from rlrefit.workers.engines.transformers.engine import TransformersEngine

        self._rank = rank
        self.engine = TransformersEngine(checkpoint, torch.bfloat16)

    def _rlrefit_side(self) -> Any:
        return self.engine

    def _rlrefit_rank(self) -> int:
        return self._rank

    def probe_poison(self) -> None:
        with torch.no_grad():
            for parameter in self.engine.model.parameters():
                parameter.fill_(torch.nan)

    def probe_wrong(self, weights: dict[str, torch.Tensor]) -> list[str]:
        held = self.engine.model.state_dict()
        return [
            name
            for name, tensor in weights.items()
            if not torch.equal(held[name].view(torch.int16), tensor.view(torch.int16))
        ] + sorted(held.keys() ^ weights.keys())


class TransformersLlm:
    """``vllm.LLM`` over ranks of transformers, in a thread each as vLLM's are in a process each."""

    def __init__(self, checkpoint: str) -> None:
        self._checkpoint = checkpoint
        self.ranks = [TransformersRank(checkpoint)]

    def resize(self, ranks: int) -> None:
        self.ranks = [TransformersRank(self._checkpoint, rank) for rank in range(ranks)]

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(lambda rank: getattr(rank, method)(*args), self.ranks))


class GenerationWorker:
    """``VllmGenerationWorker`` of an engine's first worker, and the call that reaches all of them by name."""

    def __init__(self, checkpoint: str, kind: str) -> None:
        self.llm = TransformersLlm(checkpoint) if kind == "transformers" else self._vllm(checkpoint)

    def resize(self, ranks: int) -> None:
        self.llm.resize(ranks)

    def _vllm(self, checkpoint: str) -> Any:
        from vllm import LLM

        from rlrefit.workers.frameworks.nemo_rl.settings import WORKER_CLS

        return LLM(
            checkpoint,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=64,
            worker_cls=WORKER_CLS,
            worker_extension_cls=EXTENSION,
        )

    def checkpoint_engine_rpc(self, checkpoint_method: str, method_args: tuple[Any, ...] = ()) -> Any:
        return self.llm.collective_rpc(checkpoint_method, args=method_args)

    def wake_up(self, tags: Sequence[str]) -> None:
        """On CPUs it never sleeps."""

    def generate(self) -> list[int]:
        """Greedy tokens of vLLM."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
        [output] = self.llm.generate([{"prompt_token_ids": [3, 5, 7]}], sampling, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def die_in_refit(self) -> None:
        """End this process where its next refit begins."""
        self.llm.ranks[-1].rlrefit_refit = lambda version: os.kill(os.getpid(), signal.SIGKILL)


class WorkerGroup:
    """``RayWorkerGroup`` over workers that are there, of which ``ranks`` in a row are an engine."""

    def __init__(self, workers: Sequence[Any], ranks: int = 1) -> None:
        self.workers, self._ranks = list(workers), ranks

    def run_all_workers_single_data(
        self, method_name: str, *args: Any, run_rank_0_only_axes: Any = None, **kwargs: Any
    ) -> list[Any]:
        assert not args
        shared = {key: ray.put(value) for key, value in kwargs.items()}
        return [
            getattr(worker, method_name).remote(**shared) for worker in self._called(run_rank_0_only_axes)
        ]

    def run_all_workers_multiple_data(
        self,
        method_name: str,
        *args: Any,
        run_rank_0_only_axes: Any = None,
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        assert not args
        workers = self._called(run_rank_0_only_axes)
        assert all(len(values) == len(workers) for values in kwargs.values())
        return [
            getattr(worker, method_name).remote(
                **{key: values[place] for key, values in kwargs.items()}, **(common_kwargs or {})
            )
            for place, worker in enumerate(workers)
        ]

    def _called(self, run_rank_0_only_axes: Sequence[str] | None) -> list[Any]:
        return self.workers[:: self._ranks] if run_rank_0_only_axes else self.workers


class Policy:
    """``Policy``, which notes what is asked of it."""

    def __init__(self, workers: Sequence[Any], noted: list[str]) -> None:
        self.worker_group, self._noted = WorkerGroup(workers), noted

    def offload_before_refit(self) -> None:
        self._all("offload_before_refit")

    def offload_after_refit(self) -> None:
        self._all("offload_after_refit")

    def _all(self, method: str) -> None:
        self._noted.append(method)
        ray.get(self.worker_group.run_all_workers_single_data(method))


class VllmGeneration:
    """``VllmGeneration``, which notes what is asked of it."""

    def __init__(self, workers: Sequence[Any], cfg: dict[str, Any], noted: list[str], ranks: int = 1) -> None:
        self.worker_group, self.cfg = WorkerGroup(workers, ranks), cfg
        self.dp_size = len(workers) // ranks
        self.weight_synchronizer: Any = None
        self._noted = noted

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        self._noted.extend(kwargs["tags"])
        try:
            axes = ["tensor_parallel", "pipeline_parallel"]
            ray.get(
                self.worker_group.run_all_workers_single_data("wake_up", run_rank_0_only_axes=axes, **kwargs)
            )
        except Exception:
            return False
        return True


def timer(noted: list[str]) -> Any:
    """``Timer``."""
    from contextlib import contextmanager

    @contextmanager
    def time(label: str) -> Any:
        noted.append(label)
        yield

    return SimpleNamespace(time=time)


def called(workers: Sequence[Any], method: str, *args: Any) -> list[Any]:
    """The method's results on all of ``workers``."""
    return ray.get([getattr(worker, method).remote(*args) for worker in workers], timeout=280)
