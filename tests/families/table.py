"""The README's table of families; ``python -m tests.families.table`` walks through all cases and rewrites it."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from rlrefit.workers.catalog import TrainLayout, bundled_models, open_model, train_holdings
from rlrefit.workers.catalog.units import TURNED

from .cases import CASES, Layout
from .expected import MISC
from .report import Report, examine

README = Path(__file__).parents[2] / "README.md"
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
    "qwen3_moe": "Qwen3-MoE",
    "deepseek_v3": "DeepSeek-V3 (MLA, dense first layer, shared expert, MTP)",
    "gpt_oss": "GPT-OSS",
    "nemotron_h": "NemotronH (Mamba-2, attention, MLP, experts without gates)",
    "qwen3_next": "Qwen3-Next (gated delta net, output gates)",
    "qwen3_5_moe": "Qwen3.5-MoE",
    "qwen3_5_moe-stacked": "Qwen3.5-MoE, experts stacked in the checkpoint",
    "qwen3_5_moe-transposed": "the same, stacked and transposed",
}

# Further model types of the same family.
_ALIKE = {"deepseek_v3": ("kimi_k2",)}


def section(report: Report) -> str:
    """The text between the markers."""
    lines = [
        "| family | tiny | true shapes | layouts on four ranks | misc |",
        "| --- | --- | --- | --- | --- |",
    ]
    for family in dict.fromkeys(case.family for case in CASES):
        cases = [case for case in CASES if case.family == family]
        found = [report.of(case) for case in cases]
        share = min(1 - case["misc_bytes"] / case["bytes"] for case in found)
        layouts = ", ".join(_told(case.layout) for case in cases)
        names = ", ".join(f"`{part}`" for part, _ in MISC.get(family, ()))
        lines.append(
            f"| {_TITLES[family]} | {_percent(share)} | {_true_shares(family)} | {layouts} | {names or 'nothing'} |"
        )
    return "\n".join(lines)


def written() -> str:
    """What the README says now."""
    return README.read_text().partition(BEGIN)[2].partition(END)[0].strip()


def _told(layout: Layout) -> str:
    sizes, custom, _ = str(layout).partition("-stages")
    return sizes.replace("-", "·").upper() + ("·CUSTOM" if custom else "")


def _percent(share: float) -> str:
    # Never rounded up: 100% says that all is bulk.
    return "100%" if share == 1 else f"{int(share * 10000) / 100:.2f}%"


@functools.cache
def true_share(name: str) -> float:
    """What the trainer's rules place of a bundled model."""
    model = open_model(name)
    specs = model.specs()
    held = train_holdings(model, TrainLayout(), 0, {spec.name: i for i, spec in enumerate(specs)})
    refused = {int(i) for reason, found in held.refused.items() if reason != TURNED for i in found}
    return 1 - sum(specs[i].nbytes for i in refused) / sum(spec.nbytes for spec in specs)


def _true_shares(family: str) -> str:
    if "-" in family:
        return "as above"
    kinds = {family, *_ALIKE.get(family, ())}
    names = [name for name in bundled_models() if open_model(name).config["model_type"] in kinds]
    return ", ".join(f"{name} {_percent(true_share(name))}" for name in names) or "not in the catalogue"


def main() -> None:
    """Walk, and rewrite the section."""
    with tempfile.TemporaryDirectory() as folder:
        text = section(examine(CASES, Path(folder)))
    before, _, rest = README.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    README.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    main()
