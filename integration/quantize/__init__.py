"""Formats of quantized weights, a module per format, and the kernels that make them."""

from . import blocks, e8m0, fp8_blockwise, int4, mxfp4, mxfp8, nvfp4
from .float8 import FLOAT8, as_bytes, from_bytes, is_float8

__all__ = [
    "FLOAT8",
    "as_bytes",
    "blocks",
    "e8m0",
    "fp8_blockwise",
    "from_bytes",
    "int4",
    "is_float8",
    "mxfp4",
    "mxfp8",
    "nvfp4",
]
