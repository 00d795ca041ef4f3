"""``QAT``: a model's quantized layers, kept up to date from step to step, and what they are exported as."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from ....integration.quantize.nvfp4_checkpoint import packed_tensors
from ....integration.weights.endpoints import Look, WeightSource, rank_device
from ....integration.weights.manifest import TensorSpec
from ....integration.weights.quantizing import packed_specs
from .config import Linear, QATConfig, select
from .layers import Quantizer
from .scales import AsSent, InputScales, WeightScales


class QAT:
    """NVFP4 fake quantization of a model; made by :func:`.fsdp.quantize_module` and :func:`.megatron.quantize_chunks`.

    Each step: :meth:`refresh` on all trainer ranks, forward and backward passes, optimizer. Before the first one,
    with static scales of inputs, some forward passes inside :meth:`calibrating`.

    Args:
        config: what to quantize.
        linears: this rank's linear layers.
        names: of all weights of the model.
        make_source: the rank's source of unquantized weights.
        decoder_layers: as the model's configuration counts them; None if it does not.
        group: of all trainer ranks; None for the default group.

    Attributes:
        weights: names of the quantized weights, the same on all ranks.

    Building it is a collective of all trainer ranks.

    Raises:
        ValueError: what is asked for can't be done; on all ranks, and tells all that is wrong.
    """

    def __init__(
        self,
        config: QATConfig,
        linears: Collection[Linear],
        names: Collection[str],
        make_source: Callable[[], WeightSource],
        decoder_layers: int | None,
        group: dist.ProcessGroup | None = None,
    ):
        self.config = config
        of_all: list[Any] = [(list(linears), list(names))]
        if dist.is_initialized():
            of_all = of_all * dist.get_world_size(group)
            dist.all_gather_object(of_all, (list(linears), list(names)), group=group)
        self.weights = select(
            config,
            [linear for found, _ in of_all for linear in found],
            {name for _, found in of_all for name in found},
            decoder_layers,
        )
        self._scales = WeightScales(make_source, self.weights, group)
        self._inputs = (
            InputScales(self.weights, rank_device(), group, config.force_dynamic_quantization)
            if config.activations
            else None
        )
        self._group = group
        self._quantizers: list[Quantizer] = []
        scales = weakref.ref(self._scales)

        def stepped(*_: Any) -> None:
            if (alive := scales()) is not None:
                alive.now_stale("an optimizer has made a step")

        self._hooks: list[Any] = [register_optimizer_step_post_hook(stepped)]
        weakref.finalize(self._scales, _remove, self._hooks)  # layers hold these, and may outlive self

    def quantizer(self, *weights: str) -> Quantizer:
        """For a parameter that holds parts of these weights, which share a scale."""
        at = self._scales.position(weights[0])
        return self._made(at, (at,), weights[0])

    def stack_quantizer(self, weights: Collection[str]) -> Quantizer:
        """For a parameter that holds one of these weights, or several that share a scale, for each expert in order."""
        places = tuple(self._scales.position(weight) for weight in weights)
        return self._made(torch.tensor(places, device=rank_device()), places, next(iter(weights)))

    def watch(self, module: torch.nn.Module) -> None:
        """Take notice when weights are loaded into a module, or one inside it."""

        def loaded(*_: Any) -> None:
            self._scales.now_stale("weights have been loaded")

        self._hooks += [inner.register_load_state_dict_post_hook(loaded) for inner in module.modules()]

    def watch_contents(self, module: torch.nn.Module) -> None:
        """Look before each forward pass of a module whether weights were written that torch counts no version of.

        It reads this rank's shards once. Not in a compiled graph.
        """

        def before(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                self._scales.check_contents()

        self._hooks.append(module.register_forward_pre_hook(before, prepend=True))

    def refresh(self) -> None:
        """Compute the global scales of the weights as they are now; a collective of all trainer ranks.

        To be called after each optimizer step, and after weights are loaded, before the next forward pass, which is
        refused otherwise.

        Raises:
            RefitError: on all ranks, if a weight holds NaN or infinity.
        """
        self._scales.refresh()

    def release(self) -> None:
        """Free the quantized values that Megatron's layers keep, a copy of the quantized weights, before generation, say.

        And the views of parameters, which would keep memory that they are moved out of. The next forward pass, refit or
        refresh makes them again. Of what is written until then only what changes a scale is noticed, by the refit.
        """
        self._scales.forget()
        for quantizer in self._quantizers:
            quantizer.release()

    def calibrating(self) -> AbstractContextManager[None]:
        """Forward passes inside compute unquantized, and their inputs' largest magnitudes make the static scales.

        Leaving it is a collective of all trainer ranks. Calibrate again when activations have grown: elements beyond
        the range are cut off and get no gradient.

        Raises:
            ValueError: inputs are not quantized.
        """
        if self._inputs is None:
            raise ValueError(
                "there is nothing to calibrate: activations is false, so inputs are not quantized"
            )
        return self._inputs.calibration()

    def prepare_export(self, source: WeightSource | None = None, ahead: AsSent | None = None) -> Look | None:
        """Make all scales those to export with; a collective of all trainer ranks, before :meth:`packed` and :meth:`scale`.

        Args:
            source: that is exported from, which is prepared, too; if that fails on one rank, all raise. It tells the weights, so
                that each is looked at once.
            ahead: if scales of the last :meth:`refresh` will do where nothing tells of a write since, what is looked at as it is sent.

        Returns:
            If they did, what looks on this rank alone whether they are still those of its weights: as
            :meth:`rlrefit.integration.weights.endpoints.PreparesAhead.prepare_ahead`.

        Raises:
            RefitError: on all ranks: a weight is not finite, inputs were never seen, or a rank failed. Training goes on
                with the scales of before, unless it is the weights that are at fault.
        """
        return self._scales.refresh_for_export(self._inputs, source, ahead)

    @property
    def alone(self) -> bool:
        """Whether there is no other trainer rank, for which a collective would wait."""
        return not dist.is_initialized() or dist.get_world_size(self._group) == 1

    def scale(self, weight: str, dtype: torch.dtype) -> torch.Tensor:
        """``weight_scale_2`` of a weight that is exported in ``dtype``."""
        return self._scales.of(self._scales.position(weight), dtype)

    def input_scale(self, weight: str) -> torch.Tensor | None:
        """``input_scale`` of a weight; None if inputs are not quantized."""
        return None if self._inputs is None else self._inputs.exported(weight)

    def positions(self, weights: Sequence[str]) -> torch.Tensor:
        """Where the global scales of ``weights`` are, for :meth:`scales_at`."""
        return torch.tensor([self._scales.position(weight) for weight in weights], device=rank_device())

    def scales_at(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """As :meth:`scale`, of many weights at a time."""
        return self._scales.of(positions, dtype)

    def input_positions(self, weights: Sequence[str]) -> torch.Tensor:
        """Where the scales of the inputs of ``weights`` are, for :meth:`input_scales_at`; nowhere if they are not quantized."""
        if self._inputs is None:
            weights = ()
        found = [0 if self._inputs is None else self._inputs.position(weight) for weight in weights]
        return torch.tensor(found, dtype=torch.int64, device=rank_device())

    def input_scales_at(self, positions: torch.Tensor) -> torch.Tensor:
        """As :meth:`input_scale`, of many weights at a time."""
        return positions.new_zeros(0).float() if self._inputs is None else self._inputs.exported_at(positions)

    def specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """What stands in a weight's place; the weight itself if it is not quantized."""
        return packed_specs(spec, self.config.activations) if spec.name in self.weights else (spec,)

    def packed(self, name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of :meth:`specs`, from the whole weight."""
        if name not in self.weights:
            yield name, weight
        else:
            yield from packed_tensors(name, weight, self.scale(name, weight.dtype), self.input_scale(name))

    def state_dict(self) -> dict[str, float]:
        """What calibration found, as plain values, to be saved beside the model."""
        return {} if self._inputs is None else self._inputs.state_dict()

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Inverse of :meth:`state_dict`.

        Raises:
            ValueError: it is that of other layers.
        """
        if self._inputs is not None:
            self._inputs.load_state_dict(state)

    def _made(self, at: int | torch.Tensor, places: tuple[int, ...], weight: str) -> Quantizer:
        input_at = 0 if self._inputs is None else self._inputs.position(weight)
        self._quantizers.append(Quantizer(self._scales, at, places, self._inputs, input_at))
        return self._quantizers[-1]


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
