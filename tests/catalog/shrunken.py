"""Configurations of every family at a size for tests; all other keys as transformers' own classes need them."""

from __future__ import annotations

from typing import Any

_COMMON: dict[str, Any] = {"vocab_size": 300, "hidden_size": 64, "max_position_embeddings": 64}
_DENSE: dict[str, Any] = _COMMON | {
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
_LATENT: dict[str, Any] = _DENSE | {
    "num_key_value_heads": 8,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "topk_method": "noaux_tc",
}
_HYBRID: dict[str, Any] = _DENSE | {
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 4,
    "ssm_state_size": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_DENSE, "attention_bias": False, "mlp_bias": False},
    "llama-tied": {"model_type": "llama", **_DENSE, "head_dim": 16, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", **_DENSE},
    "qwen3": {"model_type": "qwen3", **_DENSE, "head_dim": 16},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_DENSE,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "deepseek_v3": {"model_type": "deepseek_v3", **_LATENT, "num_nextn_predict_layers": 1},
    "deepseek_v3-no-q-rank": {
        "model_type": "deepseek_v3",
        **_LATENT,
        "q_lora_rank": None,
        "num_nextn_predict_layers": 0,
    },
    "kimi_k2": {"model_type": "kimi_k2", **_LATENT, "num_nextn_predict_layers": 0},
    "glm4_moe": {
        "model_type": "glm4_moe",
        **_DENSE,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 1,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_DENSE,
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "attention_bias": True,
    },
    "mistral": {"model_type": "mistral", **_DENSE},
    "gemma2": {"model_type": "gemma2", **_DENSE, "head_dim": 16, "tie_word_embeddings": True},
    "gemma3_text": {"model_type": "gemma3_text", **_DENSE, "head_dim": 16, "tie_word_embeddings": True},
    "minimax_m2": {
        "model_type": "minimax_m2",
        **_DENSE,
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
        "rotary_dim": 8,
    },
    "nemotron_h-latent": {
        "model_type": "nemotron_h",
        **_HYBRID,
        "hybrid_override_pattern": "ME*E",
        "mtp_hybrid_override_pattern": "*E",
        "num_hidden_layers": 4,
        "num_nextn_predict_layers": 1,
        "moe_latent_size": 48,
    },
    "nemotron_h-experts": {
        "model_type": "nemotron_h",
        **_HYBRID,
        "hybrid_override_pattern": "ME-*",
        "num_hidden_layers": 4,
        "num_nextn_predict_layers": 0,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        **_HYBRID,
        "hybrid_override_pattern": "M-M*-",
        "num_hidden_layers": 5,
        "num_nextn_predict_layers": 0,
    },
}

# Such that two ranks of an engine hold whole blocks of 128 by 128, by family.
_BLOCKS: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
_WIDE_HEADS: dict[str, Any] = {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
BLOCK_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": CONFIGS["llama"] | _BLOCKS | _WIDE_HEADS,
    "qwen2": CONFIGS["qwen2"] | _BLOCKS | {"num_attention_heads": 2, "num_key_value_heads": 2},
    "qwen3": CONFIGS["qwen3"] | _BLOCKS | _WIDE_HEADS,
    "qwen3_moe": CONFIGS["qwen3_moe"] | _BLOCKS | _WIDE_HEADS | {"moe_intermediate_size": 256},
    "deepseek_v3": CONFIGS["deepseek_v3"]
    | _BLOCKS
    | {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 256,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
    },
}
