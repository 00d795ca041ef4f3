"""What a recipe trains and where, in the words of ``rlrefit plan``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...integration.config import RefitConfig
from ...integration.quantize.int4 import GROUPS
from ..config.errors import ConfigError
from ..config.schema import TrainConfig, TrainerConfig
from .catalog import CatalogError, FsdpLayout, GenLayout, Model, TrainLayout, open_model


@dataclass(frozen=True)
class RecipePlan:
    """A recipe's side of a plan.

    Attributes:
        model: with the weights that the policy exports.
        train: its trainer's layout.
        gen: its engines' layout.
        refit: its buckets and streams.
        colocated: whether each trainer rank shares its GPU with an engine's.
        group: elements that share a scale where engines hold INT4.
        qat: as ``policy.qat``.
    """

    model: Model
    train: TrainLayout | FsdpLayout
    gen: GenLayout
    refit: RefitConfig
    colocated: bool = False
    group: int = GROUPS[0]
    qat: str = "off"

    @property
    def quantize(self) -> str:
        """What the trainers make as they pack, as ``--quantize`` has it."""
        if self.qat in ("w4a4", "w4a16"):
            return self.qat
        if self.refit.trainer_quantize_int4:
            return "int4"
        return "fp8" if self.refit.trainer_quantize_fp8 else "off"


def read_recipe(recipe: str, overrides: Sequence[str] = ()) -> RecipePlan:
    """A recipe as it would be refitted.

    Args:
        recipe: name of a bundled recipe, or path of a YAML file.
        overrides: ``key=value``.

    Raises:
        ConfigError: with all that is wrong with the recipe, or the one thing that can't be planned.
    """
    # Hydra is not there where only `rlrefit plan` is installed.
    try:
        from ..config.load import load_config
    except ImportError as error:
        raise ConfigError(
            recipe,
            [
                f"reading recipes needs {error.name}: pip install 'rlrefit[ray]'; or give --model, --train, --gen"
            ],
        ) from error
    return plan_of(load_config(recipe, overrides))


def plan_of(config: TrainConfig) -> RecipePlan:
    """The same of a configuration that was checked.

    Raises:
        ConfigError: its model is not in the catalogue, its trainer is FSDP with TP, its pipeline stages are of its own
            making, or it sends an adapter alone, MXFP8 or MXFP4, or all weights whole.
    """
    trainer, generation = config.trainer, config.generation
    if trainer.pipeline_model_parallel_layout is not None:
        raise ConfigError(
            config.name,
            [
                "trainer.pipeline_model_parallel_layout: stages of one's own can't be planned, only equal ones but for "
                "the first and last; plan with num_layers_in_first_pipeline_stage and …_last_… near to them"
            ],
        )
    if not config.policy.nccl_xfer_refit:
        raise ConfigError(
            config.name,
            [
                "policy.nccl_xfer_refit: false broadcasts every weight whole to every engine rank, and plans are of refits "
                "shard to shard; plan with true"
            ],
        )
    if config.policy.refit.lora == "adapter":
        raise ConfigError(
            config.name,
            [
                "policy.refit.lora: adapter sends the factors alone, and plans are of whole weights; plan with merge, which "
                "sends as much as a trainer without LoRA"
            ],
        )
    if generation.weight_dtype == "mxfp8":
        raise ConfigError(
            config.name,
            [
                "generation.weight_dtype: plans are of weights in BF16, FP8 blocks, INT4 or NVFP4; plan with fp8, which sends 3% fewer bytes of "
                "the same matrices"
            ],
        )
    if config.policy.refit.trainer_quantize_mxfp4:
        raise ConfigError(
            config.name,
            [
                "policy.refit.trainer_quantize_mxfp4: true sends experts packed in MXFP4, and plans are of weights in BF16, FP8, INT4 or NVFP4; plan "
                "with false and generation.weight_dtype=auto, which tells the same routes of all other weights"
            ],
        )
    train = _fsdp(config) if trainer.backend == "fsdp" else _megatron(trainer)
    gen = GenLayout(
        tp=generation.tensor_parallel,
        dp=generation.replicas,
        pp=generation.pipeline_parallel,
        ep=generation.tensor_parallel if generation.shares_experts else 1,
    )
    return RecipePlan(
        _model(config),
        train,
        gen,
        config.policy.refit,
        generation.colocated.enabled,
        generation.weight_group,
        config.policy.qat,
    )


def _megatron(trainer: TrainerConfig) -> TrainLayout:
    dense = trainer.tensor_parallel * trainer.context_parallel * trainer.pipeline_parallel
    return TrainLayout(
        tp=trainer.tensor_parallel,
        pp=trainer.pipeline_parallel,
        ep=trainer.expert_parallel,
        etp=trainer.expert_tensor_parallel,
        cp=trainer.context_parallel,
        dp=trainer.ranks // dense,
        vpp=trainer.virtual_pipeline or 1,
        first=trainer.num_layers_in_first_pipeline_stage,
        last=trainer.num_layers_in_last_pipeline_stage,
        # The trainer pads to a multiple of TP alone.
        vocabulary_multiple=1,
    )


def _fsdp(config: TrainConfig) -> FsdpLayout:
    trainer = config.trainer
    if trainer.tensor_parallel > 1:
        raise ConfigError(
            config.name,
            [
                f"trainer.tensor_parallel: FSDP2 over TP {trainer.tensor_parallel} can't be planned, whose parts depend on "
                "transformers' plan for the model; plan with trainer.tensor_parallel=1, or run rlrefit train and read the "
                "routes that it prints before the first step"
            ],
        )
    replicate = trainer.fsdp.replicate
    return FsdpLayout(trainer.ranks // replicate, replicate)


def _model(config: TrainConfig) -> Model:
    from ..config.model import catalog_model, local_hf_config

    dtype = torch.bfloat16 if config.model.dtype == "auto" else getattr(torch, config.model.dtype)
    found = catalog_model(config)
    if found is not None:
        return replace(found, dtype=dtype)
    local = local_hf_config(config.model.path)
    try:
        if local is None:
            return open_model(config.model.path, dtype)
        model = Model(config.model.path, dict(local), dtype)
        _ = model.architecture
    except CatalogError as error:
        raise ConfigError(config.name, [f"model.path: {error}"]) from error
    return model


def layout_text(layout: TrainLayout | FsdpLayout | GenLayout) -> str:
    """A layout as ``--train`` and ``--gen`` take it, sizes of 1 left out."""
    if isinstance(layout, FsdpLayout) and layout.fsdp == 1:
        # Without it the rest would be Megatron's.
        return f"fsdp=1,replicate={layout.replicate}"
    sizes = ((name, size) for name, size in vars(layout).items() if name != "vocabulary_multiple")
    return ",".join(f"{name}={size}" for name, size in sizes if size is not None and size > 1) or "tp=1"
