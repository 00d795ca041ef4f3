"""GPTQ layers, whose weights vLLM shuffles once for its kernel: each refit brings new ones, to be shuffled again."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from vllm import _custom_ops
from vllm.config import VllmConfig
from vllm.model_executor import parameter as vllm_parameters
from vllm.model_executor.layers.quantization.gptq import ExllamaState, GPTQConfig, GPTQLinearMethod
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from rlrefit.integration.errors import RefitError
from rlrefit.workers.engines.vllm.completeness import unused_parameters
from rlrefit.workers.engines.vllm.layouts import module_layout
from rlrefit.workers.engines.vllm.reload import ScopedReload

ROWS, COLUMNS, GROUP, BITS = 64, 32, 16, 4
NAMES = {"proj.qweight", "proj.g_idx", "proj.qzeros", "proj.scales"}


def _shuffle(weight: torch.Tensor, order: torch.Tensor, bits: int) -> None:
    """In the place of the GPU's: in place, other bytes for other weights and for another order, and never the same twice."""
    by_order = (order.to(torch.int32) * torch.arange(1, order.numel() + 1, dtype=torch.int32)).sum().int()
    weight.copy_(weight.flip(0) * 3 + bits + by_order)


@pytest.fixture(autouse=True)
def shuffles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_custom_ops, "gptq_shuffle", _shuffle)
    # Their constructors ask for a group of ranks.
    monkeypatch.setattr(vllm_parameters, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(vllm_parameters, "get_tensor_model_parallel_world_size", lambda: 1)


class _Model(nn.Module):
    """One GPTQ layer of vLLM's own method; ``ranks`` share its rows."""

    def __init__(self, ordered: bool, ranks: int = 1) -> None:
        super().__init__()
        method = GPTQLinearMethod(
            GPTQConfig(BITS, GROUP, ordered, lm_head_quantized=False, dynamic={}, checkpoint_format="gptq")
        )
        self.proj = nn.Module()
        method.create_weights(
            self.proj,
            ROWS,
            [COLUMNS],
            ROWS * ranks,
            COLUMNS,
            torch.float16,
            weight_loader=default_weight_loader,
        )
        self.proj.quant_method = method

    def load_weights(self, weights):
        for name, tensor in weights:
            found = self.get_parameter(name)
            found.weight_loader(found, tensor)

    def process(self) -> _Model:
        self.proj.quant_method.process_weights_after_loading(self.proj)
        return self


def _weights(like: _Model, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {
        name: torch.randint(-(2**10), 2**10, parameter.shape, generator=generator).to(parameter.dtype)
        for name, parameter in like.named_parameters()
    }
    found["proj.g_idx"] = (
        torch.arange(ROWS, dtype=torch.int32)[torch.randperm(ROWS, generator=generator)] // GROUP
    )
    return found


def _served(ordered: bool, ranks: int, weights: dict[str, torch.Tensor]) -> _Model:
    """What vLLM makes of a checkpoint as it starts."""
    model = _Model(ordered, ranks)
    record_metadata_for_reloading(model)
    model.load_weights(weights.items())
    return model.process()


def _reload(model: _Model, names: set[str] = NAMES, absent: int = 0) -> ScopedReload:
    modules, needed = {"proj": model.proj}, {"proj": frozenset(names)}
    return ScopedReload(model, VllmConfig(), torch.device("cpu"), modules, needed, {}, {"proj": absent})


def _bytes(model: _Model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("ordered", "ranks", "state"),
    [
        (False, 1, ExllamaState.READY),
        (True, 1, ExllamaState.READY),
        (False, 2, ExllamaState.READY),
        (True, 2, ExllamaState.UNUSED),
    ],
)
def test_refits_shuffle_the_weights_as_the_engine_does_when_it_starts(ordered, ranks, state):
    like = _Model(ordered, ranks)
    live = _served(ordered, ranks, _weights(like, 0))
    assert live.proj.exllama_state is state
    held = dict(live.named_parameters())
    layout = module_layout("proj", live.proj, like.proj)
    assert (layout.direct, layout.reload) == (False, True)
    reload = _reload(live)
    for seed in (1, 2):
        weights = _weights(like, seed)
        for parameter in held.values():
            parameter.data.fill_(torch.nan if parameter.is_floating_point() else -1)
        reload.load(weights.items())
        reload.finish()
        assert _equal(_bytes(live), _bytes(_served(ordered, ranks, weights)))
        assert live.proj.exllama_state is state
        assert all(live.get_parameter(name) is parameter for name, parameter in held.items())


def test_groups_in_their_own_order_need_not_come():
    like = _Model(False)
    live = _served(False, 1, _weights(like, 0))
    assert unused_parameters(live) == {"proj.g_idx"}
    reload = _reload(live, NAMES - {"proj.g_idx"}, absent=ROWS)
    for seed in (1, 2):
        weights = _weights(like, seed)
        reload.load((name, tensor) for name, tensor in weights.items() if name != "proj.g_idx")
        reload.finish()
        assert _equal(_bytes(live), _bytes(_served(False, 1, weights)))


@pytest.mark.parametrize("come", [set(), {"proj.qweight"}, NAMES], ids=["nothing", "a part", "all"])
def test_a_refit_that_is_abandoned_leaves_a_layer_whose_weights_are_shuffled_known_as_such(come):
    like = _Model(True)
    live = _served(True, 1, _weights(like, 0))
    old, new = _bytes(live), _weights(like, 1)
    reload = _reload(live)
    reload.load((name, tensor) for name, tensor in new.items() if name in come)
    if come == NAMES:
        reload.abandon()
    else:
        with pytest.raises(RefitError, match="are incomplete"):
            reload.finish()
    assert live.proj.exllama_state is ExllamaState.READY
    assert _equal(_bytes(live), _bytes(_served(True, 1, new)) if come == NAMES else old)
    reload.load(new.items())
    reload.finish()
    assert _equal(_bytes(live), _bytes(_served(True, 1, new)))
