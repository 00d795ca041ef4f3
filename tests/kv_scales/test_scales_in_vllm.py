"""Scales in vLLM's own attention layers: in place, on device and host, after reloads too; and engines that refuse."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import CacheConfig, CompilationConfig, CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from rlrefit.integration.errors import RefitError
from rlrefit.workers.engines.vllm.kv_scales import VllmScaledCache
from rlrefit.workers.engines.vllm.worker_refit import WorkerRefit
from rlrefit.workers.kv_scales.endpoints import KvScaleDestination, Scales, scale_names, scale_specs
from tests.refit.synthetic import SyntheticDestination

LAYERS = [f"model.layers.{i}.self_attn" for i in range(2)]
FIRST = {LAYERS[0]: Scales(0.25, 0.5, 3.0), LAYERS[1]: Scales(0.125, 2.0, 4.0)}
SECOND = {LAYERS[0]: Scales(0.75, 1.5, 5.0), LAYERS[1]: Scales(1.25, 2.5, 6.0)}


def config(cache_dtype: str = "fp8", **changes: Any) -> VllmConfig:
    cache = CacheConfig(block_size=16, cache_dtype=cache_dtype, **changes)
    compilation = CompilationConfig(cudagraph_mode=CUDAGraphMode.NONE)
    return VllmConfig(cache_config=cache, compilation_config=compilation)


class Model(nn.Module):
    """Attention layers where vLLM's models have them."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "model.layers") -> None:
        super().__init__()
        names = [f"{prefix}.{i}.self_attn.attn" for i in range(2)]
        with set_current_vllm_config(vllm_config), set_default_torch_dtype(torch.bfloat16):
            self.attentions = tuple(
                Attention(4, 32, 1.0, 2, cache_config=vllm_config.cache_config, prefix=name) for name in names
            )
        for name, attention in zip(names, self.attentions, strict=True):
            parent: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(parent, part):
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            parent.add_module(last, attention)


def live(model: Model, kinds: str = "kv") -> list[tuple[float, ...]]:
    """Of each layer, scales on the device and then on the host."""
    return [
        (
            *(getattr(attention, f"_{kind}_scale").item() for kind in kinds),
            *(getattr(attention, f"_{kind}_scale_float") for kind in kinds),
        )
        for attention in model.attentions
    ]


def both(scales: dict[str, Scales], kinds: str = "kv") -> list[tuple[float, ...]]:
    return [tuple(getattr(of_layer, kind) for kind in kinds) * 2 for of_layer in scales.values()]


def claimed(model: Model) -> VllmScaledCache:
    found = VllmScaledCache(model, config())
    assert found.claim(LAYERS) == (LAYERS, [])
    return found


@pytest.fixture
def model() -> Model:
    return Model(config())


@pytest.fixture
def cache(model: Model) -> VllmScaledCache:
    return claimed(model)


def use_backend(model: Model, name: str, *, queries: bool = False) -> None:
    """Have the layers say that they run on another backend than the CPU's, which this machine has no device for."""

    class Backend:
        @staticmethod
        def get_name() -> str:
            return name

    for attention in model.attentions:
        attention.attn_backend = Backend
        if queries:
            with set_current_vllm_config(config()):
                attention.query_quant = QuantFP8(static=True, group_shape=GroupShape.PER_TENSOR)


def test_scales_go_where_kernels_and_cuda_graphs_read_them(model: Model, cache: VllmScaledCache) -> None:
    def places() -> list[int]:
        return [scale.data_ptr() for a in model.attentions for scale in (a._k_scale, a._v_scale)]

    before = places()
    for scales in (FIRST, SECOND):
        cache.set(scales)
        assert live(model) == both(scales)
        # The CPU's kernels take queries as they are.
        assert live(model, "q") == [(1.0, 1.0)] * 2
    assert places() == before
    assert cache.live()[f"{LAYERS[1]}.v_scale"] == [2.5, 2.5]


@pytest.mark.parametrize(
    ("backend", "taken"), [("FLASH_ATTN", True), ("FLASHINFER", True), ("TRITON_ATTN", False)]
)
def test_queries_are_scaled_where_the_backend_reverts_it(model: Model, backend: str, taken: bool) -> None:
    use_backend(model, backend, queries=True)
    cache = claimed(model)
    cache.set(FIRST)
    assert live(model, "q") == (both(FIRST, "q") if taken else [(1.0, 1.0)] * 2)
    cache.set({layer: scales._replace(q=math.nan) for layer, scales in SECOND.items()})
    assert live(model, "q") == (both(FIRST, "q") if taken else [(1.0, 1.0)] * 2)
    assert live(model) == both(SECOND)


def test_what_flashinfer_derived_from_old_scales_is_derived_again(model: Model) -> None:
    use_backend(model, "FLASHINFER", queries=True)
    cache = claimed(model)
    for attention in model.attentions:
        attention.impl.bmm1_scale, attention.impl.bmm2_scale, attention._o_scale_float = 0.1, 0.2, 0.3
    cache.set(FIRST)
    for attention in model.attentions:
        assert (attention.impl.bmm1_scale, attention.impl.bmm2_scale, attention._o_scale_float) == (None,) * 3


def test_kernels_with_half_the_range_get_scales_of_twice_the_size(
    model: Model, cache: VllmScaledCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda cls: True))
    cache.set(FIRST)
    assert live(model) == [tuple(2 * value for value in row) for row in both(FIRST)]


def test_scales_outlive_reloads_and_refits_without_new_ones(model: Model, cache: VllmScaledCache) -> None:
    destination = KvScaleDestination(SyntheticDestination([], {}), cache)
    specs = scale_specs(LAYERS)
    assert set(destination.fragments(specs)[1]) == {spec.name for spec in specs}
    none = {layer: Scales(math.nan, math.nan, math.nan) for layer in LAYERS}
    shown = {layer: Scales(1.0, 1.0, 1.0) for layer in LAYERS}
    for version, given in enumerate((none, FIRST, none, SECOND, none)):
        for attention in model.attentions:
            # What vLLM's layerwise reload ends with: it sets all scales to 1.
            attention.process_weights_after_loading(torch.bfloat16)
            assert attention._k_scale_float == 1.0
        destination.load_weights(
            (name, torch.tensor(value))
            for layer, scales in given.items()
            for name, value in zip(scale_names(layer), scales, strict=True)
        )
        destination.finish(version)
        shown = shown if given is none else given
        assert live(model) == both(shown)


def test_a_refit_that_was_abandoned_leaves_the_scales(model: Model, cache: VllmScaledCache) -> None:
    destination = KvScaleDestination(SyntheticDestination([], {}), cache)
    destination.fragments(scale_specs(LAYERS))
    destination.load_weights([(f"{LAYERS[0]}.k_scale", torch.tensor(7.0))])
    destination.abandon()
    destination.finish(1)
    assert live(model) == [(1.0, 1.0, 1.0, 1.0)] * 2


def test_layers_are_found_by_the_models_own_names() -> None:
    model = Model(config(), "language_model.model.layers")
    model.hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"visual.": None, "model.language_model.": "language_model.model."}
    )
    layers = [f"model.language_model.layers.{i}.self_attn" for i in range(2)]
    cache = VllmScaledCache(model, config())
    assert cache.claim(["visual.layers.0.self_attn", *layers]) == (layers, [])
    cache.set(dict(zip(layers, FIRST.values(), strict=True)))
    assert live(model) == both(FIRST)
    assert cache.claim(layers[:1]) == (layers[:1], ["language_model.model.layers.1.self_attn.attn"])


def test_layers_that_vllm_was_told_to_leave_in_16_bits_take_no_scales() -> None:
    skipping = config(kv_cache_dtype_skip_layers=["1"])
    assert VllmScaledCache(Model(skipping), skipping).claim(LAYERS) == (LAYERS[:1], [])


@pytest.mark.parametrize("cache_dtype", ["auto", "bfloat16", "fp8_e5m2"])
def test_an_engine_whose_cache_is_not_quantized_or_to_another_fp8_refuses(cache_dtype: str) -> None:
    with pytest.raises(RefitError, match=cache_dtype):
        VllmScaledCache(Model(config(cache_dtype)), config(cache_dtype))


def test_all_that_is_wrong_with_an_engine_is_told_at_once(model: Model) -> None:
    use_backend(model, "FLASHINFER")
    piecewise = config()
    piecewise.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE
    VllmScaledCache(model, piecewise)
    model.attentions[1].attn_backend = type("Other", (), {"get_name": staticmethod(lambda: "OTHER")})
    model.attentions[0].kv_sharing_target_layer_name = "model.layers.1.self_attn.attn"
    model.attentions[0]._k_scale = torch.ones(2)
    unusable = config(calculate_kv_scales=True)
    unusable.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    with pytest.raises(RefitError) as raised:
        VllmScaledCache(model, unusable)
    for text in (
        "calculate_kv_scales",
        "scale for each head",
        "cache of another layer",
        "backend OTHER",
        "backend FLASHINFER",
    ):
        assert text in str(raised.value)


def test_a_worker_tells_the_scales_in_use_once_a_trainer_brings_any(model: Model) -> None:
    runner = SimpleNamespace(get_model=lambda: model, execute_model=lambda: None)
    worker = SimpleNamespace(
        vllm_config=config(),
        model_runner=runner,
        sleep=lambda: None,
        wake_up=lambda: None,
        compile_or_warm_up_model=lambda: None,
        reload_weights=lambda: None,
    )
    refit = WorkerRefit(worker)
    with pytest.raises(RefitError, match=r"no trainer has been met with policy\.refit\.kv_scales=true"):
        refit.kv_scales()
    cache = refit._make_scaled_cache()
    cache.claim(LAYERS)
    cache.set(FIRST)
    assert refit.kv_scales()[f"{LAYERS[0]}.v_scale"] == [0.5, 0.5]
