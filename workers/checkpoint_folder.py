"""The folder of a checkpoint that is named by its path, or by its name on the Hugging Face hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# Configuration, tokenizer, the index of the weights' files, and code that is run where it is trusted.
_SMALL = ("*.json", "*.txt", "*.jinja", "*.model", "*.py")
# How long copies of such code may take.
_COPYING_S = 300.0
INDEX = "model.safetensors.index.json"
_LAYER = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class CheckpointUnreachable(OSError):
    """A checkpoint of the hub that is neither in this host's cache nor can be fetched."""


def is_hub_name(name: str | Path) -> bool:
    """Whether ``name`` names a checkpoint of the hub (``organisation/model``), and no folder that is here."""
    text = str(name)
    return (
        not text.startswith((".", "/", "~")) and bool(_HUB_NAME.fullmatch(text)) and not Path(text).exists()
    )


def checkpoint_folder(name: str | Path, *, weights: bool = True) -> Path:
    """The local folder; what is missing of a hub checkpoint is fetched to this host's cache first.

    Ranks of one host may ask for it together: huggingface_hub locks the files that it writes.

    Args:
        name: a folder, or the hub's ``organisation/model``.
        weights: with the safetensors files; otherwise configuration, tokenizer and index only.

    Raises:
        CheckpointUnreachable: tells why, and what to do.
    """
    if not is_hub_name(name):
        return Path(name).expanduser()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*_SMALL, "*.safetensors"] if weights else list(_SMALL)
    try:
        return Path(snapshot_download(str(name), allow_patterns=patterns))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointUnreachable(
            f"checkpoint {name!r} is no folder here and can't be fetched from the hub "
            f"({type(error).__name__}: {reason}). Correct the name; log in (`hf auth login`) if it is gated; or, on "
            f"hosts without a network, fetch it elsewhere with `hf download {name} --local-dir FOLDER`, put FOLDER "
            "where all hosts see it, and give it as model.path"
        ) from error


def copy_own_code(name: str | Path) -> None:
    """Have transformers copy the code that a checkpoint brings to its folder of such code, one process at a time.

    transformers 5.12 writes these copies (``HF_MODULES_CACHE``) in place, where another process may be reading them, and writes none that
    is there already. So whoever runs such code calls this before, on each host; hosts may share the folder.

    Args:
        name: as :func:`checkpoint_folder` takes it.

    Raises:
        CheckpointUnreachable: as :func:`checkpoint_folder`, and where another process keeps the lock of the copies.
    """
    from filelock import Timeout
    from huggingface_hub.utils import WeakFileLock
    from transformers import dynamic_module_utils

    folder = checkpoint_folder(name, weights=False)
    files = sorted(set(_own_code(folder)))
    if not files:
        return
    copies = Path(dynamic_module_utils.HF_MODULES_CACHE)
    lock = copies / ".rlrefit.lock"
    try:
        copies.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock, timeout=_COPYING_S):
            for file in files:
                # Copies of what an engine is given by the hub's name have places of their own.
                for source in {str(folder), str(name)}:
                    # Code may be wrong in any way, and need not be: what is wrong with it is told where it is run, if it is.
                    with suppress(Exception):
                        dynamic_module_utils.get_cached_module_file(source, file, local_files_only=True)
    except Timeout as error:
        raise CheckpointUnreachable(
            f"{lock} has been held for {_COPYING_S:.0f} s, while another process copies the code that a checkpoint brings, or since one ended "
            f"that did, so the code of {name} is not run here. Remove the file if no run is starting, or give HF_MODULES_CACHE a folder of its own"
        ) from error
    except OSError as error:
        raise CheckpointUnreachable(
            f"the code that {name} brings can't be copied to {copies} ({error}); give HF_MODULES_CACHE a folder that can be written"
        ) from error


def _own_code(folder: Path) -> Iterator[str]:
    """The files that a checkpoint's configurations name, its model's, its parts' and its tokenizer's; none of another checkpoint."""
    for path in folder.glob("*config.json"):
        # What can't be read is told by who needs it.
        with suppress(OSError, ValueError, AttributeError):
            config = json.loads(path.read_text())
            for part in (config, *config.values()):
                named = part.get("auto_map") if isinstance(part, dict) else None
                for references in named.values() if isinstance(named, dict) else ():
                    for reference in references if isinstance(references, list) else [references]:
                        if isinstance(reference, str) and "--" not in reference:
                            yield f"{reference.partition('.')[0]}.py"


def ending_tokens(folder: Path) -> tuple[int, ...]:
    """Tokens that end a completion as the checkpoint itself generates: of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            found = json.loads((folder / name).read_text()).get("eos_token_id")
            if found is not None:
                return tuple(found) if isinstance(found, list) else (found,)
    return ()


def has_weights(folder: Path) -> bool:
    """Whether there are safetensors in it, or an index of them."""
    return (folder / INDEX).is_file() or any(folder.glob("*.safetensors"))


def weight_names(folder: Path) -> frozenset[str]:
    """Names of the weights that a full load of the checkpoint's model takes, by its index or its files' headers.

    Left out is what a folder may hold besides: a tied copy of the embedding, tables that models compute, and the layers
    for multi-token prediction, which are a draft model's.

    Raises:
        ValueError: the folder has no safetensors, or what can't be read as such.
    """
    from safetensors import SafetensorError, safe_open

    index, config = folder / INDEX, folder / "config.json"
    found: set[str] = set()
    try:
        if index.is_file():
            found.update(json.loads(index.read_text())["weight_map"])
        else:
            for path in folder.glob("*.safetensors"):
                with safe_open(path, framework="pt") as file:
                    found.update(file.keys())
        text = json.loads(config.read_text()) if config.is_file() else {}
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError(
            f"the weights of {folder} can't be told ({type(error).__name__}: {error})"
        ) from error
    if not found:
        raise ValueError(f"{folder} has neither {index.name} nor any .safetensors file")
    # A multimodal model's shapes are its text model's; whether its embedding is tied may stand in either.
    shapes = text.get("text_config", text)
    if text.get("tie_word_embeddings", shapes.get("tie_word_embeddings", False)):
        found.discard("lm_head.weight")
    layers = shapes.get("num_hidden_layers")
    return frozenset(name for name in found if not _is_extra(name, layers))


def _is_extra(name: str, layers: int | None) -> bool:
    layer = _LAYER.search(name)
    predicts = name.startswith("mtp.") or (layer and layers is not None and int(layer[1]) >= layers)
    return bool(predicts) or name.endswith("rotary_emb.inv_freq")
