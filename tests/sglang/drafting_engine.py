"""A real SGLang engine that drafts with MTP layers or an EAGLE head, on a CPU or on a GPU, and what the tests ask of its workers.

SGLang's CPU build drafts by kernels that it has for Intel's AMX alone. On a CPU the engine takes the kernels that it has in Triton in their
place, in Triton's interpreter: those of XPUs, and its Triton attention. All else of it is as on GPUs.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rlrefit.integration.errors import EngineDirty
from rlrefit.recipes.rollout.sglang import SglangActor
from rlrefit.workers.engines.sglang.loader import LOADER
from tests.families.chains import successors
from tests.fp8_refits import poison

from .real_engine import settings_for

if TYPE_CHECKING:
    from rlrefit.workers.engines.sglang.sender import SglangSender
    from rlrefit.workers.engines.sglang.worker_refit import WorkerRefit

DIGESTS = f"{__name__}.serve_digests"
TOKENS = 6
PROMPTS = [[5, 17, 33], [3, 40]]
DRAFTING: dict[str, Any] = {
    "custom_weight_loader": [LOADER, DIGESTS],
    "attention_backend": "triton",
    "disable_radix_cache": True,
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 1,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 2,
}


def serve_digests(model: Any, named_tensors: Any) -> None:
    """A custom weight loader: has a worker tell the digests of its weights, and poison them."""
    from rlrefit.workers.engines.sglang.worker_refit import also_serve

    also_serve({"digests": _digests, "poison": _poison})


def _poison(worker: WorkerRefit) -> dict[str, Any]:
    from rlrefit.workers.engines.sglang.drafters import live_drafter

    poison((*worker.model.parameters(), *live_drafter(worker._runner).model.parameters()))
    return {}


def _digests(worker: WorkerRefit) -> dict[str, Any]:
    from rlrefit.workers.engines.sglang.drafters import live_drafter

    served, drafter = worker.model, live_drafter(worker._runner).model
    held = {f"served.{name}": tensor for name, tensor in _tensors(served).items()}
    addresses = {tensor.data_ptr() for tensor in held.values()}
    own = _tensors(drafter)
    shared = [name for name, tensor in own.items() if tensor.data_ptr() in addresses]
    held |= {f"drafter.{name}": tensor for name, tensor in own.items()}
    for name in [name for name in held if name.endswith("._weight_fp32")]:
        # SGLang 0.5.17 makes a router's copy in its first pass: it has to be of the router's weights.
        assert torch.equal(held.pop(name), held[f"{name.removesuffix('_weight_fp32')}weight"].float()), name
    found = {name: hashlib.sha256(_bytes(tensor)).hexdigest() for name, tensor in held.items()}
    return {"digests": found, "shared": shared}


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def run_scheduler(*arguments: Any, **named: Any) -> Any:
    """``run_scheduler_process`` with kernels in Triton, on a machine without GPUs."""
    from unittest.mock import patch

    # Of every process that builds a drafter, whatever the device.
    with patch("torch.cuda.synchronize"), patch("torch.cuda.empty_cache"):
        from sglang.kernels.ops.speculative import cache_locs
        from sglang.srt.managers.scheduler import run_scheduler_process
        from sglang.srt.speculative import eagle_utils

        kernels = [cache_locs, eagle_utils]
        # Later releases have them there, and not in eagle_utils.
        if importlib.util.find_spec("sglang.kernels.ops.speculative.spec_tree"):
            kernels.append(importlib.import_module("sglang.kernels.ops.speculative.spec_tree"))
        for module in kernels:
            module._is_xpu = True
        return run_scheduler_process(*arguments, **named)


class Drafting:
    """An engine that was started from the first of two checkpoints, and the digests of what SGLang loads from each of them.

    A recipe's actor has started it, and drives it.

    Args:
        paths: of checkpoints that give each token one successor. MTP layers of the first, or its head, are always wrong, of the second
            always right.
        chains: their successors.
        device: of the engine.
        heads: checkpoints of EAGLE heads that draft for these; empty for MTP layers.
        settings: of it.
    """

    def __init__(
        self,
        paths: Sequence[str],
        chains: Sequence[Sequence[int]],
        device: str = "cpu",
        heads: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        self.paths = list(paths)
        self.chains = chains
        self._device, self._heads, self._settings = device, heads, settings
        if heads:
            # SGLang's own update would have a head take the model's checkpoint.
            self._start(1)
            second = self.digests()
            self.engine.shutdown()
            self._start(0)
            self.expected = [self.digests(), second]
            return
        self._start(0)
        self.expected = [self.digests()]
        self.load(1)
        self.expected.append(self.digests())
        self.load(0)

    def _start(self, index: int) -> None:
        """An engine of one of the checkpoints."""
        import sglang
        from sglang.srt.entrypoints.engine import Engine

        class Interpreted(Engine):
            run_scheduler_process_func = staticmethod(run_scheduler)

        given = settings_for(self._device) | DRAFTING | self._settings
        if self._heads:
            given["speculative_draft_model_path"] = self._heads[index]
        with pytest.MonkeyPatch.context() as patch:
            if self._device == "cpu":
                patch.setenv("TRITON_INTERPRET", "1")
                # It takes a NCCL that it finds for a sign of GPUs.
                patch.setenv("SGLANG_NCCL_SO_PATH", os.devnull)
                patch.setattr(sglang, "Engine", Interpreted)
            self.actor = SglangActor()
            self.actor.build(self.paths[index], given, ())
        self.engine, self.refit = self.actor._engine, self.actor._calls.refit
        self.refit.calls.extend(DIGESTS)

    def digests(self) -> dict[str, str]:
        """SHA-256 of each parameter and buffer of both models."""
        [found] = self.refit.calls.ask("digests")
        digests: dict[str, str] = found["digests"]
        return digests

    def shared(self) -> set[str]:
        """Names of what the drafter has of the served model."""
        [found] = self.refit.calls.ask("digests")
        return set(found["shared"])

    def require_the_drafters_own_kept(self, before: dict[str, str], index: int) -> None:
        """What the drafter does not share has the digests of ``before``; all else is of a checkpoint."""
        shared = {f"drafter.{name}" for name in self.shared()}
        for name, digest in self.digests().items():
            kept = name.startswith("drafter.") and name not in shared
            assert digest == (before if kept else self.expected[index])[name], name

    def load(self, index: int) -> None:
        """SGLang's own update of both models from a checkpoint."""
        success, message, *_ = self.engine.update_weights_from_disk(self.paths[index])
        assert success, message

    def poison(self) -> None:
        """Not-a-number in all parameters of both models."""
        self.refit.calls.ask("poison")

    def require_refit_after_a_sleep(self, sender: SglangSender, source: Any) -> None:
        """Nothing is generated after a sleep before a refit, which brings the first weights to both models."""
        self.refit.sleep()
        self.refit.wake(["weights"])
        with pytest.raises(EngineDirty):
            self.refit.require_servable()
        self.poison()
        source.take_on(0)
        sender.refit(12)
        self.refit.wake(["kv_cache"])
        assert self.digests() == self.expected[0]
        assert self.drafts(0) == 0

    def drafts(self, chain: int) -> float:
        """The share of drafts that were accepted; tokens have to be of a checkpoint's chain."""
        sampling = {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}
        outputs = self.engine.generate(input_ids=PROMPTS, sampling_params=sampling)
        for output, prompt in zip(outputs, PROMPTS, strict=True):
            assert output["output_ids"] == successors(prompt, [self.chains[chain]] * TOKENS)
        counts = [output["meta_info"] for output in outputs]
        accepted = sum(count["spec_num_correct_drafts"] for count in counts)
        return float(accepted / sum(count["spec_num_proposed_drafts"] for count in counts))
