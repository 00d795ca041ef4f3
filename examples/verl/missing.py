"""What this host lacks for an example, told at once: ``python missing.py --config-name NAME [OVERRIDE...]``; exit code 2 if
anything is missing."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

_ENGINES = {
    "vllm": "pip install vllm==0.21.0",
    "sglang": "pip install sglang==0.5.17, after verl",
}


def missing(
    gpus: int,
    files: Iterable[tuple[str, str]] = (),
    packages: Iterable[tuple[str, str]] = (),
    engine: str | None = None,
) -> list[str]:
    """A sentence for each thing.

    Args:
        gpus: how many this host must have, unless the run joins a Ray cluster.
        files: that this host must have, unless it does: key, and path or URL.
        packages: that it must have besides: name, and how it is installed.
        engine: that generates: ``vllm`` or ``sglang``; None before the configuration has told.
    """
    told = [
        f"there is no Python package {name} ({how}; see docs/verl.md)"
        for name, how in (
            ("verl", "pip install verl==0.9.1"),
            *([(engine, _ENGINES[engine])] if engine in _ENGINES else []),
            ("rlrefit", "pip install . in this repository"),
            *packages,
        )
        if not _is_there(name)
    ]
    if find_spec("trl") is not None and not any(map(_has_value_head, ("trl.experimental.ppo", "trl"))):
        told.append(
            "verl 0.9.1 finds trl here and imports AutoModelForCausalLMWithValueHead from it, which this trl has given up: "
            "the actors would not start. Use an environment without trl (docs/trl.md)"
        )
    if gpus and "RAY_ADDRESS" not in os.environ and find_spec("torch") is not None:
        import torch

        found = torch.cuda.device_count()
        if found < gpus:
            told.append(f"this example needs {gpus} GPUs, and torch {torch.__version__} finds {found} here")
    if "RAY_ADDRESS" not in os.environ:
        told += [
            f"there is no {path}, which {key} names; examples/data_preprocess/gsm8k.py of verl's repository writes GSM8K, or "
            f"give another file ({key}=FILE)"
            for key, path in files
            if "://" not in path and not Path(path).expanduser().exists()
        ]
    return told


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that holds it
        return False


def _has_value_head(module: str) -> bool:
    try:
        return hasattr(import_module(module), "AutoModelForCausalLMWithValueHead")
    except ImportError:
        return False


def main() -> int:
    """Entry."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config-name")
    known, others = parser.parse_known_args()
    told = missing(0)
    if not told:
        from hydra.errors import HydraException

        try:
            wanted = _wanted(known.config_name, [one for one in others if not one.startswith("-")])
        except HydraException as error:
            told = [f"this configuration can't be composed: {' '.join(str(error).split())}"]
        else:
            gpus, files, engine = wanted
            told = missing(gpus, files, engine=engine)
    for line in told:
        print(line, file=sys.stderr)
    return 2 if told else 0


def _wanted(name: str, overrides: list[str]) -> tuple[int, list[tuple[str, str]], str]:
    """GPUs of the trainer and of the engines beside it, the files of the prompts, and the engine."""
    import verl
    from hydra import compose, initialize_config_dir

    path = f"hydra.searchpath=[file://{Path(verl.__file__).parent}/trainer/config]"
    with initialize_config_dir(str(Path(__file__).resolve().parent), version_base=None):
        config = compose(name, [path, *overrides])
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    gpus = int(trainer.nnodes * trainer.n_gpus_per_node + rollout.nnodes * rollout.n_gpus_per_node)
    files = []
    for key in ("train_files", "val_files"):
        given = config.data[key] or []
        files += [(f"data.{key}", path) for path in ([given] if isinstance(given, str) else given)]
    return gpus, files, str(rollout.name)


if __name__ == "__main__":
    sys.exit(main())
