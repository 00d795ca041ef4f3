"""A checkpoint folder without weights: a configuration, and an index that names the tensors.

Bridge reads the names from the index, the engine starts with random weights (``load_format="dummy"``); neither opens a file
of weights, so that a model of any size costs no disk.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from ...plan.catalog import Model


def write_weightless(folder: Path, model: Model, dtype: torch.dtype) -> Path:
    """Write ``config.json`` and ``model.safetensors.index.json`` of ``model`` into ``folder``; returns it."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    settings = {key: value for key, value in model.config.items() if not key.startswith("_")}
    settings["dtype"] = str(dtype).removeprefix("torch.")
    settings.setdefault("architectures", [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[settings["model_type"]]])
    settings.pop("torch_dtype", None)
    folder.mkdir(parents=True, exist_ok=True)
    AutoConfig.for_model(**settings).save_pretrained(folder)
    specs = model.specs()
    index = {
        "metadata": {"total_size": sum(spec.nbytes for spec in specs)},
        "weight_map": {spec.name: "model-00001-of-00001.safetensors" for spec in specs},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
