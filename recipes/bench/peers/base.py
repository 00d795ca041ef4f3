"""What a peer of the benchmark offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from ..scene import Scene


class Peer(ABC):
    """Moves all weights that the engines keep from the trainers' storage into theirs, another way."""

    name: ClassVar[str]

    @staticmethod
    @abstractmethod
    def unavailable(scene: Scene) -> str:
        """Why it can't run here, in words; empty if it can. Every rank is asked, and one reason is enough."""

    @abstractmethod
    def __init__(self, scene: Scene):
        """Make groups and buffers; all ranks do so at the same time."""

    @abstractmethod
    def run(self) -> None:
        """Move all weights once, on streams of its choice. The caller synchronizes devices and ranks before and after."""

    @abstractmethod
    def close(self) -> None:
        """Free what outlives a run; all ranks do so at the same time."""


def not_quantizing(scene: Scene) -> str:
    """Why a peer that writes the trainers' own bytes into the engines' parameters can't run; empty if it can."""
    if not scene.options.is_quantized:
        return ""
    return "it sends the trainers' own bytes to where they stay, and engines that hold FP8 have no place for them"
