"""An FSDP2 rank as a weight source: fragments of its DTensors' shards, and gathered tensors for the rest."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from operator import add

import torch

from ....integration.errors import RefitError
from ....integration.layout import Fragment
from ....integration.quantize.formats import Format
from ....integration.weights.endpoints import StorageLook, Writes, rank_device
from ....integration.weights.manifest import TensorSpec
from ..trained import noted_formats, require_no_adapters
from .adapters import Adapters, base_model, has_adapters
from .casting import exported, kept_in_float32
from .checkpoint import CheckpointWeight, conversion_of, trace_checkpoint, unwrapped_modules
from .merging import MergedShards
from .own_plan import OwnPlan
from .parameters import KeptTensors, require_known


class FSDPSource:
    """Implements :class:`rlrefit.integration.weights.endpoints.WeightSource` for a model under ``fully_shard``.

    FSDP2 and HSDP, resharded after the forward pass or not, offloaded to the CPU or not; over tensor or expert
    parallelism too, in DTensors (``parallelize_module``) or by transformers' own plan. A plain tensor otherwise counts
    as whole on every rank. LoRA adapters of peft are merged on the way, as :mod:`.merging` says.

    Args:
        model: a transformers model, or a ``PeftModel`` that holds one, whose weights get the names that ``save_pretrained`` gives them, or another
            module, whose state dict gives the names.
        dtype: of the export of floating-point parameters, that of the engine; those that transformers keeps in
            FP32 stay so. None exports them as they are kept, and an engine of another dtype gets them over the
            misc path.

    Raises:
        RefitError: a model whose weights can't be told from its tensors; lists all reasons.
        RefitMismatch: adapters over weights that are trained quantized.

    Nothing is a collective but ``export``, and under adapters ``prepare``, which gathers their factors once all ranks have told that
    they compute with the same.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype | None = None):
        whole, model = model, base_model(model)
        require_known(model, whole)
        self._adapters = Adapters(model) if has_adapters(model) else None
        if self._adapters is None:
            self._kept = self._factors = KeptTensors(model, whole)
            self._merged = MergedShards(self._kept, self._factors, {}, self.device)
        else:
            self._kept = KeptTensors(model, whole, self._adapters.base_name)
            self._factors = KeptTensors(model, whole, self._adapters.factor_name)
            self._merged = MergedShards(self._kept, self._factors, self._adapters.targets, self.device)
        self._model = model
        self._convert = conversion_of(model)
        kept = {name: self._kept[name] for name in self._kept.names}
        shapes = {name: tuple(tensor.shape) for name, tensor in kept.items()}
        self._plan: OwnPlan | None = None
        if (getattr(model, "_tp_size", None) or 1) > 1:
            self._plan = OwnPlan(model, shapes)
            shapes = {name: self._plan.shape(name) for name in shapes}
        self._weights = trace_checkpoint(
            self._convert, {name: (shapes[name], tensor.dtype) for name, tensor in kept.items()}
        )
        if self._plan is not None:
            self._plan.check(self._weights)
        if self._adapters is not None:
            adapted = self._adapters.targets.keys()
            require_no_adapters(
                self.trained_formats, {w.name for w in self._weights if adapted & set(w.made_of)}
            )
        self._dtypes = _export_dtypes(model, self._kept, dtype)
        self._specs = [TensorSpec(w.name, w.shape, self._dtype(w)) for w in self._weights]
        self._chosen: tuple[frozenset[str], list[CheckpointWeight]] = frozenset(), []
        self._look = StorageLook()

    @property
    def device(self) -> torch.device:
        return rank_device()

    def specs(self) -> list[TensorSpec]:
        return self._specs

    def fragments(self) -> tuple[list[Fragment], dict[str, str]]:
        held: list[Fragment] = []
        refused: dict[str, str] = {}
        known: dict[str, list[Fragment] | str] = {}
        for weight in self._weights:
            if weight.part is None:
                refused[weight.name] = weight.reason
                continue
            (name,) = weight.made_of
            if name not in known:
                known[name] = self._held(name)
            found = known[name]
            if isinstance(found, str):
                refused[weight.name] = found
            else:
                cuts = (weight.part.cut(weight.name, fragment) for fragment in found)
                held.extend(exported(cut, self._dtype(weight)) for cut in cuts if cut)
        return held, refused

    def prepare(self) -> None:
        # What FSDP has gathered needs nothing: the shards are read, which the optimizer writes.
        self._merged.refresh(self._require_ready)

    @property
    def prepares_alone(self) -> bool:
        """Unless factors of adapters have to be gathered; a subclass with a ``prepare`` of its own says so itself."""
        return self._adapters is None and type(self).prepare is FSDPSource.prepare

    @property
    def trained_formats(self) -> Mapping[str, Format]:
        """As :attr:`rlrefit.integration.weights.endpoints.TellsFormats.trained_formats`, of a model that :mod:`..qat` quantizes."""
        return noted_formats(unwrapped_modules(self._model))

    @property
    def sent_formats(self) -> Mapping[str, Format]:
        return {}

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        wanted = frozenset(names)
        if wanted != self._chosen[0]:
            # Kept: every refit asks for the same ones, and must not walk through thousands of weights.
            self._chosen = wanted, [weight for weight in self._weights if weight.name in wanted]
        made: dict[str, torch.Tensor] = {}
        made_of: tuple[str, ...] = ()
        for weight in self._chosen[1]:
            if weight.made_of != made_of:
                made.clear()  # before more is gathered
                made_of = weight.made_of
                with torch.no_grad():
                    made = self._convert({name: self._whole(name) for name in made_of})
            yield weight.name, made[weight.name].to(self._dtype(weight))

    def storage_key(self) -> Hashable:
        # A copy of a shard that came to lie on another device is another one, even if the shard comes back.
        return self._look.key([*self._kept.locals(), *self._merged.copies])

    def writes(self) -> Writes:
        """As :meth:`rlrefit.integration.weights.endpoints.CountsWrites.writes`, of the weights and of the factors that are merged into them."""
        kept = self._kept.writes()
        return kept if self._adapters is None else Writes(*map(add, kept, self._factors.writes()))

    def _require_ready(self) -> None:
        if self._adapters is not None:
            self._adapters.require_same_modules()
        elif has_adapters(self._model):
            raise RefitError(
                f"{type(self._model).__name__} has adapters that it had not when the refit was prepared; the engine would "
                "get its weights without them. Nothing was sent. Prepare the refit again, with a new source",
                stage="export",
            )
        self._kept.require_same_places()
        self._require_memory()

    def _require_memory(self) -> None:
        """All shards leave the GPU together, but a return that runs out of memory brings some of them."""
        away = [
            name
            for name, shard in zip(self._kept.names, self._kept.locals(), strict=True)
            if type(shard) is torch.Tensor and shard.numel() and not shard.untyped_storage().nbytes()
        ]
        if away:
            raise RefitError(
                f"the trainer's shards are away, {len(away)} of {len(self._kept.names)}: their memory was freed, with copies on the host that a refit does not know. "
                "Nothing was sent. Bring the trainer back to its GPU first (load_trainer of a colocated cycle)",
                stage="export",
                parameter=away[0],
            )

    def _dtype(self, weight: CheckpointWeight) -> torch.dtype:
        """Of the export: a conversion's own dtype stands."""
        kept = [self._kept[name].dtype for name in weight.made_of]
        return self._dtypes[weight.made_of[0]] if set(kept) == {weight.dtype} else weight.dtype

    def _held(self, name: str) -> list[Fragment] | str:
        """What this rank holds of one of the model's tensors, or why that can't be told."""
        local = self._kept.local(name)
        unknown = self._kept.held(name, local)
        if isinstance(unknown, str):
            return unknown
        current = self._merged.of(name, self._dtypes[name]) if name in self._merged else local
        held = self._kept.held(name, current)
        return held if self._plan is None or isinstance(held, str) else self._plan.placed(name, held)

    def _whole(self, name: str) -> torch.Tensor:
        if name in self._merged:
            return self._merged.whole(name)
        whole = self._kept.whole(name, self.device)
        return whole if self._plan is None else self._plan.gathered(name, whole)


def _export_dtypes(
    model: torch.nn.Module, kept: KeptTensors, dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """The dtype that each of the model's tensors is exported in."""
    in_fp32 = kept_in_float32(model, dtype)
    return {
        name: dtype
        if dtype and kept.is_parameter(name) and kept[name].is_floating_point() and not in_fp32(name)
        else kept[name].dtype
        for name in kept.names
    }
