"""Runs what compares Triton's kernels with torch where Triton interprets them, on the addresses of CPU tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from tests.spawn import run_alone


def run_interpreted(compare: Callable[..., None], *args: Any) -> None:
    """Call a module's function in a process of its own: Triton decides when a kernel is defined whether to interpret it.

    Raises:
        RankFailed: with the function's traceback.
    """
    run_alone(_call, compare.__module__, compare.__qualname__, args, environment={"TRITON_INTERPRET": "1"})


def _call(module: str, name: str, args: tuple[Any, ...]) -> None:
    # The server has it, with kernels of its own that are not interpreted; its library cannot be loaded twice.
    for loaded in list(sys.modules):
        if loaded.partition(".")[0] == "triton" and not loaded.startswith("triton._C"):
            del sys.modules[loaded]
    interpreter = import_module("triton.runtime.interpreter")
    interpreter.ReduceOps.generic_reduce = _reduce
    interpreter.InterpreterBuilder.create_fma = _fma
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    # Each sum and product would be made again in 64 bits, for an assertion that Triton makes in its debug mode alone.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    _remember_types(import_module("triton.language.core"), interpreter)
    getattr(import_module(module), name)(*args)


def _remember_types(core: Any, interpreter: Any) -> None:
    """Make each type once, which Triton makes at each operation, and the names of tuples' types when they are asked for."""
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    make_block, numpy_dtype = core.block_type.__init__, interpreter._get_np_dtype
    dtypes: dict[str, np.dtype[Any]] = {}

    def of_block(self: Any, element_ty: Any, shape: Any) -> None:
        kind = element_ty.name, *(core._unwrap_if_constexpr(side) for side in shape)
        if kind not in blocks:
            make_block(self, element_ty, shape)
            blocks[kind] = vars(self)
        vars(self).update(blocks[kind])

    def of_tuple(self: Any, types: Any, fields: Any = None) -> None:
        self.types, self.fields = types, fields or [""] * len(types)

    def of_numpy(kind: Any) -> np.dtype[Any]:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = numpy_dtype(kind)
        return dtypes[name]

    core.block_type.__init__ = of_block
    core.tuple_type.__init__ = of_tuple
    core.tuple_type.name = property(lambda self: str(dict(zip(self.fields, self.types, strict=True))))
    interpreter._get_np_dtype = of_numpy


def _once_a_launch(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Triton puts its interpreter in the place of its language at a launch, and again at each call of a device function.

    The calls find it there already, in the modules that the launch and earlier calls have gone through.
    """
    done: set[frozenset[int]] = set()

    def patch_once(fn: Any) -> Any:
        seen = frozenset(id(found) for found in fn.__globals__.values() if isinstance(found, ModuleType))
        if seen in done:
            return None  # nobody takes away what a call has put there
        scope = patch(fn)
        if not done:
            restore = scope.restore
            scope.restore = lambda: (done.clear(), restore())
        done.add(seen)
        return scope

    return patch_once


def fused(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """``x * y + z`` of FP32, rounded once as GPUs do.

    FP64 holds the product whole. What its sum leaves out decides the last bit of that, which is odd wherever something is left out:
    so no sum is a tie of FP32 that was none, and rounding again is as good as rounding once.
    """
    product, addend = x.astype(np.float64) * y, z.astype(np.float64)
    # Infinities and NaN leave out nothing that counts.
    with np.errstate(invalid="ignore"):
        total = product + addend
        of_addend = total - product
        left_out = (product - (total - of_addend)) + (addend - of_addend)
    to_odd = np.isfinite(left_out) & (left_out != 0) & (np.asarray(total).view(np.int64) % 2 == 0)
    odd = np.nextafter(total, np.where(left_out > 0, np.inf, -np.inf))
    return np.where(to_odd, odd, total).astype(np.float32)


def _fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    """In the place of the interpreter's own, which rounds the product first."""
    return type(x)(fused(x.data, y.data, z.data), z.dtype.scalar)


def _reduce(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """By the kernel's function, which the interpreter calls for each element on its own, half a minute for a thousand rows."""
    assert self.axis is not None
    assert not self.keep_dims
    whole = [given.handle.data for given in inputs]

    def at(place: int) -> tuple[Any, ...]:
        taken = (data.take(place, self.axis) for data in whole)
        return tuple(self.to_tensor(data, given.dtype) for data, given in zip(taken, inputs, strict=True))

    reduced = at(0)
    for place in range(1, whole[0].shape[self.axis]):
        found = self.combine_fn.fn(*reduced, *at(place))
        reduced = found if isinstance(found, tuple) else (found,)
    return list(reduced)
