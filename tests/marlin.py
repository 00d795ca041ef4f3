"""Marlin's order of 4-bit weights on a CPU, as vLLM's CUDA code has it (``gptq_marlin_repack.cu``), thread by thread."""

from __future__ import annotations

import numpy as np
import torch

TILE_K, TILE_N = 16, 64
_OFFSETS = (0, 1, 8, 9)
_PACK = (0, 2, 4, 6, 1, 3, 5, 7)


def gptq_marlin_repack(
    b_q_weight: torch.Tensor,
    perm: torch.Tensor,
    size_k: int,
    size_n: int,
    num_bits: int,
    is_a_8bit: bool = False,
) -> torch.Tensor:
    """``[k / 8, n]`` int32, eight codes of one column in a word, as int32 ``[k / 16, 2 n]``."""
    assert num_bits == 4
    assert not is_a_8bit
    assert not perm.numel()
    assert size_k % TILE_K == size_n % TILE_N == 0
    words = b_q_weight.numpy().view(np.uint32)
    assert words.shape == (size_k // 8, size_n)
    # Of each element its code: [k, n].
    codes = ((words[:, None, :] >> (4 * np.arange(8, dtype=np.uint32))[None, :, None]) & 0xF).reshape(
        size_k, size_n
    )
    out = np.empty((size_k // TILE_K, size_n // TILE_N, 128), dtype=np.uint32)
    for thread in range(32):
        for warp in range(4):
            n = warp * 16 + thread // 4
            rows = [thread % 4 * 2 + offset for offset in _OFFSETS]
            tiles = codes.reshape(size_k // TILE_K, TILE_K, size_n // TILE_N, TILE_N)
            values = [tiles[:, k, :, n] for k in rows] + [tiles[:, k, :, n + 8] for k in rows]
            word = np.zeros_like(out[:, :, 0])
            for i, at in enumerate(_PACK):
                word |= values[at] << np.uint32(4 * i)
            out[:, :, thread * 4 + warp] = word
    return torch.from_numpy(out.reshape(size_k // TILE_K, size_n * 2).view(np.int32))


def permute_scales(scales: np.ndarray) -> np.ndarray:
    """Scales ``[groups, n]`` in the kernel's order, before the four of a word are put in that of its bytes."""
    order = [i + 8 * j for i in range(8) for j in range(8)]
    return scales.reshape(-1, 64)[:, order].reshape(scales.shape)
