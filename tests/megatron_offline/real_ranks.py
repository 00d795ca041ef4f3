"""What trainer ranks with real parameters, over gloo, export and hold."""

from __future__ import annotations

from typing import Any


def tell(rank: int, cases: list[tuple[str, dict[str, int]]]) -> list[dict[str, Any]]:
    """For each (checkpoint, fields of ``MegatronLayout``): the rank's specs and fragments, as plain data."""
    import torch
    from megatron.core import parallel_state

    from rlrefit.workers.trainers.megatron.model import MegatronLayout, build_megatron
    from rlrefit.workers.trainers.megatron.source import MegatronSource

    found = []
    for path, layout in cases:
        built = build_megatron(path, MegatronLayout(**layout))
        source = MegatronSource(built.bridge, built.model)
        held, refused = source.fragments()
        names = [spec.name for spec in source.specs()]
        exported = {name: weight.clone() for name, weight in source.export(names)}
        values, key = [fragment.view.clone() for fragment in held], source.storage_key()
        offload(built.model)
        away, _ = source.fragments()
        found.append(
            {
                "specs": [spec.to_json() for spec in source.specs()],
                "exported": set(exported),
                "offloaded": {
                    "key changes": source.storage_key() != key,
                    "equal fragments": all(
                        torch.equal(fragment.view, value)
                        for fragment, value in zip(away, values, strict=True)
                    ),
                    "equal export": all(torch.equal(w, exported[n]) for n, w in source.export(names)),
                },
                "held": [(f.name, tuple(f.full_shape), f.box, f.view.dtype) for f in held],
                "refused": refused,
            }
        )
        parallel_state.destroy_model_parallel()
    return found


def offload(model: list[Any]) -> None:
    """As trainers do: the buffers' parameters copied to the host, and the storage under all parameters freed."""
    for chunk in model:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            buffer.param_data_cpu = buffer.param_data.clone()
            buffer.param_data.untyped_storage().resize_(0)
