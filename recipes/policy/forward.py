"""What policies take of logits, and Megatron's forward and backward schedules around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .batch import BatchSplit, PolicyBatch
from .context import own_tokens, whole_rows

# Entropy, and log-probabilities under FSDP, take float32 copies of the logits of so many tokens of each row.
TOKENS_AT_A_TIME = 512


def aligned(of_next: Tensor) -> Tensor:
    """``[B, S]`` with each token's value in its own place, from that of the place before it; column 0 is 0."""
    return torch.nn.functional.pad(of_next[:, :-1], (1, 0))


def token_logprobs(logits: Tensor, input_ids: Tensor, temperature: float, vocab_size: int) -> Tensor:
    """Log-probability of each token given the ones before it, from vocabulary-parallel logits.

    Args:
        logits: ``[B, S / CP, V/TP]``, this tensor-parallel rank's columns of this context-parallel rank's tokens. Overwritten
            where they are float32.
        input_ids: ``[B, S]`` int64.
        temperature: logits are divided by it, as the sampler does.
        vocab_size: of the checkpoint; columns from there on are padding and get no probability.

    Returns:
        ``[B, S]`` float32 in nats, on all context-parallel ranks, with gradient for this one's logits; column 0 is 0.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    # Before the row is cut: the token behind a chunk is another rank's. The last one predicts nothing that is asked for.
    targets = own_tokens(torch.nn.functional.pad(input_ids[:, 1:], (0, 1)))
    predictions = logits.float()
    if temperature != 1.0:
        predictions = predictions / temperature
    first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
    if first + logits.shape[-1] > vocab_size:
        columns = torch.arange(first, first + logits.shape[-1], device=logits.device)
        predictions = predictions.masked_fill(columns >= vocab_size, float("-inf"))
    return aligned(whole_rows(-vocab_parallel_cross_entropy(predictions.contiguous(), targets)))


@torch.no_grad()
def token_entropy(
    logits: Tensor, temperature: float, columns: int, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Entropy of the distribution that the logits of each place give.

    Args:
        logits: ``[B, S, V]``, or this tensor-parallel rank's columns of them; left as they are.
        temperature: logits are divided by it, as the sampler does.
        columns: those before the padding of the vocabulary.
        group: the tensor-parallel ranks, where each has its columns alone.

    Returns:
        ``[B, S]`` float32 in nats.
    """
    entropies = []
    for part in logits[:, :, :columns].split(TOKENS_AT_A_TIME, dim=1):
        scores = part.float() / temperature
        top = scores.amax(-1, keepdim=True)
        if group is not None:
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        scores -= top
        weights = scores.exp()
        total = torch.stack([weights.sum(-1), (weights * scores).sum(-1)])
        if group is not None:
            dist.all_reduce(total, group=group)
        entropies.append(total[0].log() - total[1] / total[0])
    return torch.cat(entropies, 1)


def run_schedule(
    model: list[Any],
    batch: PolicyBatch,
    split: BatchSplit,
    on_logits: Callable[[Tensor, PolicyBatch], tuple[Tensor, Any]],
    *,
    forward_only: bool,
    trains_mtp: bool = False,
) -> list[Any]:
    """Run this rank's micro-batches through Megatron's schedule for the layout.

    Args:
        model: this rank's chunks.
        batch: this data-parallel rank's part, ``split.local(...)``, on the model's device.
        split: of the whole batch.
        on_logits: on the last pipeline stage, (logits ``[B, S / CP, V/TP]``, micro-batch of whole rows) to (loss, result).
            The schedule takes the *mean* of the losses over micro-batches.
        forward_only: leave the backward out.
        trains_mtp: the model has MTP layers, which learn the tokens that ``loss_mask`` selects.

    Returns:
        The results in the order of the micro-batches; empty on all but the last pipeline stage.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config

    def step(micro_batches: Any, chunk: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Any]]]:
        part = next(micro_batches)
        places = torch.arange(part.input_ids.shape[1], device=part.input_ids.device)
        tokens, places = own_tokens(part.input_ids), own_tokens(places.expand_as(part.input_ids))
        # Megatron takes the layers' labels from the tokens, and without a mask would have them learn prompts and padding too.
        learned = {"loss_mask": own_tokens((part.loss_mask != 0).float())} if trains_mtp else {}
        # No mask: attention is causal, so the padding on the right is seen by padding only.
        output = chunk(tokens, places, None, **learned)
        return output, lambda logits: on_logits(logits, part)

    iterators = [split.parts(batch) for _ in model]
    # Stages then tell each other the shapes: they are not the same for all micro-batches.
    get_model_config(model[0]).variable_seq_lengths = len(set(split.widths)) > 1
    with torch.set_grad_enabled(not forward_only):
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if len(model) > 1 else iterators[0],
            model=model if len(model) > 1 else model[0],
            num_microbatches=split.micro_batches,
            seq_length=split.widths[0],
            micro_batch_size=split.micro_batch,
            forward_only=forward_only,
        )
