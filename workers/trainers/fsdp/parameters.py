"""The tensors of a model under FSDP2 as they are kept between steps: the shards that the optimizer writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from operator import add
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ....integration.errors import RefitError
from ....integration.layout import Fragment, box_of, layout_of, local_fragments
from ....integration.weights.endpoints import Writes, writes_of
from .checkpoint import saved_names, unwrapped


@dataclass(frozen=True)
class _Place:
    """Where a module keeps a tensor.

    Attributes:
        shard: FSDP's record of it; None for what FSDP does not manage, or a module that is not part of the model.
        mesh: that its shards are on while nothing is gathered; None if it is not sharded.
    """

    module: torch.nn.Module
    key: str
    shard: Any
    mesh: DeviceMesh | None

    def tensor(self) -> torch.Tensor:
        """The tensor that is the truth now.

        While FSDP has a parameter gathered (``reshard_after_forward=False``, and always the root's after a forward
        pass), the module shows a copy that the optimizer does not write; the shard stands in FSDP's record alone.
        """
        registered = self.module._parameters.get(self.key)
        if registered is None:
            buffer = self.module._buffers.get(self.key)
            if buffer is None:
                raise RefitError(
                    f"{type(self.module).__name__} has no {self.key} any more, which it had when the refit was prepared; "
                    "an engine would keep old values. Nothing was sent. Prepare the refit again, with a new source",
                    stage="bind",
                )
            return buffer
        if self.shard is None and self.mesh is not None and _mesh_of(registered) is not self.mesh:
            # Gathered for a module around the model. FSDP's hook on this brings the shards back, as torch's own saving does.
            self.module.state_dict()
            registered = self.module._parameters[self.key]
            assert registered is not None, "it was there before"
        gathered = self.shard is not None and self.shard.sharded_state.name != "SHARDED"
        return self.shard.sharded_param if gathered else registered


class KeptTensors:
    """The tensors that a model is saved from, by their names in its state dict, as they are at the moment.

    Args:
        model: ``fully_shard`` was applied to it or its modules, or to what holds it.
        within: the outermost module that holds it, if any does: a ``PeftModel``, or what torch.compile makes, to either of which
            ``fully_shard`` may have been applied.
        named: the name that an entry of the state dict goes by here; None leaves it out.

    Attributes:
        names: one for each tensor.

    Raises:
        RefitError: the state dict holds what is no parameter or buffer of a module.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        within: torch.nn.Module | None = None,
        named: Callable[[str], str | None] = str,
    ):
        # Brings gathered parameters back to shards once, so that it and the modules show these.
        state = {unwrapped(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
        self._root = model if within is None else within  # a compiled module has a length, which fails
        places = _places(self._root)
        strangers = [name for name, tensor in state.items() if id(tensor) not in places]
        if strangers:
            raise RefitError(
                f"{len(strangers)} entries of the model's state dict are neither parameters nor buffers of its modules "
                f"({', '.join(strangers[:5])}{' …' if len(strangers) > 5 else ''}); they could not be followed from one "
                "step to the next. Nothing was sent. Remove the hook or extra state that adds them",
                stage="prepare",
                parameter=strangers[0],
            )
        state = {new: tensor for name, tensor in state.items() if (new := named(name)) is not None}
        found = {name: places[id(state[name])] for name in saved_names(model, state)}
        self._places = {name: held[0] for name, held in found.items()}
        self._tied = {name: held for name, held in found.items() if len(held) > 1}
        self.names = tuple(self._places)
        self._edges, self._paths = _edges(self._root), _paths(self._root)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._places[name].tensor()

    def require_same_places(self) -> None:
        """Check that the model still computes with the modules that these tensors are looked up in, and ties the same ones.

        Raises:
            RefitError: it has another module in the place of one, or computes with two tensors where it had one.
        """
        for name, places in self._tied.items():
            if any(place.tensor() is not places[0].tensor() for place in places[1:]):
                raise RefitError(
                    "this weight stood in several places of the model, and is tied no more: an engine would get one of them for "
                    "all. Nothing was sent. Tie them again, or prepare the refit again, with a new source",
                    stage="bind",
                    parameter=name,
                )
        # Asked before every refit: the rest is for when something has changed.
        if all(children.get(name) is child for children, name, child in self._edges):
            return
        paths = _paths(self._root)
        for name, place in self._places.items():
            now, before = paths.get(place.module), self._paths[place.module]
            if now != before:
                raise RefitError(
                    f"the module that had this weight is {f'{now} now' if now else 'not part of the model any more'}, and was {before} "
                    "when the refit was prepared; an engine would get weights that the model does not compute with. Nothing was "
                    "sent. Prepare the refit again, with a new source",
                    stage="bind",
                    parameter=name,
                )
        self._edges = _edges(self._root)

    def local(self, name: str) -> torch.Tensor:
        """What this rank keeps of a tensor, without gradients: its shard, or all of what is not sharded."""
        with torch.no_grad():
            return _local(self[name])

    def locals(self) -> list[torch.Tensor]:
        """:meth:`local` of all :attr:`names`, as every refit looks at them."""
        with torch.no_grad():
            return [_local(place.tensor()) for place in self._places.values()]

    def writes(self) -> Writes:
        """As :meth:`rlrefit.integration.weights.endpoints.CountsWrites.writes`.

        A DTensor counts what is written through it, and its shard what is written to that: neither counts for the other.
        """
        tensors = [place.tensor() for place in self._places.values()]
        with torch.no_grad():
            shards = writes_of(zip(self.names, map(_local, tensors), strict=True))
        through = writes_of(zip(self.names, tensors, strict=True)).counts
        return shards._replace(counts=tuple(map(add, shards.counts, through)))

    def held(self, name: str, local: torch.Tensor) -> list[Fragment] | str:
        """What this rank holds of a tensor, as views of ``local``, or why that can't be told.

        Args:
            local: what :meth:`local` gives, or a copy of its shape.
        """
        tensor = self[name]
        if type(local) is not torch.Tensor:
            return f"{name} is kept as {type(local).__name__}, whose memory may not be its values"
        if not isinstance(tensor, DTensor):
            return [Fragment(name, tuple(local.shape), box_of(local.shape), local)]
        try:
            mesh, placements = layout_of(tensor)
        except ValueError as reason:
            return f"{name}: {reason}"
        if mesh.coordinate(dist.get_rank()) is None:
            return []
        return local_fragments(name, tensor.shape, mesh, placements, dist.get_rank(), local)

    def whole(self, name: str, device: torch.device) -> torch.Tensor:
        """A full tensor on ``device``; a collective of the ranks that share it."""
        tensor, local = self[name], self.local(name).to(device)
        if not isinstance(tensor, DTensor):
            return local
        # Anew, since an offloaded shard is on the host, where the mesh's backend may not gather.
        shards = DTensor.from_local(
            local,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        return shards.full_tensor()

    def is_parameter(self, name: str) -> bool:
        """Whether the optimizer may train it; else it is a buffer."""
        return isinstance(self[name], torch.nn.Parameter)


def require_known(model: torch.nn.Module, within: torch.nn.Module) -> None:
    """Check that a model's weights are its parameters' values and its names those of a checkpoint.

    Args:
        model: whose weights are sent.
        within: the outermost module that holds it; itself, or what peft or torch.compile has put around it.

    Raises:
        RefitError: they are not, or what holds it computes with more; lists all reasons.
    """
    problems = []
    own = {id(parameter) for parameter in model.parameters()}
    beside = [name for name, parameter in within.named_parameters() if id(parameter) not in own]
    if beside:
        problems.append(
            f"{type(within).__name__} computes with {', '.join(beside[:5])} beside it (peft's virtual tokens, say), which no engine "
            "would get; train without them"
        )
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        problems.append(
            "it is wrapped by FSDP1, whose flat parameters have no names or shapes of their own; use fully_shard"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        problems.append(
            "it is quantized, so its parameters are not its weights; load it without quantization"
        )
    if problems:
        raise RefitError(
            f"{type(model).__name__} can't be a source of a refit:\n  " + "\n  ".join(problems),
            stage="prepare",
        )


def _places(model: torch.nn.Module) -> dict[int, list[_Place]]:
    """The places of every parameter and buffer of the modules by its identity."""
    shards = {
        id(shard.sharded_param): shard
        for module in model.modules()
        if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group)
        for shard in group.fsdp_params
    }
    found: dict[int, list[_Place]] = defaultdict(list)
    for module in model.modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                found[id(tensor)].append(_Place(module, key, shards.get(id(tensor)), _mesh_of(tensor)))
    return found


def _edges(model: torch.nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """Which module is whose child."""
    return [
        (module._modules, name, child)
        for module in model.modules()
        for name, child in module._modules.items()
    ]


def _paths(model: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """Where modules are, as :class:`KeptTensors` names their tensors."""
    return {module: unwrapped(path) or "the model" for path, module in model.named_modules()}


def _mesh_of(tensor: torch.Tensor) -> DeviceMesh | None:
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
