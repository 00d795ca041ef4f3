"""Pure arithmetic of layouts: boxes, their intersections and coverage. Knows of no model and no transport."""

from .boxes import Box, box_of, coverage_gap, intersect, overlap, split, subtract, volume
from .fragments import Fragment, local_slice

__all__ = [
    "Box",
    "Fragment",
    "box_of",
    "coverage_gap",
    "intersect",
    "local_slice",
    "overlap",
    "split",
    "subtract",
    "volume",
]
