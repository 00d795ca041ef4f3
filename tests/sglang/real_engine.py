"""A real SGLang engine, on a CPU or on GPUs, with what the tests ask of it. To be used where SGLang can be imported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rlrefit.workers.engines.sglang.callers import EngineCaller
from rlrefit.workers.engines.sglang.driver import SglangRefit
from rlrefit.workers.engines.sglang.loader import LOADER
from tests.gpu.vllm_checkpoints import read_checkpoint

PROMPTS = [[5, 17, 33, 90], [101, 7, 8, 9, 10, 11], [64], [3 + i % 1000 for i in range(60)]]
SAMPLING = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}


def start(path: str, device: str, **arguments: Any) -> Any:
    """An ``sglang.Engine`` with :func:`settings_for` a device."""
    import sglang

    return sglang.Engine(model_path=path, **(settings_for(device) | arguments))


def settings_for(device: str) -> dict[str, Any]:
    """Of an engine without anything that the bare package lacks."""
    return {
        "device": device,
        "skip_tokenizer_init": True,
        "attention_backend": "torch_native" if device == "cpu" else "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_cuda_graph": True,
        "dtype": "bfloat16",
        "mem_fraction_static": 0.1,
        "max_total_tokens": 4096,
        "max_running_requests": 8,
        "random_seed": 0,
        "log_level": "warning",
        "skip_server_warmup": True,
        "custom_weight_loader": [LOADER],
    }


@contextmanager
def updating(engine: Any) -> Iterator[None]:
    """Around SGLang's own updates, which later releases take in sessions alone."""
    sessions = hasattr(engine, "begin_weight_update")
    if sessions:
        success, message = engine.begin_weight_update()
        assert success, message
    yield
    if sessions:
        success, message = engine.end_weight_update()
        assert success, message


def poison(engine: Any, path: str) -> None:
    """Not-a-number wherever a tensor of a checkpoint goes, through SGLang's own update."""
    tensors = [
        (name, torch.full_like(tensor, float("nan"))) for name, tensor in read_checkpoint(path).items()
    ]
    with updating(engine):
        success, message = engine.update_weights_from_tensor(tensors, flush_cache=False)
        assert success, message


class Scene:
    """An engine that was started from the first of two checkpoints, and what it holds with each of them."""

    def __init__(self, paths: Sequence[str], device: str, **arguments: Any) -> None:
        self.paths = list(paths)
        self._device = device
        self.engine = start(self.paths[0], device, **arguments)
        self.refit = SglangRefit(EngineCaller(self.engine))
        # Of the engine as it was started from a checkpoint, and as its own update from disk leaves it.
        self.references = [self.generate()]
        self.check("snapshot")
        self._load(1)
        self.references.append(self.generate())
        self._load(0)
        assert self.generate() == self.references[0]
        assert self.references[0] != self.references[1]

    def generate(self) -> list[Any]:
        """Greedy tokens; on a CPU, where nothing depends on what ran before, with their log-probabilities."""
        return self._told(
            self.engine.generate(input_ids=PROMPTS, sampling_params=SAMPLING, return_logprob=True)
        )

    async def generate_async(self) -> list[Any]:
        """The same, awaited."""
        return self._told(
            await self.engine.async_generate(input_ids=PROMPTS, sampling_params=SAMPLING, return_logprob=True)
        )

    def _told(self, outputs: list[dict[str, Any]]) -> list[Any]:
        if self._device != "cpu":
            return [output["output_ids"] for output in outputs]
        return [
            (output["output_ids"], [found[0] for found in output["meta_info"]["output_token_logprobs"]])
            for output in outputs
        ]

    def check(self, action: str) -> None:
        """SGLang's own check of its weights: ``snapshot``, ``reset_tensors`` (to random numbers), ``compare``.

        It compares on a GPU, so that on a CPU the log-probabilities have to tell.
        """
        if self._device == "cpu":
            return
        success, message, *_ = self.engine.loop.run_until_complete(self._checked(action))
        assert success, message

    def poison(self) -> None:
        """Not-a-number wherever a checkpoint tensor goes."""
        poison(self.engine, self.paths[0])

    def settle(self) -> None:
        """Wait until no batch is left: SGLang's own updates flush the cache, and its scheduler ends where that fails."""
        manager = self.engine.tokenizer_manager
        flushed = self.engine.loop.run_until_complete(manager.flush_cache(timeout_s=10.0))
        assert flushed.success, flushed.message

    def _load(self, index: int) -> None:
        self.settle()
        success, message, *_ = self.engine.update_weights_from_disk(self.paths[index])
        assert success, message

    async def _checked(self, action: str) -> Any:
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        return await self.engine.tokenizer_manager.check_weights(CheckWeightsReqInput(action=action), None)
