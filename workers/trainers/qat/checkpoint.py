"""A trained model as a checkpoint that engines load, packed tensors and their configuration: NVFP4 for vLLM and TensorRT-LLM, INT4 for vLLM."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from ....integration.errors import RefitError
from ....integration.quantize import int4_checkpoint, nvfp4_checkpoint
from ....integration.quantize.formats import Int4
from ....integration.weights.endpoints import WeightSource
from ....integration.weights.manifest import TensorSpec
from ..durable import sync
from .model import QAT

logger = logging.getLogger(__name__)

_SHARD_BYTES = 5 * 10**9
_INDEX = "model.safetensors.index.json"
_COPIED = (".json", ".txt", ".model", ".jinja", ".py")
_MADE = (_INDEX, "config.json", "hf_quant_config.json")


def write_checkpoint(
    folder: str | Path,
    original: str | Path,
    source: WeightSource,
    qat: QAT,
    *,
    group: dist.ProcessGroup | None = None,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Write the model of all trainer ranks, which all call this; rank 0 writes.

    Args:
        folder: of the new checkpoint; must not exist, and is whole as soon as it does.
        original: the checkpoint folder that training began with: configuration, tokenizer and code are copied.
        source: of unquantized weights in the engine's dtype (``FSDPSource(model, torch.bfloat16)``, ``MegatronSource``).
        qat: of the same model.
        group: of all trainer ranks; None for the default group.
        shard_bytes: a file of tensors is ended at this size.

    Raises:
        RefitError: on all ranks; nothing is left behind.
    """
    qat.prepare_export(source)
    specs = source.specs()
    writes = not dist.is_initialized() or dist.get_rank(group) == 0
    writer = _Writer(Path(folder), shard_bytes)
    if writes and qat.config.force_dynamic_quantization:
        logger.warning(
            "%s is trained with force_dynamic_quantization: each call scales its inputs by their own maximum. vLLM and SGLang "
            "have no such mode; they take input_scale, the largest that was seen in training, and cut off what exceeds it. "
            "Serve it with TensorRT-LLM and LLM(force_dynamic_quantization=True), or train without the option",
            folder,
        )
    try:
        # Told before the model is gathered for nothing.
        _tell(folder, _attempt(writer.begin) if writes else None, group)
        fault: Exception | None = None
        # To its end whatever happens to the files: it is a collective.
        for name, weight in source.export([spec.name for spec in specs]):
            if writes and fault is None:
                fault = _attempt(writer.add_all, qat, name, weight)
        if writes and fault is None:
            fault = _attempt(writer.finish, Path(original), specs, qat)
        _tell(folder, fault, group)
    except BaseException:  # an interrupt, too
        writer.discard()
        raise


def _attempt(work: Callable[..., None], *arguments: Any) -> Exception | None:
    """What went wrong, whatever it is: the other ranks must hear of it before it is raised.

    safetensors' own error for a full disk is no OSError, and a GPU may have no memory for what is packed.
    """
    try:
        work(*arguments)
    except Exception as error:
        return error
    return None


def _tell(folder: str | Path, fault: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Raise on all ranks what failed on rank 0."""
    told = ["" if fault is None else f"{type(fault).__name__}: {fault}"]
    if dist.is_initialized():
        dist.broadcast_object_list(told, group=group, group_src=0)
    if told[0]:
        raise RefitError(
            f"the checkpoint {folder} was not written: {told[0]}. Training can go on; nothing is left behind",
            stage="export",
        ) from fault


class _Writer:
    """Files of a checkpoint in a folder beside the final one."""

    def __init__(self, folder: Path, shard_bytes: int):
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._aside: Path | None = None
        self._pending: dict[str, torch.Tensor] = {}
        self._shards: list[list[str]] = []
        self._total = 0

    def begin(self) -> None:
        if self._folder.exists():
            raise FileExistsError(f"{self._folder} exists; it was left as it is, name another folder")
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        self._aside = Path(tempfile.mkdtemp(prefix=f".{self._folder.name}.", dir=self._folder.parent))

    def add_all(self, qat: QAT, name: str, weight: torch.Tensor) -> None:
        for packed_name, tensor in qat.packed(name, weight):
            if self._pending and _bytes(self._pending.values()) + tensor.nbytes > self._shard_bytes:
                self._flush()
            # A copy: what an export yields is the parameter itself where nothing had to be gathered or cast.
            self._pending[packed_name] = tensor.detach().to("cpu", copy=True).contiguous()

    def finish(self, original: Path, specs: list[TensorSpec], qat: QAT) -> None:
        self._flush()
        written = {name for names in self._shards for name in names}
        wanted = {packed.name for spec in specs for packed in qat.specs(spec)}
        if written != wanted:
            missing, extra = sorted(wanted - written), sorted(written - wanted)
            raise ValueError(f"the export did not yield {missing[:3]}, and did yield {extra[:3]}")
        self._name_shards()
        aside = self._made()
        for file in original.iterdir():
            if file.suffix in _COPIED and file.name not in _MADE and file.is_file():
                shutil.copy(file, aside / file.name)
        self._configure(original, specs, qat)
        aside.chmod(0o755)  # mkdtemp's are for the owner alone, which would shut out engines of another user
        for file in aside.iterdir():
            file.chmod(0o644)
            sync(file)
        sync(aside)
        self._aside = aside.rename(self._folder)
        sync(self._folder.parent)
        self._aside = None

    def discard(self) -> None:
        if self._aside is not None:
            shutil.rmtree(self._aside, ignore_errors=True)

    def _configure(self, original: Path, specs: list[TensorSpec], qat: QAT) -> None:
        kept = [spec.name for spec in specs if len(spec.shape) > 1 and spec.name not in qat.weights]
        kept = [name for name in kept if "embed" not in name]
        config, format = json.loads((original / "config.json").read_text()), qat.config.format
        if isinstance(format, Int4):
            ignore = sorted(nvfp4_checkpoint.module_of(name) for name in kept if name.endswith(".weight"))
            config["quantization_config"] = int4_checkpoint.quantization_config(format.group, ignore)
        else:
            made = nvfp4_checkpoint.quantization_config(
                qat.weights,
                kept,
                _version(),
                qat.config.activations,
                qat.config.force_dynamic_quantization,
            )
            config["quantization_config"] = made.quantization_config
            _write_json(self._made() / "hf_quant_config.json", made.hf_quant_config)
        _write_json(self._made() / "config.json", config)

    def _flush(self) -> None:
        if self._pending:
            save_file(self._pending, self._made() / _pending_name(len(self._shards)), {"format": "pt"})
            self._shards.append(list(self._pending))
            self._total += _bytes(self._pending.values())
            self._pending = {}

    def _name_shards(self) -> None:
        """As transformers names them: by number and count, or one file without an index."""
        aside, count = self._made(), len(self._shards)
        if count == 1:
            (aside / _pending_name(0)).rename(aside / "model.safetensors")
            return
        file_of = {}
        for index, names in enumerate(self._shards):
            file = f"model-{index + 1:05}-of-{count:05}.safetensors"
            (aside / _pending_name(index)).rename(aside / file)
            file_of.update(dict.fromkeys(names, file))
        _write_json(aside / _INDEX, {"metadata": {"total_size": self._total}, "weight_map": file_of})

    def _made(self) -> Path:
        if self._aside is None:
            raise ValueError("the checkpoint's folder was not begun")
        return self._aside


def _version() -> str:
    """Of rlrefit, which may run from its folder without being installed; a checkpoint does not fail for want of it."""
    try:
        return version("rlrefit")
    except PackageNotFoundError:
        return "(not installed)"


def _pending_name(index: int) -> str:
    return f"pending-{index}.safetensors"


def _bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")
