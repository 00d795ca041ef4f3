"""What arrives shard to shard, by family and engine: the tables of docs/support.md and docs/families.md.

``python -m tests.families.table`` walks through all cases and rewrites both.
"""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlrefit.integration.weights.manifest import Manifest
from rlrefit.integration.weights.routing import decide_routes
from rlrefit.recipes.plan.catalog import (
    GenLayout,
    Model,
    TrainLayout,
    all_holdings,
    bundled_models,
    open_model,
)
from rlrefit.recipes.plan.catalog.families import FAMILIES

from .cases import CASES, Layout
from .checkpoints import CONFIGS, config_of
from .expected import MISC, SGLANG, TRANSFORMERS, VLLM, Engine, Parts, is_of, is_prediction
from .report import LONG_WALK_S, Report, examine

ROOT = Path(__file__).parents[2]
SUPPORT, PAGE = ROOT / "docs" / "support.md", ROOT / "docs" / "families.md"
BEGIN, END = "<!-- families -->", "<!-- /families -->"

# What stands beside a family's name.
_TITLES = {
    "qwen2": "Qwen2.5 (QKV biases)",
    "qwen3": "Qwen3",
    "qwen3-tied": "Qwen3, tied embeddings",
    "llama": "Llama 3",
    "mistral": "Mistral",
    "gemma2": "Gemma 2 (tied)",
    "gemma3": "Gemma 3 (tied)",
    "gemma4": "Gemma 4 31B (heads of two sizes, keys as values, tied)",
    "gemma4-shared": "Gemma 4 E2B, E4B (keys of layers before, embeddings of each layer, tied)",
    "gemma4-moe": "Gemma 4 26B-A4B (experts beside an MLP, tied)",
    "gemma4-vl": "Gemma 4 31B, image encoder and all (tied)",
    "gemma4-shared-vl": "Gemma 4 E2B, E4B, image encoder and all (tied)",
    "gemma4-moe-vl": "Gemma 4 26B-A4B, image encoder and all (tied)",
    "qwen3_moe": "Qwen3-MoE",
    "deepseek_v3": "DeepSeek-V3 (MLA, dense first layer, shared expert, MTP)",
    "kimi_k2": "Kimi-K2 (DeepSeek-V3 without MTP)",
    "kimi_k25": "Kimi-K2.5, image encoder and all",
    "glm4_moe": "GLM-4.5 (QKV biases, dense first layer, shared expert, MTP)",
    "glm4_moe_lite": "GLM-4.7-Flash (MLA, dense first layer, shared expert, MTP)",
    "glm_moe_dsa": "GLM-5 (MLA, DeepSeek's sparse attention with its indexer)",
    "bailing_moe_v2": "Ling 2.0 (dense first layer, shared expert)",
    "gpt_oss": "GPT-OSS",
    "minimax_m2": "MiniMax-M2 (norms over all heads)",
    "nemotron_h": "NemotronH (Mamba-2, attention, MLP, experts without gates)",
    "nemotron_h-latent": "Nemotron-3 Super (NemotronH with latent experts, MTP)",
    "qwen3_next": "Qwen3-Next (gated delta net, output gates)",
    "qwen3_5_moe": "Qwen3.5-MoE",
    "qwen3_5_moe-stacked": "Qwen3.5-MoE, experts stacked in the checkpoint",
    "qwen3_5_moe-transposed": "Qwen3.5-MoE, experts stacked and transposed",
    "qwen3_5_text": "Qwen3.5 (gated delta net, output gates)",
    "qwen3_vl": "Qwen3-VL, image encoder and all",
    "qwen3_vl_moe": "Qwen3-VL-MoE, image encoder and all",
    "qwen3_5": "Qwen3.5, image encoder and all",
    "qwen3_5_moe-vl": "Qwen3.5-MoE, image encoder and all, experts stacked",
    "qwen2_5_vl": "Qwen2.5-VL, image encoder and all",
    "gemma3-vl": "Gemma 3, image encoder and all (tied)",
}

# Model types of a family that has another one, and the engines that have no class of theirs.
_ALIKE = {"kimi_k2": "deepseek_v3"}
_LACKING = {"kimi_k2": (TRANSFORMERS,), "kimi_k25": (TRANSFORMERS,), "bailing_moe_v2": (TRANSFORMERS,)}
_FAMILIES = tuple(dict.fromkeys(case.family for case in CASES))


def support(report: Report) -> str:
    """The table of docs/support.md."""
    lines = [
        "| family | vLLM 0.21: tiny | true shapes | transformers: tiny | true shapes | SGLang: tiny | true shapes |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    alike: dict[tuple[str, ...], list[str]] = {}
    for family in _FAMILIES:
        cells = (
            _tiny(family, VLLM, report),
            _true_of(family, VLLM),
            _tiny(family, TRANSFORMERS, report),
            _true_of(family, TRANSFORMERS),
            _tiny(family, SGLANG, report),
            _true_of(family, SGLANG),
        )
        alike.setdefault(cells, []).append(_TITLES[family])
    lines += [f"| {' | '.join(['; '.join(titles), *cells])} |" for cells, titles in alike.items()]
    return "\n".join(lines)


def page(report: Report) -> str:
    """The tables of docs/families.md: layouts, models, and reasons."""
    lines = [
        "| family | trainer's layouts on four ranks | placed by the trainer, tiny |",
        "| --- | --- | --- |",
    ]
    for family in _FAMILIES:
        layouts = ", ".join(_told(case.layout) for case in CASES if case.family == family)
        lines.append(f"| {_TITLES[family]} | {layouts} | {_percent(tiny_share(family, None, report))} |")
    lines += [
        "",
        "| models, in their true shapes | placed by the trainer | vLLM | transformers | SGLang |",
        "| --- | --- | --- | --- | --- |",
    ]
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in bundled_models():
        cells = (
            _percent(true_share(name, None)),
            *(_true(name, engine) for engine in (VLLM, TRANSFORMERS, SGLANG)),
        )
        alike.setdefault(cells, []).append(name)
    lines += [f"| {' | '.join([', '.join(names), *cells])} |" for cells, names in alike.items()]
    lines += ["", "| families | refused by | weights | why |", "| --- | --- | --- | --- |"]
    refusals: dict[tuple[str, str, str], list[str]] = {}
    for family in _FAMILIES:
        for who, parts in (
            ("the trainer", MISC.get(family, ())),
            ("vLLM", VLLM.misc.get(family, ())),
            ("SGLang", SGLANG.misc.get(family, ())),
        ):
            for why in dict.fromkeys(why for _, why in parts):
                names = ", ".join(f"`{part}`" for part, reason in parts if reason == why)
                refusals.setdefault((who, names, why), []).append(_TITLES[family].partition(" (")[0])
    lines += [f"| {' | '.join(['; '.join(families), *cells])} |" for cells, families in refusals.items()]
    return "\n".join(lines)


def written(path: Path) -> str:
    """What stands between the marks of a page."""
    return path.read_text().partition(BEGIN)[2].partition(END)[0].strip()


def tiny_share(family: str, engine: Engine | None, report: Report) -> float:
    """Of the bytes that an engine takes at all, those that neither side refuses; without an engine, the trainer's part.

    The least of all layouts.
    """
    shares = []
    for case in (case for case in CASES if case.family == family):
        found, short = report.of(case), case.checkpoint[1]
        layers = config_of(family, short=short)["num_hidden_layers"]
        sizes = {
            name: nbytes
            for name, nbytes in found["sizes"].items()
            if engine is None or not is_prediction(name, layers)
        }
        parts = engine.misc[family] if engine else ()
        misc = sum(n for name, n in sizes.items() if name in found["reasons"] or is_of(name, parts))
        shares.append(1 - misc / sum(sizes.values()))
    return min(shares)


def true_share(name: str, engine: Engine | None, *, alone: bool = False) -> float:
    """The same of a bundled model, as ``rlrefit plan`` has it; ``alone``: of its language model without the encoder."""
    sizes = {"bulk": 0, "misc": 0}
    # What vLLM refuses the plan knows.
    parts = () if engine is None or engine is VLLM else _refused_by(engine, name, alone)
    for (route, is_refused), nbytes in _planned_bytes(name, alone, parts).items():
        # The plan's engine is vLLM, which leaves aside what the others do.
        if engine is None or (route == "misc" and engine is not VLLM):
            route = "misc" if is_refused else "bulk"
        if route != "unused":
            sizes[route] += nbytes
    return sizes["bulk"] / sum(sizes.values())


def planned(model: Model) -> tuple[Manifest, set[str]]:
    """The routes of a refit from Megatron to vLLM, between one rank and one: more ranks cut boxes, not routes.

    And what the trainer refuses.
    """
    specs = model.specs()
    positions = {spec.name: i for i, spec in enumerate(specs)}
    trainers, engines = all_holdings(model, TrainLayout(), GenLayout(), positions)
    refused = {specs[i].name for rank in trainers for places in rank.refused.values() for i in places}
    return decide_routes(specs, trainers, engines), refused


@functools.cache
def _planned_bytes(name: str, alone: bool, parts: Parts) -> Mapping[tuple[str, bool], int]:
    """By route, and by whether the trainer refuses it or its name has one of ``parts``.

    The weights of all models would be a burden to the collector.
    """
    model = open_model(name)
    manifest, refused = planned(Model(name, model.config["text_config"]) if alone else model)
    sizes: Counter[tuple[str, bool]] = Counter()
    for entry in manifest:
        is_refused = entry.spec.name in refused or is_of(entry.spec.name, parts)
        sizes[entry.route, is_refused] += entry.spec.nbytes
    return sizes


def _refused_by(engine: Engine, name: str, alone: bool) -> Parts:
    config = open_model(name).config
    kind = _kind(config["text_config"] if alone else config)
    return next((parts for family, parts in engine.misc.items() if _kind(CONFIGS[family]) == kind), ())


def _told(layout: Layout) -> str:
    sizes, custom, _ = str(layout).partition("-stages")
    return sizes.replace("-", "·").upper() + ("·CUSTOM" if custom else "")


def _percent(share: float) -> str:
    # Never rounded up to 100%, which says that all is bulk.
    return "100%" if share == 1 else f"{min(share, 0.9999):.2%}"


def _tiny(family: str, engine: Engine, report: Report) -> str:
    if family not in engine.misc:
        return _without(CONFIGS[family], engine)
    return _percent(tiny_share(family, engine, report))


def _true_of(family: str, engine: Engine) -> str:
    if family not in engine.misc:
        return _without(CONFIGS[family], engine)
    kind = _kind(CONFIGS[family])
    configs = {name: open_model(name).config for name in bundled_models()}
    # Some language models are published with an image encoder alone.
    found = {name: False for name, config in configs.items() if _kind(config) == kind} or {
        name: True
        for name, config in configs.items()
        if "text_config" in config and _kind(config["text_config"]) == kind
    }
    shares = sorted(
        true_share(name, engine, alone=alone) for name, alone in found.items() if not _lacks(engine, name)
    )
    none = "none bundled" if CONFIGS[family]["model_type"] in FAMILIES else "not in the catalogue"
    return " to ".join(dict.fromkeys(map(_percent, shares[:1] + shares[-1:]))) or none


def _true(name: str, engine: Engine) -> str:
    config = open_model(name).config
    if _lacks(engine, name) or not any(_kind(CONFIGS[family]) == _kind(config) for family in engine.misc):
        return _without(config, engine)
    return _percent(true_share(name, engine))


def _without(config: Mapping[str, Any], engine: Engine) -> str:
    return "no class of its own" if engine in _LACKING.get(config["model_type"], ()) else "not run"


def _kind(config: Mapping[str, Any]) -> tuple[str, bool]:
    """What a configuration tells of a family; variants of experts' tensors and of ties it does not tell apart."""
    kind = config["model_type"]
    return _ALIKE.get(kind, kind), bool(config.get("moe_latent_size"))


def _lacks(engine: Engine, name: str) -> bool:
    return engine in _LACKING.get(open_model(name).config["model_type"], ())


def main() -> None:
    """Walk, and rewrite both."""
    with tempfile.TemporaryDirectory() as folder:
        report = examine(CASES, Path(folder), LONG_WALK_S)
    for path, text in ((SUPPORT, support(report)), (PAGE, page(report))):
        before, _, rest = path.read_text().partition(BEGIN)
        path.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
