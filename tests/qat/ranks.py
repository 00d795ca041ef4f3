"""What the ranks of these tests do: train in NVFP4 in several layouts, one after another, and export."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

STEPS = 2


@dataclass(frozen=True)
class Case:
    """A trainer in a layout of Megatron's, or under FSDP over all ranks; ``written`` is where it writes its checkpoint."""

    checkpoint: str
    written: Path
    megatron: dict[str, int] | None = None


def token_ids() -> torch.Tensor:
    """Of which every expert of ``tiny:qwen3-moe`` gets some, in both steps."""
    return torch.randint(0, 60, (4, 16), generator=torch.Generator().manual_seed(22))


def run(rank: int, cases: Sequence[Case]) -> list[dict[str, Any]]:
    return [_megatron(rank, case) if case.megatron else _fsdp(rank, case) for case in cases]


def _fsdp(rank: int, case: Case) -> dict[str, Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM

    from rlrefit.workers.trainers.fsdp.source import FSDPSource
    from rlrefit.workers.trainers.qat.checkpoint import write_checkpoint
    from rlrefit.workers.trainers.qat.config import QATConfig
    from rlrefit.workers.trainers.qat.fsdp import quantize_module
    from rlrefit.workers.trainers.qat.source import PackedSource

    model = AutoModelForCausalLM.from_pretrained(case.checkpoint, dtype=torch.float32)
    qat = quantize_module(model, QATConfig())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    source = FSDPSource(model, torch.bfloat16)
    packed = PackedSource(source, qat)
    with torch.no_grad(), qat.calibrating():
        model(token_ids())
    qat.refresh()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    rows = token_ids()[rank::2]
    report = _report(model, qat, packed)
    losses = []
    for _ in range(STEPS):
        loss = model(rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        qat.refresh()
        losses.append(loss.item())
    with torch.no_grad():
        report["logits"] = model(token_ids()).logits.float()
    report |= {"losses": losses, "slices": slices(packed)}
    if case.written.name == "of-fsdp":
        report |= _faults(rank, case, source, qat) | {"looks": _looks(rank, model, source, qat)}
        report |= _written_behind(case, model, qat)
    write_checkpoint(case.written, case.checkpoint, source, qat)
    return report


def _faults(rank: int, case: Case, source: Any, qat: Any) -> dict[str, Any]:
    """What all ranks say of what fails on one."""
    from rlrefit.workers.trainers.qat.checkpoint import write_checkpoint
    from rlrefit.workers.trainers.qat.source import PackedSource

    torch.distributed.barrier()
    folder = case.written.parent / "failed"
    with _full_disk() if rank == 0 else nullcontext():
        found = {
            "full disk": _error_of(lambda: write_checkpoint(folder / "new", case.checkpoint, source, qat))
        }
    packed = PackedSource(source, qat)
    if rank == 1:
        source.prepare = _raise
    found["prepare"] = _error_of(packed.prepare)
    source.__dict__.pop("prepare", None)
    calibrated = qat.state_dict()
    if rank == 1:
        qat.load_state_dict({name: 2 * value for name, value in calibrated.items()})
    found["other scales"] = _error_of(packed.prepare)
    qat.load_state_dict(calibrated)
    return found | {"left behind": [path.name for path in folder.iterdir()] if folder.exists() else []}


def _raise() -> None:
    raise OSError("the host's memory")


@contextmanager
def _full_disk() -> Iterator[None]:
    """Files of this process can't become large."""
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, kept[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)


def _written_behind(case: Case, model: Any, qat: Any) -> dict[str, str]:
    """What a forward pass says of writes to shards that torch counts no versions of; the weights are then as before."""
    from torch.distributed.checkpoint import load, save

    saved = case.written.parent / "saved"
    state = {"model": model.state_dict()}
    save(state, checkpoint_id=saved)
    qat.refresh()
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.99)
    found = {"averaged": _error_of(lambda: model(token_ids()))}
    qat.refresh()
    found["none"] = _error_of(lambda: model(token_ids()))
    load({"model": model.state_dict()}, checkpoint_id=saved)
    found["loaded"] = _error_of(lambda: model(token_ids()))
    qat.refresh()
    assert not found.pop("none")
    return found


def _looks(rank: int, model: Any, source: Any, qat: Any) -> dict[str, list[tuple[bool | None, float]]]:
    """What two exports in turn find out on this rank, and by which scale, once rank 1 has written a shard of its own without a word: by
    a look at all weights, and by what encodes them."""
    from rlrefit.workers.trainers.qat.source import PackedSource

    name = "model.layers.0.self_attn.q_proj.weight"
    shard = model.get_parameter(name).to_local().data
    kept = shard.clone()
    found: dict[str, list[tuple[bool | None, float]]] = {"read": [], "encoded": []}
    for how, answers in found.items():
        if rank == 1:
            shard.mul_(100)
        packed = PackedSource(source, qat)
        made = [f for f in packed.fragments()[0] if f.encoding is not None]
        encoded = frozenset(f.name for f in made) if how == "encoded" else frozenset[str]()
        for _ in range(2):
            look = packed.prepare_ahead(encoded)
            scale = qat.scale(name, torch.float32).item()
            answer = None if look is None else look()
            _encode(made)
            answers.append((None if answer is None else answer(), scale))
        shard.copy_(kept)
        qat.refresh()
    return found


def _encode(fragments: Any) -> None:
    from rlrefit.integration.layout import box_of
    from rlrefit.integration.packing import EncodedView, make_encoders

    pairs = []
    for fragment in fragments:
        shape = fragment.encoding.shape(fragment.view.shape)
        made = torch.empty(shape, dtype=fragment.encoding.dtype)
        pairs.append((EncodedView(fragment.view, fragment.encoding, box_of(shape)), made))
    for encoder in make_encoders(pairs, torch.device("cpu")):
        encoder.launch()


def _megatron(rank: int, case: Case) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads

    from rlrefit.workers.trainers.megatron.model import MegatronLayout, build_megatron
    from rlrefit.workers.trainers.megatron.source import MegatronSource
    from rlrefit.workers.trainers.qat.checkpoint import write_checkpoint
    from rlrefit.workers.trainers.qat.config import QATConfig
    from rlrefit.workers.trainers.qat.megatron import quantize_chunks
    from rlrefit.workers.trainers.qat.source import PackedSource

    assert case.megatron is not None
    built = build_megatron(
        case.checkpoint, MegatronLayout(**case.megatron), dtype=torch.float32, distributed_optimizer=False
    )
    (model,) = built.model
    built.provider.gradient_accumulation_fusion = True
    try:
        quantize_chunks(built.bridge, built.model, QATConfig())
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    built.provider.gradient_accumulation_fusion = False
    qat = quantize_chunks(built.bridge, built.model, QATConfig())
    source = MegatronSource(built.bridge, built.model)
    packed = PackedSource(source, qat)
    ids = token_ids()
    positions = torch.arange(ids.shape[1]).expand_as(ids).contiguous()
    with torch.no_grad(), qat.calibrating():
        model(ids, positions, None)
    qat.refresh()
    report = _report(model, qat, packed)
    with torch.no_grad():
        out = model(ids, positions, None)
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(out) for _ in range(group.size())]
    torch.distributed.all_gather(parts, out.contiguous(), group=group)
    report |= {"logits": torch.cat(parts, -1).float(), "refusal": refusal, "without_gradient": [], "kept": []}
    labels = ids.roll(-1, 1)
    losses = []
    for step in range(STEPS):
        model.zero_grad_buffer()
        loss = model(ids, positions, None, labels=labels).mean()
        loss.backward()
        finalize_model_grads([model])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if not parameter.main_grad.any():
                    report["without_gradient"].append(f"{step} {name}")
                parameter.sub_(0.5 * parameter.main_grad)
        if step == 0:
            report["stale"] = _error_of(lambda: model(ids, positions, None))
        qat.refresh()
        report["kept"].append(sum(one._value is not None for one in qat._quantizers))
        (qat.free_values if step else qat.release)()
        report["kept"].append(sum(one._value is not None for one in qat._quantizers))
        losses.append(loss.item())
    report |= {"losses": losses, "slices": slices(packed)}
    write_checkpoint(case.written, case.checkpoint, source, qat)
    parallel_state.destroy_model_parallel()
    return report


def _error_of(work: Callable[[], Any]) -> str:
    from rlrefit.integration.errors import RefitError

    try:
        with torch.no_grad():
            work()
    except RefitError as error:
        return str(error)
    return ""


def _report(model: Any, qat: Any, packed: Any) -> dict[str, Any]:
    return {
        "weights": qat.weights,
        "inputs": qat.state_dict(),
        "first": slices(packed),
        "scales": {name: qat.scale(name, torch.float32).item() for name in qat.weights},
    }


def slices(packed: Any) -> dict[str, Any]:
    """What this rank would send: box and bytes of each packed tensor."""
    fragments, refused = packed.fragments()
    packed.prepare()
    return {
        "refused": refused,
        "held": [(f.name, f.box, as_bytes(_sent(f))) for f in fragments],
    }


def _sent(fragment: Any) -> torch.Tensor:
    from rlrefit.integration.packing import EncodedView, make_encoders

    if fragment.encoding is None:
        return fragment.view
    sent = torch.empty([stop - start for start, stop in fragment.box], dtype=fragment.dtype)
    whole = tuple((0, n) for n in sent.shape)
    for encoder in make_encoders([(EncodedView(fragment.view, fragment.encoding, whole), sent)], sent.device):
        encoder.launch()
    return sent


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def cut(tensors: dict[str, torch.Tensor], held: Any) -> Iterator[str]:
    """Names of the parts that are not slices of the whole tensors, bit for bit."""
    for name, box, sent in held:
        part = tensors[name][tuple(slice(a, b) for a, b in box)]
        if not torch.equal(as_bytes(part), sent):
            yield f"{name} {box}"
