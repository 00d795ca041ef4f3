"""A tiny checkpoint that brings code: transformers has no class of its configuration, nor of its model by that."""

from __future__ import annotations

import json
from pathlib import Path

from rlrefit.recipes.tiny.checkpoints import make_checkpoint

_CONFIGURATION = """from transformers import Qwen3Config


class OwnConfig(Qwen3Config):
    model_type = "own_qwen3"
"""
_MODELING = """from transformers import Qwen3ForCausalLM as Qwen3

from .configuration_own import OwnConfig


class Qwen3ForCausalLM(Qwen3):
    config_class = OwnConfig
"""


def write_with_code(folder: Path, *, of_model: bool = True) -> Path:
    """Write it; ``of_model``: with the class of its model, beside that of its configuration."""
    made = make_checkpoint("qwen3", folder)
    brought = {"AutoConfig": "configuration_own.OwnConfig"}
    (made / "configuration_own.py").write_text(_CONFIGURATION)
    if of_model:
        brought["AutoModelForCausalLM"] = "modeling_own.Qwen3ForCausalLM"
        (made / "modeling_own.py").write_text(_MODELING)
    file = made / "config.json"
    own = {"model_type": "own_qwen3", "auto_map": brought}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    return made
