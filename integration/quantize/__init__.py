"""Math and layouts of quantized weights, a module per format. Knows of no plan and no transport."""

from . import blocks, fp8_blockwise, layouts, mxfp8, nvfp4
from .float8 import FLOAT8, as_bytes, from_bytes, is_float8

__all__ = [
    "FLOAT8",
    "as_bytes",
    "blocks",
    "fp8_blockwise",
    "from_bytes",
    "is_float8",
    "layouts",
    "mxfp8",
    "nvfp4",
]
