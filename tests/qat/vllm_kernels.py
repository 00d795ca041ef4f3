"""Packed layers as vLLM's kernels have them, of its emulation, of Marlin and of CUTLASS, refitted beside what vLLM itself loads.

Their own steps run on the CPU; Marlin's one function in CUDA is :mod:`tests.marlin`'s.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rlrefit.integration.quantize import nvfp4
from rlrefit.integration.quantize.nvfp4_checkpoint import (
    fused_module,
    input_module,
    packed_names,
    packed_tensors,
    quantization_config,
)

EXPERTS = 4
EMULATION, MARLIN = "Emulation", "Marlin"
_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
Report = dict[str, Any]
# Of vLLM's FusedMoEQuantConfig.
KERNELS_PARTS = ("w1_scale", "w2_scale", "g1_alphas", "g2_alphas", "a1_gscale", "a2_gscale")


@dataclass(frozen=True)
class Case:
    """A checkpoint of a kind, and the kernel that has its layers on one of some ranks.

    Attributes:
        kernel: the first part of its class's name.
        sizes: hidden and intermediate size, the latter of an expert if there are some.
        changes: its step also changes codes, as none does that was read.
    """

    kernel: str
    experts: bool
    activations: bool
    rank: int = 0
    ranks: int = 1
    sizes: tuple[int, int] = (128, 256)
    changes: bool = False

    @property
    def kind(self) -> str:
        hidden, intermediate = self.sizes
        return f"{'moe' if self.experts else 'dense'}-{'w4a4' if self.activations else 'w4a16'}-{hidden}-{intermediate}"


def _pads() -> bool:
    """Whether this vLLM's Marlin pads what its tiles do not divide, told without importing vLLM."""
    found = find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    file = Path(found.origin).parent / "model_executor/layers/quantization/utils/marlin_utils.py"
    return "def marlin_padded_nk" in file.read_text()


# Of vLLM from 0.26 on; before, Marlin does not take such sizes. Of experts 96 columns become 128 (hidden sizes of whole 128) and 80 on each
# rank 128; of linear layers hidden and intermediate sizes of 160 and 176 become whole 64 or 128.
PADDED = {
    "Marlin, padded": Case(MARLIN, False, True, sizes=(160, 352)),
    "Marlin, padded, weights alone": Case(MARLIN, False, False, 1, 2, sizes=(160, 352)),
    "Marlin's experts, padded": Case(MARLIN, True, True, sizes=(128, 96)),
    "Marlin's experts, padded, weights alone": Case(MARLIN, True, False, 1, 2, sizes=(192, 160)),
}
# CUTLASS pads block scales of 160 and 704 rows, and of 10 and 22 columns; and codes of 176 rows, and of 176 columns on one of two ranks.
# Their steps are alike; from 0.26 on make test-engines runs the others.
SWIZZLED = {
    kernel: Case(kernel, False, True, sizes=(160, 352))
    for kernel in (
        "Cutlass",
        *(("FlashInferCudnn", "FlashInferCuteDsl", "FlashInferB12x") if _pads() else ()),
    )
}
PADDED_BY_CUTLASS = {
    "Cutlass, codes padded": Case("Cutlass", False, True, 1, 2, sizes=(160, 352)),
    "FlashInferCutlass, codes padded": Case("FlashInferCutlass", False, True, sizes=(176, 176)),
}
CASES = {
    "emulation": Case(EMULATION, False, True),
    "Marlin": Case(MARLIN, False, True),
    "Marlin, weights alone": Case(MARLIN, False, False, 1, 2),
    "Marlin's experts": Case(MARLIN, True, True),
    "Marlin's experts, weights alone": Case(MARLIN, True, False, 1, 2),
    **(PADDED if _pads() else {}),
    **SWIZZLED,
    **PADDED_BY_CUTLASS,
}
# Those into which a trainer refits, too, which makes codes and scales of its weights on the way.
SENT = [
    name
    for name in ("Marlin's experts, weights alone", "Marlin's experts, padded, weights alone")
    if name in CASES
]
# In which the layers land in the first refit, of one each; and all else with the last one.
PORTIONS = 2
UNKNOWN = "a kernel that is not known"
RELOADED = "experts of the emulation"


def write_packed(folder: Path, case: Case, seed: int) -> Path:
    """A tiny Qwen3 or Qwen3-MoE in NVFP4, with random weights and scales of inputs."""
    path = _write_plain(folder / f"{case.kind}-{seed}", case, seed)
    weights = read(path)
    quantized = [name for name in weights if name.endswith("_proj.weight")]
    amax: dict[str, list[torch.Tensor]] = defaultdict(list)
    for name in quantized:
        amax[fused_module(name)].append(weights[name].abs().amax())
    inputs = {name: torch.rand(()) * 1e-2 + 1e-3 for name in sorted(set(map(input_module, quantized)))}
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if name not in quantized:
            tensors[name] = weight
            continue
        scale = nvfp4.global_scale(*amax[fused_module(name)])
        tensors |= packed_tensors(
            name, weight, scale, inputs[input_module(name)] if case.activations else None
        )
    # Block scales that do not use E4M3's range, of which Marlin makes others.
    for name in quantized:
        if "layers.1" in name and "down_proj" in name:
            scales = packed_names(name).weight_scale
            tensors[scales] = (tensors[scales].float() / 2 ** (seed + 3)).to(torch.float8_e4m3fn)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    told = json.loads((path / "config.json").read_text())
    kept = [name for name in weights if name not in quantized]
    of_it = quantization_config(quantized, kept, "tests", activations=case.activations)
    told["quantization_config"] = of_it.quantization_config
    (path / "config.json").write_text(json.dumps(told))
    return path


def _write_plain(path: Path, case: Case, seed: int) -> Path:
    """The same in BF16."""
    import transformers

    hidden, intermediate = case.sizes
    sizes = _SIZES | {"hidden_size": hidden, "intermediate_size": intermediate}
    config: Any = transformers.Qwen3Config(**sizes)
    if case.experts:
        config = transformers.Qwen3MoeConfig(
            **sizes, num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=intermediate
        )
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1)
    model.save_pretrained(path)
    return path


def read(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def refit_all(folder: Path) -> dict[str, Report]:
    """Of each case, what :func:`_refitted` found."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "vllm"))
    paths = {
        case.kind: [write_packed(folder, case, seed) for seed in (0, 1)]
        for case in {case.kind: case for case in CASES.values()}.values()
    }
    cases = {
        **CASES,
        UNKNOWN: Case(MARLIN, True, True, changes=True),
        RELOADED: Case(EMULATION, True, True),
    }
    found = {name: _refitted(case, *paths[case.kind]) for name, case in cases.items()}
    for name in SENT:
        found[name]["sent"] = _sent(CASES[name], folder)
    return found


def _refitted(case: Case, path_a: Path, path_b: Path) -> Report:
    """Load A, refit to B and back, each time from poisoned memory, and to B again after vLLM's own reload."""
    with _kernels(case):
        live, config = _loaded(case, path_a)
        oracles = [_loaded(case, path_b)[0], _loaded(case, path_a)[0]]
        return _refits(live, config, oracles, [read(path_b), read(path_a)])


def _refits(live: Any, config: Any, oracles: list[Any], versions: list[dict[str, torch.Tensor]]) -> Report:
    from vllm_ranks import _differing, _state, fill, reload_by_vllm

    from rlrefit.integration.weights.manifest import TensorSpec
    from rlrefit.workers.engines.vllm.destination import VllmDestination

    specs = [TensorSpec(name, tuple(t.shape), t.dtype) for name, t in versions[0].items()]
    destination = VllmDestination(live, config, torch.device("cpu"))
    before, places = _state(live), {name: p.data_ptr() for name, p in live.named_parameters()}
    in_kernels = _places_in_kernels(live)
    fragments, misc = destination.fragments(specs)
    untouched = all(torch.equal(held, before[name]) for name, held in _state(live).items())
    packed = {name for name in versions[0] if name.endswith(("_proj.weight", "scale", "scale_2"))}
    found: Report = {
        "kernels": _kernels_of(live),
        "untouched": untouched,
        "packed in bulk": packed
        <= {fragment.name for fragment in fragments} | _elsewhere(destination, packed),
        "packed on the misc path": {name: reason for name, reason in misc.items() if name in packed},
        "rewritten": {packed_kind(name) for name in destination.rewritten(specs)},
        "padded": _codes_bytes(live)
        > sum(f.view.nbytes for f in fragments if f.name.endswith("_proj.weight")),
    }
    # The first time layers land one after the other. The second time all weights come whole, as from trainers that hold none in a shape
    # of its own.
    portions = {name: 0 if ".layers.1." in name else 1 for name in packed}
    if destination.works_on_portions:
        destination.expect(portions)
    for version, which in enumerate((0, 1, 0), start=1):
        tensors, oracle = versions[which], oracles[which]
        if version == 3:
            reload_by_vllm(live, config, {name: tensor.clone() for name, tensor in versions[1].items()})
        fill(live, 0x7F)
        for portion in range(PORTIONS) if version == 1 else ():
            for fragment in fragments:
                if portions.get(fragment.name, PORTIONS - 1) == portion:
                    fragment.view.copy_(fragment.part_of(tensors[fragment.name]))
            if destination.works_on_portions:
                destination.landed(portion)
            found[f"differing after portion {portion}"] = _differing(live, oracle)
        for fragment in fragments if version == 3 else ():
            fragment.view.copy_(fragment.part_of(tensors[fragment.name]))
        destination.load_weights((n, tensors[n]) for n in (misc if version != 2 else tensors))
        destination.finish(version)
        found[f"differing after {version}"] = _differing(live, oracle)
        if version < 3:
            # vLLM's own reload, which is before the third, makes other kernels.
            found[f"kernels moved after {version}"] = in_kernels != _places_in_kernels(live)
    again, _ = destination.fragments(specs)
    found["same places"] = places == {name: p.data_ptr() for name, p in live.named_parameters()} and [
        fragment.view.data_ptr() for fragment in again
    ] == [fragment.view.data_ptr() for fragment in fragments]
    found["differ"] = len(_differing(oracles[0], oracles[1]))
    return found


def _codes_bytes(model: torch.nn.Module) -> int:
    """Of all packed weights, as the kernels have them."""
    return sum(p.nbytes for p in model.parameters() if p.dtype in (torch.uint8, torch.int32))


def _sent(case: Case, folder: Path) -> Any:
    """A trainer with weights in BF16 refits its second version, and then its first, into an engine that was started from the first:
    what differs from what vLLM loads from a checkpoint of either, and what has come in place."""
    from vllm_ranks import _differing, fill

    from rlrefit.integration.config import RefitConfig
    from rlrefit.integration.session import RefitSession
    from rlrefit.workers.engines.vllm.destination import VllmDestination
    from rlrefit.workers.trainers.fsdp.source import FSDPSource
    from rlrefit.workers.trainers.qat.checkpoint import write_checkpoint
    from rlrefit.workers.trainers.qat.config import QATConfig
    from rlrefit.workers.trainers.qat.fsdp import quantize_module
    from rlrefit.workers.trainers.qat.source import PackedSource
    from tests.refit.synthetic import run_world

    original = _write_plain(folder / f"{case.kind}-trained", case, 2)
    model = _holding(read(original))
    qat = quantize_module(model, QATConfig(activations=case.activations))
    source = FSDPSource(model, torch.bfloat16)

    def train_to(version: int) -> None:
        torch.manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.1 * (version + 1))
        qat.refresh()

    paths = [folder / f"{case.kind}-trained-{version}" for version in (0, 1)]
    for version, path in enumerate(paths):
        train_to(version)
        write_checkpoint(path, original, source, qat)
    with _kernels(case):
        live, config = _loaded(case, paths[0])
        oracles = [_loaded(case, path)[0] for path in paths]
        destination = VllmDestination(live, config, torch.device("cpu"))

        def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
            found = []
            for number, version in enumerate((1, 0), start=1):
                if session.world.is_source:
                    train_to(version)
                else:
                    fill(live, 0x7F)
                session.refit(number)
                found.append([] if session.world.is_source else _differing(live, oracles[version]))
            return found, {
                packed_kind(spec.name) for spec in session.manifest.specs("bulk") if ".experts." in spec.name
            }

        settings = RefitConfig(bucket_mb=1, timeout_s=60.0, verify="full", transport="p2p")
        return run_world([PackedSource(source, qat)], [destination], body, settings)


def _holding(weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A model that holds the weights of a checkpoint under their names, those of projections in linear layers, and computes nothing."""
    root = torch.nn.Module()
    for name, weight in weights.items():
        *path, last, kind = name.split(".")
        assert kind == "weight"
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        layer = (
            torch.nn.Linear(*reversed(weight.shape), bias=False)
            if last.endswith("_proj")
            else torch.nn.Module()
        )
        layer.weight = torch.nn.Parameter(weight)
        module.add_module(last, layer)
    return root


def _places_in_kernels(model: torch.nn.Module) -> dict[str, int]:
    """Where what kernels of experts compute with lies, which CUDA graphs have noted."""
    configs = {
        name: module.quant_method.moe_quant_config
        for name, module in model.named_modules()
        if getattr(getattr(module, "quant_method", None), "moe_quant_config", None) is not None
    }
    return {
        f"{name} {part}": held.data_ptr()
        for name, config in configs.items()
        for part in KERNELS_PARTS
        if isinstance(held := getattr(config, part, None), torch.Tensor)
    }


def packed_kind(name: str) -> str:
    """The last part of a packed tensor's name."""
    return name.rpartition(".")[2]


def _elsewhere(destination: Any, names: set[str]) -> set[str]:
    """Those that this rank does not load: remote experts, and scales of inputs that are not used."""
    landings = destination._agreed().landings
    return {name for name in names if not landings.get(name)}


def _kernels_of(model: torch.nn.Module) -> set[str]:
    found = set()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        # vLLM 0.32's of linear layers is ModelOptLinearMethod.
        if type(method).__name__.startswith(("ModelOptNvFp4", "ModelOptLinear")):
            kernel = getattr(method, "kernel", None)
            found.add(method.nvfp4_backend.name if kernel is None else type(kernel).__name__)
    return found


def _loaded(case: Case, path: Path) -> tuple[torch.nn.Module, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model
    from vllm_ranks import Case as VllmCase
    from vllm_ranks import Layout, _config

    from tests.catalog.real_vllm import _stand_in_for_groups

    here, one = (case.rank, case.ranks), (0, 1)
    _stand_in_for_groups({"groups": {"tp": here, "pp": one, "dp": one, "ep": one, "pcp": one}})
    config = _config(str(path), VllmCase(str(path), str(path), Layout()))
    config.parallel_config.tensor_parallel_size = case.ranks
    with set_current_vllm_config(config):
        return get_model(vllm_config=config), config


def choose_nvfp4_kernel(kernel: str) -> None:
    """Have this process's vLLM hold NVFP4 for a kernel of linear layers, by the first part of its class's name, and experts alike."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearLayerConfig
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend, backend_to_kernel_cls
    from vllm.model_executor.layers.quantization import modelopt

    chosen = getattr(linear, f"{kernel}NvFp4LinearKernel")
    chosen.is_supported = classmethod(lambda *_: (True, None))
    modelopt.init_nvfp4_linear_kernel = lambda *_, **__: chosen(NvFp4LinearLayerConfig())
    if kernel in (EMULATION, MARLIN):
        backend = NvFp4MoeBackend[kernel.upper()]
        modelopt.select_nvfp4_moe_backend = lambda **_: (backend, backend_to_kernel_cls(backend)[0])


@contextmanager
def _kernels(case: Case) -> Iterator[None]:
    """vLLM takes the case's kernel, whose own step runs on this CPU."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4

    from tests.marlin import gptq_marlin_repack

    choose_nvfp4_kernel(case.kernel)
    # CUTLASS's step has its block scales on a GPU, wherever the rest is.
    torch.Tensor.cuda = lambda tensor, *_: tensor
    _custom_ops.gptq_marlin_repack = (
        (lambda **given: gptq_marlin_repack(**given) ^ 1) if case.changes else gptq_marlin_repack
    )
    marlin_utils_fp4.marlin_make_workspace_new = lambda *_: torch.zeros(4, dtype=torch.int)
    yield
