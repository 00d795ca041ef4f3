"""Models in blocks of FP8, in INT4 and in NVFP4: trainers' holdings beside what the refit's own sources make, and refusals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from rlrefit.integration.layout import Fragment
from rlrefit.integration.plan import analyse
from rlrefit.integration.quantize.formats import Fp8Blockwise, Int4, Nvfp4
from rlrefit.integration.weights.endpoints import WeightSource
from rlrefit.integration.weights.holdings import Holdings
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.integration.weights.quantizing import QuantizingSource
from rlrefit.recipes.plan.catalog import (
    CatalogError,
    FsdpLayout,
    GenLayout,
    Model,
    Param,
    QuantizedFormat,
    TrainLayout,
    all_holdings,
    exported_specs,
    open_model,
    train_storage,
    violations,
)
from rlrefit.workers.trainers.qat.config import Linear, QATConfig
from rlrefit.workers.trainers.qat.model import QAT
from rlrefit.workers.trainers.qat.source import PackedSource

from .shrunken import BLOCK_CONFIGS, CONFIGS


class _Rank:
    """A trainer rank with parameters that have no memory."""

    device = torch.device("meta")

    def __init__(self, specs: list[TensorSpec], params: Sequence[Param]):
        self._specs, self._params = specs, params

    def specs(self) -> list[TensorSpec]:
        return self._specs

    def fragments(self) -> tuple[list[Fragment], dict[str, str]]:
        held = []
        for param in self._params:
            storage = torch.empty(param.shape, dtype=param.dtype, device="meta")
            held += [Fragment(p.name, p.full_shape, p.box, storage[p.index]) for p in param.parts]
        return held, {name: param.reason for param in self._params for name in param.refused}


# One key head, which two ranks cut in the middle of its block.
_ONE_KEY_HEAD = BLOCK_CONFIGS["qwen3_moe"] | {"num_key_value_heads": 1}
_CASES: list[tuple[str, dict[str, Any], TrainLayout | FsdpLayout, set[str]]] = [
    ("qwen3_moe", BLOCK_CONFIGS["qwen3_moe"], TrainLayout(tp=2, ep=2), {"mlp.gate"}),
    ("qwen3_moe", BLOCK_CONFIGS["qwen3_moe"], TrainLayout(pp=2, ep=2), {"mlp.gate"}),
    ("qwen3_moe", _ONE_KEY_HEAD, FsdpLayout(2, 2), set()),
    ("qwen3_moe", BLOCK_CONFIGS["qwen3_moe"], FsdpLayout(3), set()),
    # Its output projections are cut to half a block of columns.
    ("deepseek_v3", BLOCK_CONFIGS["deepseek_v3"], TrainLayout(tp=4), {"mlp.gate"}),
    ("deepseek_v3", BLOCK_CONFIGS["deepseek_v3"], TrainLayout(tp=2), {"mlp.gate"}),
]

# Of each down projection a rank has half a group of columns.
_NARROW = BLOCK_CONFIGS["qwen3"] | {"intermediate_size": 64, "num_key_value_heads": 4}
_INT4_CASES: list[tuple[str, dict[str, Any], TrainLayout | FsdpLayout, set[str]]] = [
    ("qwen3_moe", BLOCK_CONFIGS["qwen3_moe"], TrainLayout(tp=2, ep=2), {"mlp.gate"}),
    ("qwen3_moe", BLOCK_CONFIGS["qwen3_moe"], FsdpLayout(3), set()),
    ("qwen3", BLOCK_CONFIGS["qwen3"], TrainLayout(tp=2, pp=2), set()),
    ("qwen3", _NARROW, TrainLayout(tp=4), {"mlp.down_proj"}),
    ("deepseek_v3", BLOCK_CONFIGS["deepseek_v3"], TrainLayout(tp=2, ep=2), {"mlp.gate"}),
    ("deepseek_v3", BLOCK_CONFIGS["deepseek_v3"], TrainLayout(pp=2, ep=4), {"mlp.gate"}),
]


@pytest.mark.parametrize(
    ("format", "name", "config", "layout", "refused"),
    [(Fp8Blockwise(), *case) for case in _CASES] + [(Int4(32), *case) for case in _INT4_CASES],
)
def test_trainers_hold_what_the_refits_quantizing_source_makes_and_refuses(
    format: QuantizedFormat,
    name: str,
    config: dict[str, Any],
    layout: TrainLayout | FsdpLayout,
    refused: set[str],
) -> None:
    model, served = Model(name, config), Model(name, config, quantize=format)
    specs, travelling = exported_specs(model, layout), exported_specs(served, layout)
    positions = {spec.name: i for i, spec in enumerate(travelling)}
    gen = GenLayout(tp=2)
    sources, destinations = all_holdings(served, layout, gen, positions)
    manifest = analyse(travelling, sources, destinations, bucket_bytes=1 << 20).manifest
    found = {
        entry.spec.name.split(".", 3)[3].split(".weight")[0] for entry in manifest if entry.route == "misc"
    }
    assert {name for name in found if "e_score" not in name} == refused
    formats = {spec.name: format for spec in specs if spec.name in served.formats()}
    for rank, ours in enumerate(sources):
        source = _Rank(specs, train_storage(model, layout, rank))
        real = QuantizingSource(cast(WeightSource, source), formats)
        assert real.specs() == travelling
        assert _content(Holdings.from_fragments(rank, *real.fragments(), positions)) == _content(ours)


@pytest.mark.parametrize("activations", [True, False])
@pytest.mark.parametrize(
    ("name", "layout", "refused"),
    [
        ("qwen3_moe", TrainLayout(tp=2, ep=2), {"gate"}),
        ("qwen3_moe", FsdpLayout(3), set()),
        ("qwen3", TrainLayout(tp=2, pp=2), set()),
        # Two ranks share a key head.
        ("llama", TrainLayout(tp=4), {"q_proj", "k_proj", "v_proj"}),
    ],
)
def test_trainers_in_nvfp4_hold_what_their_packed_source_makes(
    name: str, layout: TrainLayout | FsdpLayout, refused: set[str], activations: bool
) -> None:
    config = BLOCK_CONFIGS[name]
    model = Model(name, config)
    served = Model(name, config, quantize=Nvfp4(), activations=activations)
    specs, travelling = exported_specs(model, layout), exported_specs(served, layout)
    positions = {spec.name: i for i, spec in enumerate(travelling)}
    sources, destinations = all_holdings(served, layout, GenLayout(tp=2), positions)
    linears = [Linear(spec.name, spec.shape[-1]) for spec in specs if spec.name in served.formats()]
    for rank, ours in enumerate(sources):
        source = cast(WeightSource, _Rank(specs, train_storage(model, layout, rank)))
        names = [spec.name for spec in specs]
        qat = QAT(QATConfig(activations=activations), linears, names, lambda source=source: source, None)
        assert qat.weights == served.formats().keys(), "training takes other layers than plans do"
        real = PackedSource(source, qat)
        assert real.specs() == travelling
        assert _content(Holdings.from_fragments(rank, *real.fragments(), positions)) == _content(ours)
    routes = defaultdict(set)
    for entry in analyse(travelling, sources, destinations, bucket_bytes=1 << 20).manifest:
        routes[entry.route].add(entry.spec.name.split(".")[-3 if ".experts." in entry.spec.name else -2])
    assert routes["misc"] == refused
    # No kernel computes with those of experts.
    assert ("unused" in routes) == (activations and name == "qwen3_moe")


def test_nvfp4_is_refused_where_a_rank_would_train_or_hold_parts_of_blocks() -> None:
    narrow = BLOCK_CONFIGS["qwen3"] | {"intermediate_size": 96}
    model = Model("qwen3", narrow, quantize=Nvfp4(), activations=True)
    (found,) = violations(model, TrainLayout(tp=4))
    assert found.startswith("train: training has mlp.")
    assert "leave --quantize w4a4 out" in found
    (found,) = violations(model, GenLayout(tp=4))
    assert found.startswith("gen: vLLM holds mlp.")
    assert violations(model, TrainLayout(tp=2)) == violations(model, FsdpLayout(4)) == []


@pytest.mark.parametrize("format", [Nvfp4(), Int4(32)])
def test_weights_whose_rows_are_no_multiple_of_what_shares_a_scale_are_refused(
    format: QuantizedFormat,
) -> None:
    config = BLOCK_CONFIGS["qwen3"] | {"intermediate_size": 100}
    with pytest.raises(CatalogError, match="has rows of 100 elements"):
        Model("qwen3", config, quantize=format).specs()


def _content(holdings: Holdings) -> tuple[dict[int, Any], dict[int, str]]:
    held = {int(i): (sorted(g.boxes), g.dtype) for g in holdings.groups for i in g.indices}
    return held, {int(i): reason for reason, indices in holdings.refused.items() for i in indices}


def test_what_vllm_refuses_to_hold_in_blocks_is_told_with_the_layout_that_it_takes() -> None:
    served = open_model("qwen3-30b-a3b")
    served = Model(served.name, served.config, quantize=Fp8Blockwise())
    found = violations(served, GenLayout(tp=4))
    assert len(found) == 2
    assert "mlp.experts.0.gate_proj.weight it would have 192" in found[0]
    assert "ep = tp" in found[1]
    assert violations(served, GenLayout(tp=4, ep=4)) == violations(served, GenLayout(tp=2)) == []


def test_families_that_are_not_known_in_blocks_or_under_fsdp_are_refused() -> None:
    with pytest.raises(CatalogError, match="gpt_oss model in blocks of FP8 is not in the catalogue"):
        Model("gpt_oss", CONFIGS["gpt_oss"], quantize=Fp8Blockwise()).specs()
    with pytest.raises(CatalogError, match="qwen2 model in NVFP4 is not in the catalogue"):
        Model("qwen2", CONFIGS["qwen2"], quantize=Nvfp4()).specs()
    with pytest.raises(CatalogError, match="glm4_moe model in INT4 is not in the catalogue"):
        Model("glm4_moe", CONFIGS["glm4_moe"], quantize=Int4(32)).specs()
    for name in ("kimi_k2", "nemotron_h"):
        (found,) = violations(Model(name, CONFIGS[name]), FsdpLayout(2))
        assert f"how FSDP2 holds a {name} model is not in the catalogue" in found
