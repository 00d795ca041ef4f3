"""Megatron-core and Megatron-Bridge on a machine without a GPU: real sharding over gloo, stand-in kernels.

What is needed, and no more: Transformer Engine's classes (:mod:`.cpu_te`), and CPU answers where
Megatron's code names CUDA outright (``device="cuda"``, ``torch.cuda.current_device()``, streams, the random
state). Megatron's modules get a view of ``torch`` that gives these answers; ``torch`` itself, and so every
other library in the process, stays as it was. :func:`ensure_megatron` is the way in, on any machine.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import torch

_LOG = logging.getLogger(__name__)
# Where the stand-ins put what Megatron asks to have on CUDA.
DEVICE = torch.device("cpu")
# Transformer Engine's release as which the stand-ins behave.
_ANSWERS_AS = "2.0"
_FACTORIES = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")


class _Stream:
    """A stream or event of a device that has none: all work is done when it is asked."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> _Stream:
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    record = synchronize = wait = wait_event = wait_stream = _nothing


class _View(types.ModuleType):
    """A module seen with some of its names replaced."""

    def __init__(self, module: types.ModuleType, replaced: dict[str, Any]) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(replaced)
        self.__dict__["_viewed"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_viewed"], name)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda"))


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = DEVICE
        kwargs.pop("pin_memory", None)  # for copies to a GPU
        return factory(*args, **kwargs)

    return make


def _cpu_view_of_torch() -> _View:
    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    def zero(*args: Any, **kwargs: Any) -> int:
        return 0

    def one_stream(*args: Any, **kwargs: Any) -> _Stream:
        return _Stream()

    cuda = _View(
        torch.cuda,
        {
            "current_device": lambda: DEVICE,
            "set_device": nothing,
            "synchronize": nothing,
            "empty_cache": nothing,
            "memory_allocated": zero,
            "max_memory_allocated": zero,
            "memory_reserved": zero,
            "max_memory_reserved": zero,
            "Stream": _Stream,
            "Event": _Stream,
            "current_stream": one_stream,
            "default_stream": one_stream,
            "stream": lambda *args, **kwargs: contextlib.nullcontext(),
            # Megatron keeps one random state per parallel role and swaps it in; here it is the CPU's.
            "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)),
            "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
            "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        },
    )
    return _View(torch, {"cuda": cuda, **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}})


@contextlib.contextmanager
def _tensors_answer_as_cuda() -> Iterator[None]:
    """``Tensor.type()`` names CUDA types and ``Tensor.cuda()`` is a no-op, while Megatron's code runs inside."""
    original_type, original_cuda = torch.Tensor.type, torch.Tensor.cuda

    def cuda_type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original_type(tensor, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    torch.Tensor.type = cuda_type
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor
    try:
        yield
    finally:
        torch.Tensor.type, torch.Tensor.cuda = original_type, original_cuda


def _answering_as_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _tensors_answer_as_cuda():
            return function(*args, **kwargs)

    return run


def _to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's ``maybe_move_tensor_to_cpu`` for tensors that are there already (it converts CUDA's only)."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _replace_cuda_only_code() -> None:
    """The few functions that ask a tensor whether it is a CUDA tensor, move it there, or reach below ``torch.cuda``."""
    from megatron.core.models.common.embeddings import (
        rope_utils,
        rotary_pos_embedding,
        yarn_rotary_pos_embedding,
    )
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    distributed = distrib_optimizer.DistributedOptimizer
    distributed.__init__ = _answering_as_cuda(distributed.__init__)
    mixed = optimizer.Float16OptimizerWithFloat16Params
    mixed.__init__ = _answering_as_cuda(mixed.__init__)
    clip = _answering_as_cuda(clip_grads.clip_grad_by_total_norm_fp32)
    clip_grads.clip_grad_by_total_norm_fp32 = optimizer.clip_grad_by_total_norm_fp32 = clip
    # Moves a pipeline's second copy of a tied embedding to the device.
    LanguageModule.setup_embeddings_and_output_layer = _answering_as_cuda(
        LanguageModule.setup_embeddings_and_output_layer
    )
    # Moves the numbers of a context-parallel rank's chunks to the device.
    of_own_chunks = _answering_as_cuda(rope_utils.get_pos_emb_on_this_cp_rank)
    for module in (rope_utils, rotary_pos_embedding, yarn_rotary_pos_embedding):
        module.get_pos_emb_on_this_cp_rank = of_own_chunks
    # Bridge moves each model to the device, unless it is asked for initialisation on CPUs.
    MegatronModule.cuda = lambda module, device=None: module
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = _to_cpu


def _import_bridge_without_transformer_engine() -> None:
    """Import Megatron-Bridge, whose LoRA module names ``transformer_engine.pytorch`` at import time.

    The mock stands in ``sys.modules`` during the import only: code that later asks whether Transformer
    Engine is installed gets the true answer.
    """
    mock = MagicMock()
    mock.__version__ = "0.0.0"
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.common")
    mocked = {name: mock if "." not in name else getattr(mock, name.partition(".")[2]) for name in names}
    sys.modules.update(mocked)
    # It prints a traceback for each of Transformer Engine's names that it looks for in vain.
    prober = logging.getLogger("megatron.bridge.utils.import_utils")
    prober.disabled = True
    try:
        import megatron.bridge  # noqa: F401
    finally:
        prober.disabled = False
        for name in mocked:
            sys.modules.pop(name, None)
    # Bridge's LoRA asks under sequence parallelism whether the norm's output comes gathered, as the stand-ins give it.
    sys.modules["megatron.bridge.peft.utils"].version = lambda package: _ANSWERS_AS


def _view_torch_on_cpu(view: _View) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and vars(module).get("torch") is torch:
            module.torch = view


def _import_and_replace() -> None:
    # Megatron-core first: it must see that Transformer Engine is missing. torch.compile of its small
    # functions would start a C++ compiler on each rank and change no value.
    import megatron.core.jit

    megatron.core.jit.disable_jit_fuser()
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.transformer.experimental_attention_variant.absorbed_mla

    from .cpu_te import place_standins

    _replace_cuda_only_code()
    place_standins()
    _import_bridge_without_transformer_engine()


_VIEW: _View | None = None


def install() -> None:
    """Make Megatron-core and Megatron-Bridge run on this machine's CPUs; a second call does nothing new.

    Models of these families then build, convert, train (forward, backward, Megatron's DDP with the
    distributed optimizer, pipeline schedules) over gloo. Logs one warning.

    Raises:
        RuntimeError: a GPU is there (the stand-ins would hide Transformer Engine from it), or Megatron-Bridge
            was imported before with what it found then.
    """
    global _VIEW
    if torch.cuda.is_available():
        raise RuntimeError(
            f"CPU stand-ins for Transformer Engine were asked for, but torch sees {torch.cuda.device_count()} "
            "GPU(s). They would replace Transformer Engine's kernels in this process; call ensure_megatron(), "
            "which installs them only where there is no GPU, or hide the GPUs with CUDA_VISIBLE_DEVICES=''"
        )
    if _VIEW is None:
        if "megatron.bridge" in sys.modules:
            raise RuntimeError(
                "megatron.bridge was imported before the CPU stand-ins: its layers are bound to what it found "
                "then and would fail later; call ensure_megatron() before any import of megatron.bridge"
            )
        with warnings.catch_warnings():
            # A dozen modules each warn that Apex or Transformer Engine is missing; the one line below says it.
            warnings.simplefilter("ignore", UserWarning)
            _import_and_replace()
        _VIEW = _cpu_view_of_torch()
        _LOG.warning(
            "No GPU: Megatron runs on CPUs with plain-torch stand-ins for Transformer Engine. Sharding, "
            "communication and weight conversion are the real ones; numerics of Transformer Engine's and FP8 "
            "kernels are not those of a GPU."
        )
    _view_torch_on_cpu(_VIEW)


def ensure_megatron() -> Any:
    """Megatron-Bridge's ``AutoBridge``, with the stand-ins installed if and only if there is no GPU.

    Raises:
        ImportError: megatron-core or megatron-bridge is missing.
    """
    try:
        if not torch.cuda.is_available():
            install()
        from megatron.bridge import AutoBridge
    except ModuleNotFoundError as error:
        raise ImportError(
            f"Megatron can't be imported: {error}. {_remedy(error.name or '')}", name=error.name
        ) from error
    return AutoBridge


def _remedy(missing: str) -> str:
    package = missing.partition(".")[0]
    if package in ("megatron", "transformer_engine", ""):
        return (
            "Install megatron-core 0.19 and megatron-bridge 0.6 (the `megatron` extra; both with --no-deps), and "
            "transformer-engine on a GPU machine"
        )
    return f"It imports {package}, which --no-deps leaves out: install the package that has it, pip install {package} for most"
