"""verl's FP8 rollouts, refitted with what its actors quantize: vLLM's model under verl's patches, which CPUs can load alone."""

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
from tests.gpu.vllm_checkpoints import write_checkpoint
from tests.spawn import run_ranks, run_together
from tests.verl_adapter import fp8_ranks
from tests.vllm_processes import vllm_processes

TIMEOUT_S = 290.0
QUANTIZED = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.experts.w13", "mlp.experts.w2")


@keeping_time  # each side waits only so long for the other
def refits(folder: Path) -> tuple[list[list[dict[str, Any]]], fp8_ranks.Fp8Rollout]:
    """What two actors were answered, and what the rollout saw, in two refits with other weights each."""
    trained = [write_checkpoint(folder / f"bf16_{n}", n, fp8=False, experts=True) for n in range(3)]
    served = [write_checkpoint(folder / f"fp8_{n}", n, fp8=True, experts=True) for n in (1, 2)]
    own = trained[0], served, folder, named_vllm(folder)
    actors, [rollout] = run_together(
        lambda: run_ranks(fp8_ranks.actor, fp8_ranks.TRAIN_RANKS, trained, folder, timeout_s=TIMEOUT_S),
        lambda: run_ranks(fp8_ranks.rollout, 1, *own, timeout_s=TIMEOUT_S, made_by=vllm_processes),
    )
    return actors, rollout


AHEAD = (refits,)


def test_codes_and_scales_of_the_actors_make_twice_the_engine_that_vllm_loads(
    found_ahead: FoundAhead,
) -> None:
    actors, rollout = found_ahead.by(refits)
    before, *after = rollout.differing
    assert before
    assert after == [[], []]
    assert rollout.answers == [{"version": 1}, {"version": 2}]
    # All go straight into live parameters that verl's patches have processed.
    assert rollout.patched == {"verl.utils.vllm.vllm_fp8_utils"}
    for routes, *records in actors:
        assert (routes["misc"], routes["bulk"] > 0) == (0, True)
        assert [record["version"] for record in records] == [1, 2]
    # verl's configuration quantizes projections and experts and nothing else.
    ends = {name: "_weight" if "experts" in name else ".weight" for name in QUANTIZED}
    codes = {f"model.layers.{layer}.{name}{ends[name]}" for layer in (0, 1) for name in QUANTIZED}
    assert rollout.own == codes | {f"{name}_scale_inv" for name in codes}


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
