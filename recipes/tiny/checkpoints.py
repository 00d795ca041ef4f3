"""Tiny Qwen3 checkpoints with random weights: real architectures at a size for CPUs and tests.

``python -m rlrefit.recipes.tiny.checkpoints KIND DIR`` makes one; a recipe names one as its model
with a path such as ``tiny:qwen3``.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from .make_tokenizer import EOS, TOKENIZER_FILE, load_tokenizer, vocabulary

PREFIX = "tiny:"

# Everything divides by a tensor-parallel size of 2: vocabulary, heads, KV heads and hidden sizes.
_COMMON: dict[str, Any] = {
    "vocab_size": len(vocabulary()),
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": vocabulary()[EOS],
    # The tokenizer has one. By a model's, transformers makes that row of the embedding zeros, which RMSNorm scales by a thousand, and
    # does not train it; Megatron does, and its gradient would be the largest of all.
    "pad_token_id": None,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", **_COMMON},
    "qwen3-tied": {"model_type": "qwen3", **_COMMON, "tie_word_embeddings": True},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        **_COMMON,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}


def make_checkpoint(kind: str, folder: str | os.PathLike[str], seed: int = 0) -> Path:
    """Writes a BF16 checkpoint with random weights, its configuration and its tokenizer.

    The same kind and seed give the same bytes. The checkpoint is written beside ``folder`` and renamed,
    so a folder of that name is always whole.

    Args:
        kind: a key of :data:`KINDS`.
        folder: the checkpoint's folder; must not exist, or be empty.
        seed: of the weights (transformers' own initialization).

    Returns:
        ``folder`` as a path.

    Raises:
        ValueError: an unknown kind.
        FileExistsError: ``folder`` exists and isn't empty; it is left as it was.
    """
    _check_kind(kind, f"kind {kind!r}")
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write(kind, aside, seed)
        # mkdtemp and safetensors write for the owner alone, which would shut out engines of another user.
        aside.chmod(0o755)
        for file in aside.iterdir():
            file.chmod(0o644)
        aside.rename(folder)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise FileExistsError(
                f"{folder} exists and is not an empty folder; it was left as it is: name another folder or "
                "remove it first"
            ) from error
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def resolve_model_path(path: str, cache_root: str | os.PathLike[str]) -> str:
    """The folder (or hub name) of a model: ``tiny:KIND`` is made once in ``cache_root``, others pass.

    Safe when processes race: each writes its own copy aside, the first rename wins, and the copies are
    equal. The folder's name holds a digest of configuration and tokenizer, so a cache never serves what an
    earlier version of the package made.

    Raises:
        ValueError: an unknown kind after ``tiny:``.
    """
    if not path.startswith(PREFIX):
        return path
    kind = path.removeprefix(PREFIX)
    _check_kind(kind, f"model path {path!r}")
    identity = json.dumps(KINDS[kind], sort_keys=True).encode() + TOKENIZER_FILE.read_bytes()
    folder = Path(cache_root) / f"tiny-{kind}-{hashlib.sha256(identity).hexdigest()[:8]}"
    if not folder.exists():
        # Another process may win the race; its checkpoint is equal.
        with contextlib.suppress(FileExistsError):
            make_checkpoint(kind, folder)
    return str(folder)


def _check_kind(kind: str, given: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"{given} names no tiny model; the kinds are {', '.join(KINDS)}")


def _write(kind: str, folder: Path, seed: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # for a file of half a megabyte
    config = AutoConfig.for_model(**KINDS[kind])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(folder)
    load_tokenizer().save_pretrained(folder)


def main() -> None:
    """Entry of ``python -m rlrefit.recipes.tiny.checkpoints``."""
    parser = argparse.ArgumentParser(description="Write a tiny checkpoint with random weights.")
    parser.add_argument("kind", choices=KINDS, help="architecture")
    parser.add_argument("folder", help="the checkpoint's folder; must not exist")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    arguments = parser.parse_args()
    make_checkpoint(arguments.kind, arguments.folder, arguments.seed)


if __name__ == "__main__":
    main()
