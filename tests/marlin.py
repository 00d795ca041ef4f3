"""Marlin's order of weights of 4 and 8 bits on a CPU, as vLLM's CUDA code has it (``gptq_marlin_repack.cu``), thread by thread."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

TILE_K, TILE_N = 16, 64
_OFFSETS = (0, 1, 8, 9)
# Values of a thread in the order in which they stand in its words.
_PACK = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3, 4, 6, 5, 7)}


@cache
def _places(num_bits: int) -> np.ndarray:
    """Of each word of a tile, by thread and warp, where its codes are in the tile: [words, codes]."""
    in_word = 32 // num_bits
    of_thread = 8 // in_word
    places = np.empty((128 * of_thread, in_word), dtype=np.intp)
    for thread in range(32):
        for warp in range(4):
            n = warp * 16 + thread // 4
            rows = [thread % 4 * 2 + offset for offset in _OFFSETS]
            values = [k * TILE_N + n for k in rows] + [k * TILE_N + n + 8 for k in rows]
            for part in range(of_thread):
                order = _PACK[num_bits][part * in_word : (part + 1) * in_word]
                places[(thread * 4 + warp) * of_thread + part] = [values[at] for at in order]
    return places


def gptq_marlin_repack(
    b_q_weight: torch.Tensor,
    perm: torch.Tensor | None = None,
    *,
    size_k: int,
    size_n: int,
    num_bits: int,
    is_a_8bit: bool = False,
) -> torch.Tensor:
    """Int32 ``[k · bits / 32, n]``, codes of one column in a word, as int32 ``[k / 16, n · bits / 2]``."""
    assert not is_a_8bit
    # Of an activation order; vLLM 0.32's has none.
    assert perm is None or not perm.numel()
    assert size_k % TILE_K == size_n % TILE_N == 0
    in_word = 32 // num_bits
    words = b_q_weight.numpy().view(np.uint32)
    assert words.shape == (size_k // in_word, size_n)
    shifts = num_bits * np.arange(in_word, dtype=np.uint32)
    # Of each element its code: [k, n].
    codes = ((words[:, None, :] >> shifts[None, :, None]) & np.uint32((1 << num_bits) - 1)).reshape(
        size_k, size_n
    )
    tiles = codes.reshape(size_k // TILE_K, TILE_K, size_n // TILE_N, TILE_N).swapaxes(1, 2)
    of_words = tiles.reshape(*tiles.shape[:2], TILE_K * TILE_N)[:, :, _places(num_bits)]
    out = np.bitwise_or.reduce(of_words << shifts, axis=-1).reshape(size_k // TILE_K, size_n * num_bits // 2)
    # As the kernel returns it; numpy's order in memory is that of what it was chosen from.
    return torch.from_numpy(np.ascontiguousarray(out).view(np.int32))


def permute_scales(scales: np.ndarray) -> np.ndarray:
    """Scales ``[groups, n]`` in the kernel's order, before the four of a word are put in that of its bytes."""
    order = [i + 8 * j for i in range(8) for j in range(8)]
    return scales.reshape(-1, 64)[:, order].reshape(scales.shape)
