"""What a recipe requires of the machine: files, packages, GPUs, and a name that no earlier run has."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from ...workers.checkpoint_folder import INDEX, has_weights
from ..tiny.checkpoints import KINDS, PREFIX
from .drafting import speculation_gpu_violations
from .engines import colocated_gpu_violations, sglang_gpu_violations
from .errors import Violation
from .options import missing_engine, missing_megatron
from .schema import TrainConfig

_PACKAGE_SCHEME = "package:"
_DATA_SUFFIXES = (".jsonl", ".json", ".parquet")


def resolve_data_path(path: str) -> str:
    """The file behind ``package:NAME``, which ships with rlrefit's recipes; any other path as it is.

    Raises:
        ValueError: ``NAME`` leads out of the package.
    """
    if not path.startswith(_PACKAGE_SCHEME):
        return path
    root = Path(__file__).resolve().parents[1]
    file = (root / path.removeprefix(_PACKAGE_SCHEME)).resolve()
    if not file.is_relative_to(root):
        raise ValueError(f"{path!r} leads out of rlrefit's recipes ({root}); give a plain path instead")
    return str(file)


def file_violations(config: TrainConfig) -> Iterator[Violation]:
    """Data files and a model folder that are named as local ones but are not there.

    A data set or model that is not written as a file (a hub name) is left to the hub.
    """
    for key, path in (("data.train", config.data.train), ("data.validation", config.data.validation)):
        try:
            file = Path(resolve_data_path(path)).expanduser()
        except ValueError as error:
            yield Violation((key,), f"{key}: {error}")
            continue
        local = path.startswith((_PACKAGE_SCHEME, "/", ".", "~")) or file.suffix in _DATA_SUFFIXES
        if local and not file.is_file():
            yield Violation(
                (key,), f"{key}: there is no file {file}; give an existing JSON-lines or Parquet file"
            )
    path = config.model.path
    folder = Path(path).expanduser()
    if path.startswith(PREFIX):
        kind = path.removeprefix(PREFIX)
        if kind not in KINDS:
            names = ", ".join(PREFIX + name for name in KINDS)
            yield Violation(("model.path",), f"model.path: {path!r} is no bundled model; give one of {names}")
    elif folder.is_file():
        yield Violation(
            ("model.path",), f"model.path: {path} is a file; give the folder of a Hugging Face checkpoint"
        )
    elif (folder.is_dir() or path.startswith(("/", ".", "~"))) and not (folder / "config.json").is_file():
        yield Violation(
            ("model.path",),
            f"model.path: there is no {folder / 'config.json'}; give a Hugging Face checkpoint folder",
        )


def weight_violations(config: TrainConfig) -> Iterator[Violation]:
    """A model folder that has a configuration and no weights, of which no run can start."""
    folder = Path(config.model.path).expanduser()
    if (folder / "config.json").is_file() and not has_weights(folder):
        yield Violation(
            ("model.path",),
            f"model.path: {folder} has neither {INDEX} nor any .safetensors file, so that there is nothing to train; give a "
            f"folder that `hf download NAME --local-dir {folder}` filled",
        )


def name_violations(config: TrainConfig) -> Iterator[Violation]:
    """A name under which an earlier run has saved checkpoints, which a run that starts over must not mix with its own."""
    checkpoints = config.folder / "checkpoints"
    if not config.resume and any(checkpoints.glob("step_*")):
        yield Violation(
            ("name", "resume", "run_root"),
            f"name: {checkpoints} holds checkpoints of an earlier run of this name; give resume=true to go on from them, "
            "another name, or remove the folder",
        )


def package_violations(config: TrainConfig) -> Iterator[Violation]:
    """A trainer or an engine that would start with this Python's packages and is not among them."""
    generation, ray = config.generation, config.ray
    trained_here = ray.address is None and "PYTHONPATH" not in ray.trainer_env
    if config.trainer.backend == "megatron" and trained_here:
        instead = "trainer=fsdp, or ray.trainer_env.PYTHONPATH, the folder where its packages are, with rlrefit and Ray"
        for problem in missing_megatron("trainer.backend", instead):
            yield Violation(("trainer.backend",), problem)
    by_peft = (config.trainer.backend == "fsdp" and trained_here) or (
        config.policy.refit.lora == "adapter" and generation.backend == "transformers" and ray.address is None
    )
    if config.trainer.lora.rank and by_peft and find_spec("peft") is None:
        yield Violation(
            ("trainer.lora.rank",),
            "trainer.lora.rank: peft, by which FSDP trains adapters and transformers computes with them, is not installed: "
            "pip install 'rlrefit[lora]'; or give 0",
        )
    # The recipes themselves require transformers.
    if ray.address is not None:
        return
    if (python := ray.generation_python) is not None:
        if shutil.which(python) is None:
            yield Violation(
                ("ray.generation_python",),
                f"ray.generation_python: {python} is no program of this machine, so that no engine could start; give the path "
                "of a Python in whose environment rlrefit, Ray and the engine are",
            )
        return
    if generation.backend not in ("vllm", "sglang") or "PYTHONPATH" in ray.generation_env:
        return
    elsewhere = (
        "give ray.generation_python, the Python of an environment that has it, or ray.generation_env.PYTHONPATH, the folder "
        "where its packages are, both with rlrefit and Ray"
    )
    for problem in missing_engine("generation.backend", generation.backend, elsewhere):
        yield Violation(("generation.backend",), problem)


def gpu_violations(config: TrainConfig, gpus: int) -> Iterator[Violation]:
    """Ranks that a Ray cluster on this machine could not place.

    Args:
        config: the recipe.
        gpus: CUDA devices of this machine; without any, ranks run on CPUs and nothing is asked of their number.
    """
    yield from sglang_gpu_violations(config, gpus)
    yield from speculation_gpu_violations(config, gpus)
    if config.policy.qat == "w4a16" and not gpus and config.ray.address is None:
        yield Violation(
            ("policy.qat", "ray.address"),
            "policy.qat: w4a16, but vLLM has no product with such weights for CPUs, and this machine has no GPU; give w4a4, or "
            "ray.address of a cluster with some",
        )
    if (
        config.generation.weight_dtype == "int4"
        and config.generation.backend == "vllm"
        and not gpus
        and config.ray.address is None
        and not torch.cpu.get_capabilities().get("avx512_f")
    ):
        yield Violation(
            ("generation.weight_dtype", "ray.address"),
            "generation.weight_dtype: int4, but this machine has neither a GPU nor AVX-512, without which vLLM's build for CPUs has no "
            "product with such weights; give auto, or ray.address of a cluster with some",
        )
    if config.generation.weight_dtype in ("mxfp4", "mxfp8") and not gpus and config.ray.address is None:
        instead = "auto" if config.generation.weight_dtype == "mxfp4" else "fp8"
        yield Violation(
            ("generation.weight_dtype", "ray.address"),
            f"generation.weight_dtype: {config.generation.weight_dtype}, but vLLM has no product with such weights for CPUs, and this "
            f"machine has no GPU; give {instead}, or ray.address of a cluster with some",
        )
    if config.generation.colocated.enabled:
        yield from colocated_gpu_violations(config, gpus)
        return
    generation = config.generation.ranks
    needed = config.trainer.ranks + generation
    if config.ray.address is None and 0 < gpus < needed:
        yield Violation(
            (
                "trainer.ranks",
                "generation.replicas",
                "generation.tensor_parallel",
                "generation.pipeline_parallel",
                "ray.address",
            ),
            f"trainer.ranks: {config.trainer.ranks} trainer and {generation} generation ranks take a GPU each, "
            f"{needed} in all, and this machine has {gpus}; use fewer ranks, or give ray.address of a larger cluster",
        )
