"""Tiny EAGLE heads as checkpoints of their own, as trainers of such heads write them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .checkpoints import config_of

# Of an EAGLE-3 head: the hidden states of so many layers are joined.
_JOINED = 3


def write_head(
    folder: Path,
    seed: int,
    *,
    method: str = "eagle3",
    tokens: int | None = 32,
    embedding: torch.Tensor | None = None,
    chain: Sequence[int] | None = None,
    right: bool = False,
    sizes: dict[str, Any] | None = None,
    mapping: int | None = None,
    bias: bool = False,
    changes: dict[str, Any] | None = None,
) -> str:
    """Write a head in BF16 for a tiny model, and return its folder.

    Args:
        folder: where to.
        seed: decides all that nothing else says.
        method: ``eagle3`` or ``eagle``, as vLLM calls them.
        tokens: how many the head of EAGLE-3 has; None for all of the model's, without ``d2t``.
        embedding: of the head's own; None for one that takes the model's.
        chain: the successor of each token of the model, where the model's hidden states are its tokens alone. The head
            has all tokens then, in an order of its own.
        right: whether the head knows the successors; else it gives them the least of all probabilities.
        sizes: of the model, where they are not the family's.
        mapping: decides which tokens the head has, and their order; None for ``seed``.
        bias: whether hidden states are joined with one, as SGLang's heads of EAGLE have it.
        changes: of the head's configuration; what is None is null there.
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    keys = {**config_of("llama", short=True), **(sizes or {})}
    hidden, vocabulary, inner = keys["hidden_size"], keys["vocab_size"], keys["intermediate_size"]
    heads, groups, size = keys["num_attention_heads"], keys["num_key_value_heads"], keys["head_dim"]
    layer, wide = ("midlayer", 2 * hidden) if method == "eagle3" else ("layers.0", hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, (_JOINED if method == "eagle3" else 2) * hidden),
        f"{layer}.self_attn.q_proj.weight": (heads * size, wide),
        f"{layer}.self_attn.k_proj.weight": (groups * size, wide),
        f"{layer}.self_attn.v_proj.weight": (groups * size, wide),
        f"{layer}.self_attn.o_proj.weight": (hidden, heads * size),
        f"{layer}.mlp.gate_proj.weight": (inner, hidden),
        f"{layer}.mlp.up_proj.weight": (inner, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inner),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
    }
    if chain is not None:
        tokens = vocabulary
    if method == "eagle3":
        shapes |= {
            f"{layer}.hidden_norm.weight": (hidden,),
            f"{layer}.input_layernorm.weight": (hidden,),
            "norm.weight": (hidden,),
            "lm_head.weight": (tokens or vocabulary, hidden),
        }
    if bias:
        shapes["fc.bias"] = (hidden,)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if mapping is not None:
        generator = torch.Generator().manual_seed(2000 + mapping)
    order = torch.randperm(vocabulary, generator=generator)
    if tokens is not None and chain is None:
        order = order[:tokens].sort().values
    if chain is not None:
        # The hidden state of a token goes through, and the head knows which one follows the one that the model gives.
        one = torch.eye(hidden)
        tensors["fc.weight"] = torch.cat((one if right else -one, torch.zeros(hidden, 2 * hidden)), dim=1)
        after_next = torch.tensor([chain[following] for following in chain])
        tensors["lm_head.weight"] = one[after_next.argsort()][order]
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"{layer}.{name}.weight"].zero_()
        tensors |= {name: 1 + tensor.abs() for name, tensor in tensors.items() if "norm" in name}
    found = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    if method == "eagle3" and tokens is not None:
        found["d2t"] = order - torch.arange(tokens)
        found["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, order, True)
    if embedding is not None:
        found["embed_tokens.weight"] = embedding.contiguous()
    folder.mkdir(parents=True)
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    config = keys | {
        "architectures": ["LlamaForCausalLMEagle3" if method == "eagle3" else "LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "dtype": "bfloat16",
    }
    if method == "eagle3":
        config |= {"draft_vocab_size": tokens or vocabulary, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    (folder / "config.json").write_text(json.dumps(config | (changes or {})))
    return str(folder)
