"""What trainer ranks with real parameters, over gloo, export and hold."""

from __future__ import annotations

from typing import Any


def tell(rank: int, cases: list[tuple[str, dict[str, int]]]) -> list[dict[str, Any]]:
    """For each (checkpoint, fields of ``MegatronLayout``): the rank's specs and fragments, as plain data."""
    from megatron.core import parallel_state

    from rlrefit.workers.megatron.model import MegatronLayout, build_megatron
    from rlrefit.workers.megatron.source import MegatronSource

    found = []
    for path, layout in cases:
        built = build_megatron(path, MegatronLayout(**layout), wrap_with_ddp=False)
        source = MegatronSource(built.bridge, built.model)
        held, refused = source.fragments()
        exported = {name for name, _ in source.export([spec.name for spec in source.specs()])}
        found.append(
            {
                "specs": [spec.to_json() for spec in source.specs()],
                "exported": exported,
                "held": [(f.name, tuple(f.full_shape), f.box, f.view.dtype) for f in held],
                "refused": refused,
            }
        )
        parallel_state.destroy_model_parallel()
    return found
