"""What commands check of their options before they start: what is found only at the end costs the whole run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ...integration.config import RefitConfig

PICTURES = (".png", ".svg", ".pdf")
# What reading and running a recipe imports beside a trainer and an engine: the extra `ray`.
_RECIPES = (
    "ray",
    "hydra",
    "datasets",
    "transformers",
    "tokenizers",
    "safetensors",
    "accelerate",
    "matplotlib",
)
# What a Megatron trainer imports, with how it is installed; einops is Bridge's, which --no-deps leaves out.
_MEGATRON = {
    "megatron.core": "--no-deps 'megatron-core>=0.19,<0.20'",
    "megatron.bridge": "--no-deps 'megatron-bridge>=0.6.2,<0.7'",
    "transformers": "'transformers>=5.8,<=5.12.1'",
    "einops": "einops",
}
# Keys of policy.refit whose options have names of their own.
_OPTIONS = {"timeout_s": "timeout"}


def output_problems(option: str, path: Path, suffixes: Sequence[str] = ()) -> list[str]:
    """Why a file could not be written, one sentence each; empty if it can.

    Args:
        option: that names the file, for the texts.
        path: of the file.
        suffixes: that the file may have, in lower case; empty for any. Those of ``PICTURES`` need matplotlib.
    """
    found: list[str] = []
    suffix, folder = path.suffix.lower(), path.absolute().parent
    if suffixes and suffix not in suffixes:
        found.append(f"{option}: {path} ends in none of {', '.join(suffixes)}")
    elif suffixes and suffix in PICTURES and find_spec("matplotlib") is None:
        page = "; or give .html" if ".html" in suffixes else ""
        found.append(f"{option}: {path} needs matplotlib: pip install 'rlrefit[plots]'{page}")
    if not folder.is_dir():
        found.append(f"{option}: the folder {folder} does not exist; make it, or give a file elsewhere")
    elif path.is_dir():
        found.append(f"{option}: {path} is a folder; give a file in it")
    return found


def missing_engine(key: str, backend: str, elsewhere: str) -> list[str]:
    """A complaint if an engine that runs in this Python is not installed in it; found without an import of it.

    Args:
        key: that chose the engine, for the text.
        backend: the engine, whose package and extra of rlrefit are called like it.
        elsewhere: how the engine gets packages from somewhere else.
    """
    if _is_here(backend):
        return []
    return [
        f"{key}: {backend}, and this Python ({sys.executable}), in which the engine would run, has no package {backend}; "
        f"pip install 'rlrefit[{backend}]', or {elsewhere}"
    ]


def missing_megatron(key: str, instead: str) -> list[str]:
    """A complaint if this Python, in which Megatron would be imported, lacks some of it; found without an import.

    Args:
        key: that asked for Megatron, for the text.
        instead: what else may be given.
    """
    absent = [module for module in _MEGATRON if not _is_here(module)]
    if not absent:
        return []
    remedies = "; ".join(f"pip install {_MEGATRON[module]}" for module in absent)
    return [
        f"{key}: Megatron, and this Python ({sys.executable}) has no package {', '.join(absent)}; {remedies}; or {instead}"
    ]


def missing_for_recipes() -> str:
    """What a recipe can't even be read without, as one sentence; empty if all of it is here."""
    absent = [module for module in _RECIPES if not _is_here(module)]
    return (
        f"rlrefit train needs {', '.join(absent)}, which this Python ({sys.executable}) has not; pip install 'rlrefit[ray]'. "
        "A trainer and an engine come beside it: the extras megatron, vllm and sglang, or trainer=fsdp with "
        "generation.backend=transformers, which need no more"
        if absent
        else ""
    )


def _is_here(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


def refit_problems(config: RefitConfig) -> list[str]:
    """What is wrong with values of ``policy.refit`` that were given as options, told by the options' names."""
    found = []
    for problem in config.violations("--"):
        name, told, rest = problem.removeprefix("--.").partition(":")
        found.append(f"--{_OPTIONS.get(name, name).replace('_', '-')}{told}{rest}")
    return found


def empty_layouts(train: str | None, gen: str | None) -> list[str]:
    """A complaint for each layout that is given and empty, as an unset variable of a shell leaves it."""
    return [
        f"{who}: the layout is empty; give e.g. tp=4,pp=2, or tp=1 for one rank"
        for who, text in (("train", train), ("gen", gen))
        if text is not None and not text.strip()
    ]
