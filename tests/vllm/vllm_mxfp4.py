"""GPT-OSS in MXFP4 in vLLM's kernels, Marlin's among them, refitted beside what vLLM itself loads.

Marlin's own step runs on the CPU; its one function in CUDA is :mod:`tests.marlin`'s.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.layout import Axes, Box
from rlrefit.integration.session import RefitSession
from rlrefit.integration.weights.manifest import TensorSpec
from tests.oss_checkpoints import Tensors, read, unpacked, write_oss
from tests.refit.synthetic import SyntheticSource, run_world

Report = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A kernel that has the experts on one of some ranks.

    Attributes:
        backend: of vLLM's ``Mxfp4MoeBackend``.
        sizes: hidden and intermediate size.
        expert: the ranks share the experts, and not their columns.
        changes: the kernel's step also changes codes, as none does that was read.
    """

    backend: str
    sizes: tuple[int, int]
    rank: int = 0
    ranks: int = 1
    expert: bool = False
    changes: bool = False


PADDED, WHOLE = (96, 160), (256, 256)
# GPT-OSS's own are 131,072, whose table each of the many models here would make, and each comparison read.
PLACES = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
    "rope_theta": 150000.0,
}
CASES = {
    "as loaded": Case("NONE", PADDED),
    "as loaded, last of two": Case("NONE", PADDED, 1, 2),
    "Marlin": Case("MARLIN", WHOLE),
    "Marlin, padded": Case("MARLIN", PADDED),
    "Marlin, padded, first of two": Case("MARLIN", PADDED, 0, 2),
    "Marlin, padded, last of two": Case("MARLIN", PADDED, 1, 2),
    "Marlin, half of the experts": Case("MARLIN", PADDED, 1, 2, expert=True),
}
UNKNOWN = "a kernel that is not known"
REFUSED = "weights of the other kind"
ALL = {**CASES, UNKNOWN: Case("MARLIN", PADDED, changes=True)}
# Those into which trainers refit, too.
SENT = ("Marlin, padded", UNKNOWN)


def refit_all(folder: Path) -> dict[str, Report]:
    """Of each case, what :func:`_refitted` found, and of some what :func:`_sent` did."""
    sys.path.insert(0, str(Path(__file__).parent))
    places = {"max_position_embeddings": 512, "rope_parameters": PLACES}
    paths = {
        sizes: [write_oss(folder, sizes, seed, **places) for seed in (0, 1)] for sizes in (PADDED, WHOLE)
    }
    found = {name: _refitted(case, *paths[case.sizes]) for name, case in ALL.items()}
    found[REFUSED] = _refusals(paths[PADDED][0])
    for name in SENT:
        found[name] |= _sent(ALL[name], *paths[ALL[name].sizes])
    return found


def _refitted(case: Case, path_a: Path, path_b: Path) -> Report:
    """Load A, refit to B and back, each time from poisoned memory, and both again after vLLM's own reload, at last by a new destination."""
    from vllm_ranks import _differing, _state, fill, reload_by_vllm

    from rlrefit.workers.engines.vllm.destination import VllmDestination
    from rlrefit.workers.engines.vllm.layouts import has_padding

    with _kernels(case):
        live, config = _loaded(case, path_a)
        oracles = [_loaded(case, path_b)[0], _loaded(case, path_a)[0]]
        versions = [read(path_b), read(path_a)]
        specs = [TensorSpec(name, tuple(t.shape), t.dtype) for name, t in versions[0].items()]
        destination = VllmDestination(live, config, torch.device("cpu"))
        before, places = _state(live), {name: p.data_ptr() for name, p in live.named_parameters()}
        fragments, misc = destination.fragments(specs)
        found: Report = {
            "backends": {m.quant_method.mxfp4_backend.name for m in _experts(live)},
            "untouched": all(torch.equal(held, before[name]) for name, held in _state(live).items()),
            "misc": {name: reason for name, reason in misc.items() if ".experts." in name},
            "bulk": {name.rpartition(".")[2] for name in {f.name for f in fragments} if ".experts." in name},
            "rewritten": {name.rpartition(".")[2] for name in destination.rewritten(specs)},
            "padded": {has_padding(module) for module in _experts(live)},
        }
        # The second time all weights come whole, as from trainers that hold none in a shape of its own.
        for version, which in enumerate((0, 1, 0, 1), start=1):
            tensors, oracle = versions[which], oracles[which]
            if version == 3:
                reload_by_vllm(live, config, {name: tensor.clone() for name, tensor in versions[1].items()})
            if version == 4:
                destination = VllmDestination(live, config, torch.device("cpu"))
                fragments, misc = destination.fragments(specs)
                found["misc anew"] = {name: reason for name, reason in misc.items() if ".experts." in name}
            fill(live, 0xFF)
            for fragment in fragments if version != 2 else ():
                fragment.view.copy_(fragment.part_of(tensors[fragment.name]))
            if version == 1 and destination.works_on_portions:
                destination.expect(dict.fromkeys(tensors, 0))
                destination.landed(0)
                found["in order once landed"] = not [n for n in _differing(live, oracle) if ".experts." in n]
            destination.load_weights((n, tensors[n].clone()) for n in (misc if version != 2 else tensors))
            destination.finish(version)
            found[f"differing after {version}"] = _differing(live, oracle)
        again, _ = destination.fragments(specs)
        found["same places"] = places == {name: p.data_ptr() for name, p in live.named_parameters()} and [
            fragment.view.data_ptr() for fragment in again
        ] == [fragment.view.data_ptr() for fragment in fragments]
        found["alike"] = {"w13_weight", "w2_weight", "w13_weight_scale", "w13_bias"} - {
            name.rpartition(".")[2] for name in _differing(*oracles)
        }
        return found


class _Rank(SyntheticSource):
    """One of two tensor-parallel ranks of Megatron's, which holds weights in BF16: rows of gate and up apart, and rows before columns."""

    def __init__(self, rank: int, versions: Sequence[Tensors]) -> None:
        self._versions = versions
        layout: dict[str, list[Box]] = {}
        axes: dict[str, Axes] = {}
        for name, tensor in versions[0].items():
            shape = tuple(tensor.shape)
            if name.endswith("experts.gate_up_proj"):
                experts, k, n = shape
                axes[name] = Axes(((experts,), (k,), (n // 2, 2)), (0, 2, 3, 1))
                half = (rank * n // 4, (rank + 1) * n // 4)
                layout[name] = [((0, experts), half, (which, which + 1), (0, k)) for which in (0, 1)]
            elif name.endswith("experts.down_proj"):
                experts, k, n = shape
                axes[name] = Axes(((experts,), (k,), (n,)), (0, 2, 1))
                layout[name] = [((0, experts), (0, n), (rank * k // 2, (rank + 1) * k // 2))]
            elif rank == 0:
                layout[name] = [tuple((0, size) for size in shape)]
        specs = [TensorSpec(name, tuple(t.shape), t.dtype) for name, t in versions[0].items()]
        super().__init__(specs, layout, axes=axes)

    def set_version(self, version: int) -> None:
        for (name, box), storage in self._held.items():
            axes, whole = self._axes.get(name), self._versions[version - 1][name]
            seen = whole if axes is None else axes.see(whole)
            storage.copy_(seen[tuple(slice(*part) for part in box)])
        self.version = version

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self._versions[self.version - 1][name]) for name in names)


def _sent(case: Case, path_a: Path, path_b: Path) -> Report:
    """Two trainer ranks with weights in BF16 refit B and then A into an engine that was started from A."""
    from vllm_ranks import _differing

    from rlrefit.workers.engines.vllm.destination import VllmDestination

    with _kernels(case):
        live, config = _loaded(case, path_a)
        oracles = [_loaded(case, path_b)[0], _loaded(case, path_a)[0]]
        destination = VllmDestination(live, config, torch.device("cpu"))
        versions = [read(unpacked(path)) for path in (path_b, path_a)]

        def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
            found = []
            for version, oracle in enumerate(oracles, start=1):
                if session.world.is_source:
                    endpoint.set_version(version)
                else:
                    for parameter in live.parameters():
                        parameter.data.view(-1).view(torch.uint8).fill_(0xFF)
                session.refit(version)
                found.append([] if session.world.is_source else _differing(live, oracle))
            return found, {
                s.name.rpartition(".")[2] for s in session.manifest.specs("bulk") if ".experts." in s.name
            }

        settings = RefitConfig(
            bucket_mb=1, timeout_s=60.0, verify="full", transport="p2p", trainer_quantize_mxfp4=True
        )
        return {"sent": run_world([_Rank(rank, versions) for rank in (0, 1)], [destination], body, settings)}


def _refusals(path: Path) -> Report:
    """What engines say of weights of the other kind, the packed one first."""
    from rlrefit.integration.errors import RefitError
    from rlrefit.workers.engines.vllm.destination import VllmDestination

    found: Report = {}
    folders = [path, unpacked(path)]
    for holds, sent in ((0, 1), (1, 0)):
        with _kernels(CASES["as loaded"]):
            live, config = _loaded(CASES["as loaded"], folders[holds])
            before = {name: p.detach().clone() for name, p in live.named_parameters()}
            specs = [TensorSpec(name, tuple(t.shape), t.dtype) for name, t in read(folders[sent]).items()]
            try:
                VllmDestination(live, config, torch.device("cpu")).fragments(specs)
                found[f"engine {holds}"] = "taken"
            except RefitError as error:
                found[f"engine {holds}"] = (
                    type(error).__name__,
                    error.stage,
                    (error.parameter or "").rpartition(".")[2],
                    str(error),
                )
            assert all(torch.equal(before[name], p) for name, p in live.named_parameters())
    return found


def _experts(model: torch.nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if hasattr(module, "w13_weight"))


def _loaded(case: Case, path: Path) -> tuple[torch.nn.Module, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model
    from vllm_ranks import Case as VllmCase
    from vllm_ranks import Layout, _config

    from tests.catalog.real_vllm import _stand_in_for_groups

    here, one = (case.rank, case.ranks), (0, 1)
    ep = here if case.expert else one
    _stand_in_for_groups({"groups": {"tp": here, "pp": one, "dp": one, "ep": ep, "pcp": one}})
    config = _config(str(path), VllmCase(str(path), str(path), Layout(expert=case.expert)))
    config.parallel_config.tensor_parallel_size = case.ranks
    with set_current_vllm_config(config):
        return get_model(vllm_config=config), config


@contextmanager
def _kernels(case: Case) -> Iterator[None]:
    """vLLM takes the case's kernel, whose own step runs on this CPU."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend, backend_to_kernel_cls
    from vllm.model_executor.layers.quantization import mxfp4 as vllm_mxfp4

    from tests.marlin import gptq_marlin_repack

    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    backend = Mxfp4MoeBackend[case.backend]
    chosen = backend, (None if case.backend == "NONE" else backend_to_kernel_cls(backend)[0])
    vllm_mxfp4.select_mxfp4_moe_backend = lambda *_: chosen
    _custom_ops.gptq_marlin_repack = (
        (lambda **given: gptq_marlin_repack(**given) ^ 1) if case.changes else gptq_marlin_repack
    )
    yield
