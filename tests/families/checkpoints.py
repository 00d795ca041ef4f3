"""A tiny random checkpoint of every model family, as transformers writes it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.quantize.int4_checkpoint import quantization_config
from tests.gpu.vllm_checkpoints import quantize_to_int4

_COMMON: dict[str, Any] = {
    # Odd, so that TP pads it.
    "vocab_size": 61,
    "hidden_size": 32,
    "max_position_embeddings": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 48,
    "tie_word_embeddings": False,
}
_ROUTER_BIASES = ("e_score_correction_bias", "gate.expert_bias")
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "shared_expert_intermediate_size": 16,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
# The last layer alone has heads of another size, takes keys as values, and has no weights of its own for these.
_GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    **_COMMON,
    "tie_word_embeddings": True,
    "global_head_dim": 16,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    # Bridge does not pad it.
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
}
# An embedding for each layer, and a last layer that takes keys and values of the one before.
_SHARED_KEYS: dict[str, Any] = {
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 1,
    "hidden_size_per_layer_input": 8,
    "layer_types": ["full_attention"] * 4,
}
# As the 31B, as E2B and E4B, and as 26B-A4B.
_GEMMA4_KINDS: dict[str, dict[str, Any]] = {
    "gemma4": _GEMMA4,
    "gemma4-shared": {**_GEMMA4, **_SHARED_KEYS},
    "gemma4-moe": {**_GEMMA4, **_EXPERTS, "enable_moe_block": True, "top_k_experts": 2},
}
# Beside the language model's keys, those of an image encoder.
_GEMMA4_VISION: dict[str, Any] = {
    "model_type": "gemma4",
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "patch_size": 4,
        "position_embedding_size": 16,
    },
}
# GLM-4.5's; its attention is none of latent vectors.
_GLM: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "attention_bias": True,
    "use_qk_norm": True,
    "num_nextn_predict_layers": 1,
}
_NEMOTRON: dict[str, Any] = {
    "hybrid_override_pattern": "M-M*EM",
    "num_hidden_layers": 6,
    "mamba_num_heads": 8,
    "mamba_head_dim": 4,
    "n_groups": 4,
    "ssm_state_size": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "moe_latent_size": None,
    "n_group": 2,
    "topk_group": 1,
}
# Beside a language model's keys, an image encoder's.
_VISION: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5000000,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "vision_config": {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_heads": 4,
        "patch_size": 4,
        "out_hidden_size": 32,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    },
}
# Qwen3.5's: nothing of it goes into the language model's layers.
_PLAIN_VISION = {
    "rope_parameters": _VISION["rope_parameters"] | {"mrope_section": [1, 0, 0]},
    "vision_config": _VISION["vision_config"] | {"deepstack_visual_indexes": []},
}
_QWEN3_5 = {"model_type": "qwen3_5_moe_text", **_COMMON, **_EXPERTS, **_DELTA_NET}
# Kimi-K2's language model beside an image encoder.
_KIMI_K25: dict[str, Any] = {
    "model_type": "kimi_k25",
    **_COMMON,
    **_LATENT,
    "n_group": 1,
    "vision_config": {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "patch_size": 2,
        "merge_kernel_size": [2, 2],
        "init_pos_emb_height": 4,
        "init_pos_emb_width": 6,
    },
}
# With all that it has but experts.
_NOT_QUANTIZED = (
    *("re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp[.](gate|up|gate_up|down)_proj.*"),
    *("re:.*lm_head.*", "re:vision_tower.*", "re:mm_projector.*"),
)

# Family → keys of its configuration.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", **_COMMON},
    **{name: {"model_type": "qwen3", **_COMMON} for name in ("qwen3", "qwen3-exchanged", "qwen3-shifted")},
    "qwen3-broken": {"model_type": "qwen3", **_COMMON},
    "qwen3-tied": {"model_type": "qwen3", **_COMMON, "tie_word_embeddings": True},
    "qwen3-few-groups": {"model_type": "qwen3", **_COMMON, "num_key_value_heads": 2},
    "qwen3-tied-twice": {"model_type": "qwen3", **_COMMON, "tie_word_embeddings": True},
    "qwen3_moe": {"model_type": "qwen3_moe", **_COMMON, **_EXPERTS},
    "llama": {"model_type": "llama", **_COMMON},
    "mistral": {"model_type": "mistral", **_COMMON},
    "mixtral": {"model_type": "mixtral", **_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {"model_type": "deepseek_v3", **_COMMON, **_LATENT, "num_nextn_predict_layers": 1},
    # DeepSeek-V3's in one group, without prediction layers.
    "kimi_k2": {"model_type": "kimi_k2", **_COMMON, **_LATENT, "n_group": 1},
    "kimi_k25": _KIMI_K25,
    # Experts of one group of INT4.
    "kimi_k25-int4": {**_KIMI_K25, "moe_intermediate_size": 32},
    "glm4_moe": {"model_type": "glm4_moe", **_COMMON, **_GLM},
    "minimax_m2": {
        "model_type": "minimax_m2",
        **_COMMON,
        "intermediate_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rotary_dim": 4,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
    },
    "nemotron_h": {"model_type": "nemotron_h", **_COMMON, **_NEMOTRON},
    "nemotron_h-latent": {
        "model_type": "nemotron_h",
        **_COMMON,
        **_NEMOTRON,
        "moe_latent_size": 24,
        "hybrid_override_pattern": "ME*MEM",
        "num_nextn_predict_layers": 1,
        "mtp_hybrid_override_pattern": "*E",
    },
    "glm4_moe_lite": {
        "model_type": "glm4_moe_lite",
        # Their rotary part has this name, too.
        **{key: value for key, value in _COMMON.items() if key != "head_dim"},
        **_LATENT,
        "num_nextn_predict_layers": 1,
    },
    "glm_moe_dsa": {
        "model_type": "glm_moe_dsa",
        **_COMMON,
        **_LATENT,
        "index_topk": 8,
        "index_head_dim": 8,
        "index_n_heads": 4,
        "indexer_rope_interleave": True,
    },
    "bailing_moe_v2": {
        "model_type": "bailing_moe_v2",
        **_COMMON,
        **_EXPERTS,
        "num_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "score_function": "sigmoid",
        "norm_topk_prob": True,
        "use_qk_norm": True,
    },
    "gemma3-vl": {
        "model_type": "gemma3",
        **_COMMON,
        "tie_word_embeddings": True,
        "mm_tokens_per_image": 4,
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
            "vision_use_head": False,
        },
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        **_COMMON,
        # Its heads share the hidden size evenly, whatever a configuration says of them.
        "hidden_size": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000, "mrope_section": [2, 1, 1]},
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_heads": 4,
            "patch_size": 4,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
        },
    },
    "qwen3_5_text": {"model_type": "qwen3_5_text", **_COMMON, **_DELTA_NET},
    "qwen3_5": {"model_type": "qwen3_5", **_COMMON, **_DELTA_NET, **_PLAIN_VISION},
    "qwen3_5_moe-vl": {"model_type": "qwen3_5_moe", **_COMMON, **_EXPERTS, **_DELTA_NET, **_PLAIN_VISION},
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_COMMON,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
    },
    "qwen3_next": {"model_type": "qwen3_next", **_COMMON, **_EXPERTS, **_DELTA_NET},
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_5_moe-stacked": _QWEN3_5,
    "qwen3_5_moe-transposed": {**_QWEN3_5, "moe_intermediate_size": 24},
    "qwen3_vl": {"model_type": "qwen3_vl", **_COMMON, **_VISION},
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe",
        **_COMMON,
        **_EXPERTS,
        **_VISION,
        "moe_intermediate_size": 24,
    },
    "gemma2": {"model_type": "gemma2", **_COMMON, "tie_word_embeddings": True},
    "gemma3": {"model_type": "gemma3_text", **_COMMON, "tie_word_embeddings": True},
    **_GEMMA4_KINDS,
    # As they are published.
    **{f"{kind}-vl": {**keys, **_GEMMA4_VISION} for kind, keys in _GEMMA4_KINDS.items()},
}


def config_of(family: str, *, short: bool) -> dict[str, Any]:
    """Keys of a family's configuration; ``short``: with one layer of each kind, or two if all are alike."""
    config = CONFIGS[family]
    if not short or "hybrid_override_pattern" in config:
        return config
    kinds = {"layer_types": config["layer_types"][:2]} if "layer_types" in config else {}
    return config | {"num_hidden_layers": 2} | kinds


def has_prediction(family: str) -> bool:
    """Whether the checkpoint has a multi-token-prediction layer, which engines leave out."""
    return "num_nextn_predict_layers" in CONFIGS[family]


def published_config(keys: dict[str, Any]) -> dict[str, Any]:
    """As published: beside an image encoder's keys those of the language model stand in a part of their own."""
    if "vision_config" not in keys:
        return keys
    whole = ("model_type", "tie_word_embeddings", "vision_config")
    text = {key: value for key, value in keys.items() if key not in whole}
    return {**{key: keys[key] for key in whole}, "text_config": text}


def write_checkpoint(
    family: str, folder: Path, *, short: bool = False, changes: Mapping[str, Any] | None = None
) -> str:
    """Write a BF16 checkpoint of one of the families, with ``changes`` of its configuration, and return its folder."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(0)
    keys = config_of(family, short=short) | dict(changes or {})
    if family == "bailing_moe_v2":
        return _write_ling(folder, keys)
    if family.startswith("kimi_k25"):
        _write_kimi_k25(folder, keys)
        if family == "kimi_k25-int4":
            quantize_experts(folder)
        return str(folder)
    config = AutoConfig.for_model(**published_config(keys | _BUILT_AS.get(family, {})))
    kind = AutoModelForImageTextToText if "vision_config" in keys else AutoModelForCausalLM
    model = kind.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    published = _AS_PUBLISHED.get(family)
    if published is not None:
        file = folder / "model.safetensors"
        save_file(published(load_file(file), keys), file, {"format": "pt"})
    if family == "kimi_k2":
        _name_kimi(folder)
    if family.startswith("nemotron_h"):
        # Published configurations have the patterns, which Bridge reads; transformers writes lists instead.
        written = json.loads((folder / "config.json").read_text())
        patterns = {key: value for key, value in keys.items() if key.endswith("hybrid_override_pattern")}
        (folder / "config.json").write_text(json.dumps(written | patterns))
    return str(folder)


# Of which transformers has no class, but one of the same architecture.
_BUILT_AS = {"kimi_k2": {"model_type": "deepseek_v3"}}


def _name_kimi(folder: Path) -> None:
    """Give a checkpoint of DeepSeek-V3's class Kimi-K2's name, with a class of its configuration beside it."""
    file = "configuration_deepseek"
    (folder / f"{file}.py").write_text(
        'from transformers import DeepseekV3Config\n\n\nclass KimiK2Config(DeepseekV3Config):\n    model_type = "kimi_k2"\n'
    )
    named = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": f"{file}.KimiK2Config"}}
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | named))


def _write_kimi_k25(folder: Path, keys: dict[str, Any]) -> None:
    """Kimi-K2.5's, of which transformers has no class: published checkpoints bring those of the encoder and the configuration.

    The language model is DeepSeek-V3's. Of the encoder here are the parameters alone, by code of :mod:`.kimi_k25`.
    """
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    from .kimi_k25 import configuration_kimi_k25 as configuration
    from .kimi_k25 import modeling_kimi_k25 as modeling

    published = published_config(keys)
    AutoModelForCausalLM.from_config(DeepseekV3Config(**published["text_config"])).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(file).items()}
    written = write_kimi_k25_config(folder, published)
    vision = configuration.KimiK25VisionConfig(**written["vision_config"])
    for name, part in {
        "vision_tower": modeling.MoonViT3dPretrainedModel(modeling.VisionTowerConfig(vision)),
        "mm_projector": modeling.PatchMergerMLP(modeling.ProjectorConfig(vision)),
    }.items():
        tensors |= {f"{name}.{key}": tensor for key, tensor in part.state_dict().items()}
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, file, {"format": "pt"})


def write_kimi_k25_config(folder: Path, published: dict[str, Any]) -> dict[str, Any]:
    """Kimi-K2.5's configuration, with the code that comes with it; returns what was written.

    Args:
        folder: of the checkpoint.
        published: the language model's keys under ``text_config``, and the encoder's under ``vision_config``.
    """
    from . import kimi_k25

    text, vision = published["text_config"], published["vision_config"]
    written = {
        **published,
        "text_config": {**text, "model_type": "kimi_k2"},
        "vision_config": {**vision, "text_hidden_size": text["hidden_size"]},
        "architectures": ["KimiK25ForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
        "dtype": "bfloat16",
        # Of the vocabulary here.
        "media_placeholder_token_id": 3,
    }
    (folder / "config.json").write_text(json.dumps(written))
    for module in Path(kimi_k25.__path__[0]).glob("*_kimi_k25.py"):
        shutil.copy(module, folder)
    return written


def quantize_experts(folder: Path, scale_rule: str = RefitConfig.int4_scale) -> None:
    """Let a checkpoint of Kimi's have its experts in INT4 in groups of 32, as compressed-tensors packs them, and all else in BF16.

    Args:
        folder: of the checkpoint.
        scale_rule: by which scales are made.
    """
    quantize_to_int4(folder, quantization_config(32, _NOT_QUANTIZED), scale_rule)


def know_configuration(folder: Path) -> None:
    """Of a checkpoint that brings the class of its configuration: as with trust_remote_code, without its folder of copies."""
    written = json.loads((folder / "config.json").read_text())
    if "auto_map" not in written:
        return
    from transformers import AutoConfig

    file, _, name = written["auto_map"]["AutoConfig"].partition(".")
    spec = spec_from_file_location(file, folder / f"{file}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    AutoConfig.register(written["model_type"], getattr(module, name), exist_ok=True)


def _write_ling(folder: Path, keys: dict[str, Any]) -> str:
    """Ling's, of which transformers has no class: published checkpoints bring the one of their configuration."""
    hidden, heads, groups, size = (
        keys[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    shapes: dict[str, tuple[int, ...]] = {
        "model.word_embeddings": (keys["vocab_size"], hidden),
        "model.norm": (hidden,),
        "lm_head": (keys["vocab_size"], hidden),
    }

    def gated(prefix: str, inner: int) -> dict[str, tuple[int, ...]]:
        wide = {f"{prefix}{part}_proj": (inner, hidden) for part in ("gate", "up")}
        return {**wide, f"{prefix}down_proj": (hidden, inner)}

    for number in range(keys["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        own = f"{layer}attention."
        shapes |= {f"{layer}{norm}_layernorm": (hidden,) for norm in ("input", "post_attention")}
        shapes |= {f"{own}{norm}_layernorm": (size,) for norm in ("query", "key")}
        shapes |= {
            f"{own}query_key_value": ((heads + 2 * groups) * size, hidden),
            f"{own}dense": (hidden, heads * size),
        }
        if number < keys["first_k_dense_replace"]:
            shapes |= gated(f"{layer}mlp.", keys["intermediate_size"])
            continue
        shapes[f"{layer}mlp.gate"] = (keys["num_experts"], hidden)
        inner = keys["moe_intermediate_size"]
        shapes |= gated(f"{layer}mlp.shared_experts.", inner * keys["num_shared_experts"])
        for expert in range(keys["num_experts"]):
            shapes |= gated(f"{layer}mlp.experts.{expert}.", inner)
    tensors = {f"{name}.weight": torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
    tensors |= {
        f"{name}.expert_bias": torch.zeros(shape[0], dtype=torch.bfloat16)
        for name, shape in shapes.items()
        if name.endswith("mlp.gate")
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    write_ling_config(folder, keys)
    return str(folder)


def write_ling_config(folder: Path, keys: dict[str, Any]) -> None:
    """Ling's configuration with the class of it, as published checkpoints bring it."""
    file = "configuration_bailing_moe_v2"
    published = {
        "architectures": ["BailingMoeV2ForCausalLM"],
        "auto_map": {"AutoConfig": f"{file}.BailingMoeV2Config"},
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(keys | published))
    core = find_spec("megatron.core")
    assert core is not None
    assert core.origin is not None
    # Bridge has a copy of the published file. It is not imported: that would import all of Bridge.
    shutil.copy(Path(core.origin).parents[1] / "bridge" / "models" / "bailing" / f"{file}.py", folder)


def write_pair(
    family: str, folder: Path, changes: Mapping[str, Any], *, router_dtype: torch.dtype = torch.bfloat16
) -> tuple[str, str]:
    """Two checkpoints of a family; every tensor of them has other values, norms and biases too.

    All is in BF16 but for biases of routers.
    """
    first = write_checkpoint(family, folder / "a", short=True, changes=changes)
    second = str(shutil.copytree(first, folder / "b"))
    for seed, path in enumerate((first, second)):
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            name: torch.randn(tensor.shape, generator=generator).to(
                router_dtype if name.endswith(_ROUTER_BIASES) else tensor.dtype
            )
            for name, tensor in load_file(f"{path}/model.safetensors").items()
        }
        save_file(tensors, f"{path}/model.safetensors", {"format": "pt"})
    return first, second


def add_qwens_prediction_layer(folder: str) -> None:
    """Add an MTP layer to a checkpoint of Qwen3-Next, as it is published: a module of its own beside the model."""
    file = Path(folder) / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(len(folder) + ord(folder[-1]))
    hidden = tensors["model.norm.weight"].shape[0]
    shapes = {
        f"mtp.layers.0.{name.removeprefix('model.layers.1.')}": tensor.shape
        for name, tensor in tensors.items()
        if name.startswith("model.layers.1.")
    }
    shapes |= {"mtp.fc.weight": torch.Size((hidden, 2 * hidden))}
    shapes |= {
        f"mtp.{n}.weight": torch.Size((hidden,))
        for n in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    }
    more = {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()
    }
    save_file(tensors | more, file, {"format": "pt"})
    config = Path(folder) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 1}))


def _with_prediction_layer(tensors: dict[str, Tensor], keys: dict[str, Any]) -> dict[str, Tensor]:
    """A multi-token-prediction layer as DeepSeek-V3's and GLM's, which transformers leaves out."""
    count, hidden = keys["num_hidden_layers"], keys["hidden_size"]
    last, added = f"model.layers.{count - 1}.", f"model.layers.{count}."
    more = {added + k.removeprefix(last): v.clone() for k, v in tensors.items() if k.startswith(last)}
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        more[f"{added}{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    more[f"{added}eh_proj.weight"] = torch.randn(hidden, 2 * hidden).to(torch.bfloat16)
    return tensors | more


def _with_whole_prediction_layer(tensors: dict[str, Tensor], keys: dict[str, Any]) -> dict[str, Tensor]:
    """The same with copies of embedding and head, which Bridge exports of GLM-4.7-Flash."""
    added = f"model.layers.{keys['num_hidden_layers']}."
    return _with_prediction_layer(tensors, keys) | {
        f"{added}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{added}shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }


def _as_nemotron(tensors: dict[str, Tensor], keys: dict[str, Any]) -> dict[str, Tensor]:
    """With the embedding's published name; Nemotron-3 with multi-token prediction: a layer of attention, one of experts."""
    found = {k.replace("backbone.embedding.", "backbone.embeddings."): v for k, v in tensors.items()}
    if not keys.get("num_nextn_predict_layers"):
        return found
    hidden, pattern = keys["hidden_size"], keys["mtp_hybrid_override_pattern"]
    for number, kind in enumerate(pattern):
        like = f"backbone.layers.{keys['hybrid_override_pattern'].index(kind)}."
        own = f"mtp.layers.{number}."
        found |= {own + k.removeprefix(like): v.clone() for k, v in tensors.items() if k.startswith(like)}
    ones = ("mtp.layers.0.enorm", "mtp.layers.0.hnorm", f"mtp.layers.{len(pattern) - 1}.final_layernorm")
    found |= {f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in ones}
    found["mtp.layers.0.eh_proj.weight"] = torch.randn(hidden, 2 * hidden).to(torch.bfloat16)
    return found


def _with_stacked_experts(tensors: dict[str, Tensor], keys: dict[str, Any]) -> dict[str, Tensor]:
    """Qwen3.5's experts in one tensor for each layer, as it is published."""
    kept = {k: v for k, v in tensors.items() if ".experts." not in k}
    for prefix in sorted({k.partition(".experts.")[0] for k in tensors.keys() - kept.keys()}):
        gate, up, down = (
            torch.stack(
                [tensors[f"{prefix}.experts.{i}.{part}_proj.weight"] for i in range(keys["num_experts"])]
            )
            for part in ("gate", "up", "down")
        )
        kept[f"{prefix}.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
        kept[f"{prefix}.experts.down_proj"] = down
    return kept


def _with_transposed_experts(tensors: dict[str, Tensor], keys: dict[str, Any]) -> dict[str, Tensor]:
    """As Qwen3-VL-MoE's are published: transformers turns them when it loads them, and writes them turned."""
    return {k: v.transpose(1, 2).contiguous() if ".experts." in k else v for k, v in tensors.items()}


def _with_unused_keys(tensors: dict[str, Tensor], keys: dict[str, Any]) -> dict[str, Tensor]:
    """Keys and values of layers that take those of a layer before: nobody reads them, and transformers has no module for them."""
    first = keys["num_hidden_layers"] - keys["num_kv_shared_layers"]
    unused = {
        name.replace("layers.0.", f"layers.{layer}."): tensor.clone()
        for layer in range(first, keys["num_hidden_layers"])
        for name, tensor in tensors.items()
        if "layers.0.self_attn." in name
        and name.split(".")[-2] in ("k_proj", "v_proj", "k_norm")
        and not name.startswith("model.vision_tower.")
    }
    return tensors | unused


# What transformers writes, and the keys that it was written for, turned into what is published.
_AS_PUBLISHED: dict[str, Callable[[dict[str, Tensor], dict[str, Any]], dict[str, Tensor]]] = {
    "deepseek_v3": _with_prediction_layer,
    "glm4_moe": _with_prediction_layer,
    "glm4_moe_lite": _with_whole_prediction_layer,
    "gemma3-vl": lambda tensors, keys: {
        k.replace("vision_tower.", "vision_tower.vision_model."): v for k, v in tensors.items()
    },
    **dict.fromkeys(("gemma4-shared", "gemma4-shared-vl"), _with_unused_keys),
    "nemotron_h": _as_nemotron,
    "nemotron_h-latent": _as_nemotron,
    "qwen3-tied-twice": lambda tensors, keys: (
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    ),
    "qwen3_5_moe-stacked": _with_stacked_experts,
    "qwen3_5_moe-vl": _with_stacked_experts,
    "qwen3_5_moe-transposed": lambda tensors, keys: _with_transposed_experts(
        _with_stacked_experts(tensors, keys), keys
    ),
    "qwen3_vl_moe": _with_transposed_experts,
}
