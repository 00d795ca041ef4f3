"""What SGLang's models make of their weights after loading, made anew where it is.

CUDA graphs hold the addresses of such tensors. Some of SGLang's models write into them (``bind_or_assign``), and others take new ones:
the absorbed projections of Kimi-Linear, DeepSeek-V4's norms in BF16, joined weights of which parameters become views. Graphs would go
on with the old ones, whose memory may be somebody else's by then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ....integration.errors import RefitError
from ..common.loader_trace.modules import tensors_in


@contextmanager
def made_in_place(model: nn.Module) -> Iterator[None]:
    """A context in which a model makes such tensors anew; at its end they are where they were, with their new values.

    Raises:
        RefitError: it has made others than those that graphs read.
    """
    held = [
        (f"{name}.{attribute}", holder, attribute, value)
        for name, module in model.named_modules()
        for holder in (vars(module), module._buffers)
        for attribute, value in holder.items()
        if tensors_in(value)
    ]
    parameters = [(name, parameter, parameter.data) for name, parameter in model.named_parameters()]
    yield
    with torch.no_grad():
        for name, holder, attribute, value in held:
            made = holder.get(attribute)
            # What is not there any more is made by a later step, if at all.
            if made is not value and made is not None:
                _follow(name, tensors_in(value), tensors_in(made))
                holder[attribute] = value
        for name, parameter, place in parameters:
            if parameter.data_ptr() != place.data_ptr():
                _follow(name, [place], [parameter.data])
                parameter.data = place


def _follow(name: str, places: list[torch.Tensor], made: list[torch.Tensor]) -> None:
    if [(t.shape, t.dtype) for t in places] != [(t.shape, t.dtype) for t in made]:
        raise RefitError(
            "SGLang has made another tensor of the new weights than of the old ones, which CUDA graphs would go on with. Start the engine "
            "anew",
            stage="post_load",
            parameter=name,
        )
    for place, new in zip(places, made, strict=True):
        place.copy_(new)
