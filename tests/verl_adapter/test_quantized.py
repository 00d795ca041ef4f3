"""verl's quantized rollouts, refitted with what its actors quantize: vLLM's model under verl's patches, which CPUs can load alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from verl.plugin.platform import platform_manager

from examples.verl.cpu_platform import PlatformCPU
from examples.verl.on_cpus import named_vllm
from rlrefit.workers.frameworks.verl import contract as verl_contract
from tests.ahead import FoundAhead, keeping_time
from tests.gpu.vllm_checkpoints import quantize_to_int4, write_checkpoint
from tests.spawn import run_ranks, run_together
from tests.verl_adapter.quantized_ranks import FP8, INT4, TRAIN_RANKS, Kind, QuantizedRollout, actor, rollout
from tests.vllm_processes import vllm_processes

TIMEOUT_S = 290.0
# Of the actors and of the rollout.
Refits = tuple[list[list[dict[str, Any]]], QuantizedRollout]
QUANTIZED = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.experts.w13", "mlp.experts.w2")


@keeping_time  # each side waits only so long for the other
def refits(folder: Path) -> Refits:
    """What two actors were answered, and what the rollout saw, in two refits with other weights each."""
    trained = [write_checkpoint(folder / f"bf16_{n}", n, fp8=False, experts=True) for n in range(3)]
    served = [write_checkpoint(folder / f"fp8_{n}", n, fp8=True, experts=True) for n in (1, 2)]
    return _refitted(folder, FP8, trained, served)


@keeping_time
def int4_refits(folder: Path) -> Refits:
    """The same of a dense model in INT4."""
    trained = [write_checkpoint(folder / f"bf16_{n}", n, fp8=False, experts=False) for n in range(3)]
    served = [write_checkpoint(folder / f"int4_{n}", n, fp8=False, experts=False) for n in (1, 2)]
    for path in served:
        quantize_to_int4(Path(path), INT4.overrides["quantization_config"])
    return _refitted(folder, INT4, trained, served)


def _refitted(folder: Path, kind: Kind, trained: list[str], served: list[str]) -> Refits:
    own = kind, trained[0], served, folder, named_vllm(folder)
    actors, [seen] = run_together(
        lambda: run_ranks(actor, TRAIN_RANKS, kind, trained, folder, timeout_s=TIMEOUT_S),
        lambda: run_ranks(rollout, 1, *own, timeout_s=TIMEOUT_S, made_by=vllm_processes),
    )
    return actors, seen


AHEAD = (refits, int4_refits)


def test_codes_and_scales_of_the_actors_make_twice_the_engine_that_vllm_loads(
    found_ahead: FoundAhead,
) -> None:
    seen = _require_twice_what_vllm_loads(found_ahead.by(refits))
    # All go straight into live parameters that verl's patches have processed.
    assert seen.patched == {"verl.utils.vllm.vllm_fp8_utils"}
    # verl's configuration quantizes projections and experts and nothing else.
    ends = {name: "_weight" if "experts" in name else ".weight" for name in QUANTIZED}
    codes = {f"model.layers.{layer}.{name}{ends[name]}" for layer in (0, 1) for name in QUANTIZED}
    assert seen.own == codes | {f"{name}_scale_inv" for name in codes}


def test_int4_of_the_actors_makes_twice_the_engine_that_vllm_loads(found_ahead: FoundAhead) -> None:
    seen = _require_twice_what_vllm_loads(found_ahead.by(int4_refits))
    packed = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    of_packed = {f"model.layers.{layer}.{name}.weight" for layer in (0, 1) for name in packed}
    assert of_packed == {name.removesuffix("_packed") for name in seen.own if name.endswith("_packed")}


def _require_twice_what_vllm_loads(found: Refits) -> QuantizedRollout:
    """Every byte of the rollout is, after each of two refits in place, what vLLM loads of the quantized checkpoint."""
    actors, seen = found
    before, *after = seen.differing
    assert before
    assert after == [[], []]
    assert seen.answers == [{"version": 1}, {"version": 2}]
    for routes, *records in actors:
        assert (routes["misc"], routes["bulk"] > 0) == (0, True)
        assert [record["version"] for record in records] == [1, 2]
    return seen


def test_of_verls_functions_only_those_that_were_read_and_call_vllms_own_are_looked_through(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(named_vllm(tmp_path))
    monkeypatch.setattr(platform_manager, "_current_platform", PlatformCPU())
    from verl.utils.vllm import vllm_fp8_utils
    from vllm.model_executor.kernels.linear.scaled_mm.triton import TritonFp8BlockScaledMMKernel
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod

    from rlrefit.workers.engines.vllm.fp8 import block_fp8

    def of_another(self: Any, layer: nn.Module) -> None:
        """As yet another library puts it in vLLM's place."""

    def effect(function: Any) -> str:
        monkeypatch.setattr(Fp8LinearMethod, "process_weights_after_loading", function)
        module, method = nn.Module(), Fp8LinearMethod.__new__(Fp8LinearMethod)
        method.block_quant, method.weight_block_size = True, [128, 128]
        method.fp8_linear = TritonFp8BlockScaledMMKernel.__new__(TritonFp8BlockScaledMMKernel)
        module.quant_method = method
        found = block_fp8(module)
        assert found is not None
        return found.effect

    wrapped = vllm_fp8_utils._make_process_weights_after_loading_for_vllm20
    own = Fp8LinearMethod.process_weights_after_loading
    assert effect(wrapped(own)) == effect(wrapped(wrapped(own))) == ""
    assert f"was replaced by a function of {__name__}" in effect(wrapped(of_another))
    assert "was replaced by a function of verl.utils" in effect(
        vllm_fp8_utils.process_weights_after_loading_for_vllm14
    )
    monkeypatch.setattr(verl_contract, "TESTED", "0.9.0")
    assert "was replaced by a function of verl.utils" in effect(wrapped(own))
