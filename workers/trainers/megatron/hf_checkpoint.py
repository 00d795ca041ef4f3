"""Is a Hugging Face checkpoint folder complete, whole, and of the architecture its config names?

Reads ``config.json``, the index and the headers of the safetensors files, never the weights. Without this
look, a missing shard or a tensor of another shape surfaces in the middle of a tensor-parallel scatter, on
some ranks only, while the others wait.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Size, device

logger = logging.getLogger(__name__)

_SHOWN = 3
_MEND = "Install what that imports, on all hosts, or mend it; or give a model that transformers has itself"
# Names that transformers writes, and published checkpoints' (NemotronH's), which it reads as the same weight.
_PUBLISHED = {"backbone.embedding.weight": "backbone.embeddings.weight"}


class CheckpointMismatch(ValueError):
    """The checkpoint folder can't be loaded as the model that its config describes. Nothing was loaded."""


def expected_tensors(
    config: Any,
    trust_remote_code: bool = False,
    needs_model: bool = False,
    known: Callable[[dict[str, Any]], Mapping[str, Size] | None] = lambda _: None,
) -> dict[str, Size] | None:
    """Names and shapes that a checkpoint of this transformers config holds, tied copies left out.

    The model is built on the meta device (no memory) and its packed experts are split into the tensors that
    checkpoints hold, by the conversion that transformers itself applies on saving.

    Args:
        config: of the checkpoint.
        trust_remote_code: run the code that it brings.
        needs_model: whether training is impossible without transformers' class of the model, or the checkpoint's.
        known: names and shapes by the config's keys, without a class of the model, or None; asked where there is none that can be run.

    Returns:
        None if there is neither class, or if the checkpoint's can't be run here, and nothing is known besides.

    Raises:
        ValueError: transformers knows no causal language model for the config.
        CheckpointMismatch: there is neither, or it can't be run, and it is needed.
    """
    kind = _automatic_class(config, trust_remote_code)
    brought = (getattr(config, "auto_map", None) or {}) if trust_remote_code else {}
    if kind is not None and kind.__name__ not in brought:
        return _tensors(kind, config, trust_remote_code)
    problem = "neither transformers nor the checkpoint has a class of its model"
    if kind is not None:
        try:
            return _tensors(kind, config, trust_remote_code)
        except Exception as error:  # the checkpoint's code may raise anything
            reason = f"{type(error).__name__}: {error}"
            problem = f"the code that it brings for its model, {brought[kind.__name__]}, can't be run here: {reason}"
    if needs_model:
        raise CheckpointMismatch(f"{config.model_type}: {problem}. {_MEND}")
    if (otherwise := known(config.to_dict())) is not None:
        return dict(otherwise)
    logger.warning(
        "%s: %s. So only the checkpoint's files were looked at; weights that are missing or have other shapes are found as they are loaded",
        config.model_type,
        problem,
    )
    return None


def _tensors(kind: Any, config: Any, trust_remote_code: bool) -> dict[str, Size]:
    from transformers.core_model_loading import revert_weight_conversion

    with device("meta"):
        model = kind.from_config(config, trust_remote_code=trust_remote_code)
    tied = set(model.all_tied_weights_keys)
    tensors = revert_weight_conversion(model, model.state_dict())
    return {name: tensor.shape for name, tensor in tensors.items() if name not in tied}


def _automatic_class(config: Any, trust_remote_code: bool) -> Any:
    """What of transformers makes the model, by the code that the checkpoint brings if that is trusted; None if it brings none."""
    from transformers import (
        CONFIG_MAPPING,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    if not trust_remote_code or config.model_type in CONFIG_MAPPING:
        return AutoModelForCausalLM
    brought = getattr(config, "auto_map", None) or {}
    kinds = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel)
    return next((kind for kind in kinds if kind.__name__ in brought), None)


def check_checkpoint(
    folder: str | Path,
    trust_remote_code: bool = False,
    needs_model: bool = False,
    known: Callable[[dict[str, Any]], Mapping[str, Size] | None] = lambda _: None,
) -> Any:
    """Check a checkpoint folder against its own config.

    Args:
        folder: of the checkpoint.
        trust_remote_code: run the code that it brings.
        needs_model: as :func:`expected_tensors` has it.
        known: as there.

    Returns:
        The transformers config.

    Raises:
        CheckpointMismatch: all that is wrong, each with its file or parameter, and what to do.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise CheckpointMismatch(
            f"{folder} has no config.json, so it is no Hugging Face checkpoint folder. Give a local folder as "
            "`hf download <model> --local-dir <folder>` makes it"
        )
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        # The checkpoint's code may raise anything, on one host alone, while other ranks wait.
        if not (trust_remote_code and brings_code(folder)):
            raise
        raise CheckpointMismatch(
            f"{folder}: its configuration can't be read by the code that it brings: {type(error).__name__}: {error}. {_MEND}"
        ) from error
    found, problems = _found_tensors(folder)
    if not problems:
        expected = expected_tensors(config, trust_remote_code, needs_model, known)
        problems = [] if expected is None else _compare(expected, found)
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointMismatch(
            f"checkpoint {folder} does not hold a whole {config.model_type} model: "
            + "; ".join(problems[:_SHOWN])
            + more
            + ". Nothing was loaded. Fetch the folder's files again, or point to the checkpoint that belongs to "
            "this config.json"
        )
    return config


def brings_code(folder: Path) -> bool:
    """Whether a checkpoint's config.json names code beside it; one that can't be read names none, and transformers tells why."""
    try:
        return bool(json.loads((folder / "config.json").read_text()).get("auto_map"))
    except (OSError, ValueError):
        return False


def _found_tensors(folder: Path) -> tuple[dict[str, tuple[Size, str]], list[str]]:
    """Name to (shape, file) for all tensors of the folder, and what is wrong with its files."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            indexed: dict[str, str] = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            return {}, [f"{index.name} is not a safetensors index ({error!r})"]
        files = sorted(set(indexed.values()))
    else:
        indexed = {}
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        if not files:
            return {}, ["it has neither model.safetensors.index.json nor any .safetensors file"]
    found: dict[str, tuple[Size, str]] = {}
    problems = []
    for file in files:
        path = folder / file
        if not path.is_file():
            count = sum(1 for holder in indexed.values() if holder == file)
            problems.append(f"shard {file} is missing ({count} tensors of the index are in it)")
            continue
        shapes, problem = _read_header(path)
        if problem:
            problems.append(problem)
        found.update({name: (shape, file) for name, shape in shapes.items()})
    if not problems:
        problems = [
            f"{name} is in the index as part of {file}, which does not hold it"
            for name, file in indexed.items()
            if name not in found
        ]
    return found, problems


def _read_header(path: Path) -> tuple[dict[str, Size], str]:
    """Shapes by name, and what is wrong with the file or an empty string.

    The format: 8 bytes, the header's length (unsigned, little-endian); the header, JSON; the tensors' bytes.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if 8 + length > size:
            return {}, f"shard {path.name} is cut off or not a safetensors file ({size} bytes)"
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            return {}, f"shard {path.name} has an unreadable header ({error})"
    header.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != end:
        return {}, f"shard {path.name} has {size} bytes where its header describes {end}"
    return {name: Size(entry["shape"]) for name, entry in header.items()}, ""


def _compare(expected: dict[str, Size], found: dict[str, tuple[Size, str]]) -> list[str]:
    problems = []
    for name, shape in expected.items():
        name = name if name in found else _PUBLISHED.get(name, name)
        if name not in found:
            problems.append(f"parameter {name} {list(shape)} is in none of its files")
        elif found[name][0] != shape:
            actual, file = found[name]
            problems.append(
                f"parameter {name} has shape {list(actual)} in {file} where config.json describes {list(shape)}"
            )
    return problems
