"""The policies of a recipe, by trainer: each inherits the refit, which is all that it has to do for it."""

from __future__ import annotations

import math
from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch

from ...integration.config import RefitConfig
from ...integration.quantize.formats import Int4
from ...workers.trainers.fsdp.mixin import FSDPRefitMixin
from ...workers.trainers.megatron.mixin import MegatronRefitMixin
from ...workers.trainers.qat.config import NVFP4, QATConfig
from ...workers.trainers.qat.fsdp import quantize_module
from ...workers.trainers.qat.megatron import quantize_chunks
from ...workers.trainers.qat.mixin import QATRefitMixin
from ...workers.trainers.qat.model import QAT
from ..config.schema import LoraConfig, TrainConfig
from .base import AdamConfig, Policy, PolicyBatch, PolicyConfig
from .fsdp import FSDPPolicy, FSDPPolicyConfig
from .megatron import MegatronPolicy, MegatronPolicyConfig
from .state import Files


class RefittingMegatronPolicy(MegatronRefitMixin, MegatronPolicy):
    """A policy on Megatron-core whose weights travel."""

    def __init__(self, config: MegatronPolicyConfig, refit_config: RefitConfig) -> None:
        super().__init__(config)
        self.refit_config = refit_config

    def _step_optimizer(self) -> tuple[float, float]:
        with self.recording_changes():
            return super()._step_optimizer()


class RefittingFSDPPolicy(FSDPRefitMixin, FSDPPolicy):
    """A policy under FSDP2 whose weights travel, in the dtype that it computes in."""

    def __init__(self, config: FSDPPolicyConfig, refit_config: RefitConfig) -> None:
        super().__init__(config)
        self.refit_config = refit_config
        self.refit_dtype = config.dtype

    def _step_optimizer(self) -> tuple[float, float]:
        with self.recording_changes():
            return super()._step_optimizer()


class TrainsInFourBits(QATRefitMixin, Policy):
    """What a policy does besides that computes in NVFP4 or INT4, and whose packed weights travel; its class inherits this first."""

    def __init__(self, config: PolicyConfig, refit_config: RefitConfig) -> None:
        super().__init__(config, refit_config)  # type: ignore[call-arg]
        assert config.qat is not None
        self.qat = self._quantize(config.qat)
        self.qat.refresh()

    @abstractmethod
    def _quantize(self, config: QATConfig) -> QAT:
        """Have the model's linear layers compute in four bits."""

    def calibrate_inputs(self, batch: PolicyBatch) -> None:
        """Take the scales of the layers' inputs from a batch; every trainer rank calls it."""
        with self.qat.calibrating():
            self.compute_logprobs(batch)

    def _step_optimizer(self) -> tuple[float, float]:
        told = super()._step_optimizer()
        self.qat.refresh()
        self._free_after_step()
        return told

    def _free_after_step(self) -> None:
        """The GPU may be the engine's next."""
        self.qat.release()

    def _identity(self) -> dict[str, Any]:
        qat = self.config.qat
        assert qat is not None
        # Checkpoints of runs in NVFP4 stay as they were.
        format = {} if qat.format == NVFP4 else {"qat.format": repr(qat.format)}
        return super()._identity() | {"qat": str(qat), **format}

    def _save_state(self, folder: Path) -> tuple[dict[str, Any], Files]:
        state, files = super()._save_state(folder)
        return state | {"qat": self.qat.state_dict()}, files

    def _load_state(self, folder: Path, state: dict[str, Any]) -> None:
        super()._load_state(folder, state)
        self.qat.load_state_dict(state["qat"])
        self.qat.refresh()


class QATMegatronPolicy(TrainsInFourBits, RefittingMegatronPolicy):
    """:class:`RefittingMegatronPolicy` in four bits."""

    def _free_after_step(self) -> None:
        # Views of parameters stay, which keep nothing of a storage that is emptied in place, and which no forward pass reads: Bridge would
        # be asked for the place of each parameter in each step.
        self.qat.free_values()

    def _quantize(self, config: QATConfig) -> QAT:
        return quantize_chunks(self.bridge, self.model, config)


class QATFSDPPolicy(TrainsInFourBits, RefittingFSDPPolicy):
    """:class:`RefittingFSDPPolicy` in four bits."""

    def _quantize(self, config: QATConfig) -> QAT:
        return quantize_module(self.model, config)


def refitting_policy(config: PolicyConfig, refit_config: RefitConfig) -> Policy:
    """Build the model and load the checkpoint's weights; every trainer rank calls it."""
    quantizes = config.qat is not None
    if isinstance(config, FSDPPolicyConfig):
        return (QATFSDPPolicy if quantizes else RefittingFSDPPolicy)(config, refit_config)
    assert isinstance(config, MegatronPolicyConfig)
    return (QATMegatronPolicy if quantizes else RefittingMegatronPolicy)(config, refit_config)


def policy_config(config: TrainConfig, model_path: str, loss: Any) -> PolicyConfig:
    """The policy's configuration from a recipe's."""
    trainer, adam, minibatches = config.trainer, config.trainer.optimizer, config.algorithm.minibatches
    # A run that ends in its warm-up has no step that decays, and Megatron wants one.
    decay_steps = adam.lr_decay_steps or max(config.algorithm.steps, adam.warmup_steps + 1)
    common: dict[str, Any] = {
        "model_path": model_path,
        "loss": loss,
        "optimizer": AdamConfig(
            lr=adam.lr,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            clip_grad=adam.grad_clip,
            # The policy counts optimizer steps.
            warmup_steps=adam.warmup_steps * minibatches,
            lr_decay=adam.lr_decay,
            lr_decay_steps=decay_steps * minibatches,
            min_lr=adam.min_lr,
            cpu_offload_fraction=adam.cpu_offload_fraction,
        ),
        "micro_batch": trainer.micro_batch_size,
        "temperature": config.generation.temperature,
        "dtype": getattr(torch, config.model.dtype),
        "seed": config.seed,
        "max_skipped_steps": adam.max_skipped_steps,
        "qat": _qat(config),
        "trust_remote_code": config.model.trust_remote_code,
    }
    return _fsdp(config, common) if trainer.backend == "fsdp" else _megatron(config, common)


def _qat(config: TrainConfig) -> QATConfig | None:
    qat = config.policy.qat
    if qat == "int4":
        group, rule = config.generation.weight_group, config.policy.refit.int4_scale
        return QATConfig(activations=False, format=Int4(group, config.model.dtype, scale_rule=rule))
    return None if qat == "off" else QATConfig(activations=qat == "w4a4")


def _fsdp(config: TrainConfig, common: dict[str, Any]) -> FSDPPolicyConfig:
    from ...workers.trainers.fsdp.model import FSDPLayout

    trainer = config.trainer
    return FSDPPolicyConfig(
        layout=FSDPLayout(replicate=trainer.fsdp.replicate, tensor_parallel=trainer.tensor_parallel),
        reshard_after_forward=trainer.fsdp.reshard_after_forward,
        cpu_offload=trainer.fsdp.cpu_offload,
        recompute=trainer.recompute.granularity == "full",
        lora=_lora(trainer.lora) if trainer.lora.rank else None,
        **common,
    )


def _lora(lora: LoraConfig) -> Any:
    """peft's configuration."""
    from peft import LoraConfig as PeftConfig

    targets = list(lora.target_modules)
    return PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        use_rslora=lora.use_rslora,
        task_type="CAUSAL_LM",
    )


def _megatron(config: TrainConfig, common: dict[str, Any]) -> MegatronPolicyConfig:
    from ...workers.trainers.megatron.lora_targets import megatron_targets
    from ...workers.trainers.megatron.model import Lora, MegatronLayout, Recompute

    trainer, recompute, lora = config.trainer, config.trainer.recompute, config.trainer.lora
    return MegatronPolicyConfig(
        layout=MegatronLayout(
            tensor_parallel=trainer.tensor_parallel,
            pipeline_parallel=trainer.pipeline_parallel,
            virtual_pipeline=trainer.virtual_pipeline,
            expert_parallel=trainer.expert_parallel,
            expert_tensor_parallel=trainer.expert_tensor_parallel,
            context_parallel=trainer.context_parallel,
            num_layers_in_first_pipeline_stage=trainer.num_layers_in_first_pipeline_stage,
            num_layers_in_last_pipeline_stage=trainer.num_layers_in_last_pipeline_stage,
            pipeline_model_parallel_layout=trainer.pipeline_model_parallel_layout,
        ),
        distributed_optimizer=trainer.distributed_optimizer,
        fp8_param=trainer.fp8_param,
        mtp_loss_scaling_factor=trainer.mtp_loss_scaling_factor,
        recompute=None
        if recompute.granularity is None
        else Recompute(
            recompute.granularity, recompute.method, recompute.num_layers, tuple(recompute.modules)
        ),
        lora=Lora(
            lora.rank,
            # Bridge divides by the rank.
            lora.alpha * (math.sqrt(lora.rank) if lora.use_rslora else 1),
            megatron_targets(lora.target_modules),
        )
        if lora.rank
        else None,
        **common,
    )
