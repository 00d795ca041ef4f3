"""A disposable twin of an SGLang worker's model without storage, on which its loader can be traced.

SGLang builds models on the meta device itself (its ``LayeredModelLoader``), by the same calls. The twin is for the live model's
sake: a loader also writes constants (a vocabulary's padding, say), which a trace on live parameters would carry out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
from sglang.srt.model_loader.utils import set_default_torch_dtype
from torch import nn

from ....integration.errors import PlanError
from ..common.loader_trace.modules import IntegerTablesStayReal


@contextmanager
def meta_twin(runner: Any) -> Iterator[nn.Module]:
    """A second model of ``runner`` for this rank with all weights on the meta device, before any post-load step.

    Raises:
        PlanError: the live model is of another class than the one that SGLang would build.
    """
    config = runner.model_config
    # SGLang shares rotary embeddings in the process; later models must not get the twin's.
    rotary = dict(factory._ROPE_DICT)
    try:
        with set_default_torch_dtype(config.dtype), torch.device("meta"), IntegerTablesStayReal():
            quantization = _get_quantization_config(config, runner.load_config)
            twin = _initialize_model(config, runner.load_config, quantization).eval()
        if type(twin) is not type(runner.model):
            raise PlanError(
                f"the live model is a {type(runner.model).__name__} where SGLang's loader builds a {type(twin).__name__}: "
                "something wrapped or replaced it after loading. Start the engine without the feature that does so",
                stage="trace",
            )
        # It computes from weights that are not there; on the live model it runs at the end of a refit.
        if hasattr(twin, "post_load_weights"):
            twin.post_load_weights = lambda *args, **kwargs: None
        yield twin
    finally:
        factory._ROPE_DICT.clear()
        factory._ROPE_DICT.update(rotary)
