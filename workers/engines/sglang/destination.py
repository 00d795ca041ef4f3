"""A live SGLang model as the destination of a refit, and the twin on which its loader is traced.

SGLang builds models on the meta device itself (its ``LayeredModelLoader``), by the same calls. A trace on the live model would
carry out what a loader writes besides: constants, a vocabulary's padding for example.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from sglang.srt.layers.parameter import ModelWeightParameter
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model, device_loading_context
from sglang.srt.model_loader.utils import set_default_torch_dtype
from torch import nn

from ....integration.errors import PlanError
from ....integration.layout import Fragment
from ....integration.layout.rearrangement import NotRearranged
from ....integration.weights.manifest import TensorSpec
from ..common.loader_trace.modules import NumbersStayReal
from ..common.loader_trace.quantized import HoldsCodes
from ..common.loader_trace.trace import Landing, LoaderTrace, Manifest, Zeros
from ..common.loader_trace.unreached import filled_buffers, require_reached
from ..common.packed.destination import PackedDestination, PackedRoutes, packed_forms
from ..common.packed.int4 import Int4Weights
from ..common.traced_destination import Routes, Traced
from .derived import made_in_place
from .drafters import check_follows, may_be_trained
from .fp8 import BlockFp8, block_modules, follow_scales, staged_scales
from .int4 import SglangPackedLayers, check_groups, clear_locks, idle_parameters, int4_modules
from .kv_scales import loaded_scales, write_tensors
from .layouts import SglangLayout, module_layout
from .wider import LARGEST_SHARE, WiderParameters, staged_bytes

# In SGLang 0.5.17: makes the absorbed projections of latent attention, which are copies, or views that are left alone; Kimi-K2.5's calls
# that of its language model.
_READ_POST_LOAD = ("sglang.srt.models.deepseek_common.deepseek_weight_loader", "sglang.srt.models.kimi_k25")
# By which modules say that no update renews what they keep.
_DERIVED = "_derived_weight_cache_error"
# What others keep of weights, and say nothing of.
_MADE_ONCE = {
    "w_kc_qrep": "its ranks hold projections of all others, which are gathered once. Start SGLang with dcp_replicate_q_proj=False",
    "_attn_res_cw_cache": "Kimi-K3 keeps the products of norms and projections",
    "_hpc_q_norm_w_fp32": "Hunyuan keeps its norms in FP32 for HPC-Ops' attention",
    "_qk_gamma_bf16": "Inkling keeps its norms in BF16",
}
# A buffer of GLM-4.5's routers, which SGLang 0.5.17 fills with their first weights and never renews.
_ROUTER_COPY = "_weight_fp32"
# What SGLang 0.5.17 gives Gemma 4's routers to fold their scale into a norm, which they do as they first compute and never again.
_FOLD_SCALE = "fuse_scale"


@dataclass(frozen=True)
class SglangRoutes(PackedRoutes):
    """Of an SGLang worker.

    Attributes:
        placed: landings of tensors that SGLang's loader can't write, whichever path they take, or only beside others; none of what
            nothing computes with.
        processed: modules that SGLang has to process after new weights were loaded into them.
        blocks: modules that hold FP8 blocks.
        as_promised: those of them that get nothing but what the trainer was asked for.
        scaled: attention layers whose scales of the KV cache are parameters.
        copying: routers that compute with an FP32 copy of their weights, once a forward pass has made it.
        folding: routers that compute with their scale in a norm, once a forward pass has folded it.
        weightless: norms that multiply by ones, which are no parameter, so that a sleep discards them.
        wider: those tensors that are written in place of which a parameter has a wider dtype.
        again: tensors that SGLang's loader is given once more from where they landed, with that parameter.
    """

    placed: dict[str, tuple[Landing, ...]]
    processed: tuple[str, ...]
    blocks: dict[str, BlockFp8]
    as_promised: frozenset[str]
    scaled: tuple[str, ...]
    copying: tuple[str, ...]
    folding: tuple[str, ...]
    weightless: tuple[str, ...]
    wider: dict[str, tuple[Landing, ...]]
    again: dict[str, str]


class SglangDestination(PackedDestination[SglangRoutes, SglangLayout, HoldsCodes]):
    """What one SGLang worker wants of each checkpoint tensor, and how it takes the rest.

    SGLang's own loader may be given full tensors in the place of :meth:`load_weights` if none of them is ``placed`` and nobody has
    asked for :meth:`fragments`.

    Args:
        runner: the worker's ``ModelRunner``, its model loaded.
        device: where the parameters live.

    Raises:
        RefitError: experts in INT4 are shared among ranks such that groups are cut.
    """

    _quantize_setting: ClassVar[str] = (
        "policy.refit.trainer_quantize_fp8=true (of a SglangSender, trainer_quantize_fp8=True)"
    )
    _int4_setting: ClassVar[str] = (
        "policy.refit.trainer_quantize_int4=true (of a SglangSender, trainer_quantize_int4=True)"
    )

    def __init__(self, runner: Any, device: torch.device) -> None:
        self._runner = runner
        # Where the scales of parameters land that are packed in the live model.
        self._staged: dict[str, torch.Tensor] = {}
        self._wider = WiderParameters()
        self._packed_layers = SglangPackedLayers(device)
        self._in_packed: tuple[nn.Module, ...] = ()
        check_groups(self._model)
        super().__init__(device)

    @property
    def gives_memory_back(self) -> bool:
        """Whether SGLang lets its memory saver unmap the weights."""
        return bool(self._runner.server_args.enable_memory_saver)

    def storage_key(self) -> Hashable:
        """As :meth:`TracedDestination.storage_key`, before a refit writes.

        Raises:
            PlanError: the model holds a copy of weights that it has made since the ranks met, as it first computed.
        """
        _require_no_caches(self._held)
        return super().storage_key()

    def agree(self, specs: Manifest) -> SglangRoutes:
        """As :meth:`TracedDestination.agree`; the model may have made copies since it was asked for these ``specs``.

        Raises:
            PlanError: it has.
        """
        _require_no_caches(self._held)
        return super().agree(specs)

    def fragments(self, specs: Manifest) -> tuple[list[Fragment], dict[str, str]]:
        """As :meth:`TracedDestination.fragments`; of parameters of a wider dtype the views are of memory beside them."""
        routes = self.agree(specs)
        self._wider.stage((at for found in routes.wider.values() for at in found), self._parameters)
        return super().fragments(specs)

    def rewritten(self, specs: Sequence[TensorSpec]) -> dict[str, str]:
        """Codes that :func:`~.fp8.follow_scales` quantizes once more, since other scales came than the trainer was asked for; what is
        put in a kernel's order; and all weights of a model with post-load work of its own that was not read."""
        unread = _unread_post_load(self._model)
        if unread:
            return {spec.name: unread for spec in specs}
        routes = self._agreed()
        again = {
            f"{module}.{codes}"
            for module, facts in routes.blocks.items()
            if module not in routes.as_promised
            for codes, scales in facts.scales.items()
            if scales in facts.packed
        }
        reason = "SGLang computes with powers of two as scales, so its codes are quantized once more after each refit"
        return super().rewritten(specs) | {
            spec.name: reason
            for spec in specs
            if any(landing.parameter in again for landing in routes.landings.get(spec.name, ()))
        }

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        # Through the model's own load_weights, as SGLang's updates do.
        with torch.no_grad():
            self._model.load_weights(self._loaded_by_sglang(weights))

    @property
    def has_trainable_drafter(self) -> bool:
        """As :attr:`TracedDestination.has_trainable_drafter`."""
        return may_be_trained(self._runner)

    def loads_alone(self, specs: Manifest) -> bool:
        """Whether SGLang's own updates write all that this destination wants of ``specs``, by whose routes it goes from here on.

        Raises:
            RefitMismatch, PlanError: as :meth:`fragments`.
        """
        return not self.agree(specs).placed

    @property
    def _model(self) -> nn.Module:
        model: nn.Module = self._runner.model
        return model

    def _twin(self) -> AbstractContextManager[nn.Module]:
        return meta_twin(self._runner)

    def _blocks(self) -> dict[str, HoldsCodes]:
        return {**block_modules(self._model), **int4_modules(self._model)}

    def _int4(self) -> dict[str, Int4Weights]:
        return int4_modules(self._model)

    def _kind_of_matrices(self) -> Callable[..., nn.Parameter]:
        kind: Callable[..., nn.Parameter] = ModelWeightParameter
        return kind

    def _follow_packed(self, modules: Iterable[nn.Module]) -> None:
        self._in_packed = tuple(modules)

    def _idle(self) -> frozenset[str]:
        return idle_parameters(self._model)

    def _layout(self, name: str, live: nn.Module, twin: nn.Module, promised: bool) -> SglangLayout:
        layout = module_layout(name, live, twin)
        if layout.direct:
            return layout
        try:
            packed = self._packed_layers.of(live, twin)
        except NotRearranged as reason:
            return replace(layout, reason=f"{layout.reason} ({reason})")
        return layout if packed is None else SglangLayout(placed=True, loadable=False, packed=packed)

    def _follow_parameters(self) -> None:
        super()._follow_parameters()
        self._held = [(path, vars(module)) for path, module in self._model.named_modules()]

    def _check(self, traced: Traced[SglangLayout, HoldsCodes]) -> None:
        _require_loadable(traced)
        check_follows(self._runner, traced.trace)
        # The drafter may be loaded otherwise than the model that it drafts for.
        dummy = str(self._runner.load_config.load_format).lower().endswith("dummy")
        filled = filled_buffers(self._model) & traced.owners.keys() if dummy else set()
        require_reached(traced.trace, self._to_fill(traced) | filled, filled if dummy else None)

    def _to_fill(self, traced: Traced[SglangLayout, HoldsCodes]) -> set[str]:
        """Names of the parameters that a manifest has to fill."""
        # No weights: they stay what they are until a calibration brings others.
        scales = {f"{name}.{kind}_scale" for name in loaded_scales(self._model) for kind in ("k", "v")}
        return traced.before.keys() - scales - self._idle()

    def _routed(self, traced: Traced[SglangLayout, HoldsCodes], shared: Routes) -> SglangRoutes:
        blocks = {name: facts for name, facts in traced.blocks.items() if isinstance(facts, BlockFp8)}
        self._staged = staged_scales(blocks, self._parameters, traced.before, self._staged)
        touched = traced.trace.touched
        loaded = {m for name in shared.reasons for p in touched[name] for m in traced.owners[p]}
        unneeded = self._unneeded(traced.trace, traced.layouts)
        # Those that come in another bucket, or whose memory is used again, would be lost.
        joined = {name: traced.trace.landings[name] for name in sorted(traced.trace.joined)}
        return SglangRoutes(
            **vars(shared),
            placed=traced.placed(traced.trace.landings) | joined | dict.fromkeys(unneeded, ()),
            processed=tuple(sorted(module for module in loaded if traced.layouts[module].processed)),
            packed=packed_forms(traced.layouts),
            blocks=blocks,
            as_promised=traced.promised,
            scaled=tuple(loaded_scales(self._model)),
            copying=tuple(name for name, m in self._model.named_modules() if _ROUTER_COPY in m._buffers),
            folding=tuple(name for name, m in self._model.named_modules() if hasattr(m, _FOLD_SCALE)),
            weightless=tuple(name for name, m in self._model.named_modules() if _multiplies_by_ones(m)),
            wider={name: found for name, found in shared.landings.items() if name in traced.trace.wider},
            again={
                name: found[0].parameter
                for name, found in shared.landings.items()
                if name in traced.trace.again
            },
        )

    def _placing(self, trace: LoaderTrace) -> LoaderTrace:
        # What SGLang's loader makes of a parameter (a norm's weight and 1) it makes again at the end of a refit.
        landings = dict(trace.again)
        wider = [at for found in trace.wider.values() for at in found]
        if staged_bytes(wider, self._parameters) <= LARGEST_SHARE * self.kept_bytes:
            landings |= trace.wider
        return trace.placing(landings)

    def _post_load(self, routes: SglangRoutes) -> None:
        modules = dict(self._model.named_modules())
        with torch.no_grad():
            self._wider.fill()
            if routes.again:
                self._model.load_weights(
                    (name, self._parameters[at].detach()) for name, at in routes.again.items()
                )
            for name in routes.processed:
                with device_loading_context(modules[name], self._device):
                    modules[name].quant_method.process_weights_after_loading(modules[name])
            for name, facts in routes.blocks.items():
                follow_scales(name, modules[name], facts, self._staged, name in routes.as_promised)
            self._make_packed()
            clear_locks(self._in_packed)
            # Their memory may have slept, and came back undefined. The numbers beside them are right.
            write_tensors([modules[name] for name in routes.scaled])
            for name in routes.weightless:
                vars(modules[name])["weight"].fill_(1)
            for router in (modules[name] for name in routes.copying):
                # In place, since graphs read it there.
                if (copy := router._buffers[_ROUTER_COPY]) is not None:
                    copy.copy_(router.weight)
            for router in (modules[name] for name in routes.folding):
                # In place too. One that has not computed does it itself.
                if router._scale_fused:
                    router.fuse_scale()
            # What a model derives from its weights (latent attention's absorbed projections).
            if hasattr(self._model, "post_load_weights"):
                with made_in_place(self._model):
                    self._model.post_load_weights()

    def _target(self, place: Landing | Zeros) -> torch.Tensor:
        # Zeros are as wide as the parameter.
        narrow = self._wider.target(place) if isinstance(place, Landing) else None
        if narrow is not None:
            return narrow
        staged = self._staged.get(place.parameter)
        return super()._target(place) if staged is None else staged

    def _loaded_by_sglang(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """What is left of ``weights`` when those that SGLang's loader can't write are where they belong."""
        routes = self._agreed()
        # What finish() copies into wider parameters has to be where it copies from.
        staged = routes.wider if self._wider else {}
        for name, tensor in weights:
            landings = routes.placed.get(name, staged.get(name))
            if landings is None:
                yield name, tensor
                continue
            for landing in landings:
                landing.write(tensor, self._target(landing))


def _multiplies_by_ones(module: nn.Module) -> bool:
    return getattr(module, "has_weight", True) is False and isinstance(
        vars(module).get("weight"), torch.Tensor
    )


def _unread_post_load(model: nn.Module) -> str:
    """Why a model's own post-load work may change parameters; empty if it has none, or the one that was read."""
    function = getattr(model, "post_load_weights", None)
    if function is None or function.__module__ in _READ_POST_LOAD:
        return ""
    return f"it was not read what post_load_weights of {type(model).__name__} changes"


def _require_no_caches(modules: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Refuse a model that computes with copies of weights which no update renews; ``modules``: what each of them holds, by name.

    Raises:
        PlanError: says which.
    """
    found = [
        (module, name, held)
        for module, held in modules
        for name in (_DERIVED, *_MADE_ONCE)
        if held.get(name) is not None
    ]
    if not found:
        return
    module, name, held = found[0]
    # SGLang's own updates ask for the first; a model may have made its copies since rlrefit's loader was called.
    reason = held[name] if name == _DERIVED else _MADE_ONCE[name]
    raise PlanError(
        f"layer {module or 'of the whole model'} computes with copies of weights that a refit would leave old: {reason}. Nothing "
        "was written",
        stage="trace",
    )


def _require_loadable(traced: Traced[SglangLayout, HoldsCodes]) -> None:
    """Refuse weights that neither bytes in place nor SGLang's loader can bring to their modules.

    Raises:
        PlanError: names the first weight and the module.
    """
    for name in sorted(traced.trace.joined & traced.trace.misc_reasons.keys()):
        raise PlanError(
            f"SGLang's loader joins it with other weights, and it can't be written in place: "
            f"{traced.trace.misc_reasons[name]}. Weights come one after another, so that the loader would not see them together. "
            "Nothing was written; send it in the dtype in which the engine holds it, or update this engine from disk",
            stage="trace",
            parameter=name,
        )
    for name, touched in traced.trace.touched.items():
        for module in sorted({module for parameter in touched for module in traced.owners[parameter]}):
            layout, reason = traced.layouts[module], traced.layouts[module].reason
            if layout.placed:
                if name not in traced.trace.misc_reasons:
                    continue
                why = traced.trace.misc_reasons[name]
                reason = f"layer {module} is written in place alone, and this weight can't be: {why}"
            if not layout.loadable:
                raise PlanError(
                    f"{reason}. SGLang's loader writes such a module as if it had not been processed, and the "
                    "engine would compute with a mixture. Nothing was written; start SGLang without the kernel that does "
                    "so, or update this engine from disk",
                    stage="trace",
                    parameter=name,
                )


@contextmanager
def meta_twin(runner: Any) -> Iterator[nn.Module]:
    """A second model of ``runner`` for this rank with all weights on the meta device, before any post-load step.

    Raises:
        PlanError: the live model is of another class than the one that SGLang would build.
    """
    config = runner.model_config
    # SGLang shares rotary embeddings in the process; later models must not get the twin's.
    rotary = dict(factory._ROPE_DICT)
    # SGLang sets it back only where nothing fails.
    dtype = torch.get_default_dtype()
    try:
        with set_default_torch_dtype(config.dtype), torch.device("meta"), NumbersStayReal():
            quantization = _get_quantization_config(config, runner.load_config)
            twin = _initialize_model(config, runner.load_config, quantization).eval()
        if type(twin) is not type(runner.model):
            raise PlanError(
                f"the live model is a {type(runner.model).__name__} where SGLang's loader builds a {type(twin).__name__}: "
                "something wrapped or replaced it after loading. Start the engine without the feature that does so",
                stage="trace",
            )
        # It computes from weights that are not there; on the live model it runs at the end of a refit. A language model within has its own.
        for module in twin.modules():
            if hasattr(module, "post_load_weights"):
                module.post_load_weights = lambda *args, **kwargs: None
        yield twin
    finally:
        torch.set_default_dtype(dtype)
        factory._ROPE_DICT.clear()
        factory._ROPE_DICT.update(rotary)
