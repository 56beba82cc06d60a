"""Stands beside the model so that its one-dot import resolves; the class lives in `configuration/`.

When a model is saved, transformers copies this file first and then overwrites it with the real one.
"""

from gated_qwen.configuration.configuration_gated_qwen_moe import GatedQwenMoeConfig

__all__ = ["GatedQwenMoeConfig"]
