"""A LoRA adapter of a live vLLM as the destination of a refit. The base weights stay as they were loaded.

vLLM loads adapters from folders. Here the factors that arrive go to vLLM's own ``LoRAModel`` and LoRA manager. Nothing is
written to a disk, and nothing of vLLM is patched. A request asks for the adapter by :func:`lora_request`. The adapter's id is
the same for all versions, so running requests go on with the new factors. vLLM finds the id among its loaded adapters and
never reads the path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name

from ....integration.errors import EngineDirty, RefitError, RefitMismatch
from ....integration.layout import Fragment
from ....integration.weights.manifest import TensorSpec
from ...lora import SETTINGS_NAME, AdapterSettings, split_name

# Above the ids that servers give to their users' adapters.
ADAPTER_ID = 1 << 30
_NAME = "rlrefit-policy"
_PATH = "in memory: the trainer's refits bring this adapter, and none has yet"
_ROUTE = "vLLM takes an adapter whole, through its LoRA manager"


def lora_request(version: int) -> LoRARequest:
    """The ``lora_request=`` of a request that vLLM answers with the trainer's adapter.

    Args:
        version: that the engine serves, by its driver. Each token of the request is made with the version that the engine
            has then.

    Raises:
        EngineDirty: no refit has brought the adapter yet. vLLM would look for its files, and end without them.
    """
    if version < 0:
        raise EngineDirty(
            "no refit has brought the trainer's adapter yet, so the engine can't answer with it. Refit first",
            stage="generate",
        )
    return LoRARequest(_NAME, ADAPTER_ID, _PATH)


class VllmAdapterDestination:
    """Implements :class:`rlrefit.integration.weights.endpoints.WeightDestination` for the adapter that a trainer sends.

    Args:
        worker: vLLM's worker, started with ``enable_lora=True``.
        require_base: called before an adapter is loaded; raises if the base weights are those of no version.

    Raises:
        RefitError: the engine serves no LoRA, or its base weights are random.
    """

    def __init__(self, worker: Any, require_base: Callable[[], None]) -> None:
        config = worker.vllm_config
        problems = []
        if config.lora_config is None:
            problems.append("it was started without enable_lora=True")
        if config.load_config.load_format == "dummy":
            problems.append(
                "load_format=dummy made its base weights random, and an adapter does not bring them"
            )
        if problems:
            raise RefitError(
                f"policy.refit.lora is adapter, but this engine can't serve the trainer's: {'; '.join(problems)}. Nothing "
                "has moved; start it otherwise, or set lora to merge on all ranks of both sides",
                stage="settings",
            )
        self._config = config
        self._runner = worker.model_runner
        self._require_base = require_base
        self._specs: tuple[TensorSpec, ...] = ()

    @property
    def device(self) -> torch.device:
        device: torch.device = self._runner.device
        return device

    @property
    def kept_bytes(self) -> int:
        """Bytes of all factors. Every rank gets all of them, and vLLM cuts them."""
        return sum(spec.nbytes for spec in self._specs)

    def fragments(self, specs: Sequence[TensorSpec]) -> tuple[list[Fragment], dict[str, str]]:
        """No fragments: vLLM keeps an adapter packed, scaled and padded to ``max_lora_rank``.

        Raises:
            RefitError: an adapter that this engine can't serve; lists all reasons.
        """
        problems = self._problems(specs)
        if problems:
            raise RefitError(
                "this engine can't serve the trainer's adapter. Nothing has moved:\n  "
                + "\n  ".join(problems),
                stage="handshake",
            )
        self._specs = tuple(specs)
        return [], {spec.name: _ROUTE for spec in specs}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace the adapter by one of these factors.

        Raises:
            RefitMismatch: settings of other layers than the factors.
            EngineDirty: the base weights are those of no version.
        """
        factors = dict(weights)
        settings = AdapterSettings.from_tensor(factors.pop(SETTINGS_NAME))
        self._require_base()
        lora = self._model_of(factors, settings)
        manager = self._runner.lora_manager._adapter_manager
        manager.remove_adapter(ADAPTER_ID)
        if len(manager) >= manager.capacity:
            manager.remove_oldest_adapter()
        manager.add_adapter(lora)
        manager.activate_adapter(ADAPTER_ID)
        # Requests may name other adapters meanwhile. vLLM must not drop this one for them.
        manager.pin_adapter(ADAPTER_ID)
        # The adapter's slot may have changed, and vLLM looks it up only when the requests change.
        manager._last_mapping = None

    def finish(self, version: int) -> None:
        """Drop what an encoder computed with the adapter. The driver resets keys and values."""
        self._runner.reset_encoder_cache()

    def abandon(self) -> None:
        """Nothing to drop. The engine stays dirty until an adapter is loaded again."""

    def storage_key(self) -> Hashable:
        return ()  # no view of the engine's memory is kept

    def _problems(self, specs: Sequence[TensorSpec]) -> list[str]:
        known = self._layers()
        most = self._config.lora_config.max_lora_rank
        problems: dict[str, None] = {}
        if SETTINGS_NAME not in {spec.name for spec in specs}:
            problems[
                "the trainer sends weights of a model, and no adapter's; give both sides the same policy.refit"
            ] = None
        for spec in specs:
            found = split_name(spec.name)
            if spec.name == SETTINGS_NAME:
                continue
            if found is None:
                problems[f"{spec.name} is no factor of an adapter"] = None
                continue
            path, factor = found
            if factor == "A" and spec.shape[0] > most:
                problems[f"rank {spec.shape[0]} is above max_lora_rank, {most}; start vLLM with more"] = None
            if self._generic(self._engine_module(spec.name)) not in known:
                problems[f"{path} is no module that vLLM puts LoRA into; leave it out of target_modules"] = (
                    None
                )
        return list(problems)

    def _model_of(self, factors: dict[str, torch.Tensor], settings: AdapterSettings) -> LoRAModel:
        """vLLM's adapter. As with files, it keeps its factors on the host until it is activated."""
        model = self._runner.lora_manager._adapter_manager.model
        rank = max(settings.ranks.values())
        lora = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            factors,
            PEFTHelper(r=rank, lora_alpha=rank, target_modules=sorted(settings.ranks)),
            device="cpu",
            dtype=self._config.lora_config.lora_dtype,
            model_vocab_size=self._config.model_config.get_vocab_size(),
            weights_mapper=getattr(model, "hf_to_vllm_mapper", None),
            skip_prefixes=getattr(model, "lora_skip_prefixes", None),
        )
        for name in factors:
            path, _ = split_name(name) or ("", "")
            layer = lora.loras.get(self._engine_module(name))
            if layer is None or path not in settings.scalings:
                raise RefitMismatch(
                    "the adapter's settings are of other layers than its factors; the trainer changed the adapter after "
                    "the ranks met. Prepare the refit again",
                    stage="misc",
                    parameter=name,
                )
            # Set for each layer: vLLM knows one rank and alpha for all, and no alpha_pattern or rank_pattern.
            layer.rank, layer.scaling = settings.ranks[path], settings.scalings[path]
            layer.lora_alpha = layer.rank * layer.scaling
        return lora

    def _layers(self) -> frozenset[str]:
        """The layers in which vLLM uses LoRA. Where vLLM joins several layers, by the checkpoint's names."""
        manager = self._runner.lora_manager._adapter_manager
        joined = (name for names in manager.packed_modules.values() for name in names)
        return frozenset(map(self._generic, (*manager.modules, *joined)))

    def _generic(self, layer: str) -> str:
        """The name without its layer's number under pipeline parallelism: a rank has some layers, and gets all factors."""
        staged = self._config.parallel_config.pipeline_parallel_size > 1
        return re.sub(r"\.\d+(?=\.)", ".*", layer) if staged else layer

    def _engine_module(self, name: str) -> str:
        """vLLM's name of the layer that a factor belongs to."""
        model = self._runner.lora_manager._adapter_manager.model
        found: str = parse_fine_tuned_lora_name(name, getattr(model, "hf_to_vllm_mapper", None))[0]
        return found
