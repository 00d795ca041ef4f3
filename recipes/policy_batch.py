"""A batch of a policy: what it holds, and how it is split over data-parallel ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class PolicyBatch:
    """Prompts with their completions, N rows padded on the right to S tokens.

    Log-probabilities are aligned with the tokens: ``logprobs[n, t]`` is that of ``input_ids[n, t]`` given
    ``input_ids[n, :t]``, in nats; column 0 has none and holds 0.

    Attributes:
        input_ids: ``[N, S]`` int64.
        loss_mask: ``[N, S]``, nonzero for the completion tokens that are trained on; never column 0.
        advantages: ``[N]`` float, one per completion; training needs it.
        old_logprobs: ``[N, S]`` float32, by the trainer before its first step on the batch; training needs it.
        rollout_logprobs: ``[N, S]`` float32, as the inference engine reported them, or None.
        ref_logprobs: ``[N, S]`` float32, by the reference policy, or None.

    Raises:
        ValueError: shapes or dtypes that don't fit, or a mask that selects column 0.
    """

    input_ids: Tensor
    loss_mask: Tensor
    advantages: Tensor | None = None
    old_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None

    def __post_init__(self) -> None:
        if self.input_ids.dim() != 2 or self.input_ids.dtype != torch.int64 or not self.input_ids.numel():
            raise ValueError(
                f"input_ids are {self.input_ids.dtype} {list(self.input_ids.shape)}; int64 [rows, tokens] is wanted"
            )
        rows = self.input_ids.shape[0]
        for field in fields(self)[1:]:
            tensor = getattr(self, field.name)
            wanted = (rows,) if field.name == "advantages" else tuple(self.input_ids.shape)
            if tensor is not None and tuple(tensor.shape) != wanted:
                raise ValueError(
                    f"{field.name} has shape {list(tensor.shape)} where input_ids {list(self.input_ids.shape)} "
                    f"ask for {list(wanted)}; a shifted or trimmed column would train on the wrong tokens"
                )
        if self.loss_mask[:, 0].any():
            raise ValueError(
                "loss_mask selects column 0, whose token has no log-probability: nothing stands before it; "
                "start the mask at the completion's first token"
            )

    def rows(self, start: int, stop: int) -> PolicyBatch:
        """The rows ``start`` to ``stop``, as views."""
        return self._map(lambda tensor: tensor[start:stop])

    def to(self, device: torch.device) -> PolicyBatch:
        """The batch on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def padded(self, rows: int, tokens: int) -> PolicyBatch:
        """The batch grown with rows and columns of zeros, which no mask selects.

        The multiples that Megatron needs (sequence parallelism, equal numbers of micro-batches on all ranks)
        are reached in this way; the loss does not see it.
        """
        more_rows, more_tokens = rows - self.input_ids.shape[0], tokens - self.input_ids.shape[1]

        def grow(tensor: Tensor) -> Tensor:
            widths = (0, more_rows) if tensor.dim() == 1 else (0, more_tokens, 0, more_rows)
            return functional.pad(tensor, widths)

        return self._map(grow)

    def micro_batches(self, size: int) -> Iterator[PolicyBatch]:
        """Consecutive parts of ``size`` rows; the last may be shorter."""
        for start in range(0, self.input_ids.shape[0], size):
            yield self.rows(start, start + size)

    def _map(self, function: Callable[[Tensor], Tensor]) -> PolicyBatch:
        present = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: function(t) for name, t in present.items() if t is not None})


@dataclass(frozen=True)
class BatchSplit:
    """How a batch of ``rows`` by ``tokens`` is cut, alike on all ranks.

    Attributes:
        rows: of the batch as given.
        tokens: of the batch as given.
        data_parallel: number of data-parallel ranks; each takes ``local_rows`` consecutive rows.
        micro_batch: rows of a micro-batch.
        micro_batches: number of micro-batches of each rank.
        padded_tokens: row length that the model sees.
    """

    rows: int
    tokens: int
    data_parallel: int
    micro_batch: int
    micro_batches: int
    padded_tokens: int

    @classmethod
    def of(
        cls,
        rows: int,
        tokens: int,
        *,
        data_parallel: int,
        micro_batch: int,
        token_multiple: int,
        micro_batch_multiple: int,
    ) -> BatchSplit:
        """The smallest split that holds the batch.

        Args:
            rows: of the batch.
            tokens: of the batch.
            data_parallel: number of data-parallel ranks.
            micro_batch: rows of a micro-batch, at most.
            token_multiple: row lengths must be multiples of it (TP size, under sequence parallelism).
            micro_batch_multiple: the number of micro-batches must be a multiple of it (PP size, under the
                interleaved schedule).
        """
        # A micro-batch larger than a rank's rows would be filled up with padding, and computed.
        micro_batch = min(micro_batch, -(-rows // data_parallel))
        each = -(-rows // (data_parallel * micro_batch))
        return cls(
            rows=rows,
            tokens=tokens,
            data_parallel=data_parallel,
            micro_batch=micro_batch,
            micro_batches=-(-each // micro_batch_multiple) * micro_batch_multiple,
            padded_tokens=-(-tokens // token_multiple) * token_multiple,
        )

    @property
    def local_rows(self) -> int:
        """Rows of each data-parallel rank, padding included."""
        return self.micro_batch * self.micro_batches

    def local(self, batch: PolicyBatch, rank: int) -> PolicyBatch:
        """The padded part of data-parallel rank ``rank``."""
        whole = batch.padded(self.local_rows * self.data_parallel, self.padded_tokens)
        return whole.rows(rank * self.local_rows, (rank + 1) * self.local_rows)
