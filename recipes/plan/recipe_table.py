"""The table of real-model recipes in ``docs/recipes.md``, planned from the recipes themselves.

``python -m rlrefit.recipes.plan.recipe_table docs/recipes.md`` brings the file up to date; what stands between the two
markers is replaced.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..config.load import bundled_recipes, load_config
from ..terminal import size
from ..tiny.checkpoints import PREFIX
from .arguments import add_arguments
from .options import read_options
from .recipe import layout_text
from .study import Study, study

BEGIN, END = "<!-- recipes: made by rlrefit.recipes.plan.recipe_table -->", "<!-- /recipes -->"


@dataclass(frozen=True)
class Row:
    """One recipe's refit as planned."""

    recipe: str
    checkpoint: str
    planned: Study

    def cells(self) -> list[str]:
        """One cell for each of ``_COLUMNS``."""
        options, analysis = self.planned.options, self.planned.analysis
        pairs, train = analysis.pair_bytes, analysis.train_ranks
        return [
            f"`{self.recipe}`",
            self.checkpoint,
            f"{train}: {_layout(layout_text(options.train))}",
            f"{analysis.gen_ranks}: {_layout(layout_text(options.gen))}",
            size(sum(spec.nbytes for spec in self.planned.specs)),
            f"{100 * self.planned.bulk_share:.2f}%",
            size(self.planned.misc_bytes),
            size(int(pairs[:train].sum(axis=1).max())),
            size(int(pairs[:, train:].sum(axis=0).max())),
            _seconds(self.planned.bound_seconds),
            _seconds(self.planned.predicted_seconds),
        ]


_COLUMNS = (
    "recipe",
    "checkpoint",
    "trainer GPUs",
    "engine GPUs",
    "weights",
    "bulk",
    "misc",
    "most sent by a trainer",
    "most kept by an engine rank",
    "T",
    "predicted refit",
)


def real_recipes() -> list[str]:
    """Bundled recipes whose models are not tiny."""
    return [name for name in bundled_recipes() if not load_config(name).model.path.startswith(PREFIX)]


def plan_recipe(recipe: str) -> Row:
    """Plan one recipe as ``rlrefit plan --recipe`` does.

    Raises:
        PlanProblems: with all that is wrong with it.
    """
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = read_options(parser.parse_args(["--recipe", recipe, "--compile-ranks", "1"]))
    return Row(recipe, load_config(recipe).model.path, study(options))


def table(rows: Iterable[Row]) -> str:
    """The rows in Markdown."""
    lines = [_COLUMNS, ["---"] * 4 + ["---:"] * (len(_COLUMNS) - 4), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def replaced(document: str, made: str) -> str:
    """``document`` with what stands between the markers replaced.

    Raises:
        ValueError: it lacks the markers.
    """
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the document has no {BEGIN} … {END}; put both where the table is to stand")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def _layout(text: str) -> str:
    return " ".join(
        part.replace("=", " ") if part.startswith(("first", "last")) else part.replace("=", "").upper()
        for part in text.split(",")
    )


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def main() -> None:
    """Entry of ``python -m rlrefit.recipes.plan.recipe_table``."""
    parser = argparse.ArgumentParser(description="Bring the table of recipes in a Markdown file up to date.")
    parser.add_argument("file", type=Path, help="docs/recipes.md")
    file = parser.parse_args().file
    file.write_text(replaced(file.read_text(), table(map(plan_recipe, real_recipes()))))


if __name__ == "__main__":
    main()
