"""What takes the misc path in each family, and why: on the trainer's side, and on each engine's.

The trainer's side is held against Megatron-Bridge by ``test_families``, vLLM's against its own models by
``tests/vllm/test_vllm_layouts.py``, transformers' by ``test_transformers_engine``; SGLang's by
``tests/sglang/test_families.py`` wherever SGLang is installed.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_ROUTER = "MoE router: engines keep it in a dtype or layout of their own"
_ZERO_CENTRED = "zero-centred norm: Bridge adds 1 to it on export"
_COPY = "made of {}.weight by Bridge's export, and no part of {}.weight"
_GATE = ("mlp.gate.weight", _ROUTER)
_SCALAR = ("layer_scalar", "buffer: exported as Bridge converts it")
_GEMMA4 = ("gemma4", "gemma4-shared", "gemma4-moe")
_GEMMA4_VL = tuple(f"{kind}-vl" for kind in _GEMMA4)

# Parts of weights' names, with ``*`` for whatever stands there, each with the reason.
Parts = tuple[tuple[str, str], ...]

# Family → what trainers don't place.
MISC: dict[str, Parts] = {
    "qwen3_moe": (_GATE,),
    **dict.fromkeys(
        ("deepseek_v3", "kimi_k2", "kimi_k25"), (_GATE, ("mlp.gate.e_score_correction_bias", _ROUTER))
    ),
    "glm4_moe": (_GATE, ("mlp.gate.e_score_correction_bias", _ROUTER)),
    "minimax_m2": (
        ("block_sparse_moe.gate.weight", _ROUTER),
        ("block_sparse_moe.e_score_correction_bias", _ROUTER),
    ),
    "glm4_moe_lite": (
        _GATE,
        ("mlp.gate.e_score_correction_bias", _ROUTER),
        ("layers.*.embed_tokens.weight", _COPY.format("model.embed_tokens", "embedding.word_embeddings")),
        ("shared_head.head.weight", _COPY.format("lm_head", "output_layer")),
    ),
    "bailing_moe_v2": (_GATE, ("mlp.gate.expert_bias", _ROUTER)),
    "glm_moe_dsa": (_GATE, ("mlp.gate.e_score_correction_bias", _ROUTER)),
    **dict.fromkeys(
        ("nemotron_h", "nemotron_h-latent"),
        (("mixer.gate.weight", _ROUTER), ("mixer.gate.e_score_correction_bias", _ROUTER)),
    ),
    "gpt_oss": (("mlp.router.weight", _ROUTER), ("mlp.router.bias", _ROUTER)),
    "qwen3_next": (_GATE, ("linear_attn.norm.weight", _ZERO_CENTRED)),
    "qwen3_5_moe": (_GATE, ("linear_attn.norm.weight", _ZERO_CENTRED)),
    "qwen3_5_moe-transposed": (_GATE, ("linear_attn.norm.weight", _ZERO_CENTRED)),
    "qwen3_5_moe-stacked": (_GATE, ("linear_attn.norm.weight", _ZERO_CENTRED)),
    "qwen3_vl_moe": (_GATE,),
    **dict.fromkeys(("gemma4", "gemma4-shared", "gemma4-vl", "gemma4-shared-vl"), (_SCALAR,)),
    **dict.fromkeys(("gemma4-moe", "gemma4-moe-vl"), (_SCALAR, (".router.", _ROUTER))),
    "qwen3_5_text": (("linear_attn.norm.weight", _ZERO_CENTRED),),
    "qwen3_5": (("linear_attn.norm.weight", _ZERO_CENTRED),),
    "qwen3_5_moe-vl": (_GATE, ("linear_attn.norm.weight", _ZERO_CENTRED)),
}


# What a checkpoint of two layers has of one that takes keys and values of the other; transformers and vLLM 0.32 have no module for it.
UNREAD = {
    family: {f"{model}layers.1.self_attn.{part}.weight" for part in ("k_proj", "v_proj", "k_norm")}
    for family, model in (("gemma4-shared", "model."), ("gemma4-shared-vl", "model.language_model."))
}


@dataclass(frozen=True)
class Engine:
    """What is known of one engine.

    Attributes:
        misc: each family that has run in it → what its own loader has to take, beside what trainers don't place.
    """

    misc: Mapping[str, Parts]


_DELTA_NET = (("linear_attn.A_log", "vLLM keeps it in FP32"),)
_ALL_IN_PLACE = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3-tied",
    "qwen3_moe",
    "mistral",
    "gemma2",
    "gemma3",
    "deepseek_v3",
)

VLLM = Engine(
    {
        **dict.fromkeys(_ALL_IN_PLACE, ()),
        **dict.fromkeys(("glm4_moe", "glm4_moe_lite"), (("mlp.gate.weight", "vLLM's router is in FP32"),)),
        "glm_moe_dsa": (("indexer.k_norm.", "vLLM keeps it in FP32"),),
        **dict.fromkeys(("kimi_k2", "kimi_k25"), ()),
        "bailing_moe_v2": (),
        "gpt_oss": (),
        "minimax_m2": (("block_sparse_moe.gate.weight", "vLLM's router is in FP32"),),
        **dict.fromkeys(
            ("nemotron_h", "nemotron_h-latent"),
            (
                ("mixer.A_log", "vLLM computes with what it makes of it, in FP32"),
                ("mixer.gate.weight", "vLLM's router is in FP32"),
            ),
        ),
        "qwen3_next": _DELTA_NET,
        "qwen3_5_moe": _DELTA_NET,
        "qwen3_5_moe-stacked": _DELTA_NET,
        "qwen3_5_text": _DELTA_NET,
        **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), ()),
        "qwen3_5": _DELTA_NET,
        "qwen3_5_moe-vl": _DELTA_NET,
        "qwen2_5_vl": (),
        "gemma3-vl": (),
        **dict.fromkeys((*_GEMMA4, *_GEMMA4_VL), (("layer_scalar", "a buffer of vLLM's"),)),
    }
)
# What transformers and SGLang take in place, all of it that trainers place.
_ALL_IN_BOTH = (
    *_ALL_IN_PLACE,
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_oss",
    "minimax_m2",
    "qwen3_next",
    "qwen3_5_moe",
    "qwen3_5_moe-stacked",
    "qwen3_5_text",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe-vl",
    "qwen2_5_vl",
    "gemma3-vl",
)
_HYBRIDS = ("nemotron_h", "nemotron_h-latent")
_COMPUTED = (("mixer.A_log", "SGLang computes with what it makes of it, in FP32"),)
TRANSFORMERS = Engine(dict.fromkeys((*_ALL_IN_BOTH, *_HYBRIDS, *_GEMMA4), ()))
SGLANG = Engine(
    {
        **dict.fromkeys((*_ALL_IN_BOTH, "bailing_moe_v2", "kimi_k25"), ()),
        **dict.fromkeys(_HYBRIDS, _COMPUTED),
        **dict.fromkeys(_GEMMA4_VL, (("layer_scalar", "a buffer of SGLang's"),)),
    }
)


def is_of(name: str, parts: Iterable[tuple[str, str]]) -> bool:
    """Whether a weight's name has one of the parts."""
    return any(fnmatch.fnmatchcase(name, f"*{part}*") for part, _ in parts)


def is_prediction(name: str, layers: int) -> bool:
    """Whether a weight is of a multi-token-prediction layer, behind the ``layers`` others: engines leave these out."""
    return name.startswith((f"model.layers.{layers}.", "mtp."))
