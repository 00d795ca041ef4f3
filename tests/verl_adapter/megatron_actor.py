"""verl's own actor worker with its Megatron engine, on GPUs, and on CPUs by the stand-ins for Transformer Engine."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_name
from verl.workers.engine_workers import ActorRolloutRefWorker

from examples.verl.on_cpus import WITHOUT_FUSIONS
from rlrefit.workers.trainers.megatron.cpu_standins import ensure_megatron
from tests.verl_adapter.fsdp_actor import weight

_MEGATRON = "actor_rollout_ref.actor.megatron"
_TRANSFORMER = f"{_MEGATRON}.override_transformer_config"


class MegatronActor(ActorRolloutRefWorker):
    """As verl made it; its weights can be changed without training.

    Attributes:
        TRAINING: verl's settings of such an actor, two of them at TP2.
    """

    TRAINING = (
        "model_engine=megatron",
        f"{_MEGATRON}.tensor_model_parallel_size=2",
        f"+{_TRANSFORMER}.gradient_accumulation_fusion=false",  # which needs Apex
        "actor_rollout_ref.actor.optim.total_training_steps=10",
        *(() if torch.cuda.is_available() else WITHOUT_FUSIONS),
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        ensure_megatron()  # before verl imports Megatron
        super().__init__(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def change(self, version: int) -> None:
        """Give each weight values that belong to the version, in place, by the loader that verl's engine begins with.

        Parameters that verl offloads are back meanwhile, as for a step, and are offloaded afterwards.
        """
        checkpoint = Path(self.actor.engine.model_config.local_path)
        shapes = {name: held.shape for name, held in load_file(checkpoint / "model.safetensors").items()}
        whole = {name: weight(name, shape, version).bfloat16() for name, shape in shapes.items()}
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(checkpoint / "config.json", folder)
            save_file(whole, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            self.take_on(folder)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_on(self, folder: str) -> None:
        """As :meth:`change`, with the weights of a checkpoint."""
        engine = self.actor.engine
        with engine.train_mode():
            engine.bridge.load_hf_weights(engine.module, folder)
        if engine.is_param_offload_enabled and get_device_name() == "cpu":
            _offload_on_a_cpu(engine.module)


def _offload_on_a_cpu(chunks: list[Any]) -> None:
    """As verl's engine does where the device is another one: on a CPU its ``to("cpu")`` loads, and has no pinned memory."""
    from verl.utils.megatron_utils import offload_megatron_model_to_cpu

    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    for buffer in buffers:
        if not hasattr(buffer.param_data, "cpu_data"):
            buffer.param_data.cpu_data = torch.empty_like(buffer.param_data)
            buffer.param_data_size = buffer.param_data.numel()
    offload_megatron_model_to_cpu(chunks)
    assert all(buffer.param_data.untyped_storage().nbytes() == 0 for buffer in buffers)
