"""The modules that Megatron-Bridge takes from a checkpoint of Kimi-K2.5, by the names that it asks for.

They have the parameters that vLLM's loader reads, by name and shape, and compute nothing: only their weights travel here.
"""

from __future__ import annotations

from typing import Any

from torch import empty, nn


class VisionTowerConfig:
    """Of the encoder's part of the configuration."""

    def __init__(self, config: Any) -> None:
        self.vision = config


class ProjectorConfig(VisionTowerConfig):
    """Of the projector's."""


class MoonViT3dPretrainedModel(nn.Module):
    def __init__(self, config: VisionTowerConfig) -> None:
        super().__init__()
        self.patch_embed = _PatchEmbedding(config.vision)
        self.encoder = MoonViT3dEncoder(config.vision)


class MoonViT3dEncoder(nn.Module):
    def __init__(self, vision: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(vision) for _ in range(vision.num_hidden_layers))
        self.final_layernorm = nn.LayerNorm(vision.hidden_size)


class PatchMergerMLP(nn.Module):
    def __init__(self, config: ProjectorConfig) -> None:
        super().__init__()
        vision = config.vision
        height, width = vision.merge_kernel_size
        merged = vision.hidden_size * height * width
        self.pre_norm = nn.LayerNorm(vision.hidden_size)
        self.proj = nn.Sequential(
            nn.Linear(merged, merged), nn.GELU(), nn.Linear(merged, vision.text_hidden_size)
        )


class _PatchEmbedding(nn.Module):
    def __init__(self, vision: Any) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, vision.hidden_size, vision.patch_size, vision.patch_size)
        self.pos_emb = _Positions(vision)


class _Positions(nn.Module):
    def __init__(self, vision: Any) -> None:
        super().__init__()
        shape = vision.init_pos_emb_height, vision.init_pos_emb_width, vision.hidden_size
        self.weight = nn.Parameter(nn.init.normal_(empty(shape)))


class _Block(nn.Module):
    def __init__(self, vision: Any) -> None:
        super().__init__()
        hidden = vision.hidden_size
        self.norm0 = nn.LayerNorm(hidden)
        self.norm1 = nn.LayerNorm(hidden)
        self.mlp = _Mlp(hidden, vision.intermediate_size)
        self.wqkv = nn.Linear(hidden, 3 * hidden)
        self.wo = nn.Linear(hidden, hidden)


class _Mlp(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.fc0 = nn.Linear(hidden, intermediate)
        self.fc1 = nn.Linear(intermediate, hidden)
