"""What takes the misc path in each family, and why."""

from __future__ import annotations

_ROUTER = "MoE router: engines keep it in a dtype or layout of their own"
_ZERO_CENTRED = "zero-centred norm: Bridge adds 1 to it on export"
_ALTERNATE = "stacked experts whose gate and up columns alternate: no box of the tensor is one of them"
_GATE = ("mlp.gate.weight", _ROUTER)

# Family → part of the weights' names, and reason.
MISC: dict[str, tuple[tuple[str, str], ...]] = {
    "qwen3_moe": (_GATE,),
    "deepseek_v3": (_GATE, ("mlp.gate.e_score_correction_bias", _ROUTER)),
    "nemotron_h": (("mixer.gate.weight", _ROUTER), ("mixer.gate.e_score_correction_bias", _ROUTER)),
    "gpt_oss": (
        ("mlp.router.weight", _ROUTER),
        ("mlp.router.bias", _ROUTER),
        ("mlp.experts.gate_up_proj", _ALTERNATE),
    ),
    "qwen3_next": (_GATE, ("linear_attn.norm.weight", _ZERO_CENTRED)),
    "qwen3_5_moe": (_GATE, ("linear_attn.norm.weight", _ZERO_CENTRED)),
    "qwen3_5_moe-transposed": (_GATE, ("linear_attn.norm.weight", _ZERO_CENTRED)),
    "qwen3_5_moe-stacked": (_GATE, ("linear_attn.norm.weight", _ZERO_CENTRED)),
}
