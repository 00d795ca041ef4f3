"""SGLang's models in FP8 blocks or MXFP8 on a few ranks without an engine, refitted with codes and scales; SGLang does all the
loading."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from rlrefit.integration.quantize import fp8_blockwise, mxfp8
from rlrefit.integration.quantize.fp8_blockwise import ScaleFormat
from rlrefit.integration.weights.manifest import TensorSpec
from tests.fp8_refits import (
    Sessions,
    State,
    bytes_of,
    differing,
    poison,
    refit_by_both_engines,
    refit_sparsely,
    refusal,
)
from tests.gpu.vllm_checkpoints import quantize_to_mxfp8, read_checkpoint, write_checkpoint
from tests.gpu.vllm_trainer import CheckpointSource

from .models import begin, load_model

if TYPE_CHECKING:
    from rlrefit.integration.config import RefitConfig
    from rlrefit.integration.quantize.formats import Format
    from rlrefit.workers.engines.sglang.destination import SglangDestination

CPU = torch.device("cpu")
# Options of :class:`Fp8Case`, by what SGLang would compute with.
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {"experts": True},
    "experts, CUTLASS": {"experts": True, "runner": "cutlass"},
    "experts, TRT-LLM": {"experts": True, "runner": "flashinfer_trtllm_routed"},
    "experts, HPC-Ops": {"experts": True, "runner": "hpc_ops"},
    "dense, Blackwell": {"blackwell": True},
    "experts, Blackwell": {"experts": True, "blackwell": True, "runner": "deep_gemm"},
    "experts, Blackwell, quantized before": {
        "experts": True,
        "blackwell": True,
        "runner": "deep_gemm",
        "quantized_before": True,
    },
    "dense, unknown kernel": {"shuffled": True},
    "dense, MXFP8": {"mxfp8": "own"},
    "dense, MXFP8, CUTLASS": {"mxfp8": "flashinfer_cutlass"},
    "dense, MXFP8, DeepGEMM": {"mxfp8": "deep_gemm"},
    "dense, MXFP8, TRT-LLM": {"mxfp8": "flashinfer_trtllm"},
}
# Of which no refit is taken.
MXFP8_EXPERTS = "experts, MXFP8"
# What a release computes with where neither FlashInfer's CUTLASS nor DeepGEMM is chosen.
_OWN_MXFP8 = {"0.5.17": "triton", "0.5.23": "flashinfer_cutedsl"}


@dataclass(frozen=True)
class Fp8Case:
    """An engine of a few ranks.

    Attributes:
        trained: two checkpoints in BF16, as a trainer has the weights.
        served: the same in FP8 blocks or MXFP8, as SGLang loads them.
        blackwell: DeepGEMM has the scales packed.
        runner: what computes with experts.
        shuffled: a kernel for linear layers that is not known to compute with weights as they are loaded.
        quantized_before: the trainer itself holds the codes and scales of ``served``.
        mxfp8: what computes with linear layers in MXFP8, of SGLang's names; empty for FP8 blocks.
        refused: no refit of it is taken.
    """

    trained: tuple[str, str]
    served: tuple[str, str]
    blackwell: bool = False
    runner: str = "triton"
    shuffled: bool = False
    quantized_before: bool = False
    mxfp8: str = ""
    refused: bool = False


def written(folder: Path, *, experts: bool = False, **options: Any) -> Fp8Case:
    """A case with ``options`` of :class:`Fp8Case`, and its checkpoints in ``folder``."""
    in_mxfp8 = bool(options.get("mxfp8"))
    # Others than powers of two have to be quantized once more.
    trained_so = options.get("blackwell") and not options.get("quantized_before")
    scale = ScaleFormat.UE8M0 if trained_so else ScaleFormat.FP32
    trained, served = (
        (
            write_checkpoint(folder / f"{kind} 1", 1, experts=experts, fp8=blocks, scale=scale),
            write_checkpoint(folder / f"{kind} 2", 2, experts=experts, fp8=blocks, scale=scale),
        )
        for kind, blocks in (("trained", False), ("served", not in_mxfp8))
    )
    if in_mxfp8:
        quantization = {
            "quant_method": "mxfp8",
            "activation_scheme": "dynamic",
            "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
        }
        for path in served:
            quantize_to_mxfp8(Path(path), quantization, "_scale_inv")
    return Fp8Case(trained, served, **options)


@dataclass(frozen=True)
class Fp8Result:
    """What one rank saw.

    Attributes:
        own: weights that it says to hold quantized.
        reasons: of what goes through the loader.
        routes: how many weights of the refit took each route; codes and scales count as two.
        differing: parameters, and copies of scales, with other bytes than they should have; by occasion.
        other_numbers: those weights that stand for other numbers than in a model that SGLang loaded; by occasion.
        moved: parameters and copies that don't lie where they did before all refits.
        packed: how many parameters of scales are packed.
        sparse: which of four refits were.
        refused: texts of errors, by occasion.
    """

    own: dict[str, Format]
    reasons: dict[str, str]
    routes: dict[str, int]
    differing: dict[str, list[str]]
    other_numbers: dict[str, list[str]]
    moved: list[str]
    packed: int
    sparse: list[bool]
    refused: dict[str, str]


def refit_fp8(rank: int, ranks: int, cases: Sequence[Fp8Case]) -> list[Fp8Result]:
    begin(rank, cases[0].served[0], ranks)
    # What is first imported among stand-ins would be forgotten with them.
    from rlrefit.workers.engines.sglang import destination  # noqa: F401

    results = []
    for case in cases:
        with kernels(case):
            results.append((_refused_case if case.refused else _one_case)(rank, case))
    return results


@contextmanager
def kernels(case: Fp8Case) -> Iterator[None]:
    """What SGLang would choose on the case's GPUs."""
    from sglang.srt import runtime_context
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.deep_gemm_wrapper import configurer
    from sglang.srt.layers.moe import MoeRunnerBackend
    from sglang.srt.layers.quantization import fp8

    blackwell = case.blackwell or bool(case.mxfp8)
    facts = {"is_sm90": not blackwell, "is_sm100": blackwell}
    asked = hasattr(runtime_context, "override_platform")  # not in 0.5.17, which has a function for each
    functions = (
        {} if asked else {f"{fact}_supported": lambda is_so=is_so: is_so for fact, is_so in facts.items()}
    )
    if case.shuffled:
        functions["dispatch_w8a8_block_fp8_linear"] = lambda **_: _shuffling
    with ExitStack() as stack:
        if asked:
            stack.enter_context(runtime_context.override_platform(**facts))
        for owner, values in (
            (runtime_context.get_flags().moe, {"runner_backend": MoeRunnerBackend(case.runner)}),
            (
                deep_gemm_wrapper,
                {"ENABLE_JIT_DEEPGEMM": case.blackwell, "DEEPGEMM_SCALE_UE8M0": case.blackwell},
            ),
            (configurer, {"DEEPGEMM_SCALE_UE8M0": blackwell}),
            (fp8, {"cutlass_fp8_supported": lambda: True} | functions),
            (torch.cuda, {"get_device_capability": lambda *_: (10, 0) if blackwell else (9, 0)}),
        ):
            stack.enter_context(mock.patch.multiple(owner, **values))
        if blackwell:
            stack.enter_context(mock.patch.dict(sys.modules, _stand_in_for_deep_gemm()))
        if case.mxfp8:
            _choose_mxfp8(stack, case)
        yield


def _choose_mxfp8(stack: ExitStack, case: Fp8Case) -> None:
    """Until ``stack`` closes."""
    import sglang
    from sglang.srt.layers.quantization import fp8, fp8_utils

    kernel = _OWN_MXFP8[sglang.__version__] if case.mxfp8 == "own" else case.mxfp8
    if hasattr(fp8_utils, "Mxfp8DenseGemmBackend"):  # not in 0.5.17
        found = {"resolve_mxfp8_dense_gemm_backend": lambda: fp8_utils.Mxfp8DenseGemmBackend(kernel)}
        stack.enter_context(mock.patch.multiple(fp8_utils, **found))
        stack.enter_context(mock.patch.multiple(fp8, **found))
    else:
        chosen = fp8_utils.Fp8GemmRunnerBackend(kernel)
        stack.enter_context(mock.patch.multiple(fp8_utils, FP8_GEMM_RUNNER_BACKEND=chosen))
    # SGLang asks whether experts in MXFP8 are on such a GPU.
    stack.enter_context(mock.patch.multiple(fp8, _is_cuda=case.refused))
    stack.enter_context(mock.patch.dict(sys.modules, {"flashinfer": _stand_in_for_flashinfer()}))


def _stand_in_for_flashinfer() -> ModuleType:
    """Its orders of scales and codes: tiles of 128 rows and 4 columns, filled up with zeros, and some order of rows."""

    def block_scale_interleave(scales: torch.Tensor) -> torch.Tensor:
        rows, columns = scales.shape
        whole = torch.nn.functional.pad(scales, (0, -columns % 4, 0, -rows % 128))
        tiles = whole.view(whole.shape[0] // 128, 4, 32, whole.shape[1] // 4, 4)
        return tiles.permute(0, 3, 2, 1, 4).flatten()

    def shuffled(rows: torch.Tensor, *_: int, **__: int) -> torch.Tensor:
        return rows.flip(0)

    package = ModuleType("flashinfer")
    package.block_scale_interleave = block_scale_interleave  # type: ignore[attr-defined]
    package.shuffle_matrix_a = package.shuffle_matrix_sf_a = shuffled  # type: ignore[attr-defined]
    return package


def _shuffling() -> None:
    """A kernel that no one knows; never called."""


def _stand_in_for_deep_gemm() -> dict[str, ModuleType]:
    """DeepGEMM's packing, by the torch version of it that SGLang has to check it with."""
    from sglang.srt.layers.quantization import fp8_utils

    def align(value: int, to: int) -> int:
        return -(-value // to) * to

    package, utils, layout = (
        ModuleType(name) for name in ("deep_gemm", "deep_gemm.utils", "deep_gemm.utils.layout")
    )
    package.utils, utils.layout = utils, layout  # type: ignore[attr-defined]
    utils.align = align  # type: ignore[attr-defined]
    utils.get_tma_aligned_size = lambda mn, element_size: align(mn, 16 // element_size)  # type: ignore[attr-defined]
    layout.get_mn_major_tma_aligned_packed_ue8m0_tensor = (  # type: ignore[attr-defined]
        fp8_utils._get_mn_major_tma_aligned_packed_ue8m0_tensor_torch_impl
    )
    return {module.__name__: module for module in (package, utils, layout)}


def _one_case(rank: int, case: Fp8Case) -> Fp8Result:
    from rlrefit.workers.engines.sglang.destination import SglangDestination

    live = load_model(case.served[0])
    loaded = [load_model(path).model for path in case.served]
    expected = _expected(case, loaded)
    destination = SglangDestination(live, CPU)
    held = case.served if case.quantized_before else case.trained
    specs = CheckpointSource(held, CPU).specs()
    own = {} if case.quantized_before else destination.quantized(specs)
    wire = [TensorSpec(name, tuple(t.shape), t.dtype) for name, t in read_checkpoint(case.served[0]).items()]
    _, reasons = destination.fragments(wire)
    before = _places(live.model)
    wrong: dict[str, list[str]] = {}
    other: dict[str, list[str]] = {}

    def sessions_by(engine: str, config: RefitConfig) -> Sessions:
        destination.new_epoch()
        source = CheckpointSource(held, CPU) if rank == 0 else None
        config = replace(config, trainer_quantize_fp8=not case.quantized_before)
        return Sessions(rank, engine, config, source, destination, 1)

    def look(occasion: str, index: int) -> None:
        wrong[occasion] = differing(bytes_of(_held(live.model)), expected[index])
        other[occasion] = differing(_numbers(live.model), _numbers(loaded[index]))

    routes = refit_by_both_engines(
        sessions_by, lambda: poison([*_held(live.model).values(), *destination._staged.values()]), look
    )
    sparse = refit_sparsely(sessions_by, look)
    packed = packed_scales(live.model)
    return Fp8Result(
        own,
        reasons,
        routes["nccl_xfer"],
        wrong,
        other,
        [name for name, place in _places(live.model).items() if before[name] != place],
        packed,
        sparse,
        _refusals(destination, case, wire),
    )


def _refused_case(rank: int, case: Fp8Case) -> Fp8Result:
    from rlrefit.workers.engines.sglang.destination import SglangDestination

    destination = SglangDestination(load_model(case.served[0]), CPU)
    told = refusal(destination.quantized, CheckpointSource(case.trained, CPU).specs())
    return Fp8Result({}, {}, {}, {}, {}, [], 0, [], {"the engine": told})


def _refusals(destination: SglangDestination, case: Fp8Case, wire: list[TensorSpec]) -> dict[str, str]:
    some = next(spec.name for spec in wire if spec.name.endswith("o_proj.weight"))
    trained = [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in read_checkpoint(case.trained[0]).items()]
    asked = {
        "BF16": (destination.fragments, trained),
        "no scales": (destination.fragments, [spec for spec in wire if spec.name != f"{some}_scale_inv"]),
        "no codes": (destination.fragments, [spec for spec in wire if spec.name != some]),
        "SGLang's own loader": (destination.routes, wire),
    }
    found = {occasion: refusal(ask, specs) for occasion, (ask, specs) in asked.items()}
    mega = SimpleNamespace(is_megamoe=lambda: True)
    with mock.patch("rlrefit.workers.engines.sglang.fp8.get_moe_a2a_backend", return_value=mega):
        found["MegaMoE"] = refusal(destination.fragments, [*wire[1:], wire[0]])
    linear = destination._model.get_submodule("model.layers.0.self_attn.o_proj")
    if case.mxfp8:
        names = ("weight_scale_inv_deepgemm", "weight_scale_inv_swizzled")
        other = next(name for name in names if getattr(linear, name, None) is None)
        with mock.patch.object(linear, other, torch.ones(1), create=True):
            found["another copy"] = refusal(destination.fragments, [*wire[2:], *wire[:2]])
        return found
    # As 0.5.23 has them for other blocks than of 128 by 128.
    later = ((linear, "weight_scale_inv_swizzled"), (linear.weight_scale_inv, "power_of_two"))
    for turn, (owner, kept) in enumerate(later, 2):
        setattr(owner, kept, torch.ones(1))
        found[kept] = refusal(destination.fragments, [*wire[turn:], *wire[:turn]])
        delattr(owner, kept)
    return found


def _expected(case: Fp8Case, loaded: Sequence[torch.nn.Module]) -> list[State]:
    """What the engine is to hold of each checkpoint, byte for byte.

    That is what SGLang loads; and of scales that are powers of two already, which SGLang would quantize once more, what it
    loads for another kernel, with the scales as SGLang packs them.
    """
    if not case.blackwell or case.quantized_before:
        return [bytes_of(_held(model)) for model in loaded]
    from sglang.srt.layers.quantization.fp8_utils import transform_scale_ue8m0

    found = []
    with kernels(replace(case, blackwell=False, runner="triton")):
        plain = [load_model(path).model for path in case.served]
    for model in plain:
        parameters = dict(model.named_parameters())
        state = _held(model)
        for name, scales in parameters.items():
            if name.endswith("_scale_inv"):
                rows = parameters[name.removesuffix("_scale_inv")].shape[-2]
                state[name] = transform_scale_ue8m0(scales.detach(), rows)
        found.append(bytes_of(state))
    return found


def packed_scales(model: torch.nn.Module) -> int:
    """How many parameters of scales are packed, copies beside them not counted."""
    return sum(
        parameter.dtype is torch.int32 and name.endswith("_scale_inv")
        for name, parameter in model.named_parameters()
    )


def _held(model: torch.nn.Module) -> State:
    """Parameters, and the copies of scales that a kernel computes with."""
    found: State = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute.startswith("hpc_ops_"):
                found[f"{name}.{attribute}"] = value
    return found


def _places(model: torch.nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in _held(model).items()}


def _numbers(model: torch.nn.Module) -> State:
    """What codes and scales stand for, by SGLang's own account of packed scales."""
    from sglang.srt.utils.weight_checker_comparator import Fp8BlockComparable

    parameters = dict(model.named_parameters())
    found = {}
    for name, scales in parameters.items():
        if name.endswith("_scale_inv"):
            codes = parameters[name.removesuffix("_scale_inv")].detach()
            if scales.dtype is torch.uint8:
                found[name] = mxfp8.dequantize(codes, scales.detach())
                continue
            plain = Fp8BlockComparable._normalize_scale(codes, scales.detach())
            matrices = (
                zip(codes.flatten(0, -3), plain.flatten(0, -3), strict=True)
                if codes.dim() > 2
                else [(codes, plain)]
            )
            found[name] = torch.stack([fp8_blockwise.dequantize(c, s) for c, s in matrices])
    return found
