"""Kimi-K2.5's configuration: a language model of DeepSeek-V3's, and an image encoder."""

from __future__ import annotations

from typing import Any

from transformers import DeepseekV3Config, PretrainedConfig


class KimiK25VisionConfig(PretrainedConfig):
    model_type = "kimi_k25_vision"


class KimiK25Config(PretrainedConfig):
    model_type = "kimi_k25"

    def __init__(
        self,
        text_config: dict[str, Any] | None = None,
        vision_config: dict[str, Any] | None = None,
        media_placeholder_token_id: int = 0,
        **more: Any,
    ) -> None:
        self.text_config = DeepseekV3Config(**(text_config or {}))
        self.vision_config = KimiK25VisionConfig(**(vision_config or {}))
        self.media_placeholder_token_id = media_placeholder_token_id
        super().__init__(**more)
