"""A live vLLM model as the destination of a refit, and the twin on which its loader is traced.

The live model is no place to trace on: post-load processing has replaced parameters and dropped their weight loaders. The twin
is built by vLLM's own ``initialize_model``, so its parameters are as they were before any processing, in the shapes of this
rank's tensor, pipeline and expert parallel groups.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn
from vllm.config import CompilationMode, ModelConfig, VllmConfig
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.utils import _model_to_pp_missing_layer_names
from vllm.model_executor.offloader import NoopOffloader, get_offloader, set_offloader
from vllm.utils.torch_utils import set_default_torch_dtype

from ....integration.errors import RefitError
from ....integration.layout import Box, box_of, subtract_all
from ....integration.layout.rearrangement import NotFoundOut, NotRearranged
from ....integration.quantize.formats import Format
from ....integration.weights.manifest import TensorSpec
from ..common.loader_trace.modules import NumbersStayReal, WeightsStayOnMeta
from ..common.loader_trace.quantized import HoldsCodes
from ..common.loader_trace.trace import Landing, LoaderTrace, Manifest
from ..common.packed.destination import PackedDestination, PackedRoutes, packed_forms, split_name
from ..common.packed.int4 import Int4Weights
from ..common.traced_destination import Routes, Traced
from .compat import FP8, INT4, require_supported_vllm
from .completeness import absent_elements, check_complete, unused_parameters
from .copies import Copies, require_read_hooks
from .drafters import check_follows, may_be_trained
from .fp8 import block_modules, tell_of_own_quantizers, uses_fp8
from .int4 import check_groups, int4_modules
from .kernel_layouts import KernelLayouts
from .layouts import VllmLayout, has_padding, module_layout
from .mxfp4 import check_experts
from .mxfp8 import mxfp8_modules
from .packed_layers import KernelState, VllmPackedLayers
from .reload import DerivedState, ScopedReload, copied_sinks, follows, packing_attention, with_sinks

# Of models that transformers computes and vLLM serves.
_TRANSFORMERS = "vllm.model_executor.models.transformers"
# Of vLLM from 0.32 on: weights in GPU memory of another process.
_WEIGHT_CACHE = "ipc_cache"


@dataclass(frozen=True)
class VllmRoutes(PackedRoutes):
    """Of a vLLM worker.

    Attributes:
        misc: loads what takes the misc path.
    """

    misc: ScopedReload


class VllmDestination(PackedDestination[VllmRoutes, VllmLayout, HoldsCodes]):
    """What one vLLM worker wants of each checkpoint tensor, and how it takes the rest.

    Args:
        model: the live model, as the worker's ``get_model()`` returns it.
        vllm_config: the worker's configuration.
        device: where the model's parameters live.
        reset_caches: called at the end of every refit, for caches in the worker that depend on weights.
            The prefix cache belongs to the scheduler: the driver resets it (``llm.reset_prefix_cache()``).
        stays_awake: whether the driver puts the engine to sleep in no epoch that begins now, sleep mode or not.

    Raises:
        RefitError: the engine moves or wraps weights behind its loader's back.
    """

    def __init__(
        self,
        model: nn.Module,
        vllm_config: VllmConfig,
        device: torch.device,
        reset_caches: Sequence[Callable[[], None]] = (),
        stays_awake: Callable[[], bool] = lambda: False,
    ) -> None:
        _check_supported(model, vllm_config)
        self._live = model
        self._vllm_config = vllm_config
        self._reset_caches = tuple(reset_caches)
        self._stays_awake = stays_awake
        self._kernel_layouts = KernelLayouts(vllm_config, device)
        self._packed_layers = VllmPackedLayers(vllm_config, device)
        self._copies = Copies(model)
        self._kernel_state = KernelState(())
        self._derived = DerivedState(model)
        super().__init__(device)

    @property
    def gives_memory_back(self) -> bool:
        """Whether vLLM has its sleep mode, whose pool unmaps the weights, and a driver that may use it."""
        return bool(self._vllm_config.model_config.enable_sleep_mode) and not self._stays_awake()

    def quantized(self, specs: Sequence[TensorSpec]) -> dict[str, Format]:
        """As :meth:`TracedDestination.quantized`; the log tells of modules that hold another FP8."""
        tell_of_own_quantizers(self._model, self._blocks())
        return super().quantized(specs)

    def storage_key(self) -> Hashable:
        """As :meth:`TracedDestination.storage_key`, before a refit writes.

        Raises:
            RefitError: the model holds a copy of weights that it has made since the ranks met, as it first computed.
        """
        self._copies.require_none()
        return super().storage_key()

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._agreed().misc.load(weights)

    def abandon(self) -> None:
        """After a refit that failed between its first write and :meth:`finish`: undo what is half loaded.

        Modules under reload get their old kernel tensors back, so that the next refit starts clean. Bytes
        that were written in place stay; the engine must not generate before a refit commits.
        """
        if self._routes is not None:
            self._routes.misc.abandon()
        super().abandon()

    @property
    def _model(self) -> nn.Module:
        return self._live

    def _twin(self) -> AbstractContextManager[nn.Module]:
        return meta_twin(self._model, self._vllm_config)

    def _trace(self, twin: nn.Module, manifest: Manifest) -> LoaderTrace:
        self._copies.compare(twin)
        return super()._trace(twin, manifest)

    def _int4(self) -> Mapping[str, Int4Weights]:
        return int4_modules(self._model)

    def _kind_of_matrices(self) -> Callable[..., nn.Parameter]:
        from vllm.model_executor.parameter import ModelWeightParameter

        kind: Callable[..., nn.Parameter] = ModelWeightParameter
        return kind

    def _follow_packed(self, modules: Iterable[nn.Module]) -> None:
        self._kernel_state = KernelState(modules)

    def _blocks(self) -> dict[str, HoldsCodes]:
        return {
            **block_modules(self._model),
            **mxfp8_modules(self._model),
            **int4_modules(self._model),
        }

    def _layout(self, name: str, live: nn.Module, twin: nn.Module, promised: bool) -> VllmLayout:
        layout = module_layout(name, live, twin, promised)
        if not layout.reload:
            return layout
        try:
            packed = self._packed_layers.of(live, twin)
            if packed is not None:
                places = {parameter: padded.places for parameter, padded in packed.padded.items()}
                return VllmLayout(placed=True, packed=packed, rearranged=places, otherwise=layout)
            found = self._kernel_layouts.of(live, twin)
        except NotRearranged as reason:
            told = f"{layout.reason} ({reason})"
            return replace(layout, reason=told, for_now=isinstance(reason, NotFoundOut))
        return layout if found is None else VllmLayout(placed=True, rearranged=found, otherwise=layout)

    def _idle(self) -> frozenset[str]:
        """As :meth:`PackedDestination._idle`: vLLM's reload would wait for scales of inputs that packed layers do not quantize."""
        return unused_parameters(self._model)

    @property
    def has_trainable_drafter(self) -> bool:
        """As :attr:`TracedDestination.has_trainable_drafter`, on this stage or on the last one."""
        return may_be_trained(self._vllm_config)

    def _needless(self) -> frozenset[str]:
        """Names of parameters that need not come, although something computes with them."""
        return frozenset()

    def _check(self, traced: Traced[VllmLayout, HoldsCodes]) -> None:
        check_follows(self._vllm_config, traced.trace)
        check_complete(
            traced.trace,
            traced.owners,
            self._model,
            traced.after,
            unused=self._idle() | self._needless(),
            dummy=self._vllm_config.load_config.load_format == "dummy",
        )

    def _padding(self, routes: VllmRoutes) -> Mapping[tuple[str, str], Sequence[Box]]:
        """As :meth:`PackedDestination._padding`."""
        padded = {
            name: form for name, form in routes.packed.items() if has_padding(self._model.get_submodule(name))
        }
        landings: dict[tuple[str, str], list[Landing]] = defaultdict(list)
        for found in routes.landings.values():
            for landing in found:
                landings[split_name(landing.parameter)].append(landing)
        rest: dict[tuple[str, str], list[Box]] = {}
        for module, form in padded.items():
            for name, (shape, dtype) in form.loaded.items():
                as_loaded = torch.empty(shape, dtype=dtype, device="meta")
                boxes = [landing.box_in(as_loaded) for landing in landings[module, name]]
                rest[module, name] = subtract_all(box_of(shape), boxes)
        return rest

    def _routed(self, traced: Traced[VllmLayout, HoldsCodes], shared: Routes) -> VllmRoutes:
        live = dict(self._model.named_modules())
        required: dict[str, set[str]] = {}
        followers: set[str] = set()
        for name in shared.reasons:
            for parameter in traced.trace.touched[name]:
                for module in traced.owners[parameter]:
                    if not traced.layouts[module].reload:
                        continue
                    if module != parameter.rpartition(".")[0] and follows(live[module]):
                        followers.add(module)
                    else:
                        required.setdefault(module, set()).add(name)
        if traced.trace.unknown:
            # One of these may reach any module that cannot be loaded in place.
            for module, layout in traced.layouts.items():
                if layout.reload and module not in followers:
                    required.setdefault(module, set())
        # Where all weights come by the misc path these do, too.
        unneeded = self._unneeded(traced.trace, traced.layouts)
        misc = ScopedReload(
            self._model,
            self._vllm_config,
            self._device,
            {module: live[module] for module in required},
            {module: frozenset(names) for module, names in required.items()},
            {**traced.placed(shared.landings), **dict.fromkeys(unneeded, ())},
            self._target,
            absent_elements(self._model, traced.trace),
            [live[module] for module in sorted(followers)],
        )
        return VllmRoutes(**vars(shared), misc=misc, packed=packed_forms(traced.layouts))

    def _post_load(self, routes: VllmRoutes) -> None:
        routes.misc.finish()
        self._make_packed()
        with self._device, torch.no_grad():
            self._kernel_state.refresh()
            self._derived.refresh(self._vllm_config.model_config.dtype)
        for reset in self._reset_caches:
            reset()


def _check_supported(model: nn.Module, vllm_config: VllmConfig) -> None:
    if vllm_config.lora_config is not None:
        raise RefitError(
            "enable_lora puts the engine's layers into others, under names by which neither vLLM's loader nor a refit finds their weights, and "
            "policy.refit.lora=merge writes all of them. Nothing has moved; start vLLM without enable_lora, or set lora to adapter on all ranks "
            "of both sides",
            stage="settings",
        )
    if vllm_config.parallel_config.enable_eplb:
        raise RefitError(
            "enable_eplb moves experts between ranks while serving, so where the loader puts an expert is not "
            "where it is used, and a refit would overwrite other experts; start vLLM without enable_eplb",
            stage="trace",
        )
    if getattr(model, "_do_torchao_reload", False):
        raise RefitError(
            "torchao quantization reloads the whole model in every load_weights call, which cannot be combined "
            "with a refit in parts; use FP8 or no quantization in the engine",
            stage="trace",
        )
    offloading = getattr(vllm_config, "offload_config", None)
    if offloading is not None and offloading.prefetch.offload_group_size:
        raise RefitError(
            "offload_group_size keeps weights in host memory, from where vLLM copies them into GPU memory that several layers share, before "
            "each of them computes: in the next step old weights would overwrite what a refit writes there. Start vLLM without it",
            stage="trace",
        )
    loading = vllm_config.load_config
    if loading.load_format == _WEIGHT_CACHE and _shares_cache(loading.model_loader_extra_config):
        raise RefitError(
            f"load_format={_WEIGHT_CACHE} maps weights that vLLM's weight cache lends to other engines too, and a refit would overwrite "
            'theirs. Start vLLM with model_loader_extra_config={"mode": "copy"}, or with another load_format',
            stage="trace",
        )
    require_read_hooks(model)
    if kernel := packing_attention(model):
        raise RefitError(
            f"{kernel} packs kv_b_proj for itself and keeps no weight that a refit could write; start vLLM with another "
            "attention_backend",
            stage="trace",
        )
    copied_sinks(with_sinks(model))
    check_experts(model)
    if uses_fp8(model):
        require_supported_vllm(FP8)
    if in_int4 := int4_modules(model):
        require_supported_vllm(INT4)
        check_groups(model, in_int4)


def _shares_cache(settings: object) -> bool:
    """Whether vLLM's loader leaves weights in the memory of its cache, as it does if it is not told otherwise."""
    return not isinstance(settings, Mapping) or settings.get("mode", "zero_copy") == "zero_copy"


@contextmanager
def meta_twin(
    model: nn.Module,
    vllm_config: VllmConfig,
    model_config: ModelConfig | None = None,
    is_own: Callable[[torch.Tensor], bool] = lambda tensor: True,
) -> Iterator[nn.Module]:
    """A second ``model`` for this rank with all weights on the meta device, before any post-load step.

    ``model`` and ``vllm_config`` are left as they are: the twin registers its layers in a copy of the
    compilation configuration, and what modules it shares with the live model (vLLM caches rotary
    embeddings for the process) keep their reload metadata. The twin must not be used after the context.

    Args:
        model: the live one.
        vllm_config: of the worker.
        model_config: of a model beside the one that is served; None for that one.
        is_own: whether a tensor of ``model`` is its own, and not one that vLLM put in the place of its own after loading.
    """
    with (
        _shared_state_kept(model),
        _own_layers_kept(type(model)),
        set_default_torch_dtype(vllm_config.model_config.dtype),
        torch.device("meta"),
        NumbersStayReal(),
        WeightsStayOnMeta(),
    ):
        twin = initialize_model(vllm_config=_twin_config(vllm_config), model_config=model_config).eval()
        _tie_as(model, twin, is_own)
    # vLLM keeps which pipeline layers a model misses by id(model), for ever. A twin may get the id of a model that
    # is gone, and a later model the twin's.
    _forget_missing_layers(twin)
    _load_only(twin)
    try:
        yield twin
    finally:
        _forget_missing_layers(twin)


def _tie_as(model: nn.Module, twin: nn.Module, is_own: Callable[[torch.Tensor], bool]) -> None:
    """Let those modules of ``twin`` share a parameter that share one of its own in ``model``.

    vLLM builds a model untied whose checkpoint has a head beside tied embeddings, and ties it after loading if both are equal.
    """
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not is_own(parameter):
            continue
        shared = first.setdefault(id(parameter), name)
        if shared != name:
            path, _, attribute = name.rpartition(".")
            setattr(twin.get_submodule(path), attribute, twin.get_parameter(shared))


def _load_only(twin: nn.Module) -> None:
    """Keep layers from quantizing themselves as soon as all their weights are loaded.

    A trace asks only where their tensors land. Quantizing would copy them once more, into tensors that belong to no parameter,
    and some of its kernels don't run without storage.
    """
    for module in twin.modules():
        if getattr(getattr(module, "quant_method", None), "uses_meta_device", False):
            for tensor in get_layer_tensors(module).values():
                tensor.weight_loader = _get_original_loader(tensor)


def _forget_missing_layers(twin: nn.Module) -> None:
    for module in twin.modules():
        _model_to_pp_missing_layer_names.pop(id(module), None)


def _twin_config(vllm_config: VllmConfig) -> VllmConfig:
    """A copy of the configuration whose registries are empty, so that layer names do not clash."""
    twin = copy.copy(vllm_config)
    compilation = copy.copy(vllm_config.compilation_config)
    compilation.static_forward_context = {}
    compilation.static_all_moe_layers = []
    compilation.enabled_custom_ops = Counter()
    compilation.disabled_custom_ops = Counter()
    compilation.traced_files = set()
    # The twin never runs, so nothing of it is to be compiled.
    compilation.mode = CompilationMode.NONE
    twin.compilation_config = compilation
    return twin


@contextmanager
def _own_layers_kept(kind: type[nn.Module]) -> Iterator[None]:
    """Let vLLM's backend for transformers' models give memory to none of the twin's parameters, and leave vLLM's own as they are.

    In the live model those on the meta device are transformers' own, and it puts plain parameters with memory in their places. In
    the twin all are there, and vLLM's own would lose their loaders.
    """
    if not kind.__module__.startswith(_TRANSFORMERS):
        yield
        return

    def init_parameters(model: nn.Module, module: nn.Module, dtype: torch.dtype | None = None) -> None:
        for holder in module.modules():
            for name, parameter in holder.named_parameters(recurse=False):
                if not hasattr(parameter, "weight_loader"):
                    as_loaded = torch.empty_like(parameter.data, dtype=dtype or model.model_config.dtype)
                    setattr(holder, name, nn.Parameter(as_loaded))

    kind.init_parameters = init_parameters  # type: ignore[attr-defined]
    try:
        yield
    finally:
        # What it inherits is there again.
        del kind.init_parameters  # type: ignore[attr-defined]


@contextmanager
def _shared_state_kept(model: nn.Module) -> Iterator[None]:
    """Undo what building the twin does to state of the process that the live model uses too, also where it fails."""
    kept = [
        (info, info.restore_metadata, info.restore_device)
        for info in map(get_layerwise_info, model.modules())
    ]
    rotary = dict(rotary_embedding._ROPE_DICT)
    # vLLM sets it back only where nothing fails.
    dtype = torch.get_default_dtype()
    # It would look for the twin's weights on the meta device, or count them beside the live ones.
    offloader = get_offloader()
    set_offloader(NoopOffloader())
    try:
        yield
    finally:
        set_offloader(offloader)
        torch.set_default_dtype(dtype)
        for info, metadata, device in kept:
            info.restore_metadata, info.restore_device = metadata, device
        rotary_embedding._ROPE_DICT.clear()
        rotary_embedding._ROPE_DICT.update(rotary)
