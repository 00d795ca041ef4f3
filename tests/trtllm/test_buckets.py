"""Which weights travel together."""

from __future__ import annotations

import torch

from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.workers.engines.common.bucket_sender import Bucket, lay_out
from rlrefit.workers.engines.trtllm.sender import unit_of

from .sources import ListSource, some_weights


def test_what_the_engine_joins_is_one_unit_with_all_its_scales() -> None:
    layer = "model.layers.3"
    joined = [f"{layer}.self_attn.{name}_proj" for name in "qkv"]
    names = [
        f"{module}.{kind}" for module in joined for kind in ("weight", "weight_scale", "input_scale", "bias")
    ]
    assert {unit_of(name) for name in names} == {f"{layer}.self_attn.qkv_proj"}
    assert unit_of(f"{layer}.mlp.experts.7.up_proj.weight_scale_inv") == unit_of(
        f"{layer}.mlp.experts.7.gate_proj.weight"
    )
    assert unit_of(f"{layer}.mlp.experts.7.up_proj.weight") != unit_of(
        f"{layer}.mlp.experts.8.up_proj.weight"
    )
    assert unit_of(f"{layer}.mlp.experts.gate_up_proj") == f"{layer}.mlp.experts.gate_up_proj"
    assert unit_of(f"{layer}.self_attn.o_proj.weight") == f"{layer}.self_attn.o_proj"


def test_buckets_hold_all_weights_and_split_no_unit_whatever_the_order_of_the_export() -> None:
    specs = ListSource(some_weights(layers=4)).specs()
    for order in (specs, sorted(specs), specs[::2] + specs[1::2]):
        nbytes = {spec.name: spec.nbytes for spec in order}
        for bucket_bytes in (1, 600, 4096, 1 << 20):
            buckets = lay_out(order, bucket_bytes, unit_of)
            assert sorted(name for bucket in buckets for name in bucket.names) == sorted(nbytes)
            units = [{unit_of(name) for name in bucket.names} for bucket in buckets]
            assert sum(map(len, units)) == len(set().union(*units)), "each unit in one bucket"
            for bucket, of_bucket in zip(buckets, units, strict=True):
                assert {spec.name for spec in order[: bucket.drawn]} >= set(bucket.names)
                assert sum(nbytes[name] for name in bucket.names) <= bucket_bytes or len(of_bucket) == 1


def test_a_bucket_goes_before_the_next_weights_are_drawn() -> None:
    large = TensorSpec("model.embed_tokens.weight", (1000,), torch.float32)
    small = [TensorSpec(f"model.layers.{i}.input_layernorm.weight", (10,), torch.float32) for i in range(2)]
    assert lay_out([small[0], large, small[1]], 100, unit_of) == [
        Bucket((small[0].name,), 1),
        Bucket((large.name,), 2),
        Bucket((small[1].name,), 3),
    ]
    assert lay_out([], 100, unit_of) == []
