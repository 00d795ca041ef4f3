"""SGLang's models in INT4 on a few ranks without an engine, refitted with what a trainer makes of BF16; SGLang does all the loading.

Marlin's one function in CUDA is :mod:`tests.marlin`'s.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import RefitError
from rlrefit.integration.quantize.formats import as_made, wire_names
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.recipes.rollout.arguments import int4
from rlrefit.workers.engines.sglang.driver import SglangRefit
from rlrefit.workers.engines.sglang.sender import SglangSender
from tests.as_sent import encoded
from tests.families.checkpoints import quantize_experts
from tests.fp8_refits import (
    CONFIG,
    Sessions,
    State,
    bytes_of,
    differing,
    poison,
    refit_by_both_engines,
    refit_sparsely,
    refusal,
)
from tests.gpu.vllm_checkpoints import quantize_to_int4, read_checkpoint, write_checkpoint
from tests.gpu.vllm_trainer import CheckpointSource
from tests.marlin import gptq_marlin_repack

from .eagle_ranks import DRAFTER, Heads, Pair, loaded_pair
from .family_checkpoints import write_as_published
from .family_ranks import load_by_sglang
from .fp8_bucket_ranks import BUCKET_BYTES, BucketScene
from .models import begin, load_model
from .ways import WAYS, driven_in

if TYPE_CHECKING:
    from rlrefit.integration.quantize.formats import Format

CPU = torch.device("cpu")
# Constants of compressed-tensors' integers, with which nothing computes and which no trainer brings.
_IDLE = ("_shape", "_g_idx", "_sort_indices")
_SCHEMES = "sglang.srt.layers.quantization.compressed_tensors.schemes"


@dataclass(frozen=True)
class Int4Case:
    """An engine of a few ranks.

    Attributes:
        trained: two checkpoints in BF16, as a trainer has the weights.
        served: the same in INT4, as SGLang loads them.
        runner: what computes with experts, of SGLang's names.
        unknown: linear layers are of a scheme that was not read.
        scale_rule: by which scales are made.
        started: how a recipe starts it from a checkpoint in BF16; empty if it is started from the served one.
    """

    trained: tuple[str, str]
    served: tuple[str, str]
    runner: str = "auto"
    unknown: bool = False
    scale_rule: str = RefitConfig.int4_scale
    started: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Int4Result:
    """What one rank saw.

    Attributes:
        own: weights that it says to hold quantized.
        bulk: names of what is written in place.
        reasons: of what goes through the loader.
        routes: by checkpoint engine how many weights took each route from trainer ranks; codes and scales count as two.
        differing: parameters, and locks, with other bytes than in a model that SGLang loaded; by occasion.
        moved: parameters that don't lie where they did before all refits.
        sparse: which of four refits were.
        refused: texts of errors, by occasion.
    """

    own: dict[str, Format]
    bulk: list[str]
    reasons: dict[str, str]
    routes: dict[str, dict[str, int]]
    differing: dict[str, list[str]]
    moved: list[str]
    sparse: list[bool]
    refused: dict[str, str]


@dataclass
class BesideInt4:
    """What a rank saw of a head beside a model in INT4.

    Attributes:
        refused: where SGLang is told to take both as if they were in INT4, the parameter that the error names, by what it was asked.
        bulk: what goes in place where the model's checkpoint is in INT4 itself.
        after_portions: what is not as SGLang loads it, after each portion of each refit.
        after_refits: the same after each refit.
    """

    refused: dict[str, str]
    bulk: set[str]
    after_portions: list[list[str]] = field(default_factory=list)
    after_refits: list[list[str]] = field(default_factory=list)


def written(
    folder: Path,
    group: int,
    *,
    experts: bool = False,
    width: int = 256,
    scale_rule: str = RefitConfig.int4_scale,
    **options: Any,
) -> Int4Case:
    """A case with ``options`` of :class:`Int4Case`, and its checkpoints in ``folder``; ``width``: of experts."""
    trained, served = (
        tuple(
            write_checkpoint(folder / f"{kind} {seed}", seed, fp8=False, experts=experts, width=width)
            for seed in (1, 2)
        )
        for kind in ("trained", "served")
    )
    for path in served:
        quantize_to_int4(Path(path), int4(group), scale_rule)
    return Int4Case((trained[0], trained[1]), (served[0], served[1]), scale_rule=scale_rule, **options)


def written_kimi(folder: Path, scale_rule: str = RefitConfig.int4_scale, runner: str = "auto") -> Int4Case:
    """A case of Kimi-K2.5, with experts alone in INT4 in groups of 32."""
    sizes = {"vocab_size": 128, "hidden_size": 256, "moe_intermediate_size": 256}
    latent = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16}
    trained = write_as_published("kimi_k25", folder / "trained", sizes | latent)
    first, second = (str(shutil.copytree(path, folder / f"served {Path(path).name}")) for path in trained)
    for path in (first, second):
        quantize_experts(Path(path), scale_rule)
    return Int4Case(trained, (first, second), runner=runner, scale_rule=scale_rule)


def refit_int4(
    rank: int, ranks: int, cases: Sequence[Int4Case], cut: Int4Case | None
) -> tuple[list[Int4Result], str]:
    """What a rank saw of each case; and with which error an engine ends whose experts' shards cut groups."""
    begin(rank, cases[0].served[0], ranks)
    from rlrefit.workers.engines.sglang.destination import SglangDestination

    results = []
    for case in cases:
        with kernels(case):
            results.append(_one_case(rank, case))
    if cut is not None:
        with kernels(cut):
            try:
                SglangDestination(load_model(cut.served[0]), CPU)
            except RefitError as error:
                return results, str(error)
    return results, ""


def refit_int4_in_buckets(
    rank: int, ranks: int, cases: Sequence[Int4Case]
) -> list[tuple[dict[str, list[str]], dict[str, str], set[str]]]:
    """What a rank saw of each case: other bytes than SGLang loads, texts of errors, and formats of updates that its updater got."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    begin(rank, cases[0].served[0], ranks)
    results = []
    for case in cases:
        with kernels(case):
            scene = _Scene(rank, case)
            scene.play()
            results.append((scene.differing, scene.refused, scene.taken))
    return results


def refit_beside_int4(rank: int, ranks: int, case: Heads, packed: tuple[str, str]) -> BesideInt4:
    """A head beside a model in INT4, which lands before the head.

    Args:
        rank: of the engine.
        ranks: of the engine.
        case: in BF16, all of it.
        packed: checkpoints of its models in INT4.
    """
    begin(rank, case.models[0], ranks)
    from rlrefit.workers.engines.common.loader_trace.quantized import on_the_wire
    from rlrefit.workers.engines.sglang.drafted import destination_of

    specs, in_int4 = _specs(case.tensors(0)), replace(case, models=packed)
    with kernels(Int4Case(case.models, packed)):
        refused = _refused_in_int4(case, specs)
        pair, expected = loaded_pair(in_int4, 0), [loaded_pair(in_int4, index).state() for index in (0, 1)]
        destination = destination_of(pair.served, CPU)
        wire = on_the_wire(specs, destination.quantized(specs))
        fragments, misc = destination.fragments(wire)
        found = BesideInt4(refused, {fragment.name for fragment in fragments})
        portions = {fragment.name: int(fragment.name.startswith(DRAFTER)) for fragment in fragments}
        destination.expect(portions)
        for index in (1, 0):
            tensors = in_int4.tensors(index)
            pair.poison()
            for portion in (0, 1):
                for fragment in fragments:
                    if portions[fragment.name] == portion:
                        fragment.view.copy_(fragment.part_of(tensors[fragment.name]))
                destination.landed(portion)
                found.after_portions.append(_wrong(pair, expected[index]))
            load_by_sglang(destination, tensors, list(misc))
            found.after_refits.append(_wrong(pair, expected[index]))
    return found


class _Partly(CheckpointSource):
    """A trainer that can't say where one of q, k and v lies, nor one of gate and up."""

    def fragments(self) -> tuple[list[Any], dict[str, str]]:
        found, reasons = super().fragments()
        misc = {
            f.name: "a test's own" for f in found if f.name.endswith((".q_proj.weight", ".up_proj.weight"))
        }
        return [f for f in found if f.name not in misc], reasons | misc


class _Scene(BucketScene):
    """INT4 in buckets.

    Attributes:
        differing: parameters, and locks, with other bytes than in a model that SGLang loaded; by occasion.
    """

    def __init__(self, rank: int, case: Int4Case) -> None:
        super().__init__(rank, case.served[0])
        self._case = case
        self._expected = [bytes_of(held(load_model(path).model)) for path in case.served]
        self.differing: dict[str, list[str]] = {}

    @property
    def taken(self) -> set[str]:
        """Formats of the updates that SGLang's updater got."""
        return self._worker.taken

    def _lead(self) -> None:
        source, version = CheckpointSource(self._case.trained, CPU), 0
        for way in WAYS:
            with driven_in(way, self._engine()) as driven:
                for index in (1, 0, 0):
                    self._tell(("poison",))
                    source.take_on(index)
                    keys = {"trainer_quantize_int4": True, "int4_scale": self._case.scale_rule}
                    self._sender(source, driven.refit, **keys).refit(version)
                    self._tell(("compare", f"{way} {version}", index))
                    version += 1
                for key, keys in {
                    "no key": {},
                    "another key": {"trainer_quantize_fp8": True},
                }.items():
                    sender = self._sender(source, driven.refit, **keys)
                    self._refusal(key, lambda sender=sender: sender.refit(90))
                    driven.refit.require_servable()
                    self._tell(("compare", f"{way}, {key}", 0))

    def _sender(self, source: CheckpointSource, refit: SglangRefit, **keys: Any) -> SglangSender:
        return SglangSender(source, refit, "cpu", BUCKET_BYTES, **keys)

    def _do_poison(self) -> None:
        poison(held(self._worker.runner.model).values())

    def _do_compare(self, occasion: str, index: int) -> None:
        self.differing[occasion] = differing(bytes_of(held(self._worker.runner.model)), self._expected[index])


@contextmanager
def kernels(case: Int4Case) -> Iterator[None]:
    """What SGLang would choose on GPUs."""
    from sglang.srt import runtime_context
    from sglang.srt.hardware_backend.gpu.quantization import gptq_kernels
    from sglang.srt.layers.moe import MoeRunnerBackend
    from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors
    from sglang.srt.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_wNa16,
        compressed_tensors_wNa16_moe,
    )

    locks = {"marlin_make_workspace": lambda *_: torch.zeros(4, dtype=torch.int)}
    with ExitStack() as stack:
        for owner, values in (
            (runtime_context.get_flags().moe, {"runner_backend": MoeRunnerBackend(case.runner)}),
            (torch.cuda, {"get_device_capability": lambda *_: (9, 0)}),
            (gptq_kernels, {"gptq_marlin_repack": _repack_expert}),
            (compressed_tensors_wNa16_moe, locks),
            # SGLang takes its types from its library for GPUs.
            (
                compressed_tensors_wNa16,
                locks | {"WNA16_SUPPORTED_TYPES_MAP": {4: SimpleNamespace(size_bits=4)}},
            ),
        ):
            stack.enter_context(mock.patch.multiple(owner, **values))
        repack = {"gptq_marlin_repack": gptq_marlin_repack}
        stack.enter_context(mock.patch.multiple(compressed_tensors_wNa16, create=True, **repack))
        if case.unknown:
            # As any other class of another name, of whose step nothing is known.
            scheme = type("OtherScheme", (compressed_tensors_wNa16.CompressedTensorsWNA16,), {})
            stack.enter_context(mock.patch.multiple(compressed_tensors, CompressedTensorsWNA16=scheme))
        yield


def _without_memory() -> AbstractContextManager[Any]:
    """SGLang's steps after loading find too little on the device."""
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsLinearMethod,
    )

    return mock.patch.object(
        CompressedTensorsLinearMethod,
        "process_weights_after_loading",
        side_effect=torch.OutOfMemoryError("CUDA out of memory"),
    )


def _wrong(pair: Pair, expected: State) -> list[str]:
    """What differs of what is computed with; weights' shapes never travel."""
    return [name for name in differing(pair.state(), expected) if not name.endswith("_shape")]


def _refused_in_int4(case: Heads, specs: Sequence[TensorSpec]) -> dict[str, str]:
    """The parameter that an error names where SGLang takes model and head as if both were in INT4, by what it was asked for."""
    from rlrefit.integration.errors import PlanError
    from rlrefit.workers.engines.sglang.drafted import destination_of

    as_if = json.dumps({"quantization_config": int4(32)})
    live = loaded_pair(case, 0, load_format="dummy", json_model_override_args=as_if)
    destination, refused = destination_of(live.served, CPU), {}
    without_head = [spec for spec in specs if not spec.name.startswith(DRAFTER)]
    for asked, manifest in (("without a head", without_head), ("with one", specs)):
        try:
            destination.quantized(manifest)
            refused[asked] = ""
        except PlanError as error:
            refused[asked] = str(error.parameter)
    return refused


def _repack_expert(
    codes: torch.Tensor, perm: torch.Tensor, size_k: int, size_n: int, num_bits: int
) -> torch.Tensor:
    return gptq_marlin_repack(codes, perm, size_k=size_k, size_n=size_n, num_bits=num_bits)


def _one_case(rank: int, case: Int4Case) -> Int4Result:
    from rlrefit.workers.engines.sglang.destination import SglangDestination

    live = load_model(case.trained[0], **case.started) if case.started else load_model(case.served[0])
    expected = [bytes_of(held(load_model(path).model)) for path in case.served]
    destination = SglangDestination(live, CPU)
    trained = [_specs(read_checkpoint(path)) for path in case.trained]
    packed = [read_checkpoint(path) for path in case.served]
    if case.unknown:
        asked = {"BF16": trained[0], "packed": _specs(packed[0])}
        refused = {brought: refusal(destination.fragments, specs) for brought, specs in asked.items()}
        return Int4Result({}, [], {}, {}, {}, [], [], refused)
    with _without_memory():
        too_little = refusal(destination.quantized, trained[0])
    own = destination.quantized(trained[0])
    wire = [encoded(read_checkpoint(path), as_made(own, case.scale_rule)) for path in case.trained]
    specs = _specs(wire[0])
    refused = {"BF16": refusal(destination.fragments, trained[0]), "too little memory": too_little}
    some = next((name for name in own if name.endswith("o_proj.weight")), min(own))
    for occasion, left_out in zip(("no codes", "no scales"), wire_names(some, own[some]), strict=True):
        rest = [spec for spec in specs if spec.name != left_out]
        refused[occasion] = refusal(destination.fragments, rest)
    fragments, reasons = destination.fragments(specs)
    before = _places(live.model)
    wrong: dict[str, list[str]] = {}

    def look(occasion: str, index: int) -> None:
        wrong[occasion] = differing(bytes_of(held(live.model)), expected[index])

    # As in buckets, and as what takes the misc path of a trainer.
    for version, index in enumerate((1, 0, 0)):
        poison(held(live.model).values())
        destination.load_weights(wire[index].items())
        destination.finish(version)
        look(f"full tensors {version}", index)
    refused["SGLang's own loader"] = str(destination.loads_alone(specs))
    # Of a trainer that packs its weights itself, with the constants.
    destination.fragments(_specs(packed[1]))
    poison(held(live.model).values())
    destination.load_weights(packed[1].items())
    destination.finish(3)
    look("packed by the trainer", 1)

    def sessions_by(engine: str, config: RefitConfig) -> Sessions:
        destination.new_epoch()
        source = CheckpointSource(case.trained, CPU) if rank == 0 else None
        config = replace(
            config, trainer_quantize_fp8=False, trainer_quantize_int4=True, int4_scale=case.scale_rule
        )
        return Sessions(rank, engine, config, source, destination, 1)

    def mixed(rank: int) -> Sessions:
        destination.new_epoch()
        source = _Partly(case.trained, CPU) if rank == 0 else None
        config = replace(
            CONFIG, trainer_quantize_fp8=False, trainer_quantize_int4=True, int4_scale=case.scale_rule
        )
        return Sessions(rank, "nccl_xfer", config, source, destination, 1)

    with mixed(rank) as sessions:
        misc = sessions.routes()["misc"]
        for version, index in enumerate((1, 0)):
            poison(held(live.model).values())
            sessions.refit(index, version)
            look(f"partly misc {version}", index)
    routes = refit_by_both_engines(sessions_by, lambda: poison(held(live.model).values()), look)
    sparse = refit_sparsely(sessions_by, look)
    return Int4Result(
        own,
        sorted({fragment.name for fragment in fragments}),
        reasons,
        routes | {"partly misc": {"misc": misc}},
        wrong,
        [name for name, place in _places(live.model).items() if before[name] != place],
        sparse,
        refused,
    )


def held(model: torch.nn.Module) -> State:
    """What is computed with: parameters, and Marlin's locks."""
    found: State = {
        name: parameter.detach() for name, parameter in model.named_parameters() if not name.endswith(_IDLE)
    }
    for name, module in model.named_modules():
        for holder in (module, getattr(module, "scheme", None)):
            locks = vars(holder).get("workspace") if holder is not None else None
            if locks is not None:
                found[f"{name}.workspace"] = locks
    return found


def _places(model: torch.nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in held(model).items()}


def _specs(tensors: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
