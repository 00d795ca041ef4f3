"""vLLM's layerwise reload, restricted to the modules that need it and checked for completeness.

Modules whose weights were processed after loading cannot be written in place. vLLM restores such a module
to its checkpoint layout, buffers its new weights, processes them and copies the result into the tensors
that kernels and CUDA graphs hold. Its own entry points do that to the whole model and accept a fused
module of which only a part came, whose other part is then uninitialised memory; here the scope is a list
of modules and a missing part is an error before anything is served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from ....integration.errors import RefitError, end_all
from ..common.loader_trace.trace import Landing
from .layouts import has_padding, packing_experts

# By name, since an engine without FP8 imports none of it; subclasses too.
_FP8_EXPERTS = "vllm.model_executor.layers.quantization.fp8.Fp8MoEMethod"
# The absorbed projections of multi-head latent attention, made from kv_b_proj: MLAAttention's W_UV, W_UK_T, W_K_scale, …
_MLA_DERIVED = "W_"
# The part of an experts' kernel that computes.
_EXPERTS = "fused_experts"
# Where the kernels of attention inherit the function that makes nothing of weights.
_ATTENTION = "vllm.v1.attention.backend"


class _ReloadScope(nn.Module):
    """Stands for a model that consists of the given modules only, which are not registered as its children."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self._scope = tuple(modules)

    def modules(self) -> Iterator[nn.Module]:
        return iter(self._scope)


class ScopedReload:
    """Loads misc weights: in place where the module allows it, by layerwise reload where it does not.

    Args:
        model: the live model, whose ``load_weights`` takes full checkpoint tensors.
        vllm_config: its configuration.
        device: where restored modules are materialised.
        modules: the modules that need the reload, by name.
        required: for each of them the checkpoint tensors that must come in every refit.
        placed: checkpoint tensors of other modules that the engine's loader cannot write, with the places that the trace
            found for them.
        target: the tensor that has the layout of a place's parameter as it is loaded.
        absent: by module, how many elements of its parameters no tensor brings and nothing needs.
        followers: modules that :func:`follows` names, whose parameters are other modules'.
    """

    def __init__(
        self,
        model: nn.Module,
        vllm_config: VllmConfig,
        device: torch.device,
        modules: Mapping[str, nn.Module],
        required: Mapping[str, frozenset[str]],
        placed: Mapping[str, Sequence[Landing]],
        target: Callable[[Landing], torch.Tensor],
        absent: Mapping[str, int],
        followers: Sequence[nn.Module] = (),
    ) -> None:
        self._model = model
        self._vllm_config = vllm_config
        self._device = device
        self._required = dict(required)
        self._buffered = frozenset().union(*self._required.values())
        self._scope = _ReloadScope(modules.values())
        self._modules = dict(modules)
        self._placed = dict(placed)
        self._target = target
        self._absent = {name: count for name, count in absent.items() if name in modules}
        self._followers = tuple(followers)
        self._arrived: set[str] = set()
        self._active = False
        self._beside: list[tuple[dict[str, Any], dict[str, torch.Tensor]]] = []
        self._shuffled: list[nn.Module] = []
        self._kernels: list[tuple[nn.Module, Any, Any]] = []

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load full checkpoint tensors; may be called several times in one refit.

        Tensors may be reused by the caller after the call: what vLLM buffers is copied.

        Raises:
            RefitError: a tensor came twice, or the engine's loader failed on one.
        """
        current = ""

        def arriving() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal current
            for name, tensor in weights:
                current = name
                if name in self._arrived:
                    raise RefitError("the tensor came twice in one refit", stage="misc", parameter=name)
                self._arrived.add(name)
                if name in self._placed:
                    self._place(name, tensor)
                else:
                    yield name, tensor.clone() if name in self._buffered else tensor

        try:
            self._begin()
            with self._context():
                self._model.load_weights(arriving())
        except Exception as error:
            end_all([self.abandon], error)
            if isinstance(error, RefitError):
                raise
            raise RefitError(
                f"the engine's loader failed: {type(error).__name__}: {error}. Modules that were loaded "
                "before it hold new weights: the engine must not generate before a refit commits.",
                stage="misc",
                parameter=current,
            ) from error

    def finish(self) -> None:
        """Process what is still buffered and put the kernels' tensors back; once after all loads of a refit.

        Raises:
            RefitError: a module of the scope did not get all of its tensors, or the model's loader wrote them where the reload
                does not look. Its old weights are back.
        """
        missing = {
            module: sorted(names - self._arrived)
            for module, names in self._required.items()
            if names - self._arrived
        }
        if missing:
            self.abandon()
            module, names = next(iter(missing.items()))
            raise RefitError(
                f"{len(missing)} modules that need the engine's layerwise reload are incomplete; {module} did "
                f"not get {', '.join(names[:8])}{' …' if len(names) > 8 else ''}. Finishing would leave "
                "uninitialised memory in it. Send every tensor of these modules by the misc route.",
                stage="post_load",
                parameter=names[0],
            )
        untouched = self._untouched()
        if untouched:
            self.abandon()
            raise RefitError(
                f"{len(untouched)} modules took none of their tensors in the engine's layerwise reload; the first is {untouched[0]}. "
                f"The loader of {type(self._model).__name__} writes into these parameters itself and not by their weight loaders, "
                "which the reload follows, so they would keep the older weights. Start vLLM so that it computes with them as "
                "they are loaded (experts on GPUs: moe_backend='triton').",
                stage="post_load",
                parameter=min(self._required[untouched[0]]),
            )
        if self._active:
            try:
                with self._context():
                    # What vLLM restores is undefined memory, and no tensor brings padding. Such layers wait until now, since vLLM
                    # counts what comes of them; one at a time is restored.
                    for module in filter(has_padding, self._modules.values()):
                        _restore_as_zeros(module)
                        finalize_layerwise_reload(_ReloadScope([module]), self._vllm_config.model_config)
                    finalize_layerwise_reload(self._scope, self._vllm_config.model_config)
                    self._put_back_beside()
                self._know_as_shuffled()
            except Exception as error:
                end_all([self.abandon], error)
                raise
        if self._arrived:
            with self._context():
                for module in self._followers:
                    module.quant_method.process_weights_after_loading(module)
        self._active = False
        self._arrived.clear()

    def abandon(self) -> None:
        """Drop what is buffered and put the kernels' tensors back where they were; does nothing when idle."""
        if self._active:
            for module in self._modules.values():
                info = get_layerwise_info(module)
                info.loaded_weights.clear()
                info.load_numel = 0
            with self._context():
                # Without loaded weights this only restores the kernels' tensors.
                finalize_layerwise_reload(self._scope, self._vllm_config.model_config)
                self._put_back_beside()
            self._know_as_shuffled()
        self._active = False
        self._arrived.clear()

    def _untouched(self) -> list[str]:
        """Modules for which nothing has come to the reload, though their tensors have; vLLM would only log that."""
        if not self._active:
            return []
        infos = {
            name: get_layerwise_info(self._modules[name]) for name, names in self._required.items() if names
        }
        return [name for name, info in infos.items() if info.load_numel_total and not info.load_numel]

    def _place(self, name: str, tensor: torch.Tensor) -> None:
        for landing in self._placed[name]:
            landing.write(tensor, self._target(landing))

    def _begin(self) -> None:
        if self._active or not self._modules:
            return
        self._beside = [
            (holder, _tensors_among(holder))
            for module in self._modules.values()
            for holder in attributes_of(module)
        ]
        # GPTQLinearMethod shuffles weights for its kernel once, and remembers that it has; those that come are as in a checkpoint.
        self._shuffled = [
            module
            for module in self._modules.values()
            # By name, since later vLLMs have no such state.
            if getattr(getattr(module, "exllama_state", None), "name", "") == "READY"
        ]
        for module in self._shuffled:
            module.exllama_state = type(module.exllama_state)["UNINITIALIZED"]
        self._kernels = []
        for module in self._modules.values():
            method: Any = getattr(module, "quant_method", None)
            held = getattr(method, "moe_kernel", None), getattr(method, "moe_quant_config", None)
            if held != (None, None):
                self._kernels.append((module, *held))
            if packing_experts(method):
                # UnquantizedFusedMoEMethod has its kernel pack experts as it makes the kernel, and makes none where it has one.
                method.moe_kernel = None
        with self._context():
            initialize_layerwise_reload(self._scope)
        for name, count in self._absent.items():
            # vLLM would wait for these, and keep what came of all such modules until the end.
            get_layerwise_info(self._modules[name]).load_numel_total -= count
        self._active = True

    def _put_back_beside(self) -> None:
        """What post-load processing makes anew beside parameters and buffers goes where CUDA graphs have it.

        vLLM itself moves those two alone. Marlin's workspace is such a tensor: a graph would go on with freed memory. So are what
        kernels of experts hold, such as the inverse scales of NVFP4's inputs, and experts get their kernels back.

        Raises:
            RefitError: a kernel of experts has become another one.
        """
        for made, held in self._beside:
            for attribute, tensor in held.items():
                new = made.get(attribute)
                if isinstance(new, torch.Tensor) and new is not tensor:
                    made[attribute] = tensor.copy_(new)
        self._beside = []
        kernels, self._kernels = self._kernels, []
        others: list[str] = []
        for module, kernel, config in kernels:
            method: Any = module.quant_method
            # Else a reload was given up before it made one.
            if method.moe_kernel is not None or kernel is None:
                made = tensors_of_kernel(method.moe_kernel, method.moe_quant_config)
                others += _follow_kernel(module, tensors_of_kernel(kernel, config), made)
            # Those of the reload compute with its tensors.
            method.moe_kernel, method.moe_quant_config = kernel, config
        if others:
            raise RefitError(
                f"vLLM's reload makes other kernels of experts than those in use, with whose tensors CUDA graphs would go on: {others[0]}. "
                "Start vLLM with another moe_backend",
                stage="post_load",
            )

    def _know_as_shuffled(self) -> None:
        """The tensors that such modules have now: new ones, or after a reload that was abandoned maybe the old ones."""
        for module in self._shuffled:
            module.exllama_state = type(module.exllama_state)["READY"]
        self._shuffled = []

    @contextmanager
    def _context(self) -> Iterator[None]:
        """What vLLM has around a load: its current configuration, the worker's device, no autograd."""
        with set_current_vllm_config(self._vllm_config), self._device, torch.no_grad():
            yield


def _restore_as_zeros(module: nn.Module) -> None:
    """Give a module under reload its tensors as they are before loading, as vLLM does, but of zeros."""
    info = get_layerwise_info(module)
    if not info.loaded_weights:
        return
    with info.restore_device:
        for name, tensor in get_layer_tensors(module).items():
            if tensor.is_meta:
                setattr(module, name, materialize_meta_tensor(tensor).zero_())


def follows(module: nn.Module) -> bool:
    """Whether a module whose parameter is another's needs only to be processed anew, once that one has its weights.

    A head that is tied to the embedding and has a packed copy (on CPUs) does. vLLM's reload would wait for weights of its own.
    """
    return type(getattr(module, "quant_method", None)) is UnquantizedEmbeddingMethod


def tensors_of_kernel(kernel: Any, config: Any) -> dict[str, torch.Tensor]:
    """What a kernel of experts computes with beside what it is given at each call, by where it is held."""
    holders = {_EXPERTS: getattr(kernel, "fused_experts", None), **getattr(config, "__dict__", {})}
    return {
        f"{name}.{key}": value
        for name, holder in holders.items()
        for key, value in getattr(holder, "__dict__", {}).items()
        if isinstance(value, torch.Tensor)
    }


def _follow_kernel(
    module: nn.Module, held: Mapping[str, torch.Tensor], made: Mapping[str, torch.Tensor]
) -> Iterator[str]:
    """Give what the kernel of some experts holds beside their parameters the values that vLLM has made, without moving it.

    Yields:
        What vLLM has made otherwise.
    """
    storages = {parameter.untyped_storage()._cdata for parameter in module.parameters(recurse=False)}
    for name, tensor in held.items():
        new = made.get(name)
        if new is tensor or tensor.untyped_storage()._cdata in storages:
            continue
        if new is None and name.startswith(_EXPERTS):
            continue  # made as the kernel first ran
        if new is None or (new.shape, new.dtype) != (tensor.shape, tensor.dtype):
            now = "nothing" if new is None else f"{new.dtype}{list(new.shape)}"
            yield f"{name} was {tensor.dtype}{list(tensor.shape)} and is {now}"
            continue
        tensor.copy_(new)


def attributes_of(module: nn.Module) -> list[dict[str, Any]]:
    """Plain attributes of a module, and those of the kernel of its scheme, if it has one (compressed-tensors')."""
    kernel = getattr(getattr(module, "scheme", None), "kernel", None)
    return [vars(module)] if kernel is None else [vars(module), vars(kernel)]


def _tensors_among(attributes: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in attributes.items() if isinstance(value, torch.Tensor)}


class DerivedState:
    """What layers of ``model`` hold of weights beside their parameters.

    Multi-head latent attention does: its absorbed projections are views of ``kv_b_proj`` where that is unquantized in the model's dtype,
    and copies otherwise. And experts in FP8 blocks: see :func:`refresh_expert_scales`. And kernels of attention that want sinks in FP32
    (FlashInfer's): see :func:`copied_sinks`.

    Which layers these are is found out once: to walk through all modules takes milliseconds, for which a refit would wait. What they
    hold is looked for each time, since vLLM's own reload puts other tensors there.
    """

    def __init__(self, model: nn.Module) -> None:
        self._latent = [module for module in model.modules() if isinstance(module, MLAAttention)]
        self._experts = [
            module for module in model.modules() if _is_fp8_experts(getattr(module, "quant_method", None))
        ]
        self._with_sinks = with_sinks(model)

    def refresh(self, dtype: torch.dtype) -> None:
        """Recompute it from the parameters, of a model in ``dtype``.

        Raises:
            RefitError: as :func:`copied_sinks`.
        """
        for copied, sinks in copied_sinks(self._with_sinks):
            copied.copy_(sinks)
        for layer in self._latent:
            refresh_absorbed_projections(layer, dtype)
        for layer in self._experts:
            refresh_expert_scales(layer)


def _is_fp8_experts(method: object) -> bool:
    kinds = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(method).__mro__)
    return _FP8_EXPERTS in kinds


def refresh_expert_scales(layer: nn.Module) -> None:
    """Give the kernel of one layer of experts in FP8 blocks the scales (and biases) of its parameters."""
    method = layer.quant_method
    config = method.moe_quant_config
    if config is None:
        return
    scale = method.weight_scale_name
    held = {
        f"w13_{scale}": config.w1_scale,
        f"w2_{scale}": config.w2_scale,
        "w13_bias": config.w1_bias,
        "w2_bias": config.w2_bias,
    }
    follow_parameters(layer, held)


def follow_parameters(layer: nn.Module, held: Mapping[str, torch.Tensor | None]) -> None:
    """Give tensors that a layer's kernel holds the values of the parameters for which they stand, without moving them.

    A kernel keeps the tensors that it was made with. Those are the parameters, until vLLM reloads the layer: then they
    are temporaries of the reload, equal to the parameters only until these are written in place.

    Args:
        layer: the one whose parameters have their new values.
        held: by parameter the tensor of its shape; None, or of a parameter that the layer has not, for none.
    """
    for name, tensor in held.items():
        parameter = getattr(layer, name, None)
        if tensor is None or parameter is None:
            continue
        if tensor.untyped_storage()._cdata != parameter.untyped_storage()._cdata:
            tensor.copy_(parameter)


class Attending(NamedTuple):
    """Attention with sinks, and the layer around it."""

    name: str
    holder: nn.Module
    attention: Attention


def with_sinks(model: nn.Module) -> list[Attending]:
    """Attention of ``model`` whose kernel has sinks."""
    return [
        Attending(name, holder, attention)
        for name, holder in model.named_modules()
        for attention in holder.children()
        if isinstance(attention, Attention)
        and isinstance(getattr(attention.impl, "sinks", None), torch.Tensor)
    ]


def copied_sinks(attending: Iterable[Attending]) -> list[tuple[torch.Tensor, nn.Parameter]]:
    """Attention sinks that a kernel keeps for itself, each with the parameter that it was made of.

    The layer around the attention holds that parameter; vLLM makes the copy once, after loading.

    Raises:
        RefitError: the layer has no parameter, or several, of that shape.
    """
    found: list[tuple[torch.Tensor, nn.Parameter]] = []
    for name, holder, attention in attending:
        sinks = attention.impl.sinks
        held = list(holder.parameters(recurse=False))
        if any(p.untyped_storage()._cdata == sinks.untyped_storage()._cdata for p in held):
            continue
        like = [p for p in held if p.shape == sinks.shape]
        if len(like) != 1:
            raise RefitError(
                f"{type(attention.impl).__name__} computes with a copy of the attention sinks of {name}, and which parameter it "
                "was made of can't be told, so it would keep old ones; start vLLM with another attention_backend",
                stage="trace",
            )
        found.append((sinks, like[0]))
    return found


def packing_attention(model: nn.Module) -> str:
    """The class of a kernel of multi-head latent attention that packs ``kv_b_proj`` for itself; empty if there is none."""
    for module in model.modules():
        if isinstance(module, MLAAttention):
            kernel = type(module.impl)
            function = getattr(kernel, "process_weights_after_loading", None)
            if function is not None and function.__module__ != _ATTENTION:
                return kernel.__name__
    return ""


def refresh_absorbed_projections(layer: nn.Module, dtype: torch.dtype) -> None:
    """Update one latent attention layer's copies of ``kv_b_proj``, without moving them.

    CUDA graphs hold the addresses of the copies, so new values go into the old storage. Views of the
    live weight already show the new values and are left alone, and so are calibrated KV-cache scales.
    """
    weights = {p.untyped_storage()._cdata for p in layer.kv_b_proj.parameters()}
    before = {
        name: value
        for name, value in (*vars(layer).items(), *layer.named_parameters(recurse=False))
        if name.startswith(_MLA_DERIVED) and isinstance(value, torch.Tensor)
    }
    if all(value.untyped_storage()._cdata in weights for value in before.values()):
        return
    scales = {
        name: getattr(layer, name).clone() for name in ("_q_scale", "_k_scale", "_v_scale", "_prob_scale")
    }
    floats = {f"{name}_float": getattr(layer, f"{name}_float") for name in scales}
    layer.process_weights_after_loading(dtype)
    for name, value in before.items():
        value.copy_(getattr(layer, name))
        setattr(layer, name, value)
    for name, value in scales.items():
        getattr(layer, name).copy_(value)
    for name, value in floats.items():
        setattr(layer, name, value)
