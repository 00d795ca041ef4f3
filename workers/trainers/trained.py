"""What the training of a model makes of its weights, noted on the model: whoever sends them learns of it there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...integration.quantize.formats import Format

_KEY = "_trained_formats"


def note_trained(model: Any, formats: Mapping[str, Format]) -> None:
    """Training of ``model``, or of this chunk of it, computes with these weights of the whole model as the formats have them."""
    setattr(model, _KEY, dict(formats))


def noted_formats(model: Any) -> Mapping[str, Format]:
    """What :func:`note_trained` noted; nothing of a model that is trained as it is."""
    # Whatever was put around it since, or taken out of it by who sends.
    noted = (getattr(module, _KEY) for module in model.modules() if hasattr(module, _KEY))
    return next(noted, {})
