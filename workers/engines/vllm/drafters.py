"""Drafters, the separate models by which vLLM decodes speculatively: which of them refits reach.

The refitted model verifies each token of a draft. So a drafter with old weights changes no text, but fewer of its tokens are
accepted. MTP layers of the served checkpoint follow the policy where it trains them, and an EAGLE drafter one that is trained beside
the policy (:mod:`.drafted`). All other drafters keep their weights, and where users would expect them to follow, the engine is
refused.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from ....integration.errors import RefitError
from ..common.drafted import STAYS, require_none_trained, words_of_stay
from ..common.loader_trace.trace import LoaderTrace
from .compat import MTP_SWITCH, has, kind_of

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

# They look drafts up in the text so far, or hand out hidden states.
_NGRAM: Final = frozenset({"ngram", "[ngram]"})
_WITHOUT_WEIGHTS: Final = _NGRAM | {"ngram_gpu", "suffix", "extract_hidden_states"}
# Drafters of a checkpoint of their own that trainers train beside the policy.
_TRAINED_BESIDE: Final = frozenset({"eagle", "eagle3"})
# Their loaders refuse a call without weights of each MTP layer, and have no other switch.
_MODELS: Final = "vllm.model_executor.models"
_WANT_ALL_LAYERS: Final = (
    f"{_MODELS}.deepseek_mtp.DeepSeekMTP",
    f"{_MODELS}.deepseek_v4_mtp.DeepSeekV4MTP",
)


def method_in(speculative_config: Mapping[str, Any]) -> str | None:
    """The method that a ``speculative_config`` names, as users give it; None if vLLM is to find it by the drafter's model.

    vLLM takes ``ngram`` as the name of a model, too (vllm/config/speculative.py, ``__post_init__``).
    """
    method, model = speculative_config.get("method"), speculative_config.get("model")
    return model if method is None and model in _NGRAM else method


def has_weights(method: str | None) -> bool:
    """Whether a method of ``speculative_config`` drafts with a model; with None, vLLM finds the method itself."""
    return method not in _WITHOUT_WEIGHTS


def may_follow(vllm_config: Any) -> bool:
    """Whether the drafter is MTP layers of the checkpoint that the engine serves, so that refits may bring its weights.

    Args:
        vllm_config: vLLM's ``VllmConfig``; not named in the signature, since trainers that have no vLLM import this module.
    """
    speculative = vllm_config.speculative_config
    return (
        speculative is not None
        and is_mtp(speculative.method)
        and speculative.model == vllm_config.model_config.model
    )


def may_be_trained(vllm_config: Any) -> bool:
    """Whether the drafter is one of a checkpoint of its own that trainers train beside the policy, so that refits may bring its weights.

    Args:
        vllm_config: as of :func:`may_follow`.
    """
    speculative = vllm_config.speculative_config
    return (
        speculative is not None
        and speculative.method in _TRAINED_BESIDE
        and speculative.model != vllm_config.model_config.model
        # Its runner keeps what it has computed of a weight, out of any refit's reach.
        and not getattr(speculative, "parallel_drafting", False)
    )


def drafts_at_random(vllm_config: Any) -> bool:
    """Whether vLLM has read no checkpoint of the drafter.

    Args:
        vllm_config: as of :func:`may_follow`.
    """
    unsaid = vllm_config.speculative_config.draft_load_config is None
    return vllm_config.load_config.load_format == "dummy" and unsaid


def is_mtp(method: str | None) -> bool:
    """Whether a method of ``speculative_config`` drafts with MTP layers."""
    return str(method).endswith("mtp")


def check_drafter(vllm_config: Any) -> None:
    """Refuse a drafter that is all of the served checkpoint, and tell of one that no refit reaches.

    MTP layers of the served checkpoint, and EAGLE drafters, follow a trainer that trains them, which is known with the manifest.

    Args:
        vllm_config: vLLM's ``VllmConfig``.

    Raises:
        RefitError: the drafter is all of the checkpoint that the engine serves, which is what the policy trains.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not has_weights(speculative.method):
        return
    if may_follow(vllm_config) or may_be_trained(vllm_config):
        return
    if speculative.model == vllm_config.model_config.model:
        raise RefitError(
            f"the engine decodes speculatively ({speculative.method}) with a drafter of the policy's own weights; {STAYS}, however "
            "far the policy is trained. Start vLLM without speculative_config, with MTP layers (method mtp), or with a method that "
            "has no weights (ngram, suffix)",
            stage="trace",
        )
    tell_of_stay(vllm_config)


def tell_of_stay(vllm_config: Any) -> None:
    """Log a warning that no refit reaches the drafter, and what becomes of it."""
    speculative = vllm_config.speculative_config
    random = (
        ". It was started with load_format=dummy and holds random numbers: give speculative_config a draft_load_config with "
        "load_format auto"
        if drafts_at_random(vllm_config)
        else ""
    )
    asleep = f"A sleep of level 2 discards the drafter for good: sleep at level 1{random}"
    logger.warning("%s", words_of_stay(speculative.method, speculative.model, asleep))


def check_follows(vllm_config: Any, trace: LoaderTrace) -> None:
    """Refuse MTP layers of another checkpoint as the drafter of a policy that trains its own.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        trace: of the whole manifest through the loader of the model that verifies drafts.

    Raises:
        PlanError: names the first weight of the manifest that was meant for the drafter.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not is_mtp(speculative.method) or may_follow(vllm_config):
        return
    remedy = (
        "Leave model out of speculative_config, so that vLLM takes those of the served checkpoint, which refits bring; or start "
        "vLLM without speculative_config"
    )
    require_none_trained(trace, layers_of(vllm_config), speculative.method, speculative.model, remedy)


def layers_of(vllm_config: Any) -> int:
    """The layers of the served model, without its MTP layers."""
    return int(vllm_config.model_config.get_total_num_hidden_layers())


def live_drafter(runner: Any) -> nn.Module | None:
    """The model by which a worker drafts; None where it has none.

    Args:
        runner: the worker's model runner, of vLLM's V1 or V2. Later releases of both have a method that tells.
    """
    from torch import nn

    if hasattr(runner, "get_draft_model"):
        found = runner.get_draft_model()
    else:
        drafts = (getattr(runner, name, None) for name in ("drafter", "speculator"))
        found = next((getattr(by, "model", None) for by in drafts if by is not None), None)
    return found if isinstance(found, nn.Module) else None


@contextmanager
def taken_in_parts(drafter: nn.Module) -> Iterator[None]:
    """Let a drafter's loader take less than all of its layers in one call, as refits bring them.

    Some loaders check each call for a whole checkpoint. Later releases have a switch for that.
    """
    if _has_switch():
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        with disable_mtp_completeness_check():
            yield
        return
    if kind_of(drafter) not in _WANT_ALL_LAYERS:
        yield
        return
    # The check asks for so many layers, and all else in the loader goes by names.
    inner: Any = drafter.model
    layers, inner.num_mtp_layers = inner.num_mtp_layers, 0
    try:
        yield
    finally:
        inner.num_mtp_layers = layers


@functools.cache
def _has_switch() -> bool:
    return has(MTP_SWITCH)
