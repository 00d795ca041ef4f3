"""``import tensorrt_llm`` from a folder of its Python sources, with stand-ins for what is compiled, and a GPU of one worker.

TensorRT-LLM can't be imported without its compiled parts. What rlrefit meets first can: :data:`PUBLISHED` are run as they are.
All else of the package is a stand-in that gives a class for any name, so that their imports succeed; :data:`MEANT` are the
stand-ins that do something.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

from . import engine_double, package_double

# Of the package ``tensorrt_llm``. A version has only some of them.
PUBLISHED = (
    "llmapi.rlhf_utils",
    "serialization",
    "llmapi.serialization",
    "_ray_utils",
    "executor.ray.utils",
    "executor.ray_gpu_worker",
    "executor.ray.gpu_worker",
    "_torch.virtual_memory",
    "_torch.pyexecutor.model_loader",
)
# What can't run without a GPU or compiled parts, and why.
NOT_RUN = (
    "_torch/utils.py get_device_uuid: torch.cuda.get_device_properties; a stand-in gives GPU-00000000",
    "torch's rebuild_cuda_tensor: UntypedStorage._new_shared_cuda; a stand-in of its name opens shared memory instead",
    "_torch/virtual_memory.py get_virtual_memory_manager: tensorrt_llm.bindings; a stand-in notes the tags",
    "executor RayWorkerWrapper.__init__: ray.get_gpu_ids and torch.cuda.set_device; call_worker_method runs without it",
    "executor/base_worker.py setup_engine: makes PyExecutor, whose imports are bindings; the engine is rlrefit's double",
    "_torch/modules/linear.py and fused_moe: torch.ops.trtllm; joining and converting is done by the double's model",
    "llmapi/llm_args.py: pydantic models over bindings; its ExecutorMemoryType is run alone",
)
# What later loaders call on the weight mapper of a model, and what its base class does nothing in.
_OF_MAPPERS = ("begin_update_weights", "finalize_update_weights", "abort_update_weights")


class _AnyName(type):
    """Of stand-in classes: any attribute is another one, so that a module's top level can name what it likes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (), {})


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "ExecutorMemoryType":
            raise AttributeError(name)
        path = f"{self.__name__}.{name}"
        if path.removeprefix("tensorrt_llm.") in PUBLISHED:
            return importlib.import_module(path)
        return _AnyName(name, (), {})


class BaseWorker:
    """What ``RayGPUWorker`` has from ``executor/base_worker.py``, over rlrefit's double of an engine."""

    doing_shutdown = True
    postproc_config = SimpleNamespace(enabled=False)

    def __init__(self, engine: engine_double.Model, hf_model_dir: Any, llm_args: Any, **others: Any) -> None:
        self._model = engine
        self._hf_model_dir = hf_model_dir
        self.llm_args = llm_args
        self.engine: Any = None

    def setup_engine(self) -> None:
        self.engine = engine_double.Engine(self._model)
        self.engine.model_engine.model_loader = model_loader()


class _RpcWorkerMixin:
    def init_rpc_worker(self, *_: Any) -> None: ...

    def start_rpc_server(self) -> None: ...


class _MemoryManager:
    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def release_with_tag(self, tag: Any) -> int:
        self.calls.append(("release", str(tag)))
        return 1

    def materialize_with_tag(self, tag: Any) -> int:
        self.calls.append(("materialize", str(tag)))
        return 1


class TorchLlmArgs(SimpleNamespace):
    backend = "pytorch"
    cuda_graph_config = None


MEMORY = _MemoryManager()
MEANT: dict[str, dict[str, Any]] = {
    "tensorrt_llm": {"TorchLlmArgs": TorchLlmArgs},
    "tensorrt_llm.logger": {"logger": logging.getLogger("tensorrt_llm")},
    "tensorrt_llm._torch.utils": {"get_device_uuid": package_double.get_device_uuid},
    "tensorrt_llm.executor.base_worker": {"BaseWorker": BaseWorker},
    "tensorrt_llm.executor.rpc_worker_mixin": {"RpcWorkerMixin": _RpcWorkerMixin},
    "tensorrt_llm.bindings.internal.runtime": {"get_virtual_memory_manager": lambda: MEMORY},
    "strenum": {"StrEnum": StrEnum},
}


class Finder(MetaPathFinder, Loader):
    """Of ``tensorrt_llm`` in this process.

    Args:
        folder: of a checkout, which holds the folder ``tensorrt_llm``.
    """

    def __init__(self, folder: Path) -> None:
        self._root = folder / "tensorrt_llm"

    def files(self) -> dict[str, str]:
        """The published files that are there, with their git blob ids, which tell their version."""
        held = {}
        for name in PUBLISHED:
            file = self._file(name)
            if file.exists():
                content = file.read_bytes()
                blob = b"blob %d\0" % len(content) + content
                held[str(file.relative_to(self._root))] = hashlib.sha1(blob).hexdigest()
        return held

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in ("tensorrt_llm", "strenum"):
            return None
        name = fullname.removeprefix("tensorrt_llm.")
        if name in PUBLISHED:
            file = self._file(name)
            return importlib.util.spec_from_file_location(fullname, file) if file.exists() else None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(MEANT.get(module.__name__, {}))
        if module.__name__ == "tensorrt_llm.llmapi.llm_args":
            vars(module).update(self._memory_types())

    def _file(self, name: str) -> Path:
        return self._root / f"{name.replace('.', os.sep)}.py"

    def _memory_types(self) -> dict[str, Any]:
        """``ExecutorMemoryType`` of ``llm_args.py``, from its own lines, if it is there in this version."""
        where = self._file("llmapi.llm_args")
        if not where.exists():
            # A folder of single files: the double's, unless this version has it in virtual_memory.
            memory = self._file("_torch.virtual_memory")
            if memory.exists() and "class ExecutorMemoryType" in memory.read_text():
                return {}
            return {"ExecutorMemoryType": package_double.ExecutorMemoryType}
        tree = ast.parse(where.read_text())
        tree.body = [
            node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ExecutorMemoryType"
        ]
        held: dict[str, Any] = {"StrEnum": StrEnum}
        exec(compile(tree, str(where), "exec"), held)
        return {name: kind for name, kind in held.items() if name == "ExecutorMemoryType"}


def model_loader() -> Any:
    """TensorRT-LLM's own ``ModelLoader`` if its file is there, with the double's counts and failures around it."""
    try:
        published = importlib.import_module("tensorrt_llm._torch.pyexecutor.model_loader").ModelLoader
    except ModuleNotFoundError:
        return engine_double.ModelLoader()

    class Counting(published):  # type: ignore[misc]
        def __init__(self) -> None:  # its own makes nothing else that a reload needs
            self.weight_mapper = SimpleNamespace(**dict.fromkeys(_OF_MAPPERS, lambda: None))
            self.buckets, self.fail_at = 0, -1

        def reload(self, model: Any, weights: Any, allow_partial_loading: bool = False) -> None:
            self.buckets += 1
            if self.buckets == self.fail_at:
                raise RuntimeError("CUDA out of memory")
            super().reload(model, weights, allow_partial_loading=allow_partial_loading)

    return Counting()


def ray_worker() -> ModuleType | None:
    """The module of ``RayGPUWorker``, if the folder has it."""
    for name in ("executor.ray.gpu_worker", "executor.ray_gpu_worker"):
        try:
            return importlib.import_module(f"tensorrt_llm.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"tensorrt_llm.{name}":
                raise
    return None


def cuda_shaped(tensor: torch.Tensor) -> Any:
    """A handle as ``reduce_tensor`` of a CUDA tensor makes it, of shared memory by its name."""
    storage = tensor.untyped_storage()
    manager, name, nbytes = storage._share_filename_cpu_()
    layout = (type(tensor), tensor.size(), tensor.stride(), tensor.storage_offset())
    memory = (torch.storage.TypedStorage, tensor.dtype, 0, name, nbytes, 0, tensor.requires_grad)
    return reductions.rebuild_cuda_tensor, (*layout, *memory, manager, 0, b"", False)


def _rebuild_shared(
    cls: Any, size: Any, stride: Any, offset: int, kind: Any, dtype: Any, device: Any, name: Any, *rest: Any
) -> torch.Tensor:
    nbytes, _, _, manager, *_ = rest
    assert device == 0, "the receiver puts its own device here"
    storage = torch.UntypedStorage._new_shared_filename_cpu(manager, name, nbytes)
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
    return torch._utils._rebuild_tensor(typed, offset, size, stride)


# Pickles as torch's.
_rebuild_shared.__module__, _rebuild_shared.__qualname__ = reductions.__name__, "rebuild_cuda_tensor"
_rebuild_shared.__name__ = "rebuild_cuda_tensor"


@contextmanager
def installed(folder: Path) -> Iterator[Finder]:
    """TensorRT-LLM's sources as ``tensorrt_llm``, and shared memory in the place of CUDA's."""
    finder = Finder(folder)
    sys.meta_path.insert(0, finder)
    rebuild = reductions.rebuild_cuda_tensor
    cuda = ("synchronize", "ipc_collect", "empty_cache", "current_stream")
    kept = {name: getattr(torch.cuda, name) for name in cuda}
    reductions.rebuild_cuda_tensor = _rebuild_shared
    for name in cuda:
        setattr(torch.cuda, name, lambda *_: SimpleNamespace(synchronize=lambda: None))
    try:
        yield finder
    finally:
        sys.meta_path.remove(finder)
        reductions.rebuild_cuda_tensor = rebuild
        for name, function in kept.items():
            setattr(torch.cuda, name, function)
