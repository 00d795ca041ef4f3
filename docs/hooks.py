"""What the site has beside the pages of this folder: the root's pages, the configuration keys and the API.

mkdocs runs it (``hooks`` of mkdocs.yml). Nothing of rlrefit is imported: all is read from the source.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
TREE = ROOT / "build" / "docs"  # the source as the package rlrefit, where mkdocs.yml has griffe look for it

# Pages of the repository's root, and their names in the site.
PAGES = {
    "README.md": "index.md",
    "BENCHMARKS.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}

# The public API, by what a reader looks for. Where a name is defined is found in the source; a name that several modules
# define stands with the end of its module.
API = {
    "Trainers": ("MegatronRefitMixin", "FSDPRefitMixin", "QATRefitMixin"),
    "Configuration": ("RefitConfig", "check_nccl_xfer_refit_support"),
    "Session and records": ("RefitSession", "ServingState", "RefitRecord"),
    "Engines' drivers": (
        "VllmDriver",
        "AsyncVllmDriver",
        "VllmRefitExtension",
        "RefitClient",
        "SglangRefit",
        "AsyncSglangRefit",
        "SglangSender",
        "TrtllmDriver",
        "TrtllmSender",
    ),
    "Trainer and engine on the same GPUs": ("ColocatedCycle", "AwaitedCycle"),
    "Frameworks": (
        "nemo_rl.install.install",
        "VerlRefitExtension",
        "RefitCheckpointManager",
        "RefitAsyncGRPOTrainer",
        "trl.transfer.ShardOptions",
    ),
    "Errors": (
        "RefitError",
        "RefitMismatch",
        "RefitTimeout",
        "PeerLost",
        "PlanError",
        "TransportUnavailable",
        "VerificationError",
        "EngineDirty",
    ),
    "One tensor between two meshes": ("xferdtensor",),
}


def on_startup(**_: Any) -> None:
    """Copy the source, with the roles of docstrings as plain code."""
    shutil.rmtree(TREE, ignore_errors=True)
    for top in ("integration", "workers", "recipes"):
        for path in (ROOT / top).rglob("*.py"):
            copy = TREE / "rlrefit" / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            text = re.sub(r":(?:class|meth|func|mod|attr|data|exc):`~?([\w.]+)`", _as_code, path.read_text())
            # What stands before a colon would be read as the type of what is returned; before this one is none.
            copy.write_text(re.sub(r"(^ +Returns:\n +)(?=[^\n]*:)", r"\1: ", text, flags=re.MULTILINE))


def _as_code(role: re.Match[str]) -> str:
    return f"`{role[1].removeprefix('.').rpartition('.')[2]}`"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made here."""
    made = {name: (ROOT / page).read_text() for page, name in PAGES.items()}
    made |= {"configuration.md": configuration(), "api.md": api()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links among the pages, which lie in one folder here."""
    for source, name in PAGES.items():
        markdown = re.sub(rf"\]\((?:\.\./)?{re.escape(source)}", f"]({name}", markdown)
    return (
        re.sub(r"\]\(docs/(\w+\.(?:md|svg))", r"](\1", markdown)
        if page.file.src_uri in PAGES.values()
        else markdown
    )


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """No page may show marks of its source."""
    if found := re.search(r".{0,60}(?:``|\\\|).{0,60}", re.sub(r"<pre.*?</pre>", "", html, flags=re.DOTALL)):
        raise PluginError(f"docs/hooks.py: {page.file.src_uri} shows marks of its source: {found[0]}")
    return html


def api() -> str:
    lines = [
        "# API",
        "",
        "What trainers, engines and frameworks call. Other modules may change without notice.",
    ]
    defined = _definitions()
    for title, names in API.items():
        lines += ["", f"## {title}"]
        for name in names:
            places = [
                place
                for place in defined.get(name.rpartition(".")[2], [])
                if f".{place}".endswith(f".{name}")
            ]
            if len(places) != 1:
                raise PluginError(
                    f"docs/hooks.py: {name} is defined as {places or 'nothing'}; name another in API"
                )
            lines += ["", f"::: {places[0]}"]
    return "\n".join(lines) + "\n"


def _definitions() -> dict[str, list[str]]:
    """Full names of all public classes and functions, by the name alone."""
    found: dict[str, list[str]] = {}
    for path in sorted(TREE.rglob("*.py")):
        module = ".".join(path.relative_to(TREE).with_suffix("").parts).removesuffix(".__init__")
        for name in re.findall(r"^(?:class|def) ([A-Za-z]\w*)", path.read_text(), re.MULTILINE):
            found.setdefault(name, []).append(f"{module}.{name}")
    return found


def configuration() -> str:
    """All keys of a recipe, section by section, from the schemas' dataclasses."""
    classes: dict[str, Any] = {}
    for module in (
        *sorted((TREE / "rlrefit/recipes/config").glob("schema*.py")),
        TREE / "rlrefit/integration/config.py",
    ):
        name = ".".join(module.relative_to(TREE).with_suffix("").parts)
        found = griffe.load(name, search_paths=[TREE], docstring_parser="google")
        classes |= {name: value for name, value in found.classes.items() if not value.is_alias}
    lines = [
        "# Configuration",
        "",
        "All keys of a recipe, with their defaults. `rlrefit train` takes each as `key=value`. In your own trainer, `policy.refit` is "
        "`RefitConfig`. Unknown keys, wrong types and values out of range are errors, reported together.",
    ]
    for path, name in _sections("", "TrainConfig", classes):
        section = classes[name]
        meanings = {
            item.name: item.description
            for part in section.docstring.parsed
            if part.kind is griffe.DocstringSectionKind.attributes
            for item in part.value
        }
        (text, *_) = (
            part.value for part in section.docstring.parsed if part.kind is griffe.DocstringSectionKind.text
        )
        lines += [
            "",
            f"## {f'`{path}`' if path else 'The run'}",
            "",
            text,
            "",
            "| key | default | meaning |",
            "| --- | --- | --- |",
        ]
        for key, field in section.attributes.items():
            if _section_of(field, classes) is None and key in meanings:
                whole = f"{path}.{key}" if path else key
                lines.append(f"| `{whole}` | `{_default(field)}` | {_cell(meanings[key])} |")
    return "\n".join(lines) + "\n"


def _sections(path: str, name: str, classes: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield path, name
    for key, field in classes[name].attributes.items():
        if (section := _section_of(field, classes)) is not None:
            yield from _sections(f"{path}.{key}" if path else key, section, classes)


def _section_of(field: Any, classes: dict[str, Any]) -> str | None:
    name = str(field.annotation)
    return name if name in classes else None


def _default(field: Any) -> str:
    """As YAML has it."""
    text = str(field.value)
    if "default_factory" in text:
        return "{}" if "dict" in text else "[]"
    value = ast.literal_eval(text)
    return (
        {None: "null", True: "true", False: "false", "": '""'}[value]
        if value in (None, "") or isinstance(value, bool)
        else str(value)
    )


def _cell(text: str) -> str:
    # A bar ends a cell, but not in code.
    parts = re.split(r"(`+[^`]+`+)", " ".join(text.split()))
    return "".join(part if part.startswith("`") else part.replace("|", "\\|") for part in parts)
