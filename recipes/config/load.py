"""Reading a recipe: ``load_config`` gives a checked configuration, or one error that lists all that is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..configs import bundled_recipes
from .checks import config_violations, unread_violations
from .compose import compose_recipe
from .errors import ConfigError, Violation
from .machine import (
    file_violations,
    gpu_violations,
    name_violations,
    package_violations,
    resolve_data_path,
    weight_violations,
)
from .model import (
    catalog_model,
    catalog_violations,
    code_violations,
    local_hf_config,
    packed_experts_violations,
    shape_violations,
    size_violations,
)
from .schema import TrainConfig
from .schema_check import check_tree

__all__ = [
    "ConfigError",
    "TrainConfig",
    "Violation",
    "bundled_recipes",
    "load_config",
    "model_violations",
    "resolve_data_path",
]

_NO_GPU = "torch finds no GPU on this machine"


def load_config(recipe: str, overrides: Sequence[str] = (), *, to_run: bool = False) -> TrainConfig:
    """Composes and checks a recipe.

    Args:
        recipe: name of a bundled recipe (:func:`bundled_recipes`), or path of a YAML file whose Hydra
            ``defaults`` may name bundled ones.
        overrides: ``key=value`` in Hydra's grammar.
        to_run: checked for what a run needs besides: the packages of this Python, in which its trainer and engines start, a
            model's weights, GPUs for a large one, and a name of its own.

    Returns:
        The configuration, checked against the schema, in itself, against the files it names, this machine's
        GPUs, and the model where its configuration is local or bundled. A hub model's own is checked by
        :func:`model_violations` once it has been downloaded.

    Raises:
        ConfigError: its text lists every violation with its remedy and the file and line, or the override,
            that it comes from.
    """
    composed = compose_recipe(recipe, overrides)
    config, refused = check_tree(composed.tree)
    # The default stands in for a refused value; what follows from it is not the user's doing.
    refused_keys = {key for violation in [*composed.violations, *refused] for key in violation.keys}
    checked = [
        *config_violations(config),
        *unread_violations(config, composed.given),
        *file_violations(config),
        *_model_checks(config),
        *gpu_violations(config, torch.cuda.device_count()),
        *(_run_checks(config) if to_run else ()),
    ]
    consistent = (violation for violation in checked if not refused_keys.intersection(violation.keys))
    texts = [violation.text for violation in composed.violations]  # these name their place themselves
    texts += _with_origins([*refused, *consistent], composed.origins)
    if texts:
        raise ConfigError(recipe, texts)
    return config


def model_violations(config: TrainConfig, hf_config: Any) -> list[str]:
    """What the model's shape rules out, one sentence each; for a model that :func:`load_config` could not see.

    Args:
        config: a checked configuration.
        hf_config: a transformers ``PretrainedConfig``, or its keys as a mapping.
    """
    keys = hf_config if isinstance(hf_config, Mapping) else hf_config.to_dict()
    return [
        violation.text for violation in [*shape_violations(config, keys), *catalog_violations(config, keys)]
    ]


def _run_checks(config: TrainConfig) -> list[Violation]:
    return [
        *package_violations(config),
        *weight_violations(config),
        *name_violations(config),
        *(size_violations(config, _NO_GPU) if _on_cpus(config) else ()),
    ]


def _on_cpus(config: TrainConfig) -> bool:
    return config.ray.address is None and not torch.cuda.device_count()


def _model_checks(config: TrainConfig) -> list[Violation]:
    sizes = (value for name, value in vars(config.trainer).items() if name.endswith("_parallel"))
    if min(*sizes, config.generation.tensor_parallel, config.generation.pipeline_parallel) < 1:
        return []  # reported as such; a remainder by 0 has no meaning
    try:
        hf_config = local_hf_config(config.model.path)
    except ValueError as error:
        return [Violation(("model.path",), f"model.path: {error}")]
    try:
        bundled = catalog_model(config)
    except ValueError as error:
        return [Violation(("model.catalog",), f"model.catalog: {error}")]
    keys = bundled.config if hf_config is None and bundled is not None else hf_config
    if keys is None:
        return []
    return [
        *shape_violations(config, keys),
        *(catalog_violations(config, hf_config) if hf_config is not None else ()),
        *(packed_experts_violations(config, keys, _NO_GPU) if _on_cpus(config) else ()),
        *code_violations(config, keys),
    ]


def _with_origins(violations: Iterable[Violation], origins: Mapping[str, str]) -> Iterable[str]:
    """Adds where the concerned keys, or keys below them, got values other than the schema's defaults."""
    for violation in violations:
        places = dict.fromkeys(
            place
            for key in violation.keys
            for origin, place in origins.items()
            if origin == key or origin.startswith(f"{key}.")
        )
        yield f"{violation.text} [{'; '.join(places)}]" if places else violation.text
