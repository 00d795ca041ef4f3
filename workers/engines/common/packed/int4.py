"""Layers that an engine loads in INT4 (W4A16) from a checkpoint of compressed-tensors: what is common to engines.

A checkpoint has codes ``weight_packed`` (int32 ``[n, k / 8]``), scales ``weight_scale`` (``[n, k / group]`` in the model's dtype) and
the constant ``weight_shape``, with which nothing computes. Which layers these are, and what a kernel makes of them, each engine says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .....integration.errors import PlanError, RefitError
from .....integration.layout.codes import Bytes, Codes, Nibbles
from .....integration.quantize import int4
from .....integration.quantize.formats import Int4
from .....integration.weights.manifest import dtype_name
from .....integration.weights.routing import SAY_REFIT_DTYPE
from ..loader_trace.trace import LoaderTrace, Manifest
from .making import Shapes

# Parameters of codes, and of their scales.
SCALES = {"weight_packed": "weight_scale"}
# Which part of a weight a parameter has, in vLLM.
_SHARD = ("tp_rank", "tp_size")
SCALES_OF_EXPERTS = {"w13_weight_packed": "w13_weight_scale", "w2_weight_packed": "w2_weight_scale"}


@dataclass(frozen=True)
class Int4Weights:
    """How one module holds its weights.

    Attributes:
        scales: name of a parameter of codes → name of the parameter of its scales.
        format: in which the trainer has to send them.
    """

    scales: Mapping[str, str]
    format: Int4


def int4_format(plain: bool, group: int, dtype: torch.dtype | None) -> Int4 | None:
    """The format of a layer; None if a trainer makes no such integers.

    Args:
        plain: its codes are symmetric ones of four bits, in the order of the weight's columns.
        group: elements that share a scale.
        dtype: in which it computes; None if that is not known.
    """
    name = "" if dtype is None else dtype_name(dtype)
    fits = plain and group in int4.GROUPS and name in ("bfloat16", "float16")
    return Int4(group, name) if fits else None


def check_columns(module: str, format: Int4, hidden: int, shared: int, engine: str, remedy: str) -> None:
    """Refuse experts whose shards cut groups: engines load them without an error, with scales of other columns than their own.

    Args:
        module: its name.
        format: that it holds.
        hidden: columns of their first matrices, which ranks don't share.
        shared: columns of their second matrices that a rank has.
        engine: its name.
        remedy: what gives a rank others of these.

    Raises:
        RefitError: a group is cut.
    """
    for what, count, start in (
        ("intermediate size", shared, f"with {remedy}, or from smaller groups"),
        ("hidden size", hidden, "from smaller groups"),
    ):
        if count % format.group:
            raise RefitError(
                f"a rank has {count} of the {what} of {module}, which cuts groups of {format.group} that share an INT4 scale: {engine} "
                f"computes with scales of other groups, whatever is loaded. Start {engine} {start}",
                stage="trace",
            )


def asked_of_int4(loaded: Shapes, besides: tuple[str, ...] = ()) -> dict[str, Codes]:
    """The parameters of a layer that a kernel may have in an order of its own: codes, scales, and those of the names ``besides``."""
    asked: dict[str, Codes] = {}
    for name, (shape, kind) in loaded.items():
        if name.endswith("weight_packed"):
            asked[name] = Nibbles((*shape[:-1], shape[-1] * int4.PER_ITEM), dtype=kind)
        elif name.endswith("weight_scale") or name in besides:
            asked[name] = Bytes((*shape[:-1], shape[-1] * kind.itemsize), kind)
    return asked


@contextmanager
def accepting_unquantized(
    twin: nn.Module, modules: Mapping[str, Int4Weights], kind: Callable[..., nn.Parameter]
) -> Iterator[dict[str, str]]:
    """Give modules of a twin parameters for weights that are not quantized, beside those for codes, in the same order.

    An engine's loader finds parameters by their names, and knows none for such a weight where it holds codes.

    Args:
        twin: without storage.
        modules: of it, by name.
        kind: the engine's class of parameters for matrices that are not quantized.

    Yields:
        Names of these parameters → names of those for codes.
    """
    made: dict[str, str] = {}
    for name, facts in modules.items():
        module = twin.get_submodule(name)
        for codes in facts.scales:
            plain = codes.removesuffix(Int4.code_name_end)
            module.register_parameter(plain, _unpacked(module, codes, facts.format, kind))
            made[f"{name}.{plain}"] = f"{name}.{codes}"
    try:
        yield made
    finally:
        for parameter in made:
            path, _, plain = parameter.rpartition(".")
            del twin.get_submodule(path)._parameters[plain]


def require_packed(trace: LoaderTrace, manifest: Manifest, taken: Mapping[str, str], setting: str) -> None:
    """Refuse weights that are not quantized where the engine holds codes.

    Args:
        trace: of ``manifest``, by a twin that was :func:`accepting_unquantized`.
        manifest: checkpoint name, full shape and dtype of every tensor.
        taken: names of its parameters for them, and of those for codes.
        setting: by which the trainer makes codes.

    Raises:
        PlanError: names the first weight.
    """
    wrong = [
        (name, taken[parameter], shape, dtype)
        for name, shape, dtype in manifest
        for parameter in sorted(trace.touched[name] & taken.keys())
    ]
    if wrong:
        name, codes, shape, dtype = wrong[0]
        if dtype is torch.float32:
            remedy = f"INT4 is not made of float32. {SAY_REFIT_DTYPE}"
        elif len(shape) != 2:
            remedy = f"A trainer makes INT4 of matrices alone, and this one has the shape {list(shape)}"
        else:
            remedy = (
                f"Set {setting}; if it is, export in the dtype in which the engine computes, of which alone the "
                "trainer makes its codes"
            )
        raise PlanError(
            f"the trainer sends {dtype_name(dtype)} and the engine holds INT4 in {codes} ({len(wrong)} such weights). Nothing was "
            f"written. {remedy}, or start the engine without quantization",
            stage="trace",
            parameter=name,
        )


def _unpacked(module: nn.Module, codes: str, format: Int4, kind: Callable[..., nn.Parameter]) -> nn.Parameter:
    """A parameter like the one of packed codes, with an element for each code."""
    packed: Any = module.get_parameter(codes)
    shape = list(packed.shape)
    shape[-2 if getattr(packed, "is_transposed", False) else -1] *= int4.PER_ITEM
    memory = torch.empty(shape, dtype=format.scale_dtype, device=packed.device)
    if len(shape) == 3:
        plain = nn.Parameter(memory, requires_grad=False)
        vars(plain).update(vars(packed))
        return plain
    plain = kind(data=memory, input_dim=1, output_dim=0, weight_loader=packed.weight_loader)
    # vLLM has layers that no tensor parallelism cuts, and their parameters say so.
    vars(plain).update({name: held for name, held in vars(packed).items() if name in _SHARD})
    return plain
