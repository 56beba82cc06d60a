"""Gated attention for Qwen-style decoders in Hugging Face Transformers (arXiv 2505.06708).

Importing this package registers the model with transformers' Auto classes, so that
`AutoModelForCausalLM.from_pretrained(folder)` finds it without remote code.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gated_qwen.configuration.configuration_gated_qwen import GatedQwenConfig
    from gated_qwen.modeling_gated_qwen import (
        GatedQwenForCausalLM,
        GatedQwenForQuestionAnswering,
        GatedQwenForSequenceClassification,
        GatedQwenForTokenClassification,
        GatedQwenModel,
    )

# The Auto class that finds each model class.
_MODEL_CLASSES = {
    "AutoModel": "GatedQwenModel",
    "AutoModelForCausalLM": "GatedQwenForCausalLM",
    "AutoModelForSequenceClassification": "GatedQwenForSequenceClassification",
    "AutoModelForTokenClassification": "GatedQwenForTokenClassification",
    "AutoModelForQuestionAnswering": "GatedQwenForQuestionAnswering",
}

__all__ = [
    "GatedQwenConfig",
    "GatedQwenForCausalLM",
    "GatedQwenForQuestionAnswering",
    "GatedQwenForSequenceClassification",
    "GatedQwenForTokenClassification",
    "GatedQwenModel",
    "__version__",
    "register_auto_classes",
]


def register_auto_classes() -> None:
    """Registers the config and model classes with transformers' Auto classes; calling it twice is harmless."""
    import transformers

    from gated_qwen import modeling_gated_qwen as modeling
    from gated_qwen.configuration.configuration_gated_qwen import GatedQwenConfig

    transformers.AutoConfig.register(GatedQwenConfig.model_type, GatedQwenConfig, exist_ok=True)
    for auto_class, model_class in _MODEL_CLASSES.items():
        getattr(transformers, auto_class).register(GatedQwenConfig, getattr(modeling, model_class), exist_ok=True)


def __getattr__(name: str) -> object:
    if name == "GatedQwenConfig":
        from gated_qwen.configuration.configuration_gated_qwen import GatedQwenConfig

        return GatedQwenConfig
    if name in _MODEL_CLASSES.values():
        from gated_qwen import modeling_gated_qwen

        return getattr(modeling_gated_qwen, name)
    raise AttributeError(f"module 'gated_qwen' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


# The command answers --help and wrong usage without loading torch, so its verbs register when they load a model.
if Path(sys.argv[0] if sys.argv else "").name not in ("gated-qwen", "gated-qwen.exe"):
    register_auto_classes()
