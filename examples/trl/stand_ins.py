"""What stands in for a Hopper GPU and the hub, both of which TRL's AsyncGRPOTrainer needs. It is for tests and a first look.

TRL fetches its attention's kernel, FlashAttention 3, from the hub. Torch's attention takes its place, slowly: each packed row is a
call of its own. Without CUDA, TRL can't look up what the device computes at most; it then knows of none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from trl.experimental.async_grpo import async_grpo_trainer, packing


@contextmanager
def put() -> Iterator[None]:
    """A context in which TRL finds them; entered before the trainer is made."""
    kernel = SimpleNamespace(flash_attn_varlen_func=_attention)
    with mock.patch.object(packing, "_flash_attn", return_value=kernel):
        if torch.cuda.is_available():
            yield
            return
        with mock.patch.object(async_grpo_trainer, "get_peak_flops_per_device", return_value=None):
            yield


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    *_: Any,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """Causal attention over rows that are packed one behind another, those of queries aligned with the end of their keys'.

    Args:
        query: of all rows, tokens × heads × size of a head.
        key, value: tokens × key-value heads × size of a head.
        starts_q, starts_k: where each row begins, and where the last one ends.
        softmax_scale: of the scores.
        causal: always.
        window_size: (-1, -1), for all tokens before.
    """
    if not causal or window_size != (-1, -1):
        raise NotImplementedError("attention that is not causal, or over a window; use FlashAttention 3")
    out = []
    for (q0, q1), (k0, k1) in zip(
        starts_q.unfold(0, 2, 1).tolist(), starts_k.unfold(0, 2, 1).tolist(), strict=True
    ):
        rows = [tokens.transpose(0, 1) for tokens in (query[q0:q1], key[k0:k1], value[k0:k1])]
        mask = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool, device=query.device).tril((k1 - k0) - (q1 - q0))
        found = torch.nn.functional.scaled_dot_product_attention(
            *rows, attn_mask=mask, scale=softmax_scale, enable_gqa=True
        )
        out.append(found.transpose(0, 1))
    return torch.cat(out)
