"""Bridge from a configuration alone, and parts of models that are built for their parameters and never run."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import importlib
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

_INDEX = "model.safetensors.index.json"
# A name by which Bridge knows how published checkpoints are written: with experts in one tensor, with the encoder's prefix.
_PUBLISHED = {
    "gemma3": "vision_tower.vision_model.post_layernorm.weight",
    "qwen3_5_moe": "model.language_model.layers.0.mlp.experts.gate_up_proj",
    "qwen3_5_moe_text": "model.layers.0.mlp.experts.gate_up_proj",
    "qwen3_vl_moe": "model.language_model.layers.0.mlp.experts.gate_up_proj",
}


def config_only_bridge(auto_bridge: Any, path: str) -> tuple[Any, Any]:
    """A transformers config, and an ``AutoBridge`` of it that exports as one with the checkpoint would.

    Args:
        auto_bridge: the class.
        path: of a ``config.json`` or of its folder. If the folder has an index of safetensors, Bridge sees the
            index's names; otherwise all, written as published checkpoints are.

    Raises:
        OSError, ValueError: there is no such file, transformers can't read it, or Bridge has no model of it.
    """
    from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
    from transformers import AutoConfig, GenerationConfig
    from transformers.models.auto import modeling_auto

    # transformers would take any other text for a hub name, and wait for the network.
    if not config_file(path).is_file():
        raise FileNotFoundError(f"there is no configuration at {config_file(path)}")
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    if not config.architectures:
        # Bridge goes by the name of the class that was saved; the configuration's own one is the default.
        classes = (
            modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
            if hasattr(config, "vision_config")
            else modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        )
        config.architectures = [classes[config.model_type]]

    kind = _WithSharedKeys if getattr(config.get_text_config(), "num_kv_shared_layers", 0) else _State

    class WithoutWeights(PreTrainedCausalLM):  # type: ignore[misc]
        state = kind(_names(Path(path), config))

    pretrained = WithoutWeights(str(path))
    pretrained.config, pretrained.generation_config = config, GenerationConfig()
    if not auto_bridge.supports(config):
        raise ValueError(f"Megatron-Bridge has no model of {config.architectures[0]}")
    return config, auto_bridge(pretrained)


def config_file(path: str | Path) -> Path:
    """The ``config.json`` that is meant by its path or its folder's."""
    return Path(path) / "config.json" if Path(path).is_dir() else Path(path)


class _State(dict[str, torch.Tensor]):
    """Stands for a checkpoint's tensors where Bridge asks which there are; it holds none."""

    def __init__(self, names: Collection[str]):
        super().__init__()
        self.source = self
        self._names = names

    def get_all_keys(self) -> Collection[str]:
        return self._names

    def has_glob(self, pattern: str) -> bool:
        """Whether a name matches, which Bridge asks to find experts that are stacked."""
        return bool(fnmatch.filter(self._names, pattern))


class _WithSharedKeys(_State):
    """One that Bridge asks for names as it exports, too: Gemma 4's layers that share keys have some of their own as published."""

    def __bool__(self) -> bool:
        return True

    def __contains__(self, name: object) -> bool:
        return name in self._names


class _AllButTied(Collection[str]):
    """The names of a checkpoint that has everything: of tied embeddings, transformers saves one.

    Who walks through them finds ``told`` alone, by which Bridge knows how the checkpoint is written.
    """

    def __init__(self, tied: bool, told: tuple[str, ...]):
        self._tied, self._told = tied, told

    def __contains__(self, name: object) -> bool:
        return not (self._tied and str(name).endswith("lm_head.weight"))

    def __iter__(self) -> Iterator[str]:
        return iter(self._told)

    def __len__(self) -> int:
        return len(self._told)


def _names(path: Path, config: Any) -> Collection[str]:
    index = (path if path.is_dir() else path.parent) / _INDEX
    if index.is_file():
        return frozenset(json.loads(index.read_text())["weight_map"])
    told = _PUBLISHED.get(config.model_type)
    return _AllButTied(bool(config.get_text_config().tie_word_embeddings), (told,) if told else ())


@contextlib.contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Other attributes of a module or class for a while; those that it had come back, whatever happens."""
    own = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in own.items():
            setattr(owner, name, value)


def accept_any_attention() -> None:
    """Build Megatron's own attention for any model.

    It stands in for Transformer Engine's, and knows nothing of head sizes that differ. It never runs, and has no weights
    that depend on them.
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    real = DotProductAttention.__init__

    @functools.wraps(real)
    def init(
        self: Any, config: Any, *args: Any, k_channels: Any = 0, v_channels: Any = 0, **kwargs: Any
    ) -> None:
        real(self, config, *args, **kwargs)

    DotProductAttention.__init__ = init


def accept_delta_nets() -> None:
    """Build gated delta nets without their kernels: parameters only."""
    from megatron.core.ssm.gated_delta_net import common, gdn

    common.HAVE_FLA = True
    gdn.chunk_gated_delta_rule = gdn.torch_chunk_gated_delta_rule


def accept_mamba() -> None:
    """Build Mamba mixers without their kernels: parameters only, and the gated norm's weight."""
    from megatron.core.models.hybrid import hybrid_layer_specs
    from megatron.core.ssm import mamba_mixer

    class GatedNorm(torch.nn.Module):
        def __init__(self, size: int, **kwargs: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(size, dtype=torch.bfloat16))

    mamba_mixer.HAVE_MAMBA_SSM = True
    mamba_mixer.RMSNormGated = mamba_mixer.ExtendedRMSNorm = GatedNorm
    mamba_mixer.MAMBA_HAS_STATE_DTYPE = False
    # Its specification was made of the classes that it found without Transformer Engine.
    importlib.reload(hybrid_layer_specs)
