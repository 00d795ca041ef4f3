"""A batch of a policy: what it holds, and how it is split over data-parallel ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
        lengths: ``[N]`` int64, tokens of each row before its padding, or None for S: what is behind them is not
            computed where a micro-batch has only shorter rows.

    Raises:
        ValueError: shapes or dtypes that don't fit, a mask that selects column 0, or what is behind a row's length.
    """

    input_ids: Tensor
    loss_mask: Tensor
    advantages: Tensor | None = None
    old_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    lengths: Tensor | None = None

    def __post_init__(self) -> None:
        if self.input_ids.dim() != 2 or self.input_ids.dtype != torch.int64 or not self.input_ids.numel():
            raise ValueError(
                f"input_ids are {self.input_ids.dtype} {list(self.input_ids.shape)}; int64 [rows, tokens] is wanted"
            )
        rows = self.input_ids.shape[0]
        for field in fields(self)[1:]:
            tensor = getattr(self, field.name)
            wanted = (rows,) if field.name in ("advantages", "lengths") else tuple(self.input_ids.shape)
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
        if self.lengths is not None:
            columns = torch.arange(self.input_ids.shape[1], device=self.lengths.device)
            if self.loss_mask[columns >= self.lengths.unsqueeze(1)].any():
                raise ValueError(
                    "loss_mask selects tokens behind the lengths of their rows, which would be left out of the training; "
                    "give each row's length with its completion"
                )

    def select(self, rows: Tensor) -> PolicyBatch:
        """The given rows."""
        return self._map(lambda tensor: tensor[rows])

    def to(self, device: torch.device) -> PolicyBatch:
        """The batch on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def padded(self, rows: int, tokens: int) -> PolicyBatch:
        """The batch grown with rows and columns of zeros, which no mask selects; columns too many are cut off.

        The multiples that Megatron needs (sequence parallelism, equal numbers of micro-batches on all ranks)
        are reached in this way; the loss does not see it.
        """
        more_rows, more_tokens = rows - self.input_ids.shape[0], tokens - self.input_ids.shape[1]

        def grow(tensor: Tensor) -> Tensor:
            widths = (0, more_rows) if tensor.dim() == 1 else (0, more_tokens, 0, more_rows)
            return functional.pad(tensor, widths)

        return self._map(grow)

    def _map(self, function: Callable[[Tensor], Tensor]) -> PolicyBatch:
        present = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: function(t) for name, t in present.items() if t is not None})


@dataclass(frozen=True)
class BatchSplit:
    """How a batch is cut, alike on all ranks: rows by length, each micro-batch as wide as its longest row.

    Rows are dealt out to the data-parallel ranks one by one, longest first, so that each rank has its share of long
    ones and the micro-batches that ranks compute at the same time are of one width.

    Attributes:
        order: ``[N]`` int64, the rows of the batch, longest first.
        tokens: of the batch as given.
        data_parallel: number of data-parallel ranks.
        micro_batch: rows of a micro-batch.
        widths: row length that the model sees, of each micro-batch of a rank.
    """

    order: Tensor
    tokens: int
    data_parallel: int
    micro_batch: int
    widths: tuple[int, ...]

    @classmethod
    def of(
        cls,
        batch: PolicyBatch,
        *,
        data_parallel: int,
        micro_batch: int,
        token_multiple: int,
        micro_batch_multiple: int,
    ) -> BatchSplit:
        """The smallest split that holds the batch.

        Args:
            batch: the whole batch.
            data_parallel: number of data-parallel ranks.
            micro_batch: rows of a micro-batch, at most.
            token_multiple: row lengths must be multiples of it, since sequence and context parallelism cut rows.
            micro_batch_multiple: the number of micro-batches must be a multiple of it (PP size, under the
                interleaved schedule).
        """
        rows, tokens = batch.input_ids.shape
        lengths = torch.full((rows,), tokens) if batch.lengths is None else batch.lengths.cpu()
        order = lengths.argsort(descending=True, stable=True)
        # A micro-batch larger than a rank's rows would be filled up with padding, and computed.
        micro_batch = min(micro_batch, -(-rows // data_parallel))
        together = data_parallel * micro_batch
        longest = lengths[order[::together]].tolist()
        # A row of one token has nothing to predict; padding alone is made as narrow as a row can be.
        longest += [0] * (-len(longest) % micro_batch_multiple)
        widths = tuple(-(-max(length, 2) // token_multiple) * token_multiple for length in longest)
        return cls(order, tokens, data_parallel, micro_batch, widths)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of each rank."""
        return len(self.widths)

    @property
    def local_rows(self) -> int:
        """Rows of each data-parallel rank, padding included."""
        return self.micro_batch * self.micro_batches

    def local(self, batch: PolicyBatch, rank: int) -> PolicyBatch:
        """The rows of data-parallel rank ``rank``, longest first, and padding."""
        rows = self.order[rank :: self.data_parallel]
        whole = replace(batch, lengths=None)
        # There may be fewer rows than ranks.
        own = whole.select(rows) if len(rows) else whole.select(self.order[:1])._map(torch.zeros_like)
        return own.padded(self.local_rows, self.widths[0])

    def parts(self, local: PolicyBatch) -> Iterator[PolicyBatch]:
        """The micro-batches of :meth:`local`."""
        for number, width in enumerate(self.widths):
            start = number * self.micro_batch
            rows = torch.arange(start, start + self.micro_batch, device=local.input_ids.device)
            yield local.select(rows).padded(self.micro_batch, width)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """``[local_rows, widths[0]]`` from what was computed of each micro-batch, zeros behind its width."""
        return torch.cat([functional.pad(part, (0, self.widths[0] - part.shape[1])) for part in parts])

    def restored(self, ranks: Tensor) -> Tensor:
        """``[N, tokens]`` in the batch's order, from ``[data_parallel, local_rows, widths[0]]``."""
        dealt = ranks.transpose(0, 1).flatten(0, 1)[: len(self.order)]
        whole = torch.empty_like(dealt)
        whole[self.order.to(dealt.device)] = dealt
        return functional.pad(whole, (0, self.tokens - whole.shape[1]))
