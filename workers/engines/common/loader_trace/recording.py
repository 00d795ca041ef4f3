"""Recording tensors: stand-ins for checkpoint tensors that watch what a loader does with them.

A recording tensor has a checkpoint tensor's shape and dtype and no storage. Views and copies of it are followed, and so is a whole
``torch.cat`` of several; a ``copy_`` into a parameter is written down; any other operation sends its tensor to the misc path,
with the reason, because only views and plain copies can be replayed as a transfer of bytes. A rank that makes nothing but zeros of a
tensor (a bias that all ranks would add up) gets none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

# Pure views: their results alias their input, element for element. Everything else is refused.
_VIEW_OPERATIONS = frozenset(
    {
        aten.alias.default,
        aten.detach.default,
        aten.permute.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.t.default,
        aten.transpose.int,
        aten.unbind.int,
        aten.unsqueeze.default,
        aten.view.default,
        aten._reshape_alias.default,
    }
)
_CONSTANT_WRITES = frozenset({aten.fill_.Scalar, aten.zero_.default})


class UntraceableOperation(Exception):
    """The loader asked a recording tensor for its values, which it does not have."""


@dataclass(frozen=True)
class StridedRegion:
    """Where a view lies in a tensor's storage, in elements from the tensor's first element."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Write:
    """One write into a parameter, in the order in which the loader made them.

    Attributes:
        parameter: name of the parameter.
        target: the part of the parameter that was written.
        tensor: checkpoint tensor that was copied, or None for a constant fill.
        source: the part of the checkpoint tensor (contiguous) that was copied, or None for a fill.
        zeros_of: for a fill, the checkpoint tensor that the loader had made zeros of and copied.
        dtype: of the checkpoint tensor, where the parameter has a wider one; None if both have the same.
    """

    parameter: str
    target: StridedRegion
    tensor: str | None = None
    source: StridedRegion | None = None
    zeros_of: str | None = None
    dtype: torch.dtype | None = None


class _Content:
    """What views of one recording tensor have in common, and a copy of it does not.

    Attributes:
        elements: of all.
        zeros: whether the loader has made zeros of all.
    """

    def __init__(self, elements: int) -> None:
        self.elements = elements
        self.zeros = False


@dataclass(frozen=True)
class Joined:
    """What a loader made of several checkpoint tensors by ``torch.cat``: these, one after another along a dimension."""

    dim: int
    parts: tuple[RecordingTensor, ...]


class RecordingTensor(torch.Tensor):
    """A checkpoint tensor without storage; only meaningful inside a :class:`Recorder`.

    Args:
        inner: a view of the checkpoint tensor, of which a copy still tells where its elements came from.
        tensors: names of the checkpoint tensors.
        content: shared by views.
        seen: has the strides that the loader sees, which a copy may have others than ``inner``; None for those of ``inner``.
        joined: what the whole of it was joined of; None if it was not.
    """

    inner: torch.Tensor
    tensors: frozenset[str]
    content: _Content
    seen: torch.Tensor
    joined: Joined | None

    @staticmethod
    def __new__(
        cls,
        inner: torch.Tensor,
        tensors: frozenset[str],
        content: _Content,
        seen: torch.Tensor | None = None,
        joined: Joined | None = None,
    ) -> RecordingTensor:
        like = inner if seen is None else seen
        return torch.Tensor._make_wrapper_subclass(
            cls,
            like.size(),
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=like.device,
        )

    def __init__(
        self,
        inner: torch.Tensor,
        tensors: frozenset[str],
        content: _Content,
        seen: torch.Tensor | None = None,
        joined: Joined | None = None,
    ) -> None:
        self.inner = inner
        self.tensors = tensors
        self.content = content
        self.seen = inner if seen is None else seen
        self.joined = joined

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UntraceableOperation(f"{func} was called on a recording tensor after its trace had ended")


class Recorder(TorchDispatchMode):
    """Watches a loader: use as a context manager around the calls to it.

    Args:
        parameters: the tensors that the loader may write, by name; any device, usually meta.

    Attributes:
        writes: copies and constant fills, in order.
        reached: for each parameter all parts that were seen to get values, those included that cannot be replayed.
        reasons: for each checkpoint tensor that cannot be replayed, why.
        touched: names of the parameters that each checkpoint tensor was seen to reach.
        unknown: tensors that also went where no parameter is, so their destination is not known whole.
        rewritten: parameters that the loader also changed by computation, with the operation.
        used: parameters that the loader made something of, with the operation.
        wider: checkpoint tensors that the loader copies into a parameter of a wider dtype, in words.
        joined: tensors that the loader joins with others before it copies them, so that it needs all of these in one call.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.writes: list[Write] = []
        self.reached: dict[str, set[StridedRegion]] = {}
        self.reasons: dict[str, str] = {}
        self.touched: dict[str, set[str]] = {}
        self.unknown: set[str] = set()
        self.rewritten: dict[str, str] = {}
        self.used: dict[str, str] = {}
        self.wider: dict[str, str] = {}
        self.joined: set[str] = set()
        self._parameters = dict(parameters)
        # Views and .data share their parameter's storage, on the meta device too.
        self._by_storage = {
            p.untyped_storage()._cdata: name for name, p in reversed(self._parameters.items()) if p.numel()
        }

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> RecordingTensor:
        """A recording tensor that stands for the whole checkpoint tensor ``name``."""
        inner = torch.empty(shape, dtype=dtype, device="meta")
        return RecordingTensor(inner, frozenset({name}), _Content(inner.numel()))

    def refuse(self, name: str, reason: str) -> None:
        """Note that ``name`` cannot be replayed; the first reason stays."""
        self.reasons.setdefault(name, reason)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorded = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, RecordingTensor)]
        if not recorded:
            self._watch_plain(func, args, kwargs)
            return func(*args, **kwargs)
        if func is aten.copy_.default and not isinstance(args[0], RecordingTensor):
            self._record_copy(args[0], args[1])
            return args[0]
        if func is aten.cat.default and len(recorded) == len(args[0]):
            return self._join(recorded, *args[1:], **kwargs)
        if func in _VIEW_OPERATIONS:
            if recorded[0].joined is None:
                return self._view(func, args, kwargs, recorded[0])
            out = func(*_unwrapped(args), **_unwrapped(kwargs))
            if isinstance(out, torch.Tensor) and _same_place(out, recorded[0].inner):
                return RecordingTensor(
                    out, recorded[0].tensors, recorded[0].content, joined=recorded[0].joined
                )
        if any(tensor.joined is not None for tensor in recorded):
            return self._refuse_operation(func, args, kwargs, recorded)
        if func is aten.clone.default:
            [source] = recorded
            copied = func(source.seen, **kwargs)
            content = _Content(copied.numel())
            content.zeros = source.content.zeros
            return RecordingTensor(source.inner, source.tensors, content, copied)
        if _makes_zeros(func, args) and args[0].numel() == args[0].content.elements:
            args[0].content.zeros = True
            return args[0]
        return self._refuse_operation(func, args, kwargs, recorded)

    def _view(self, func: Any, args: Any, kwargs: Any, source: RecordingTensor) -> Any:
        if source.seen is source.inner:
            out = func(*_unwrapped(args), **_unwrapped(kwargs))
            return _wrapped(out, source.tensors, source.content)
        seen = func(source.seen, *args[1:], **kwargs)
        try:
            if func is aten._reshape_alias.default:
                raise RuntimeError("it goes by the strides of the copy")
            inner = func(source.inner, *args[1:], **kwargs)
        except RuntimeError:
            for name in source.tensors:
                self.refuse(
                    name, f"the loader applies {func} to a copy of it whose elements have another order"
                )
            return _wrapped(seen, source.tensors, source.content)
        if isinstance(seen, torch.Tensor):
            return RecordingTensor(inner, source.tensors, source.content, seen)
        return type(seen)(
            RecordingTensor(one, source.tensors, source.content, other)
            for one, other in zip(inner, seen, strict=True)
        )

    def _join(self, recorded: list[RecordingTensor], dim: int = 0) -> RecordingTensor:
        inner = torch.cat([tensor.inner for tensor in recorded], dim)
        names = frozenset().union(*(tensor.tensors for tensor in recorded))
        plain = all(t.joined is None and t.dtype == inner.dtype and t.dim() == inner.dim() for t in recorded)
        if not plain:
            for name in names:
                self.refuse(name, "the loader joins it with tensors of another kind")
        self.joined |= names
        joined = Joined(dim % inner.dim(), tuple(recorded)) if plain else None
        return RecordingTensor(inner, names, _Content(inner.numel()), joined=joined)

    def _record_copy(self, target: torch.Tensor, source: RecordingTensor) -> None:
        if not target.numel():
            return
        if source.joined is not None and target.shape == source.shape:
            start = 0
            for part in source.joined.parts:
                rows = part.shape[source.joined.dim]
                self._record_copy(target.narrow(source.joined.dim, start, rows), part)
                start += rows
            return
        parameter = self._parameter_of(target)
        self._note_reached(parameter, target)
        for name in source.tensors:
            if parameter is None:
                self.refuse(name, "the loader copies it into a temporary tensor")
                self.unknown.add(name)
            else:
                self.touched.setdefault(name, set()).add(parameter)
                if target.dtype != source.dtype and not source.content.zeros:
                    why = f"{parameter} is {target.dtype} and the tensor is {source.dtype}"
                    if _holds_all_of(target.dtype, source.dtype):
                        self.wider.setdefault(name, why)
                    else:
                        self.refuse(name, why)
                if source.joined is not None:
                    self.refuse(name, f"the loader joins it with others and broadcasts them into {parameter}")
        if parameter is None or any(name in self.reasons for name in source.tensors):
            return
        (name,) = source.tensors
        inner = source.inner
        lead = target.dim() - inner.dim()
        if lead < 0 or any(s not in (1, t) for s, t in zip(inner.shape, target.shape[lead:], strict=True)):
            raise ValueError(
                f"{name}: a part of shape {tuple(inner.shape)} cannot be copied into {parameter}, "
                f"whose place for it has shape {tuple(target.shape)}"
            )
        if any(n != 1 for n in target.shape[:lead]) or inner.shape != target.shape[lead:]:
            self.refuse(name, f"the loader broadcasts it into {parameter}")
            return
        target = target[(0,) * lead]
        if source.content.zeros:
            self.writes.append(Write(parameter, self._region(parameter, target), zeros_of=name))
            return
        self.writes.append(
            Write(
                parameter,
                self._region(parameter, target),
                name,
                _region_of(inner, base_offset=0),
                dtype=None if inner.dtype == target.dtype else inner.dtype,
            )
        )

    def _watch_plain(self, func: Any, args: Any, kwargs: Any) -> None:
        """What involves no checkpoint tensor: constants or computed values in parameters, and what is computed of parameters."""
        written = _written(func, args, kwargs)
        if func not in _VIEW_OPERATIONS:
            changed = {id(target) for target in written}
            for leaf in _leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and id(leaf) not in changed and leaf.numel():
                    parameter = self._parameter_of(leaf)
                    if parameter is not None:
                        self.used.setdefault(parameter, str(func))
        for target in written:
            parameter = self._parameter_of(target)
            if parameter is None or not target.numel():
                continue
            if func in _CONSTANT_WRITES:
                self._note_reached(parameter, target)
                self.writes.append(Write(parameter, self._region(parameter, target)))
            else:
                # What was copied into a temporary tensor may come from there. Arithmetic on the parameter brings nothing.
                if func is aten.copy_.default and self.unknown:
                    self._note_reached(parameter, target)
                self.rewritten.setdefault(parameter, str(func))

    def _refuse_operation(self, func: Any, args: Any, kwargs: Any, recorded: list[RecordingTensor]) -> Any:
        names = frozenset().union(*(r.tensors for r in recorded))
        for name in names:
            self.refuse(name, f"the loader applies {func} to it, which is no pure view")
        for target in _written(func, args, kwargs):
            parameter = self._parameter_of(target)
            self._note_reached(parameter, target)
            for name in names:
                if parameter is None:
                    self.unknown.add(name)
                else:
                    self.touched.setdefault(name, set()).add(parameter)
        try:
            out = func(*_unwrapped(args), **_unwrapped(kwargs))
        except (RuntimeError, NotImplementedError) as error:
            raise UntraceableOperation(f"{func} needs the values of {', '.join(sorted(names))}") from error
        return _wrapped(out, names, _Content(0))

    def _note_reached(self, parameter: str | None, target: torch.Tensor) -> None:
        if parameter is not None:
            self.reached.setdefault(parameter, set()).add(self._region(parameter, target))

    def _parameter_of(self, tensor: torch.Tensor) -> str | None:
        return self._by_storage.get(tensor.untyped_storage()._cdata)

    def _region(self, parameter: str, target: torch.Tensor) -> StridedRegion:
        return _region_of(target, base_offset=self._parameters[parameter].storage_offset())


def _region_of(tensor: torch.Tensor, *, base_offset: int) -> StridedRegion:
    return StridedRegion(tensor.storage_offset() - base_offset, tuple(tensor.shape), tuple(tensor.stride()))


def _holds_all_of(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether each number of one dtype is a number of the other, so that a copy changes none. FP8 has scales beside it."""
    return narrow.is_floating_point and narrow.itemsize > 1 and torch.promote_types(wide, narrow) == wide


def _unwrapped(tree: Any) -> Any:
    return _mapped(lambda leaf: leaf.seen if isinstance(leaf, RecordingTensor) else leaf, tree)


def _wrapped(tree: Any, tensors: frozenset[str], content: _Content) -> Any:
    return _mapped(
        lambda leaf: RecordingTensor(leaf, tensors, content) if isinstance(leaf, torch.Tensor) else leaf, tree
    )


def _makes_zeros(func: Any, args: Any) -> bool:
    return isinstance(args[0], RecordingTensor) and (
        func is aten.zero_.default or (func is aten.fill_.Scalar and args[1] == 0)
    )


def _same_place(view: torch.Tensor, tensor: torch.Tensor) -> bool:
    return _region_of(view, base_offset=0) == _region_of(tensor, base_offset=0)


# The arguments of an operator nest lists, tuples and one dictionary only; torch's general tree functions
# took half of the time of a trace of 20,000 tensors.
def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _leaves(item)
    elif isinstance(tree, dict):
        yield from _leaves(tuple(tree.values()))
    else:
        yield tree


def _mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, (list, tuple)):
        return type(tree)(_mapped(function, item) for item in tree)
    if isinstance(tree, dict):
        return {key: _mapped(function, item) for key, item in tree.items()}
    return function(tree)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Plain tensors that ``func`` writes in place, by its schema."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        found += [
            leaf
            for leaf in _leaves(value)
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, RecordingTensor)
        ]
    return found
