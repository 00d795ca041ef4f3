"""What the training of a model makes of its weights, noted on the model: whoever sends them learns of it there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ...integration.errors import RefitMismatch
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


def require_no_adapters(trained: Mapping[str, Format], merged: Collection[str] | None = None) -> None:
    """Check that adapters are not sent of a model that is trained quantized.

    Args:
        trained: weights of the whole model, as :func:`noted_formats` tells them.
        merged: the weights into which adapters are merged; None if the factors travel alone.

    Raises:
        RefitMismatch: engines would compute something else than training; names the first such weight.
    """
    wrong = sorted(trained if merged is None else trained.keys() & merged)
    if not wrong:
        return
    name, more = wrong[0], len(wrong) - 1
    otherwise = (
        "and the adapter is sent alone (policy.refit.lora): the engine keeps the weights that it was started with, and nothing tells "
        "which codes these are"
        if merged is None
        else "to which the adapter is added; a refit would merge both first, and the engine would get codes of the sum"
    )
    raise RefitMismatch(
        f"training computes with what {trained[name].kind.upper()} makes of it, {otherwise}. {f'So it is with {more} more weights. ' if more else ''}"
        "The engine would generate by other weights than training computes with. Nothing was sent. Train all weights of this model, without adapters, or the "
        "adapters over a model that is not trained quantized",
        stage="prepare",
        parameter=name,
    )
