"""Marlin's order of weights of 4 and 8 bits on a CPU, as vLLM's CUDA code has it (``gptq_marlin_repack.cu``), thread by thread."""

from __future__ import annotations

import numpy as np
import torch

TILE_K, TILE_N = 16, 64
_OFFSETS = (0, 1, 8, 9)
# Values of a thread in the order in which they stand in its words.
_PACK = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3, 4, 6, 5, 7)}


def gptq_marlin_repack(
    b_q_weight: torch.Tensor,
    perm: torch.Tensor,
    size_k: int,
    size_n: int,
    num_bits: int,
    is_a_8bit: bool = False,
) -> torch.Tensor:
    """Int32 ``[k · bits / 32, n]``, codes of one column in a word, as int32 ``[k / 16, n · bits / 2]``."""
    assert not is_a_8bit
    assert not perm.numel()
    assert size_k % TILE_K == size_n % TILE_N == 0
    in_word = 32 // num_bits
    words = b_q_weight.numpy().view(np.uint32)
    assert words.shape == (size_k // in_word, size_n)
    shifts = num_bits * np.arange(in_word, dtype=np.uint32)
    # Of each element its code: [k, n].
    codes = ((words[:, None, :] >> shifts[None, :, None]) & np.uint32((1 << num_bits) - 1)).reshape(
        size_k, size_n
    )
    of_thread = 8 // in_word
    out = np.empty((size_k // TILE_K, size_n // TILE_N, 128 * of_thread), dtype=np.uint32)
    for thread in range(32):
        for warp in range(4):
            n = warp * 16 + thread // 4
            rows = [thread % 4 * 2 + offset for offset in _OFFSETS]
            tiles = codes.reshape(size_k // TILE_K, TILE_K, size_n // TILE_N, TILE_N)
            values = [tiles[:, k, :, n] for k in rows] + [tiles[:, k, :, n + 8] for k in rows]
            for part in range(of_thread):
                word = np.zeros_like(out[:, :, 0])
                for i, at in enumerate(_PACK[num_bits][part * in_word : (part + 1) * in_word]):
                    word |= values[at] << np.uint32(num_bits * i)
                out[:, :, (thread * 4 + warp) * of_thread + part] = word
    return torch.from_numpy(out.reshape(size_k // TILE_K, size_n * num_bits // 2).view(np.int32))


def permute_scales(scales: np.ndarray) -> np.ndarray:
    """Scales ``[groups, n]`` in the kernel's order, before the four of a word are put in that of its bytes."""
    order = [i + 8 * j for i in range(8) for j in range(8)]
    return scales.reshape(-1, 64)[:, order].reshape(scales.shape)
