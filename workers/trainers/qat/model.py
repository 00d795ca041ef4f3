"""``QAT``: a model's quantized layers, kept up to date from step to step, and what they are exported as."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from ....integration.quantize import int4_checkpoint, nvfp4_checkpoint
from ....integration.quantize.formats import Format, Int4
from ....integration.weights.endpoints import Look, WeightSource, rank_device
from ....integration.weights.manifest import TensorSpec
from ....integration.weights.quantizing import packed_specs, wire_specs
from .config import Linear, QATConfig, select
from .layers import Quantizer
from .scales import AsSent, InputScales, WeightScales, prepare_on_all


class QAT:
    """Fake quantization of a model in NVFP4 or INT4; made by :func:`.fsdp.quantize_module` and :func:`.megatron.quantize_chunks`.

    Each step in NVFP4: :meth:`refresh` on all trainer ranks, forward and backward passes, optimizer. Before the first one,
    with static scales of inputs, some forward passes inside :meth:`calibrating`. Codes of INT4 depend on the weights alone, as they are
    in each forward pass: nothing has to be refreshed or calibrated, and a refit makes them with ``trainer_quantize_int4``.

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
        self._make_source = make_source
        self._scales = (
            WeightScales(make_source, self.weights, group) if config.format.has_global_scale else None
        )
        self._inputs = (
            InputScales(self.weights, rank_device(), group, config.force_dynamic_quantization)
            if config.activations
            else None
        )
        self._group = group
        self._quantizers: list[Quantizer] = []
        self._hooks: list[Any] = []
        if self._scales is not None:
            self._watch_optimizers(self._scales)

    def quantizer(self, *weights: str) -> Quantizer:
        """For a parameter that holds parts of these weights, which share a scale."""
        at = 0 if self._scales is None else self._scales.position(weights[0])
        return self._made(at, (at,), weights[0])

    def stack_quantizer(self, weights: Collection[str]) -> Quantizer:
        """For a parameter that holds one of these weights, or several that share a scale, for each expert in order.

        Raises:
            ValueError: some are left out; the same on all ranks.
        """
        if kept := sorted(set(weights) - self.weights):
            raise ValueError(
                f"{kept[0]} and {len(kept) - 1} more weights would be left out, and other experts' or parts of experts of the layer quantized; "
                "engines hold all experts of a layer alike. Leave out all or none of them by exclude"
            )
        places = () if self._scales is None else tuple(self._scales.position(weight) for weight in weights)
        return self._made(torch.tensor(places, device=rank_device()), places, next(iter(weights)))

    def watch(self, module: torch.nn.Module) -> None:
        """Take notice when weights are loaded into a module, or one inside it; of global scales alone."""
        if (scales := self._scales) is None:
            return

        def loaded(*_: Any) -> None:
            scales.now_stale("weights have been loaded")

        self._hooks += [inner.register_load_state_dict_post_hook(loaded) for inner in module.modules()]

    def watch_contents(self, module: torch.nn.Module) -> None:
        """Look before each forward pass of a module whether weights were written that torch counts no version of.

        It reads this rank's shards once. Not in a compiled graph. Of global scales alone.
        """
        if (scales := self._scales) is None:
            return

        def before(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                scales.check_contents()

        self._hooks.append(module.register_forward_pre_hook(before, prepend=True))

    def refresh(self) -> None:
        """Compute the global scales of the weights as they are now; a collective of all trainer ranks.

        To be called after each optimizer step, and after weights are loaded, before the next forward pass, which is
        refused otherwise. A format without global scales has nothing to compute, so that this returns at once.

        Raises:
            RefitError: on all ranks, if a weight holds NaN or infinity.
        """
        if self._scales is not None:
            self._scales.refresh()

    def free_values(self) -> None:
        """Free the quantized values that Megatron's layers keep, a copy of the quantized weights; the next forward pass makes them again."""
        for quantizer in self._quantizers:
            quantizer.release()

    def release(self) -> None:
        """As :meth:`free_values`, and free the views of parameters: before the model leaves its GPU, for generation, say.

        They would keep memory that parameters are moved out of, and be read where it was freed. The next refit or refresh makes them again, of
        all the model's weights. Of what is written until then only what changes a scale is noticed, by the refit.
        """
        if self._scales is not None:
            self._scales.forget()
        self.free_values()

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
        if self._scales is not None:
            return self._scales.refresh_for_export(self._inputs, source, ahead)
        prepare_on_all(self._group, self._make_source() if source is None else source)
        return None

    def require_as_quantized(self) -> None:
        """Look whether the model still is one that can be quantized, as :meth:`refresh` does in NVFP4.

        Raises:
            ValueError: it is not; adapters have come since.
        """
        self._make_source()

    @property
    def formats(self) -> dict[str, Format]:
        """Of the quantized weights, by name."""
        return dict.fromkeys(self.weights, self.config.format)

    @property
    def alone(self) -> bool:
        """Whether there is no other trainer rank, for which a collective would wait."""
        return not dist.is_initialized() or dist.get_world_size(self._group) == 1

    def scale(self, weight: str, dtype: torch.dtype) -> torch.Tensor:
        """``weight_scale_2`` of a weight that is exported in ``dtype``."""
        scales = self._global_scales()
        return scales.of(scales.position(weight), dtype)

    def input_scale(self, weight: str) -> torch.Tensor | None:
        """``input_scale`` of a weight; None if inputs are not quantized."""
        return None if self._inputs is None else self._inputs.exported(weight)

    def positions(self, weights: Sequence[str]) -> torch.Tensor:
        """Where the global scales of ``weights`` are, for :meth:`scales_at`."""
        scales = self._global_scales()
        return torch.tensor([scales.position(weight) for weight in weights], device=rank_device())

    def scales_at(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """As :meth:`scale`, of many weights at a time."""
        return self._global_scales().of(positions, dtype)

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
        """What stands in a weight's place in a checkpoint; the weight itself if it is not quantized.

        Raises:
            ValueError: the weight has no such form; says why.
        """
        format: Format = self.config.format
        if spec.name not in self.weights:
            return (spec,)
        if format.has_global_scale:
            return packed_specs(spec, self.config.activations)
        return *wire_specs(spec, format), TensorSpec(int4_checkpoint.shape_name(spec.name), (2,), torch.int64)

    def packed(self, name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of :meth:`specs`, from the whole weight; raises as it."""
        format = self.config.format
        if name not in self.weights:
            yield name, weight
        elif isinstance(format, Int4):
            self.specs(TensorSpec(name, tuple(weight.shape), weight.dtype))
            yield from int4_checkpoint.packed_tensors(name, weight, format)
        else:
            scales = self.scale(name, weight.dtype), self.input_scale(name)
            yield from nvfp4_checkpoint.packed_tensors(name, weight, *scales)

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

    def _global_scales(self) -> WeightScales:
        if self._scales is None:
            raise ValueError(f"{self.config.format_name} has no global scales")
        return self._scales

    def _watch_optimizers(self, watched: WeightScales) -> None:
        scales = weakref.ref(watched)

        def stepped(*_: Any) -> None:
            if (alive := scales()) is not None:
                alive.now_stale("an optimizer has made a step")

        self._hooks.append(register_optimizer_step_post_hook(stepped))
        weakref.finalize(watched, _remove, self._hooks)  # layers hold these, and may outlive self

    def _made(self, at: int | torch.Tensor, places: tuple[int, ...], weight: str) -> Quantizer:
        input_at = 0 if self._inputs is None else self._inputs.position(weight)
        self._quantizers.append(
            Quantizer(self.config.format, self._scales, at, places, self._inputs, input_at)
        )
        return self._quantizers[-1]


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
