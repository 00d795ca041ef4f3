"""A TensorRT-LLM engine in miniature: workers, a model whose loader does to weights what TensorRT-LLM's does, and RPCs.

What its loader has in common with TensorRT-LLM's: q, k and v, and gate and up, are joined; a tensor of another dtype than
its parameter's is *converted* (``copy_weight``), silently; block scales of NVFP4 must be ``float8_e4m3fn``; a name that no
parameter wants is passed over; parts of a joined parameter may come in different calls if partial loading is allowed, but
not those of NVFP4 (``NVFP4LinearMethod.load_weights_fused_qkv_linear`` of several versions knows no partial loading; as
``load_weights`` gives every call to every joined layer, such a layer fails with each bucket that has none of its weights).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rlrefit.integration.weights.manifest import TensorSpec

_JOINED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
_JOINED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


def place_of(name: str) -> str:
    """The engine's parameter that holds this weight."""
    return ".".join(_JOINED.get(part, part) for part in name.split("."))


class _InParts:
    def load_weights(
        self, module: Any, weights: Any, mode: Any, allow_partial_loading: bool = False
    ) -> None: ...

    def load_weights_fused_qkv_linear(
        self, module: Any, weights: Any, allow_partial_loading: bool = False
    ) -> None: ...


class _AtOnce(_InParts):
    def load_weights_fused_qkv_linear(self, module: Any, weights: Any) -> None: ...  # type: ignore[override]


class Model(torch.nn.Module):
    """All parameters; each joined one holds its parts one after the other, flat."""

    def __init__(self, specs: Sequence[TensorSpec], device: str) -> None:
        super().__init__()
        self.places: dict[str, tuple[str, int]] = {}
        sizes: dict[str, int] = {}
        dtypes: dict[str, torch.dtype] = {}
        for spec in specs:
            place = place_of(spec.name)
            self.places[spec.name] = (place, sizes.get(place, 0))
            sizes[place] = sizes.get(place, 0) + spec.nbytes // spec.dtype.itemsize
            dtypes[place] = spec.dtype
        modules: dict[str, set[str]] = {}
        for name in self.places:
            modules.setdefault(place_of(name).rpartition(".")[0], set()).add(name)
        # Joined matrices in NVFP4, with all their scales.
        self.units = [names for names in modules.values() if any("weight_scale_2" in name for name in names)]
        self.held = {
            place: torch.empty(size, dtype=dtypes[place], device=device) for place, size in sizes.items()
        }
        self.derived: dict[str, torch.Tensor] = {}
        self.reloads = 0
        self.pre_reload_weights()
        self.reloads = 0

    def pre_reload_weights(self) -> None:
        self.reloads += 1
        for tensor in self.held.values():
            tensor.view(torch.uint8).fill_(255)  # NaN in all float types, FP8 too

    def process_weights_after_loading(self) -> None:
        self.derived = {}
        for place, scale in self.held.items():
            if place.endswith("input_scale"):
                other = self.held[place.replace("input_scale", "weight_scale_2")]
                self.derived[place.replace("input_scale", "alpha")] = scale * other

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        for name, tensor in weights.items():
            if name not in self.places:
                continue
            place, offset = self.places[name]
            target = self.held[place][offset : offset + tensor.numel()]
            if name.endswith("weight_scale"):
                assert tensor.dtype == torch.float8_e4m3fn
            source = tensor.flatten()
            target.copy_(source if source.dtype == target.dtype else source.to(target.dtype))


class TextModel(Model):
    """Its NVFP4 layers load in parts if ``quant_method`` says so."""

    quant_method: _InParts = _InParts()

    def load_weights(self, weights: dict[str, torch.Tensor], allow_partial_loading: bool = False) -> None:
        assert allow_partial_loading, "the extension loads in parts"
        for unit in self.units:
            elsewhere = not unit & weights.keys() and not isinstance(self.quant_method, _AtOnce)
            assert elsewhere or unit <= weights.keys(), "NVFP4 is loaded in parts"
        self.load(weights)


class AtOnceModel(TextModel):
    quant_method = _AtOnce()


class VisionModel(Model):
    def load_weights(
        self, weights: dict[str, torch.Tensor]
    ) -> None:  # all at once, as some vision-language models
        self.load(weights)


class ModelLoader:
    def __init__(self) -> None:
        self.open = False
        self.buckets = 0
        self.fail_at = -1

    def reload(
        self, model: Any, weights: dict[str, torch.Tensor], allow_partial_loading: bool = False
    ) -> None:
        self.buckets += 1
        if self.buckets == self.fail_at:
            raise RuntimeError("CUDA out of memory")
        if isinstance(model, VisionModel):
            assert allow_partial_loading is False, "allow_partial_loading is not supported for this model"
            model.load_weights(weights)
        else:
            model.load_weights(weights, allow_partial_loading=allow_partial_loading)

    def begin_update_weights(self) -> None:
        assert not self.open
        self.open = True

    def finalize_update_weights(self) -> None:
        assert self.open
        self.open = False

    def abort_update_weights(self) -> None:
        self.open = False


class _ModelEngine:
    def __init__(self, model: Model) -> None:
        self.model, self.model_loader = model, ModelLoader()
        self.graph_releases = 0

    def _release_cuda_graphs(self) -> None:
        self.graph_releases += 1

    def forward(self, batch: Any) -> str:
        return f"tokens of {batch}"

    def forward_encoder(self, batch: Any) -> str:
        return f"states of {batch}"

    def forward_multimodal_encoder_items(self, batch: Any) -> str:
        return f"features of {batch}"


class Engine:
    def __init__(self, model: Model) -> None:
        self.model_engine = _ModelEngine(model)
        self.prefix_resets = 0
        self._held = False

    @contextlib.contextmanager
    def control_action(self, drain: bool = True) -> Iterator[None]:
        assert drain, "running requests have to end before weights change"
        assert not self._held, "a control action inside another one waits for ever"
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def reset_prefix_cache(self) -> None:
        self.prefix_resets += 1


class _Worker:
    """``RayGPUWorker``: its own methods, to which an extension adds others; ``_hf_model_dir`` is ``BaseWorker``'s.

    As ``BaseWorker``, it has no engine until ``setup_engine``, which ``RayExecutor`` calls on all workers, by name, before any
    request can be given to one. Making the engine runs the model (``PyExecutor``'s warm-up).
    """

    def __init__(self, device_id: int, model: Model, load_format: str, checkpoint: Path | None) -> None:
        self.device_id = device_id
        self._model = model
        self._hf_model_dir = checkpoint
        self.can_sleep = True
        self.engine: Any = None
        self.llm_args = SimpleNamespace(load_format=SimpleNamespace(name=load_format))

    def setup_engine(self) -> None:
        self.engine = Engine(self._model)
        self.step("warm-up")

    def sleep(self, sleep_tags: list[str]) -> None:
        if not self.can_sleep:
            raise ValueError(
                "Sleep feature is not enabled, please set enable_sleep=True in the LLM arguments."
            )

    def wakeup(self, wakeup_tags: list[str]) -> None: ...

    def step(self, batch: str) -> str:
        return self.engine.model_engine.forward(batch)

    def held(self) -> dict[str, bytes]:
        model: Any = self.engine.model_engine.model
        tensors = {**model.held, **model.derived}
        return {name: tensor.view(torch.uint8).cpu().numpy().tobytes() for name, tensor in tensors.items()}

    def counts(self) -> dict[str, int]:
        engine: Any = self.engine
        loader, model = engine.model_engine.model_loader, engine.model_engine.model
        return {
            "buckets": loader.buckets,
            "reloads": model.reloads,
            "prefix_resets": engine.prefix_resets,
            "graph_releases": engine.model_engine.graph_releases,
        }

    def fail_at(self, bucket: int) -> None:
        self.engine.model_engine.model_loader.fail_at = bucket


def injected(extension: type) -> type:
    """As TensorRT-LLM mixes an extension in: behind the worker's class, and without names that this one has."""
    for name in dir(extension):
        assert name.startswith("__") or not hasattr(_Worker, name), f"the worker has {name} already"
    return type(f"RayGPUWorkerWith{extension.__name__}", (_Worker, extension), {})


class DoubleLLM:
    """``LLM`` with its workers in this process.

    Args:
        extension: worker extension.
        specs: the weights of its model.
        workers: one for each GPU from ``first`` on.
        in_parts: whether the model takes its weights in buckets.
        quantized_in_parts: whether its NVFP4 layers do.
        checkpoint: the folder that TensorRT-LLM opened as the model's.
    """

    def __init__(
        self,
        extension: type,
        specs: Sequence[TensorSpec],
        *,
        workers: int = 1,
        first: int = 0,
        in_parts: bool = True,
        quantized_in_parts: bool = True,
        load_format: str = "AUTO",
        checkpoint: Path | None = None,
        device: str = "cpu",
    ) -> None:
        kind = VisionModel if not in_parts else TextModel if quantized_in_parts else AtOnceModel
        cls = injected(extension)
        self.workers: list[Any] = [
            cls(first + i, kind(specs, device), load_format, checkpoint) for i in range(workers)
        ]
        self._collective_rpc("setup_engine", non_block=True)

    def _collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), kwargs: Any = None, non_block: bool = False
    ) -> list[Any]:
        assert non_block, "without it there is no limit to the wait"
        return [getattr(worker, method)(*args, **(kwargs or {})) for worker in self.workers]


def answered(futures: Sequence[Any], timeout_s: float) -> list[Any]:
    """The driver's wait, for workers that have answered when they were called."""
    return list(futures)


def expected(weights: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """What a worker should hold of these weights, and what it should derive from them."""
    places: dict[str, list[torch.Tensor]] = {}
    for name, tensor in weights.items():
        places.setdefault(place_of(name), []).append(tensor.flatten().cpu())
    held = {place: torch.cat([part.view(torch.uint8) for part in parts]) for place, parts in places.items()}
    for place in list(held):
        if place.endswith("input_scale"):
            scales = (place, place.replace("input_scale", "weight_scale_2"))
            first, second = (held[name].view(torch.float32) for name in scales)
            held[place.replace("input_scale", "alpha")] = (first * second).view(torch.uint8)
    return {place: raw.numpy().tobytes() for place, raw in held.items()}
