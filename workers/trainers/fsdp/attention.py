"""Which modules of a transformers model attend, by the names that their layers have in a checkpoint."""

from __future__ import annotations

import torch
from torch import nn

from ....integration.errors import RefitError
from ...kv_scales.endpoints import AttentionLayer, layer_of_weight
from .adapters import base_model
from .checkpoint import conversion_of, unwrapped_modules


def attention_modules(model: nn.Module) -> dict[AttentionLayer, nn.Module]:
    """The attention modules of ``model``, which may be compiled, sharded or under adapters.

    Raises:
        RefitError: it is no transformers model, so there is no telling where its keys are computed.
    """
    from transformers import PreTrainedModel

    model = base_model(model)
    if not isinstance(model, PreTrainedModel):
        raise RefitError(
            f"{type(model).__name__} is no transformers model, so its keys can't be found. Set policy.refit.kv_scales=false, "
            "or give refit scales of your own",
            stage="calibrate",
        )
    # Not by parameters: adapters wrap projections.
    module_of = {
        f"{name}.{projection}.weight": module
        for name, module in unwrapped_modules(model)
        for projection in ("k_proj", "qkv_proj")
        if hasattr(module, projection)
    }
    # Renamed as transformers renames weights that it saves; told by identity.
    probes = {name: torch.empty(1, device="meta") for name in module_of}
    modules = {id(probe): module_of[name] for name, probe in probes.items()}
    saved = conversion_of(model)(dict(probes))
    return {
        layer: modules[id(probe)]
        for name, probe in saved.items()
        if (layer := layer_of_weight(name)) and id(probe) in modules
    }
