"""What a bucket may hold, and what a manifest may leave out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlrefit.integration.errors import PlanError
from rlrefit.workers.engines.common.loader_trace.trace import Manifest, trace_loader
from rlrefit.workers.engines.common.loader_trace.unreached import require_reached
from rlrefit.workers.engines.sglang.sender import SglangSender
from rlrefit.workers.engines.trtllm.sender import unit_of

from .ways import Driven


class Layer(nn.Module):
    """Weights that TensorRT-LLM joins in one matrix."""

    def __init__(self) -> None:
        super().__init__()
        for name in "qkv":
            self.register_parameter(name, nn.Parameter(torch.empty(4)))


class Followed(nn.Module):
    """Two layers and a norm, whose loader can't be followed for the tensors in ``unfollowed``."""

    def __init__(self, unfollowed: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.Parameter(torch.empty(4))
        self._unfollowed = unfollowed

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if name == self._unfollowed:
                float(tensor.sum())
            parameters[name].data.copy_(tensor)


@pytest.mark.parametrize(
    ("unfollowed", "left_out"),
    [
        ("layers.0.q", "layers.1.k"),
        ("layers.0.q", "norm"),
        ("layers.0.q", "layers.0.k"),
        ("norm", "layers.1.k"),
        ("", "layers.1.k"),
        ("", ""),
        ("layers.0.q", ""),
        ("norm", ""),
    ],
)
def test_a_tensor_that_can_not_be_followed_excuses_itself_alone(unfollowed: str, left_out: str) -> None:
    with torch.device("meta"):
        model = Followed(unfollowed)
    parameters = dict(model.named_parameters())
    manifest: Manifest = tuple((name, (4,), torch.float32) for name in parameters if name != left_out)
    trace = trace_loader(model.load_weights, parameters, manifest)
    assert trace.unknown == ({unfollowed} if unfollowed else set())
    if left_out:
        with pytest.raises(PlanError, match=left_out):
            require_reached(trace, list(parameters))
    else:
        require_reached(trace, list(parameters))


def test_a_bucket_holds_no_more_than_it_may_with_its_flattened_copy(alone: Driven) -> None:
    destination, source = alone.manager.holder, alone.source
    for holder in (source, destination):
        holder.held = {
            f"layers.0.self_attn.{name}_proj.weight": torch.zeros(8, 8, dtype=torch.bfloat16)
            for name in "qkv"
        }
    assert len({unit_of(name) for name in source.held}) == 1, "together three times what a half may hold"
    sender = SglangSender(source, alone.refit, "cpu", 256)
    for version in (0, 1):
        for number, tensor in enumerate(source.held.values()):
            tensor.fill_(3 * version + number)
        for tensor in destination.held.values():
            tensor.fill_(float("nan"))
        record = sender.refit(version)
        assert all(torch.equal(destination.held[name], tensor) for name, tensor in source.held.items())
        assert record.peak_extra_bytes == 256
    assert alone.manager.calls.count("bucket") == 6
