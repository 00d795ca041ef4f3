"""A model of the catalogue: its configuration, and its weights in the order of Bridge's export."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from ....integration.weights.manifest import TensorSpec
from .families import architecture_of
from .quantized import QuantizedFormat, quantized, quantized_names, travelling_names, travelling_specs
from .sections import Architecture, CatalogError, Section
from .storage import Weight
from .units import Place

_CONFIGS = resources.files(__package__) / "configs"
# In Megatron's names.
_LAYER, _EXPERT = re.compile(r"layers\.(\d+)"), re.compile(r"(?:bias|weight)(\d+)")


@dataclass(frozen=True, eq=False)
class Model:
    """A model without weights; equal only to itself.

    Attributes:
        name: as it was asked for.
        config: of the Hugging Face configuration, what the layouts need.
        dtype: of weights that the family doesn't keep in another one.
        quantize: format in which engines hold linear layers, which the trainer makes as it packs; None for none.
        activations: whether engines quantize these layers' inputs, too, in NVFP4.
    """

    name: str
    config: dict[str, Any]
    dtype: torch.dtype = torch.bfloat16
    quantize: QuantizedFormat | None = None
    activations: bool = False

    @cached_property
    def architecture(self) -> Architecture:
        """The model's sections.

        Raises:
            CatalogError: a family that is not known, or not in this format, or a configuration that can't be read.
        """
        if self.quantize is None:
            return self._unquantized
        return quantized(self._unquantized, str(self.config["model_type"]), self.quantize, self.activations)

    def specs(self) -> list[TensorSpec]:
        """All weights that Megatron-Bridge exports, in its order on one expert-parallel rank.

        With expert parallelism Bridge yields the same weights, those of one local expert number together. Of a
        quantized model, what travels: scales stand behind their codes.
        """
        specs = [
            TensorSpec(name, weight.shape, weight.dtype or self.dtype)
            for name, weight in _in_export_order(self._unquantized)
        ]
        formats = self.formats()
        return [
            travelling
            for spec in specs
            for travelling in (
                travelling_specs(spec, formats[spec.name], self.activations)
                if spec.name in formats
                else (spec,)
            )
        ]

    @cached_property
    def _unquantized(self) -> Architecture:
        return architecture_of(self.config)

    def formats(self) -> dict[str, QuantizedFormat]:
        """The weights that engines hold quantized."""
        if self.quantize is None:
            return {}
        return dict.fromkeys(quantized_names(self.architecture), self.quantize)

    def travelling(self) -> set[str]:
        """What travels in these weights' place, by name."""
        return travelling_names(self.architecture)


def bundled_models() -> list[str]:
    """Short names of the models that come with the package."""
    return sorted(
        entry.name.removesuffix(".json") for entry in _CONFIGS.iterdir() if entry.name[-5:] == ".json"
    )


@cache
def _hub_names() -> dict[str, str]:
    """Hub name, in lower case → short name."""
    found = {}
    for short in bundled_models():
        source = json.loads((_CONFIGS / f"{short}.json").read_text(encoding="utf-8"))["_source"]
        if match := re.search(r"config\.json of (\S+?/\S+?),? ", source):
            found[match.group(1).rstrip(",").lower()] = short
    return found


def bundled_name(hub_name: str) -> str | None:
    """The short name of the bundled model whose configuration is that of ``organisation/model``; else None."""
    return _hub_names().get(hub_name.lower())


def open_model(name: str, dtype: torch.dtype = torch.bfloat16) -> Model:
    """A bundled model by short name, a folder or ``config.json`` by path, or a model of the hub by its name.

    Args:
        name: e.g. ``qwen3-30b-a3b``, ``./checkpoint``, or ``Qwen/Qwen3-8B``.
        dtype: in which the weights are trained and served.

    Raises:
        CatalogError: no such model, a configuration that can't be read, or a family that is not known.
    """
    model = Model(name, _find_config(name), dtype)
    _ = model.architecture
    return model


def _find_config(name: str) -> dict[str, Any]:
    short = name.lower() if name.lower() in bundled_models() else bundled_name(name)
    if short is not None:
        return _read((_CONFIGS / f"{short}.json").read_text(encoding="utf-8"), name)
    path = Path(name).expanduser()
    if path.is_dir() and not (path := path / "config.json").is_file():
        raise CatalogError(
            f"the folder {name} has no config.json, which tells a model's shapes; give the folder of a Hugging Face checkpoint"
        )
    if path.is_file():
        if path.suffix != ".json":
            raise CatalogError(f"{name} is no config.json; give the checkpoint's, or its folder")
        return _read(path.read_text(encoding="utf-8"), str(path))
    if path.suffix == ".json" or name.startswith((".", "/", "~")):
        raise CatalogError(f"there is no {name}; give the path of a config.json or of its folder")
    if name.count("/") != 1:
        close = get_close_matches(name.lower(), bundled_models(), n=3)
        hint = f"did you mean {', '.join(close)}? " if close else ""
        raise CatalogError(
            f"{name!r} is no bundled model and no path of a config.json or its folder; {hint}bundled are "
            f"{', '.join(bundled_models())}"
        )
    return _from_hub(name)


def _read(text: str, where: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise CatalogError(f"{where} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise CatalogError(f"{where} holds no JSON object")
    return config


def _from_hub(name: str) -> dict[str, Any]:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise CatalogError(
            f"{name!r} looks like a model of the hub, which needs huggingface_hub: pip install 'rlrefit[hub]'; or give "
            "the path of its config.json"
        ) from error
    # It logs each of its retries, and the error below says all of it.
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        path = hf_hub_download(name, "config.json")
    except (OSError, ValueError, RuntimeError) as error:
        raise CatalogError(
            f"the configuration of {name!r} can't be had from the hub ({type(error).__name__}: {error}). Give the path "
            f"of its config.json, or a bundled model: {', '.join(bundled_models())}"
        ) from error
    finally:
        log.setLevel(level)
    return _read(Path(path).read_text(encoding="utf-8"), name)


def _in_export_order(architecture: Architecture) -> Iterator[tuple[str, Weight]]:
    """Weights by their whole names, sorted as Bridge sorts Megatron's parameters; a stacked one where its last expert stands."""
    weights: dict[str, Weight] = {}
    owners: list[tuple[tuple[int, int, str], tuple[str, ...]]] = []
    # By identity: layers of one kind share their units.
    known: dict[int, tuple[list[Weight], list[tuple[str, list[str]]]]] = {}
    for section in architecture.sections:
        if section.second or section.train is None:
            continue
        for unit in section.units:
            if id(unit) not in known:
                names_of = [
                    (param.name, list(dict.fromkeys([*(part.name for part in param.parts), *param.refused])))
                    for param in unit.train(Place())
                ]
                known[id(unit)] = list(unit.weights()), names_of
            of_unit, params = known[id(unit)]
            for weight in of_unit:
                weights[section.hf + weight.name] = weight
            for param, names in params:
                owners.append((_sort_key(section, param), tuple(section.hf + name for name in names)))
    last = {name: i for i, (_, names) in enumerate(sorted(owners)) for name in names}
    for name in sorted(last, key=last.__getitem__):
        yield name, weights[name]


def _sort_key(section: Section, parameter: str) -> tuple[int, int, str]:
    """As ``extract_sort_key`` of Megatron-Bridge 0.6 has it: layer, expert, name."""
    name = section.megatron + parameter
    numbers = [int(found[1]) for found in (_LAYER.search(name), _EXPERT.search(name)) if found]
    # An absent number leaves its place to the next one.
    first, second, *_ = *numbers, -1, -1
    return first, second, name
