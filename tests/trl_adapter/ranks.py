"""Ranks of a training by TRL's trainer, on CPUs. TRL's own code runs but for what only a GPU has.

That is the kernel of FlashAttention 3, which torch's attention stands in for, the GPU's name, and that accelerate has FSDP for GPUs
alone.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import requests
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import RefitError, RefitTimeout
from rlrefit.workers.engines.common.http_calls import HttpAnswer, HttpCalls

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl"
STEPS = 2
# Routes that the server of this process refuses.
REFUSED: list[str] = []


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        folder: where each rank leaves what it has seen, and rank 0 a checkpoint of each version.
        fsdp: whether accelerate shards the policy; else it has DDP or one process.
        lora: whether adapters are trained.
        fails: what goes wrong in the second update: the server's worker is ``killed``, the server ``refuses``, or rank 1
            fails ``alone``, once its part is done.
        by_calls: whether the client refits by vLLM's own calls, before whose last one the engine is poisoned.
    """

    folder: str
    url: str
    model: str
    fsdp: bool = False
    lora: bool = False
    fails: str = ""
    by_calls: bool = False
    refit: dict[str, Any] = field(
        default_factory=lambda: {"bucket_mb": 1, "timeout_s": 60.0, "verify": "full"}
    )


@dataclass
class Update:
    """What a rank saw of one update.

    Attributes:
        version: of the trainer, on the main process.
        served: the server's, on the main process.
        digests: of the server's live parameters, on the main process.
        gathered: names of collectives of torch's that gather, and of DTensor's methods that do.
        own_bytes: of this rank's shards in BF16.
    """

    version: int
    served: int | None
    digests: dict[str, Any] | None
    gathered: list[str]
    record: dict[str, Any]
    own_bytes: int


def reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """The share of words with an even number."""
    words = [completion[-1]["content"].split() for completion in completions]
    return [sum(int(word[1:]) % 2 == 0 for word in found) / max(len(found), 1) for found in words]


def train(rank: int, case: Case) -> dict[str, Any]:
    """Train; the updates that this rank saw, TRL's metrics, and the error that ended it, if one did."""
    with _as_on_gpus(case.by_calls):
        trainer = _trainer(case)
        try:
            trainer.train()
        except RefitError as error:
            if not case.fails:
                raise
            return {
                "error": error,
                "notes": getattr(error, "__notes__", []),
                "updates": len(trainer.updates),
                "seconds": trainer.seconds,
            }
        control = [] if case.lora else _gathers(lambda: list(trainer._streaming_iter()))
        return {
            "updates": [asdict(update) for update in trainer.updates],
            "log": trainer.state.log_history,
            "control": control,
            "open": trainer._shards._refit_session is not None,
        }


def train_alone(case: Case) -> dict[str, Any]:
    """As :func:`train`, in one process without a process group."""
    return train(0, case)


def run_example(*arguments: str) -> str:
    """What ``examples/trl/grpo.py`` prints."""
    printed = io.StringIO()
    with _as_on_gpus(), contextlib.redirect_stdout(printed):
        sys.path.insert(0, str(EXAMPLE))
        assert importlib.import_module("grpo").main([*arguments]) == 0
    return printed.getvalue()


def _trainer(case: Case) -> Any:
    from datasets import Dataset
    from peft import LoraConfig
    from trl.experimental.async_grpo import AsyncGRPOConfig

    from rlrefit.workers.frameworks.trl.trainer import RefitAsyncGRPOTrainer
    from rlrefit.workers.frameworks.trl.transfer import ShardOptions

    class Watched(RefitAsyncGRPOTrainer):
        updates: list[Update]
        seconds: float

        def _sync_weight(self) -> None:
            if self.updates and self.accelerator.is_main_process:
                if case.fails == "killed":
                    _probe(case.url, "probe_die_in_the_next_refit")
                elif case.fails == "refuses":
                    REFUSED.append("/refit")
            elif self.updates and case.fails == "alone":
                _fail_after_the_part(self._shards)
            begun, main = time.monotonic(), self.accelerator.is_main_process
            try:
                gathered = _gathers(super()._sync_weight)
            except RefitError:
                self.seconds = time.monotonic() - begun
                if main:  # TRL would give its rollouts 15 s to end by themselves
                    rollouts = self.rollout_worker._process
                    rollouts.join = lambda timeout, join=rollouts.join: join(0.2)
                raise
            _save(self, Path(case.folder) / f"version-{len(self.updates) + 1}")
            self.updates.append(
                Update(
                    self.model_version,
                    _probe(case.url, "refit_serving_version")["version"] if main else None,
                    _probe(case.url, "refit_parameter_digests") if main else None,
                    gathered,
                    self.refit_record,
                    2 * sum(_local(parameter).numel() for parameter in self.model.parameters()),
                )
            )

    prompts = [[{"role": "user", "content": f"w{i} w{i + 20} w{i + 40}"}] for i in range(5, 13)]
    sharded = {
        "fsdp": True,
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]},
    }
    Watched.updates = []
    return Watched(
        case.model,
        reward,
        args=AsyncGRPOConfig(
            output_dir=f"{case.folder}/trl",
            max_steps=STEPS,
            per_device_train_batch_size=2,
            num_generations=4,
            max_completion_length=8,
            token_budget=256,
            learning_rate=0.02,
            vllm_server_base_url=case.url,
            vllm_server_timeout=60.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            **(sharded if case.fsdp else {}),
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear") if case.lora else None,
        refit=ShardOptions(RefitConfig(**case.refit)),
    )


def _fail_after_the_part(shards: Any) -> None:
    refit = shards.refit

    def failing(version: int) -> None:
        refit(version)
        raise RefitTimeout("too late", stage="record")

    shards.refit = failing


def _probe(url: str, method: str, *args: str) -> Any:
    answered = requests.post(f"{url}/collective_rpc", json={"method": method, "args": args}, timeout=60)
    answered.raise_for_status()
    return answered.json()["results"][0]


def _gathers(act: Any) -> list[str]:
    """What gathers while ``act`` runs in this thread."""
    found: list[str] = []
    full_tensor = DTensor.full_tensor

    def noted(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        found.append("full_tensor")
        return full_tensor(self, *args, **kwargs)

    with mock.patch.object(DTensor, "full_tensor", noted), CommDebugMode() as comms:
        act()
    return found + [str(op) for op in comms.get_comm_counts() if "gather" in str(op)]


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _save(trainer: Any, folder: Path) -> None:
    """The policy as a checkpoint; a collective of all ranks."""
    from copy import deepcopy

    from peft import PeftModel
    from safetensors.torch import save_file

    model = trainer.accelerator.unwrap_model(trainer.model)
    if isinstance(model, PeftModel):
        model = deepcopy(model).merge_and_unload()
    tensors = {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().contiguous()
        for name, tensor in model.state_dict().items()
    }
    if trainer.accelerator.is_main_process:
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")


@contextlib.contextmanager
def _as_on_gpus(by_calls: bool = False) -> Iterator[None]:
    from accelerate.state import AcceleratorState, DistributedType, PartialState
    from trl.experimental.async_grpo import async_rollout_worker

    from examples.trl import stand_ins
    from tests.vllm_processes import vllm_processes

    init, ask = AcceleratorState.__init__, HttpCalls.ask

    def sharding(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:  # as accelerate itself does on GPUs
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    def changed(self: HttpCalls, method: str, path: str, fields: Any = None, **how: Any) -> HttpAnswer:
        if path == "/update_weights":
            _probe(self.url, "probe_poison")
        if path == "/refit" and by_calls:
            return HttpAnswer(404, {})
        if path in REFUSED:
            return HttpAnswer(503, {"message": "refused"})
        return ask(self, method, path, fields, **how)

    with contextlib.ExitStack() as patches:
        patches.enter_context(stand_ins.put())
        for target, name, new in (
            (AcceleratorState, "__init__", sharding),
            (HttpCalls, "ask", changed),
            # Its process would import all anew; what is forked has it.
            (async_rollout_worker, "mp", SimpleNamespace(get_context=lambda _: vllm_processes())),
        ):
            patches.enter_context(mock.patch.object(target, name, new))
        yield
