"""A tiny checkpoint that brings code: transformers has no class of its configuration, nor of its model by that."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from rlrefit.recipes.tiny.checkpoints import make_checkpoint
from rlrefit.workers.checkpoint_folder import copy_own_code

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


def load_at_once(rank: int, checkpoint: Path, copies: Path, first: bool = True) -> int:
    """Load configuration and model as other ranks do, each file of code being copied slowly; how many this rank copied.

    ``first``: copy them first, as ranks of trainers and engines do.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, dynamic_module_utils

    copied = []

    def copy_slowly(source: Path, target: Path) -> None:
        copied.append(source)
        text = Path(source).read_text()
        with Path(target).open("w") as file:
            for part in (text[:60], text[60:]):
                time.sleep(0.2)
                file.write(part)
                file.flush()

    # Of a process that loaded such code: its path comes to its children, and would lead to its own folder.
    path = [each for each in sys.path if not (Path(each) / "transformers_modules").is_dir()]
    with (
        mock.patch.object(sys, "path", path),
        mock.patch.object(dynamic_module_utils, "HF_MODULES_CACHE", str(copies)),
        mock.patch.object(dynamic_module_utils.shutil, "copyfile", copy_slowly),
    ):
        dist.barrier()
        time.sleep(0.3 * rank)  # so that one finds what another is writing
        if first:
            copy_own_code(checkpoint)
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=True)
        model = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True)
    assert (config.model_type, type(model).__module__.partition(".")[0]) == (
        "own_qwen3",
        "transformers_modules",
    )
    return len(copied)
