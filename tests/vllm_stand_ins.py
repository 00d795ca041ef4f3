"""Kernels of vLLM's libraries for AVX-512 on a CPU without: they do the same to weights, tensors and groups, in Python.

They are all that vLLM calls of those libraries unasked for weights in 16 bits and more, beside what its library for AVX2 has too.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.library import Library
from vllm import _custom_ops  # noqa: F401  # loads the library for AVX2
from vllm.platforms.cpu import CpuPlatform

_library = Library("_C", "FRAGMENT")
_groups: list[dist.ProcessGroup] = []


def stand_in_for_kernels(*, tiles: bool) -> None:
    """Call it once, and before vLLM makes groups or models; ``tiles``: those of AMX too."""
    CpuPlatform.import_kernels = classmethod(lambda cls: None)  # asked again as more of vLLM is imported
    _stand_in_for_groups()
    _stand_in_for_experts()
    if tiles:
        _compute_attention_without_tiles()


def _define(schema: str, function: Any) -> None:
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, function, "CompositeExplicitAutograd")


def _stand_in_for_groups() -> None:
    """Collectives of the ranks that a name of shared memory tells, through a group that they have already."""

    def init(name: str, group_size: int, rank: int, thread_num: int) -> int:
        ranks = [int(part) for part in name[name.rindex("[") + 1 : name.rindex("]")].split("-")]
        assert (len(ranks), ranks[rank]) == (group_size, dist.get_rank())
        made = distributed_c10d._world.pg_map
        _groups.append(next(group for group in made if dist.get_process_group_ranks(group) == ranks))
        return len(_groups) - 1

    def all_reduce(handle: int, data: torch.Tensor) -> None:
        dist.all_reduce(data, group=_groups[handle])

    def gather(handle: int, data: torch.Tensor, outputs: list[torch.Tensor] | None, dst: int) -> None:
        dist.gather(data, outputs, group=_groups[handle], group_dst=dst)

    def all_gather(handle: int, data: torch.Tensor, output: torch.Tensor) -> None:
        dist.all_gather_into_tensor(output, data, group=_groups[handle])

    def send(handle: int, tensors: list[torch.Tensor], dst: int) -> None:
        dist.send_object_list(
            [[tensor.flatten() for tensor in tensors]], group=_groups[handle], group_dst=dst
        )

    def receive(handle: int, src: int) -> list[torch.Tensor]:
        found: list[Any] = [None]
        dist.recv_object_list(found, group=_groups[handle], group_src=src)
        return list(found[0])

    _define("init_shm_manager(str name, int group_size, int rank, int thread_num) -> int", init)
    _define("join_shm_manager(int handle, str name) -> str", lambda handle, name: name)
    _define("shm_allreduce(int handle, Tensor(a!) data) -> ()", all_reduce)
    _define("shm_gather(int handle, Tensor data, Tensor(a!)[]? outputs, int dst) -> ()", gather)
    _define("shm_all_gather(int handle, Tensor data, Tensor(a!) output) -> ()", all_gather)
    _define("shm_send_tensor_list(int handle, Tensor[] tensor_list, int dst) -> ()", send)
    _define("shm_recv_tensor_list(int handle, int src) -> Tensor[]", receive)


# Rows that lie beside one another in a packed weight, and values of a row that do so for AMX.
_ROWS, _PAIR = 16, 2


def tiled(weight: torch.Tensor, isa: str, *, packed: bool) -> torch.Tensor:
    """Experts' weights ``[experts, rows, columns]``, from the loader's layout to the kernels' or, if ``packed``, back."""
    experts, rows, columns = weight.shape
    width = _PAIR if isa == "amx" else 1
    tiles = (rows // _ROWS, columns // width, _ROWS) if packed else (rows // _ROWS, _ROWS, columns // width)
    return weight.reshape(experts, *tiles, width).transpose(2, 3).reshape(weight.shape)


def _stand_in_for_experts() -> None:
    """The packing of experts, and their kernel with the sizes that it takes: its tiles are 32 rows, of gate and of up."""

    def prepack(weight: torch.Tensor, packed_weight: torch.Tensor, isa: str) -> None:
        torch._check(weight.shape[1] % 32 == 0, lambda: f"{weight.shape[1]} rows are no multiple of 32")
        packed_weight.copy_(tiled(weight, isa, packed=False))

    def compute(
        output: torch.Tensor,
        values: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        w13_bias: torch.Tensor | None,
        w2_bias: torch.Tensor | None,
        topk_weights: torch.Tensor,
        topk_id: torch.Tensor,
        skip_weighted: bool,
        act: str,
        isa: str,
    ) -> None:
        torch._check(
            w13.shape[1] % 64 == 0, lambda: f"{w13.shape[1]} rows of gate and up are no multiple of 64"
        )
        torch._check(w2.shape[1] % 32 == 0, lambda: f"{w2.shape[1]} rows of down are no multiple of 32")
        up, down = (tiled(weight, isa, packed=True).float() for weight in (w13, w2))
        total = torch.zeros(output.shape)
        for chosen_experts, share in zip(topk_id.long().T, topk_weights.T, strict=True):
            inner = torch.einsum("tk,tnk->tn", values.float(), up[chosen_experts])
            if w13_bias is not None:
                inner += w13_bias[chosen_experts]
            active = _activation(act)(inner).to(values.dtype).float()
            found = torch.einsum("tk,tnk->tn", active, down[chosen_experts])
            if w2_bias is not None:
                found += w2_bias[chosen_experts]
            total += found if skip_weighted else found * share[:, None]
        output.copy_(total)

    _define("prepack_moe_weight(Tensor weight, Tensor(a!) packed_weight, str isa) -> ()", prepack)
    _define(
        "cpu_fused_moe(Tensor(a!) output, Tensor input, Tensor w13, Tensor w2, Tensor? w13_bias, Tensor? w2_bias, "
        "Tensor topk_weights, Tensor topk_id, bool skip_weighted, str act, str isa) -> ()",
        compute,
    )


def _activation(act: str) -> Any:
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import _CPU_MOE_ACT_FN

    kind = MoEActivation.from_str(act)
    return SiluAndMul.forward_native if kind is MoEActivation.SILU else _CPU_MOE_ACT_FN[kind]


def _compute_attention_without_tiles() -> None:
    """Its library has no kernel with AMX's; what is computed with is in the engine's cache alone."""
    attention = import_module("vllm.v1.attention.backends.cpu_attn")
    asked = attention._get_attn_isa

    def without_tiles(*args: Any, **kwargs: Any) -> str:
        found: str = asked(*args, **kwargs)
        return "vec" if found == "amx" else found

    attention._get_attn_isa = without_tiles
