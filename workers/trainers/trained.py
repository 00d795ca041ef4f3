"""What the training of a model makes of its weights, noted on the model: whoever sends them learns of it there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...integration.quantize.formats import Format

_KEY = "_trained_formats"


def note_trained(model: Any, formats: Mapping[str, Format]) -> None:
    """Training of ``model``, or of this chunk of it, computes with these weights of the whole model as the formats have them."""
    setattr(model, _KEY, dict(formats))


def noted_formats(modules: Iterable[tuple[str, Any]]) -> Mapping[str, Format]:
    """What :func:`note_trained` noted on some of a model's modules; nothing of a model that is trained as it is.

    Args:
        modules: with the names that their weights' names begin with for who sends: something may have been put around a model since.
    """
    return {
        f"{path}.{name}" if path else name: format
        for path, module in modules
        for name, format in getattr(module, _KEY, {}).items()
    }
