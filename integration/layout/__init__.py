"""Pure arithmetic of layouts: boxes, meshes and placements. Knows of no model and no transport."""

from .axes import Axes, common_axes
from .boxes import (
    Box,
    BoxIndex,
    box_of,
    coverage_gap,
    intersect,
    overlap,
    split,
    subtract,
    subtract_all,
    volume,
)
from .dtensor import dtensor_fragments, layout_of, local_fragments, mesh_of, placement_of, placements_of
from .fragments import Encoding, Fragment, Misfit, flat_bytes, local_slice
from .mesh import Mesh
from .placements import Placement, Replicate, Shard, StridedShard, boxes_of, chunk, local_shape

__all__ = [
    "Axes",
    "Box",
    "BoxIndex",
    "Encoding",
    "Fragment",
    "Mesh",
    "Misfit",
    "Placement",
    "Replicate",
    "Shard",
    "StridedShard",
    "box_of",
    "boxes_of",
    "chunk",
    "common_axes",
    "coverage_gap",
    "dtensor_fragments",
    "flat_bytes",
    "intersect",
    "layout_of",
    "local_fragments",
    "local_shape",
    "local_slice",
    "mesh_of",
    "overlap",
    "placement_of",
    "placements_of",
    "split",
    "subtract",
    "subtract_all",
    "volume",
]
