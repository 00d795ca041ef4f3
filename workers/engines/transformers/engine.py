"""Rollouts with transformers: tensor-parallel by transformers' own plan, on GPUs or CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ....integration.errors import RefitError
from ....integration.weights.endpoints import rank_device
from ...checkpoint_folder import copy_own_code
from ..common.completion import Completion
from ..common.destination_mixin import DestinationRefitMixin
from .adapter_destination import TransformersAdapterDestination
from .destination import TransformersDestination, TransformersFp8Destination


class TransformersEngine(DestinationRefitMixin):
    """One rank of a transformers generation engine.

    Args:
        model_path: Hugging Face checkpoint folder.
        dtype: dtype of the weights.
        tp_size: tensor-parallel ranks; above 1, ``torch.distributed`` is initialised with this many.
        fp8: hold the decoder layers' matrices in FP8 blocks: :class:`~.destination.TransformersFp8Destination`.
        trust_remote_code: run the code that the checkpoint brings.
    """

    def __init__(
        self,
        model_path: str,
        dtype: torch.dtype,
        tp_size: int = 1,
        *,
        fp8: bool = False,
        trust_remote_code: bool = False,
    ):
        from transformers import GenerationConfig

        self._fp8 = fp8

        self._tp_size = tp_size
        self._tp_rank = dist.get_rank() if tp_size > 1 else 0
        device = rank_device()
        if tp_size > 1:
            mesh = dist.device_mesh.init_device_mesh(device.type, (tp_size,))
            spread: dict[str, Any] = {"tp_plan": "auto", "device_mesh": mesh}
        else:
            spread = {}
        if trust_remote_code:
            copy_own_code(model_path)
        model = _model_class(model_path, trust_remote_code).from_pretrained(
            model_path, dtype=dtype, trust_remote_code=trust_remote_code, **spread
        )
        if tp_size == 1:
            model = model.to(device)
        # The checkpoint's own sampling defaults (repetition penalty, min_p, …) would change the distribution
        # behind the log-probabilities that are reported.
        model.generation_config = GenerationConfig()
        self.model = model.eval().requires_grad_(False)

    def _make_refit_destination(self) -> TransformersDestination:
        kind = TransformersFp8Destination if self._fp8 else TransformersDestination
        return kind(self.model, self._tp_rank, self._tp_size)

    def _make_adapter_destination(self) -> TransformersAdapterDestination:
        if self._tp_size > 1:
            raise RefitError(
                f"policy.refit.lora is adapter, but the transformers engine at tensor parallelism {self._tp_size} has no "
                "rule for an adapter's parts. Nothing has moved; start it at 1, with more replicas, or set lora to merge",
                stage="settings",
            )
        return TransformersAdapterDestination(self.model)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        stop_token_ids: Sequence[int],
        pad_token_id: int,
    ) -> list[Completion]:
        """Sample one completion for each prompt; temperature 0 decodes greedily.

        All tensor-parallel ranks must call it with the same arguments: they draw the same tokens from
        the same seed. Any of ``stop_token_ids`` ends a completion, and stands at its end.

        Raises:
            EngineDirty: a refit began to write the weights and did not commit.
        """
        self.refit_state.require_clean()
        width = max(len(p) for p in prompts)
        device = self.model.device
        input_ids = torch.full((len(prompts), width), pad_token_id, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            # Left padding: the last prompt token must stand next to the first generated one.
            input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
            attention_mask[row, width - len(prompt) :] = 1
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        output = self.model.generate(
            input_ids=input_ids.to(device),
            attention_mask=attention_mask.to(device),
            max_new_tokens=max_new_tokens,
            eos_token_id=list(stop_token_ids) or None,
            pad_token_id=pad_token_id,
            output_logits=True,
            return_dict_in_generate=True,
            **(sampling if temperature > 0 else {"do_sample": False}),
        )
        tokens = output.sequences[:, width:].cpu()
        logits = torch.stack(output.logits, dim=1).float() / (temperature if temperature > 0 else 1.0)
        logprobs = torch.log_softmax(logits, dim=-1).cpu().gather(2, tokens.unsqueeze(-1)).squeeze(-1)
        rows = zip(tokens.tolist(), logprobs.tolist(), strict=True)
        return [_completion(t, p, stop_token_ids, self.refit_state.version) for t, p in rows]


def _model_class(model_path: str, trust_remote_code: bool) -> Any:
    """The automatic class that makes the model: of images too if the checkpoint is of such a class, or there is no other."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    kind = type(config)
    if kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForCausalLM
    saved = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind].__name__ in (config.architectures or ())
    return (
        AutoModelForImageTextToText
        if saved or kind not in MODEL_FOR_CAUSAL_LM_MAPPING
        else AutoModelForCausalLM
    )


def _completion(
    tokens: list[int], logprobs: list[float], stop_token_ids: Sequence[int], version: int
) -> Completion:
    end = next((place for place, token in enumerate(tokens) if token in stop_token_ids), None)
    length = len(tokens) if end is None else end + 1
    return Completion(tokens[:length], logprobs[:length], end is not None, version)
