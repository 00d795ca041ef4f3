"""One tensor between two meshes of ranks: :func:`xferdtensor`."""

from .op import xferdtensor
from .reshard import LocalPart, RankPart, Reshard, Side

__all__ = ["LocalPart", "RankPart", "Reshard", "Side", "xferdtensor"]
