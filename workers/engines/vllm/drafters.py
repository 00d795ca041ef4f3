"""Drafters, the separate models by which vLLM decodes speculatively. No refit reaches them.

The refitted model verifies each token of a draft. So a drafter with old weights changes no text, but fewer of its tokens are
accepted. MTP layers that the policy trains are refused, because users expect them to follow. MTP layers that the trainer doesn't
have keep their weights, like a drafter of another checkpoint.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any, Final

from ....integration.errors import PlanError, RefitError
from ..common.loader_trace.trace import LoaderTrace

logger = logging.getLogger(__name__)

# They look drafts up in the text so far, or hand out hidden states.
_WITHOUT_WEIGHTS: Final = frozenset({"ngram", "[ngram]", "ngram_gpu", "suffix", "extract_hidden_states"})
# MTP layers have a module of their own (Qwen3-Next, MiMo, LongCat, ERNIE), or follow the last layer (DeepSeek, GLM).
_MTP_MODULE: Final = re.compile(r"(?:^|\.)mtp(?:_\w+)?\.")
_LAYER: Final = re.compile(r"^(?:language_model\.)?model\.(?:language_model\.)?layers\.(\d+)\.")
STAYS: Final = "refits don't reach the drafter, which would go on with the weights of its start"


def has_weights(method: str | None) -> bool:
    """Whether a method of ``speculative_config`` drafts with a model; with None, vLLM finds the method itself."""
    return method not in _WITHOUT_WEIGHTS


def check_drafter(vllm_config: Any) -> None:
    """Refuse a drafter that is the served checkpoint itself, and tell what happens to any other.

    Whether the policy trains MTP layers is known with the manifest: see :func:`check_follows`.

    Args:
        vllm_config: vLLM's ``VllmConfig``; not named in the signature, since trainers that have no vLLM import this module.

    Raises:
        RefitError: the drafter is all of the checkpoint that the engine serves, which is what the policy trains.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not has_weights(speculative.method):
        return
    method, drafter = speculative.method, speculative.model
    if drafter == vllm_config.model_config.model and not _is_mtp(speculative):
        raise RefitError(
            f"the engine decodes speculatively ({method}) with a drafter of the policy's own weights; {STAYS}, however far the "
            "policy is trained. Start vLLM without speculative_config, or with a method that has no weights (ngram, suffix)",
            stage="trace",
        )
    random = (
        ". It was started with load_format=dummy and holds random numbers: give speculative_config a draft_load_config with "
        "load_format auto"
        if vllm_config.load_config.load_format == "dummy" and speculative.draft_load_config is None
        else ""
    )
    logger.warning(
        "the engine decodes speculatively (%s) with %s; %s. Texts stay those of the refitted model, which verifies each draft; "
        "the further it is trained, the fewer tokens are accepted. A sleep of level 2 discards the drafter for good: sleep at "
        "level 1%s",
        method,
        drafter,
        STAYS,
        random,
    )


def check_follows(vllm_config: Any, trace: LoaderTrace) -> None:
    """Refuse MTP layers as the drafter of a policy that trains them.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        trace: of the whole manifest through the loader of the model that verifies drafts.

    Raises:
        PlanError: names the first weight of the manifest that was meant for the drafter.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not _is_mtp(speculative):
        return
    trained = sorted(_mtp_weights(trace, vllm_config.model_config.get_total_num_hidden_layers()))
    if trained:
        raise PlanError(
            f"the engine decodes speculatively ({speculative.method}) with MTP layers that the policy trains: the manifest has "
            f"{len(trained)} of their weights, and {STAYS}, however far the policy is trained. Start vLLM without "
            "speculative_config or with a method that has no weights (ngram, suffix), or train without MTP layers",
            stage="trace",
            parameter=trained[0],
        )


def _is_mtp(speculative: Any) -> bool:
    return str(speculative.method).endswith("mtp")


def _mtp_weights(trace: LoaderTrace, layers: int) -> Iterator[str]:
    """Names of MTP layers among the tensors that the loader leaves aside, in a model of so many layers."""
    for name, touched in trace.touched.items():
        # Tensors of other ranks are left aside too, so that the name has to tell.
        if touched or name in trace.unknown:
            continue
        layer = _LAYER.match(name)
        if _MTP_MODULE.search(name) or (layer and int(layer[1]) >= layers):
            yield name
