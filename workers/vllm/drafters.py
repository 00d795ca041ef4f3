"""What becomes of a drafter, the model of its own by which vLLM decodes speculatively: no refit reaches it.

vLLM lets the refitted model verify each token of a draft, so that a drafter of old weights changes no text; fewer of its
tokens are accepted. One that the policy trains with its other weights (MTP layers) was meant to follow, and is refused.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from ...integration.errors import RefitError

logger = logging.getLogger(__name__)

# They look drafts up in the text so far, or hand out hidden states.
_WITHOUT_WEIGHTS: Final = frozenset({"ngram", "[ngram]", "ngram_gpu", "suffix", "extract_hidden_states"})
STAYS: Final = "refits don't reach the drafter, which would go on with the weights of its start"


def has_weights(method: str | None) -> bool:
    """Whether a method of ``speculative_config`` drafts with a model; None is the one that vLLM finds out."""
    return method not in _WITHOUT_WEIGHTS


def check_drafter(vllm_config: Any) -> None:
    """Refuse a drafter of the policy's own weights, and tell what happens to one of another checkpoint.

    Args:
        vllm_config: vLLM's ``VllmConfig``; not named in the signature, since trainers that have no vLLM import this module.

    Raises:
        RefitError: the drafter is made of MTP layers, or of the checkpoint that the engine serves.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not has_weights(speculative.method):
        return
    method, drafter = speculative.method, speculative.model
    if str(method).endswith("mtp") or drafter == vllm_config.model_config.model:
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
