"""The arrows between the rooms of the product: recipes → workers → integration, and none in a circle."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("integration", "workers", "recipes")
# What `integration` may load beside the standard library. Triton comes with torch for GPUs, _typeshed with type checkers.
OF_INTEGRATION = {"torch", "omegaconf", "numpy", "triton", "_typeshed"}


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_as_it_loads(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Those outside of functions, and those for type checkers."""
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield statement
        elif isinstance(statement, ast.If | ast.Try):
            yield from imports_as_it_loads([*statement.body, *statement.orelse])


def targets(module: str) -> Iterator[str]:
    """What a module imports as it loads: modules of the product, and the packages of others."""
    path = modules()[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for found in imports_as_it_loads(ast.parse(path.read_text()).body):
        if isinstance(found, ast.Import):
            yield from (alias.name.split(".")[0] for alias in found.names)
        elif not found.level:
            yield str(found.module).split(".")[0]
        else:
            base = package[: len(package) - found.level + 1]
            source = ".".join([*base, *([found.module] if found.module else [])])
            for alias in found.names:
                inner = f"{source}.{alias.name}"
                yield inner if inner in modules() else source


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module: {t for t in targets(module) if t in modules()} - {module} for module in modules()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_arrows_lead_from_recipes_to_workers_to_integration() -> None:
    upwards = [
        f"{module} → {target}"
        for module in modules()
        for target in targets(module)
        if target in modules() and ROOMS.index(target.split(".")[0]) > ROOMS.index(module.split(".")[0])
    ]
    assert upwards == []


def test_integration_loads_torch_and_omegaconf_alone() -> None:
    allowed = {*sys.stdlib_module_names, *OF_INTEGRATION}
    others = [
        f"{module} → {target}"
        for module in modules()
        if module.split(".")[0] == "integration"
        for target in targets(module)
        if target not in modules() and target not in allowed
    ]
    assert others == []
