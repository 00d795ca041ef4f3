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
_DELTA_NET: dict[str, Any] = _DENSE | {
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_GATED_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_GEMMA4: dict[str, Any] = _DENSE | {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 296,
    "tie_word_embeddings": True,
}
_IMAGES: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "in_channels": 3,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def _with_images(
    text: dict[str, Any], sections: list[int], vision: dict[str, Any] = _IMAGES
) -> dict[str, Any]:
    """A language model's keys in a part of their own, beside an image encoder's."""
    rope = {"rope_type": "default", "rope_theta": 10000, "mrope_section": sections}
    return {
        "text_config": text | ({"rope_parameters": rope} if sections else {}),
        "vision_config": vision,
        "tie_word_embeddings": text["tie_word_embeddings"],
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
    "kimi_k25": {
        "model_type": "kimi_k25",
        **_with_images(
            _LATENT | {"n_group": 1, "num_nextn_predict_layers": 0},
            [],
            {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "patch_size": 4,
                "merge_kernel_size": [2, 2],
                "init_pos_emb_height": 4,
                "init_pos_emb_width": 6,
            },
        ),
    },
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
    "gemma4": {"model_type": "gemma4_text", **_GEMMA4, "attention_k_eq_v": True},
    "gemma4-shared": {
        "model_type": "gemma4_text",
        **_GEMMA4,
        "num_global_key_value_heads": 4,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "use_double_wide_mlp": True,
    },
    "gemma4-moe": {
        "model_type": "gemma4_text",
        **_GEMMA4,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
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
    "qwen3_next": {
        "model_type": "qwen3_next",
        **_DELTA_NET,
        **_GATED_EXPERTS,
        # vLLM's own class of its configuration knows this key alone.
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "qwen3_5_text": {"model_type": "qwen3_5_text", **_DELTA_NET, "mtp_num_hidden_layers": 1},
    "qwen3_5_moe_text": {"model_type": "qwen3_5_moe_text", **_DELTA_NET, **_GATED_EXPERTS},
    "qwen3_5": {
        "model_type": "qwen3_5",
        **_with_images(_DELTA_NET | {"tie_word_embeddings": True}, [1, 1, 0]),
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        **_with_images(_DELTA_NET | _GATED_EXPERTS | {"mtp_num_hidden_layers": 1}, [1, 1, 0]),
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        **_with_images(_DENSE | {"head_dim": 16}, [4, 2, 2], _IMAGES | {"deepstack_visual_indexes": [0, 1]}),
    },
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe",
        **_with_images(
            # Neither side of an expert's matrices is as long as the other, so that Bridge knows which is turned.
            _DENSE
            | {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
            | {"norm_topk_prob": True},
            [4, 2, 2],
            _IMAGES | {"deepstack_visual_indexes": [0]},
        ),
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        **_with_images(_DENSE, [2, 1, 1], _IMAGES | {"fullatt_block_indexes": [1]}),
    },
    "gemma3": {
        "model_type": "gemma3",
        **_with_images(
            _DENSE | {"head_dim": 16, "tie_word_embeddings": True},
            [],
            {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "image_size": 16,
                "patch_size": 4,
                "vision_use_head": False,
            },
        ),
        "mm_tokens_per_image": 4,
    },
    "glm4_moe_lite": {
        "model_type": "glm4_moe_lite",
        **{key: value for key, value in _LATENT.items() if key not in ("topk_method", "moe_layer_freq")},
        "num_nextn_predict_layers": 1,
    },
    "glm_moe_dsa": {
        "model_type": "glm_moe_dsa",
        **_LATENT,
        "head_dim": 4,
        "index_topk": 8,
        "index_head_dim": 8,
        "index_n_heads": 4,
        "indexer_rope_interleave": True,
        "num_nextn_predict_layers": 1,
    },
    "bailing_moe_v2": {
        "model_type": "bailing_moe_v2",
        **_DENSE,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "score_function": "sigmoid",
        "norm_topk_prob": True,
        "use_qk_norm": True,
        "use_rmsnorm": True,
        "moe_router_enable_expert_bias": True,
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
