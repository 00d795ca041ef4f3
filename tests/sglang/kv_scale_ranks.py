"""SGLang's models with an FP8 KV cache on two ranks without an engine, refitted with weights and scales; SGLang does all the loading."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import nn

from rlrefit.integration.errors import RefitError
from rlrefit.workers.kv_scales.endpoints import KvScaleDestination, KvScaleSource, Scales
from tests.fp8_refits import Sessions, State, bytes_of, differing, poison, refit_by_both_engines
from tests.gpu.vllm_checkpoints import quantize_in_blocks, read_checkpoint, write_checkpoint
from tests.gpu.vllm_trainer import CheckpointSource

from .fp8_ranks import Fp8Case, kernels
from .models import begin, load_model

if TYPE_CHECKING:
    from rlrefit.integration.config import RefitConfig
    from rlrefit.workers.engines.sglang.destination import SglangDestination

CPU = torch.device("cpu")
LAYERS = [f"model.layers.{i}.self_attn" for i in range(2)]
# Of two calibrations; the second one is without queries.
GIVEN = (
    {f"{layer}.{kind}_scale": 0.1 * (3 * i + j + 1) for i, layer in enumerate(LAYERS) for j, kind in enumerate("kvq")},
    {f"{layer}.{kind}_scale": 0.07 * (2 * i + j + 2) for i, layer in enumerate(LAYERS) for j, kind in enumerate("kv")},
)  # fmt: skip
CASES = ("Qwen3", "Qwen3-MoE", "Llama", "Qwen2 in FP8 blocks")
# What SGLang makes scales for, without touching a weight: ModelOpt's form of a checkpoint whose cache alone is quantized.
_CACHE_ALONE = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "ignore": ["*"],
    "kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": False},
}


@dataclass(frozen=True)
class ScaledCase:
    """An engine of two ranks.

    Attributes:
        trained: two checkpoints in BF16, as a trainer has the weights.
        served: the same as SGLang loads them, with the scales of :data:`GIVEN`.
        loads: whether SGLang takes scales of this model from a checkpoint.
        blocks: the trainer makes FP8 blocks.
    """

    trained: tuple[str, str]
    served: tuple[str, str]
    loads: bool
    blocks: bool


@dataclass(frozen=True)
class ScaledResult:
    """What one rank saw.

    Attributes:
        made: how many layers SGLang itself had made scales for.
        weights: parameters with other bytes than those that SGLang loads; by occasion.
        scales: attributes of layers that are not what SGLang makes of these scales; by occasion.
        moved: tensors that don't lie where they did before all refits.
        told: what the engine says of its scales at the end.
        stored: keys and values, divided and stored by SGLang's memory pool, that are not the same to the bit as with a layer of SGLang's.
        error: the largest relative error of those, times their scale.
        nan: whether keys beyond the calibration's became NaN in the pool.
        refused: texts of errors, by occasion.
    """

    made: int
    weights: dict[str, list[str]]
    scales: dict[str, list[str]]
    moved: list[str]
    told: dict[str, list[float]]
    stored: list[str]
    error: float
    nan: bool
    refused: dict[str, str]


def write_case(folder: Path, name: str) -> ScaledCase:
    loads, blocks = name == "Llama", name.endswith("blocks")

    def write(kind: str, seed: int) -> str:
        path = folder / f"{kind}_{seed}"
        if name.startswith("Qwen3"):
            return write_checkpoint(path, seed, fp8=False, experts=name == "Qwen3-MoE")
        return _write_other(path, seed, "LlamaConfig" if loads else "Qwen2Config")

    trained, served = (tuple(write(kind, seed) for seed in (1, 2)) for kind in ("trained", "served"))
    for path, given in zip(served, GIVEN, strict=True):
        if blocks:
            quantize_in_blocks(Path(path))
        elif loads:
            _set(path, _CACHE_ALONE)
        tensors = read_checkpoint(path)
        # SGLang knows no scales of queries.
        scales = {n: torch.tensor(value) for n, value in given.items() if not n.endswith("q_scale")}
        save_file(tensors | scales, Path(path) / "model.safetensors", metadata={"format": "pt"})
    return ScaledCase(trained, served, loads, blocks)


def _write_other(path: Path, seed: int, kind: str) -> str:
    """As :func:`write_checkpoint`, of a family that hands its quantization to its attention."""
    import transformers

    config = json.loads(Path(write_checkpoint(path, seed, fp8=False), "config.json").read_text())
    sizes = {
        name: value for name, value in config.items() if name.endswith(("size", "heads", "hidden_layers"))
    }
    # Heads of 64 numbers, so that each rank has whole blocks of keys.
    sizes |= {"num_attention_heads": 4}
    made = getattr(transformers, kind)(**sizes, max_position_embeddings=2048, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_config(made).to(torch.bfloat16)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(path)
    return str(path)


def _set(path: str, quantization: Mapping[str, Any]) -> None:
    file = Path(path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": dict(quantization)}))


class _Trainer(KvScaleSource):
    """Holds the weights of one checkpoint after the other, and has a calibration with each."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._checkpoints = CheckpointSource(paths, CPU)
        super().__init__(self._checkpoints)

    def take_on(self, index: int) -> None:
        self._checkpoints.take_on(index)
        self.give(GIVEN[index])


def refit_scales(rank: int, cases: Sequence[ScaledCase]) -> list[ScaledResult]:
    begin(rank, cases[0].trained[0])
    found = []
    for case in cases:
        with kernels(Fp8Case(case.trained, case.served)), _graphs("disabled"):
            found.append(_one_case(rank, case))
    return found


def runner_of(path: str, **changes: Any) -> Any:
    """What a worker uses of its ``ModelRunner``, on a GPU without CUDA graphs."""
    loaded = load_model(path)
    return SimpleNamespace(
        **(
            vars(loaded)
            | {
                "server_args": SimpleNamespace(enable_memory_saver=False),
                "prefill_attention_backend_str": "triton",
                "decode_attention_backend_str": "triton",
                "kv_cache_dtype_str": "fp8_e4m3",
            }
            | changes
        )
    )


def _one_case(rank: int, case: ScaledCase) -> ScaledResult:
    from rlrefit.workers.engines.sglang.destination import SglangDestination
    from rlrefit.workers.engines.sglang.kv_scales import SglangScaledCache

    # Not of the checkpoint that comes first, nor with its scales.
    runner = runner_of(case.served[1])
    loaded = [load_model(path).model for path in case.served]
    attentions = _attentions(runner.model)
    made = sum(attention.k_scale is not None for attention in attentions.values())
    refused = _refusals(runner)
    cache = SglangScaledCache(runner, CPU)
    destination = SglangDestination(runner, CPU)
    expected = [
        _as_sglang_has_them(model, given, case.loads) for model, given in zip(loaded, GIVEN, strict=True)
    ]
    before = _places(runner.model)
    weights: dict[str, list[str]] = {}
    scales: dict[str, list[str]] = {}

    def sessions_by(engine: str, config: RefitConfig) -> Sessions:
        destination.new_epoch()
        source = _Trainer(case.trained) if rank == 0 else None
        config = replace(config, trainer_quantize_fp8=case.blocks, kv_scales=True)
        return Sessions(rank, engine, config, source, KvScaleDestination(destination, cache), 1)

    def poison_all() -> None:
        poison([*_weights(runner.model).values(), *_scale_tensors(runner.model).values()])
        for attention in attentions.values():
            attention.k_scale_float = attention.v_scale_float = 7.0

    def look(occasion: str, index: int) -> None:
        weights[occasion] = differing(bytes_of(_weights(runner.model)), bytes_of(_weights(loaded[index])))
        scales[occasion] = _other(_attributes(runner.model), _attributes_of(expected[index]))

    refit_by_both_engines(sessions_by, poison_all, look)
    scales["woken"] = _woken(destination, runner.model, expected[0])
    stored, error, nan = _stored(attentions[LAYERS[0] + ".attn"], expected[0][LAYERS[0] + ".attn"])
    return ScaledResult(
        made,
        weights,
        scales,
        [name for name, place in _places(runner.model).items() if before[name] != place],
        cache.live(),
        stored,
        error,
        nan,
        refused,
    )


def _woken(destination: SglangDestination, model: nn.Module, expected: Mapping[str, Any]) -> list[str]:
    """The end of a refit that brings no scales, after a sleep that discarded the parameters."""
    poison(parameter for name, parameter in model.named_parameters() if name.endswith("_scale"))
    destination.finish(99)
    return _other(_attributes(model), _attributes_of(expected))


def _attentions(model: nn.Module) -> dict[str, Any]:
    from sglang.srt.layers.radix_attention import RadixAttention

    return {name: module for name, module in model.named_modules() if isinstance(module, RadixAttention)}


def _as_sglang_has_them(model: nn.Module, given: Mapping[str, float], loads: bool) -> dict[str, Any]:
    """Attention layers with these scales: as SGLang has loaded them; or, where it loads none, as its own method for them would."""
    from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod

    attentions = _attentions(model)
    if loads:
        return attentions
    method = BaseKVCacheMethod(mock.Mock())
    for name, attention in attentions.items():
        method.create_weights(attention)
        for kind in "kv":
            getattr(attention, f"{kind}_scale").data.fill_(
                given[f"{name.removesuffix('.attn')}.{kind}_scale"]
            )
        method.process_weights_after_loading(attention)
    return attentions


def _attributes(model: nn.Module) -> dict[str, Any]:
    return _attributes_of(_attentions(model))


def _attributes_of(attentions: Mapping[str, Any]) -> dict[str, Any]:
    """What is read of the layers' scales: bytes of the tensors with their dtypes and shapes, and the numbers."""
    found: dict[str, Any] = {}
    for name, attention in attentions.items():
        for kind in "kv":
            held = getattr(attention, f"{kind}_scale").detach()
            found[f"{name}.{kind}_scale"] = (held.dtype, tuple(held.shape), held.numpy().tobytes())
            found[f"{name}.{kind}_scale_float"] = getattr(attention, f"{kind}_scale_float")
    return found


def _other(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, value in found.items() if value != expected[name]]


def _weights(model: nn.Module) -> State:
    return {n: p.detach() for n, p in model.named_parameters() if not n.endswith((".k_scale", ".v_scale"))}


def _scale_tensors(model: nn.Module) -> State:
    return {
        f"{name}.{kind}": getattr(a, f"{kind}_scale").data
        for name, a in _attentions(model).items()
        for kind in "kv"
    }


def _places(model: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in (_weights(model) | _scale_tensors(model)).items()}


def _stored(live: Any, sglangs: Any) -> tuple[list[str], float, bool]:
    """Keys and values of a few tokens in SGLang's own memory pool, by the live layer and by one of SGLang's."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool

    torch.manual_seed(0)
    # What the calibration saw, and once more than its margin leaves room for.
    keys, values = (torch.rand(8, live.tp_k_head_num, live.head_dim, dtype=torch.bfloat16) for _ in "kv")
    keys *= 448 * live.k_scale_float / keys.max()
    values *= 448 * live.v_scale_float / values.max()

    def held(layer: Any, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pool = MHATokenToKVPool(
            size=16,
            page_size=1,
            dtype=torch.float8_e4m3fn,
            head_num=layer.tp_k_head_num,
            head_dim=layer.head_dim,
            layer_num=2,
            device="cpu",
            enable_memory_saver=False,
        )
        slots = torch.arange(1, 9)
        pool.set_kv_buffer(
            layer, KVWriteLoc(slots, None), keys.clone(), values.clone(), layer.k_scale, layer.v_scale
        )
        return tuple(buffer[slots] for buffer in pool.get_kv_buffer(layer.layer_id))  # type: ignore[return-value]

    ours, theirs = held(live, keys), held(sglangs, keys)
    stored = [
        kind
        for kind, a, b in zip("kv", ours, theirs, strict=True)
        if not torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    ]
    error = max(
        ((found.float() * scale - true.float()).abs().max() / true.float().abs().max()).item()
        for found, scale, true in zip(
            ours, (live.k_scale_float, live.v_scale_float), (keys, values), strict=True
        )
    )
    return stored, error, bool(held(live, keys * 1.2)[0].float().isnan().any())


@contextmanager
def _graphs(decode: str, prefill: str = "disabled") -> Iterator[None]:
    """An engine that was started with these graphs."""
    chosen = {"decode": decode, "prefill": prefill}
    asked = "rlrefit.workers.engines.sglang.kv_scales.check_cuda_graph_backend"
    with mock.patch(asked, side_effect=lambda phase, backend: chosen[phase] == backend):
        yield


def _refusals(runner: Any) -> dict[str, str]:
    """Of the engine as it was started, before it has any scales."""
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.layers.radix_attention import AttentionType

    from rlrefit.workers.engines.sglang.kv_scales import SglangScaledCache

    first, second = list(_attentions(runner.model).values())[:2]

    def told(**changes: Any) -> str:
        changed = SimpleNamespace(**(vars(runner) | changes))
        try:
            SglangScaledCache(changed, CPU)
        except RefitError as error:
            return str(error)
        return ""

    def backends(name: str) -> dict[str, str]:
        return {"prefill_attention_backend_str": name, "decode_attention_backend_str": name}

    def with_graphs(decode: str, prefill: str = "disabled", **changes: Any) -> str:
        with _graphs(decode, prefill):
            return told(**changes)

    def with_layer(changes: Mapping[str, Any], **more: Any) -> str:
        with mock.patch.multiple(first, **changes):
            return told(**more)

    def with_numbers() -> str:
        """As ``quantization_param_path`` leaves layers that have no tensors."""
        return with_layer({"k_scale": 0.5, "v_scale": 0.5}) if first.k_scale is None else ""

    asked: dict[str, Callable[[], str]] = {
        **{
            name: lambda name=name: told(**backends(name))
            for name in ("torch_native", "flashinfer", "trtllm_mha")
        },
        "auto": lambda: told(kv_cache_dtype_str="auto"),
        "fp8_e5m2": lambda: told(kv_cache_dtype_str="fp8_e5m2"),
        "latent": lambda: told(model_config=SimpleNamespace(attention_arch=AttentionArch.MLA)),
        "triton, graphs of decoding": lambda: with_graphs("full"),
        "triton, graphs of prefill": lambda: with_graphs("disabled", "full"),
        "wide heads": lambda: with_layer({"qk_head_dim": 320}, **backends("fa3")),
        "two layers of one cache": lambda: with_layer({"layer_id": second.layer_id}),
        "bidirectional": lambda: with_layer({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}),
        "numbers": with_numbers,
        "all at once": lambda: told(kv_cache_dtype_str="auto", **backends("flashinfer")),
    }
    with mock.patch("rlrefit.workers.engines.sglang.kv_scales.is_hip", return_value=True):
        found = {"AMD": told()}
    with mock.patch("sglang.__version__", "0.5.99"):
        found["unknown release"] = told()
    found |= {occasion: ask() for occasion, ask in asked.items()}
    # Those that are taken come last, since they give the layers their scales: graphs of which the layers had tensors as they were captured.
    return found | {
        "fa3, graphs": with_graphs("full", **backends("fa3")),
        "fa3": told(**backends("fa3")),
        "wide heads, triton": with_layer({"qk_head_dim": 320}),
        "fa3, large queries": _large_queries(runner, backends("fa3")),
        "triton, large queries": _large_queries(runner, backends("triton")),
        "fa3, graphs with scales": with_graphs("full", **backends("fa3")),
    }


def _large_queries(runner: Any, backends: Mapping[str, str]) -> str:
    from rlrefit.workers.engines.sglang.kv_scales import SglangScaledCache

    cache = SglangScaledCache(SimpleNamespace(**(vars(runner) | dict(backends))), CPU)
    assert cache.claim([*LAYERS, "model.layers.7.self_attn"]) == (LAYERS, [])
    assert cache.claim(LAYERS[:1]) == (LAYERS[:1], [f"{LAYERS[1]}.attn"])
    try:
        cache.set({LAYERS[0]: Scales(1.0, 1.0, 1.5)})
    except RefitError as error:
        return f"{error.parameter}: {error}"
    return ""
