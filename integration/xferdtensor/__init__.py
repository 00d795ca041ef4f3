"""One tensor between two meshes of ranks: :func:`xferdtensor`."""

from .op import xferdtensor

__all__ = ["xferdtensor"]
