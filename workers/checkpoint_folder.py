"""The folder of a checkpoint that is named by its path, or by its name on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

# Configuration, tokenizer and the index of the weights' files.
_SMALL = ("*.json", "*.txt", "*.jinja", "*.model")
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
