"""vLLM models in FP8 blocks, MXFP8 or INT4 on two ranks, refitted with what a trainer made of BF16 weights."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from transformers import Qwen2Config, Qwen3Config, Qwen3MoeConfig
from vllm_checkpoints import manifest_of, read_checkpoint, write_checkpoint
from vllm_fp8_kernels import choose_kernels
from vllm_int4 import choose_int4_kernel
from vllm_mxfp8 import choose_mxfp8_kernel
from vllm_ranks import BIASED_ROUTER, Case, Layout, Tensors, accept_family, groups_of, loaded, reload_by_vllm
from vllm_refit import refit

from rlrefit.integration.errors import RefitError
from rlrefit.integration.layout import Fragment
from rlrefit.integration.quantize.formats import wire_names
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.integration.weights.quantizing import quant_weights_by_name
from tests.as_sent import encoded
from tests.families.checkpoints import quantize_experts, write_pair
from tests.fp8_refits import (
    Sessions,
    bytes_of,
    differing,
    poison,
    refit_by_both_engines,
    refit_sparsely,
    refusal,
)
from tests.gpu.vllm_checkpoints import quantize_in_blocks, quantize_to_int4, quantize_to_mxfp8

if TYPE_CHECKING:
    from rlrefit.integration.config import RefitConfig
    from rlrefit.integration.quantize.formats import Format

_SHAPE = {
    "vocab_size": 128,  # no padding, which a refit leaves alone
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_EXPERTS = {
    "moe_intermediate_size": 256,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
}


# Constants of compressed-tensors' integers, with which nothing computes and which no trainer brings.
_IDLE = ("_shape", "_g_idx", "_sort_indices")


class Halves:
    """A trainer rank that has a half of each weight's rows in BF16 where both halves are whole blocks, else all."""

    def __init__(self, rank: int, checkpoints: Sequence[Tensors]) -> None:
        self.device = torch.device("cpu")
        self._rank, self._checkpoints = rank, checkpoints
        self._now = checkpoints[0]
        self._held = {name: self._part(tensor).clone() for name, tensor in self._now.items()}

    def take_on(self, index: int) -> None:
        self._now = self._checkpoints[index]
        for name, tensor in self._now.items():
            self._held[name].copy_(self._part(tensor))

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(*entry) for entry in manifest_of(self._now)]

    def fragments(self) -> tuple[list[Fragment], dict[str, str]]:
        found = []
        for name, part in self._held.items():
            shape = tuple(self._now[name].shape)
            start = self._rank * part.shape[0] if part.shape[0] < shape[0] else 0
            box = ((start, start + part.shape[0]), *((0, n) for n in shape[1:]))
            found.append(Fragment(name, shape, box, part))
        return found, {}

    def prepare(self) -> None:
        pass

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self._now[name]) for name in names)

    def storage_key(self) -> Hashable:
        return tuple(part.data_ptr() for part in self._held.values())

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        half, rest = divmod(tensor.shape[0], 2)
        return tensor if rest or half % 128 else tensor[self._rank * half : (self._rank + 1) * half]


@dataclass(frozen=True)
class Fp8Case:
    """An engine of two ranks.

    Attributes:
        trained: two checkpoints in BF16, as a trainer has the weights.
        served: the same in FP8 blocks, as vLLM loads them.
        rearranged: the kernels of linear layers turn the rows of their weights round after loading.
        replaced: another library's functions stand where vLLM's methods process loaded weights.
        kernel: the one that has MXFP8 or INT4, as :mod:`vllm_mxfp8` or :mod:`vllm_int4` names it; empty of FP8 blocks.
        setting: by which a trainer makes codes and scales.
    """

    trained: tuple[str, str]
    served: Case
    rearranged: bool = False
    replaced: bool = False
    kernel: str = ""
    setting: str = "trainer_quantize_fp8"


@dataclass(frozen=True)
class Fp8Result:
    """What one rank saw: names by route, with reasons, and errors by occasion.

    Attributes:
        own, told: weights that it says to hold quantized, and that the worker extension's call tells.
        differing: parameters, and scales of kernels, with other bytes than in a model that vLLM loaded; by occasion.
        kept: bytes that it says to keep, and bytes of its parameters.
        routes: by checkpoint engine how many weights took each route from trainer ranks; codes and scales count as two.
        sparse: which of four refits were.
    """

    own: dict[str, Format]
    told: dict[str, Format]
    bulk: list[str]
    misc: dict[str, str]
    differing: dict[str, list[str]]
    refused: dict[str, str]
    kept: tuple[int, int]
    routes: dict[str, dict[str, int]]
    sparse: list[bool]


def write_case(folder: Path, *, experts: bool = False, in_parallel: bool = False, **options: bool) -> Fp8Case:
    """Two models in BF16 and in FP8 blocks, the latter as block-FP8 checkpoints of the hub have it."""
    config: Any = Qwen3MoeConfig(**_SHAPE, **_EXPERTS) if experts else Qwen3Config(**_SHAPE)
    more = {"moe_backend": "triton"} if experts else {}
    layout = Layout(tensor=2, expert=in_parallel)
    return _written(folder, config, quantize_in_blocks, layout, more, **options)


def write_mxfp8_case(
    folder: Path,
    kernel: str,
    quantization: dict[str, Any],
    *,
    experts: bool = False,
    stages: bool = False,
    intermediate: int = 512,
) -> Fp8Case:
    """Two models in BF16 and in MXFP8, for two ranks of TP, or two stages of one rank each."""
    shape = _SHAPE | {"intermediate_size": intermediate, "num_hidden_layers": 2 if stages else 1}
    config: Any = Qwen3MoeConfig(**shape, **_EXPERTS) if experts else Qwen3Config(**shape)
    layout = Layout(pipeline=2) if stages else Layout(tensor=2)
    quantize = partial(quantize_to_mxfp8, config=quantization)
    return _written(folder, config, quantize, layout, {}, kernel=kernel)


def write_int4_case(
    folder: Path,
    kernel: str,
    quantization: dict[str, Any],
    *,
    experts: bool = False,
    biases: bool = False,
    ranks: int = 2,
    width: int = _EXPERTS["moe_intermediate_size"],
) -> Fp8Case:
    """Two models in BF16 and in INT4, for two ranks of TP, or two stages of one rank each; ``width`` is that of experts."""
    shape = _SHAPE | {"num_hidden_layers": 3 - ranks}
    config: Any = (
        Qwen3MoeConfig(**shape, **_EXPERTS | {"moe_intermediate_size": width})
        if experts
        else Qwen3Config(**shape)
    )
    if biases:
        config = Qwen2Config(**{key: value for key, value in shape.items() if key != "head_dim"})
    layout = Layout(tensor=2) if ranks == 2 else Layout(pipeline=2)
    quantize = partial(quantize_to_int4, config=quantization)
    setting = "trainer_quantize_int4"
    return _written(folder, config, quantize, layout, {}, kernel=kernel, setting=setting)


def write_kimi_case(
    folder: Path, family: str, kernel: str, quantize: Callable[[Path], None] = quantize_experts
) -> Fp8Case:
    """Two models of Kimi-K2 or Kimi-K2.5 in BF16, and, unless told otherwise, with experts alone in INT4 in groups of 32, for two ranks of TP."""
    sizes = {key: _SHAPE[key] for key in ("vocab_size", "hidden_size", "max_position_embeddings")}
    latent = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32}
    widths = {"intermediate_size": 64, "moe_intermediate_size": 256}
    changes = sizes | latent | widths | BIASED_ROUTER
    trained = write_pair(family, folder / "bf16", changes, router_dtype=torch.float32)
    served = [str(shutil.copytree(path, folder / "int4" / Path(path).name)) for path in trained]
    for path in served:
        quantize(Path(path))
    case = Case(served[0], served[1], Layout(tensor=2), family=True)
    return Fp8Case(trained, case, kernel=kernel, setting="trainer_quantize_int4")


def _written(
    folder: Path,
    config: Any,
    quantize: Callable[[Path], None],
    layout: Layout,
    more: dict[str, Any],
    **options: Any,
) -> Fp8Case:
    trained, served = (
        [write_checkpoint(folder / f"{kind}_{seed}", config, seed) for seed in (1, 2)]
        for kind in ("bf16", "fp8")
    )
    for path in served:
        quantize(path)
    return Fp8Case(
        (str(trained[0]), str(trained[1])), Case(str(served[0]), str(served[1]), layout, more=more), **options
    )


def refit_fp8(rank: int, cases: list[Fp8Case]) -> list[Fp8Result]:
    results = []
    for case in cases:
        if case.served.family:
            accept_family(case.served.path_a)
        with groups_of(rank, case.served), _post_load_functions(case):
            if case.setting == "trainer_quantize_int4":
                choose_int4_kernel(case.kernel)
            elif case.kernel:
                choose_mxfp8_kernel(case.kernel)
            else:
                choose_kernels(rearranged=case.rearranged)
            results.append(_one_case(rank, case))
    return results


@dataclass(frozen=True)
class ShortOfMemory:
    """An engine that has too little memory left as it first meets a trainer.

    Attributes:
        misc: how many weights took the misc path, by epoch, with the text of the first epoch's reasons.
        warned: the texts of warnings, by epoch.
        differing: as :attr:`Fp8Result.differing`.
    """

    misc: list[int]
    reasons: set[str]
    warned: list[list[str]]
    differing: dict[str, list[str]]


def refit_int4_and_short_of_memory(
    rank: int, cases: list[Fp8Case], short: Fp8Case
) -> tuple[list[Fp8Result], ShortOfMemory]:
    """As :func:`refit_fp8`, and an engine that has too little memory."""
    results = refit_fp8(rank, cases)
    with groups_of(rank, short.served):
        choose_int4_kernel(short.kernel)
        return results, _short_of_memory(short)


def refit_int4_and_cut(rank: int, cases: list[Fp8Case], cut: Fp8Case) -> tuple[list[Fp8Result], str]:
    """As :func:`refit_fp8`, and with which error an engine ends whose experts' shards cut groups; empty if with none."""
    from rlrefit.workers.engines.vllm.destination import VllmDestination

    results = refit_fp8(rank, cases)
    with groups_of(rank, cut.served):
        choose_int4_kernel(cut.kernel)
        try:
            VllmDestination(*loaded(cut.served), torch.device("cpu"))
        except (RefitError, ValueError) as error:
            return results, f"{type(error).__name__}: {error}"
    return results, ""


def refit_under_verl(rank: int, cases: list[Fp8Case], path: str) -> list[Fp8Result]:
    """In a process that verl has patched; ``path`` has vLLM by the name that verl asks for."""
    os.environ.update(VERL_USE_EXTERNAL_MODULES="examples.verl.cpu_platform", VERL_PLATFORM="cpu")
    sys.path.insert(0, path)
    from verl.utils.vllm.vllm_quant_utils import apply_vllm_quant_patches
    from vllm.model_executor.layers.quantization import fp8

    apply_vllm_quant_patches()
    for method in (fp8.Fp8LinearMethod, fp8.Fp8MoEMethod):
        assert method.process_weights_after_loading.__module__ == "verl.utils.vllm.vllm_fp8_utils"
    return refit_fp8(rank, cases)


@contextmanager
def _post_load_functions(case: Fp8Case) -> Iterator[None]:
    """Put others in the place of vLLM's as NeMo-RL does: by ``patch``, in place and with a kernel that stays.

    They turn the rows of the weights round, so that what was written past them shows.
    """
    from vllm.model_executor.layers.quantization import fp8

    def linear(self: Any, layer: torch.nn.Module) -> None:
        layer.weight.data.copy_(layer.weight.data.flip(0))
        layer.input_scale = None

    own = fp8.Fp8MoEMethod.process_weights_after_loading

    def experts(self: Any, layer: torch.nn.Module) -> None:
        layer.w2_weight.data.copy_(layer.w2_weight.data.flip(1))
        if self.moe_kernel is None:
            own(self, layer)
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)

    with ExitStack() as stack:
        if case.replaced:
            for method, function in ((fp8.Fp8LinearMethod, linear), (fp8.Fp8MoEMethod, experts)):
                stack.enter_context(patch.object(method, "process_weights_after_loading", function))
        yield


def _one_case(rank: int, case: Fp8Case) -> Fp8Result:
    from rlrefit.workers.engines.vllm.destination import VllmDestination

    live, config = loaded(case.served)
    expected = [
        bytes_of(_held(loaded(case.served, path)[0])) for path in (case.served.path_a, case.served.path_b)
    ]
    destination = VllmDestination(live, config, torch.device("cpu"))
    trained = [read_checkpoint(path) for path in case.trained]
    specs = [TensorSpec(*entry) for entry in manifest_of(trained[0])]
    refused = {"BF16": refusal(destination.fragments, manifest_of(trained[0]))}
    own = destination.quantized(specs)
    wire = [encoded(tensors, _of_all_ranks(own)) for tensors in trained]
    some = next((name for name in own if name.endswith("o_proj.weight")), min(own))
    for occasion, left_out in zip(("no codes", "no scales"), wire_names(some, own[some]), strict=True):
        rest = {name: tensor for name, tensor in wire[0].items() if name != left_out}
        refused[occasion] = refusal(destination.fragments, manifest_of(rest))
    fragments, misc = destination.fragments(manifest_of(wire[0]))
    wrong: dict[str, list[str]] = {}

    def look(occasion: str, index: int) -> None:
        wrong[occasion] = differing(bytes_of(_held(live)), expected[index])

    for version, (occasion, index) in enumerate([("first", 1), ("second", 0), ("the same again", 0)]):
        refit(destination, fragments, misc, wire[index], version)
        look(occasion, index)
    refit(destination, [], dict.fromkeys(wire[1], ""), wire[1], 3)
    look("all through the loader", 1)
    reload_by_vllm(live, config, read_checkpoint(case.served.path_b))
    fragments, misc = destination.fragments(manifest_of(wire[0]))
    refit(destination, fragments, misc, wire[0], 4)
    look("after vLLM's own reload", 0)
    told = _told(rank, live, config, specs)
    full = _full_tensors(Halves(rank, trained), _of_all_ranks(told))
    poison(_weights(live))
    reload_by_vllm(live, config, full)
    look("full tensors by name", 0)

    def sessions_by(engine: str, config: RefitConfig) -> Sessions:
        destination.new_epoch()
        config = replace(config, **{"trainer_quantize_fp8": False, case.setting: True})
        return Sessions(rank, engine, config, Halves(rank, trained), destination, 2)

    routes = refit_by_both_engines(sessions_by, lambda: poison(_weights(live)), look)
    sparse = refit_sparsely(sessions_by, look)
    held = sum(p.numel() * p.element_size() for p in live.parameters())
    return Fp8Result(
        own,
        told,
        sorted({f.name for f in fragments}),
        misc,
        wrong,
        refused,
        (destination.kept_bytes, held),
        routes,
        sparse,
    )


def _short_of_memory(case: Fp8Case) -> ShortOfMemory:
    from rlrefit.workers.engines.vllm import packed_layers
    from rlrefit.workers.engines.vllm.destination import VllmDestination

    live, config = loaded(case.served)
    expected = [
        bytes_of(_held(loaded(case.served, path)[0])) for path in (case.served.path_a, case.served.path_b)
    ]
    destination = VllmDestination(live, config, torch.device("cpu"))
    trained = [read_checkpoint(path) for path in case.trained]
    specs = [TensorSpec(*entry) for entry in manifest_of(trained[0])]
    found, version, logged = ShortOfMemory([], set(), [], {}), 0, _Logged()
    logging.getLogger("rlrefit").addHandler(logged)
    # In the first epoch the device has too little; in the second one a part of the layers finds enough.
    for epoch, fails in enumerate((lambda of: True, lambda of: "mlp" in of, lambda of: False)):
        destination.new_epoch()
        logged.texts = []
        with _without_memory(packed_layers, fails):
            wire = [encoded(tensors, _of_all_ranks(destination.quantized(specs))) for tensors in trained]
            fragments, misc = destination.fragments(manifest_of(wire[0]))
        # Meanwhile there is enough, and ranks that have met go on as they have agreed.
        assert destination.fragments(manifest_of(wire[0]))[1] == misc
        found.misc.append(len(misc))
        found.reasons.update(misc.values())
        found.warned.append(logged.texts)
        for index in (1, 0):
            poison(_weights(live))
            refit(destination, fragments, misc, wire[index], version)
            found.differing[f"{epoch}, {version}"] = differing(bytes_of(_held(live)), expected[index])
            version += 1
    logging.getLogger("rlrefit").removeHandler(logged)
    return found


class _Logged(logging.Handler):
    """The texts of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def _without_memory(packed_layers: Any, fails: Callable[[str], bool]) -> Iterator[None]:
    """The steps of some layers find too little memory on the device."""
    of = packed_layers.VllmPackedLayers._stepped

    def stepped(self: Any, live: Any, given: Any) -> Any:
        if fails(live.prefix):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return of(self, live, given)

    with patch.object(packed_layers.VllmPackedLayers, "_stepped", stepped):
        yield


def _nothing(*_: Any) -> None:
    pass


def _told(rank: int, live: torch.nn.Module, config: Any, specs: Sequence[TensorSpec]) -> dict[str, Format]:
    """What the worker extension answers of the live model, as a trainer reads it."""
    from rlrefit.integration.quantize.formats import from_json
    from rlrefit.workers.engines.common.answers import raise_refit_errors
    from rlrefit.workers.engines.vllm.extension import VllmRefitExtension

    worker = VllmRefitExtension()
    worker.model_runner = SimpleNamespace(
        get_model=lambda: live,
        device=torch.device("cpu"),
        execute_model=_nothing,
        reset_encoder_cache=_nothing,
    )
    # What rlrefit wraps of vLLM's worker.
    worker.compile_or_warm_up_model = worker.sleep = worker.wake_up = worker.reload_weights = _nothing
    worker.vllm_config, worker.rank = config, rank
    answer = json.loads(json.dumps(worker.refit_formats([spec.to_json() for spec in specs])))
    [formats] = raise_refit_errors([answer])
    return {name: from_json(format) for name, format in formats.items()}


def _full_tensors(source: Halves, formats: dict[str, Format]) -> Tensors:
    async def drawn() -> Tensors:
        return {name: tensor async for name, tensor in quant_weights_by_name(source, formats)}

    return asyncio.run(drawn())


def _of_all_ranks(own: dict[str, Format]) -> dict[str, Format]:
    answers: list[Any] = [None, None]
    torch.distributed.all_gather_object(answers, own)
    assert all(answers[1].get(name, format) == format for name, format in answers[0].items())
    return answers[0] | answers[1]


def _weights(model: torch.nn.Module) -> list[torch.Tensor]:
    """All parameters but those of attention, which are scales that no trainer here has (compressed-tensors'), and locks."""
    brought = (
        p for name, p in model.named_parameters() if ".attn._" not in name and not name.endswith(_IDLE)
    )
    return [*brought, *_locks(model).values()]


def _locks(model: torch.nn.Module) -> Tensors:
    """Of Marlin's kernels."""
    from rlrefit.workers.engines.vllm.reload import attributes_of

    return {
        f"{name}.workspace": holder["workspace"]
        for name, module in model.named_modules()
        for holder in attributes_of(module)
        if "workspace" in holder
    }


def _held(model: torch.nn.Module) -> Tensors:
    """Parameters, the scales that experts' kernels compute with, locks, and the absorbed projections of latent attention."""
    computed_with = {name: p for name, p in model.named_parameters() if not name.endswith(_IDLE)}
    found: Tensors = computed_with | _locks(model)
    for name, module in model.named_modules():
        found |= {f"{name}.{key}": vars(module)[key] for key in ("W_UV", "W_UK_T") if key in vars(module)}
        config = getattr(getattr(module, "quant_method", None), "moe_quant_config", None)
        if config is not None:
            found[f"{name}, first scales of its kernel"] = config.w1_scale
            found[f"{name}, second scales of its kernel"] = config.w2_scale
    return found
