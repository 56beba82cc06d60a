"""Gated attention for Qwen-style decoders in Hugging Face Transformers (arXiv 2505.06708).

Importing this package registers the models with transformers' Auto classes, so that
`AutoModelForCausalLM.from_pretrained(folder)` finds them without remote code.
"""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gated_qwen.configuration.configuration_gated_qwen import GatedQwenConfig
    from gated_qwen.configuration.configuration_gated_qwen_moe import GatedQwenMoeConfig
    from gated_qwen.modeling_gated_qwen import (
        GatedQwenForCausalLM,
        GatedQwenForQuestionAnswering,
        GatedQwenForSequenceClassification,
        GatedQwenForTokenClassification,
        GatedQwenModel,
    )
    from gated_qwen.modeling_gated_qwen_moe import (
        GatedQwenMoeForCausalLM,
        GatedQwenMoeForQuestionAnswering,
        GatedQwenMoeForSequenceClassification,
        GatedQwenMoeForTokenClassification,
        GatedQwenMoeModel,
    )

# What follows a family's name in its model classes, and the Auto class that finds it.
_AUTO_CLASSES = {
    "Model": "AutoModel",
    "ForCausalLM": "AutoModelForCausalLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
}
_CONFIG_MODULES = {
    "GatedQwen": "gated_qwen.configuration.configuration_gated_qwen",
    "GatedQwenMoe": "gated_qwen.configuration.configuration_gated_qwen_moe",
}
_MODEL_MODULES = {
    "GatedQwen": "gated_qwen.modeling_gated_qwen",
    "GatedQwenMoe": "gated_qwen.modeling_gated_qwen_moe",
}
_MODULE_OF = {
    **{f"{family}Config": module for family, module in _CONFIG_MODULES.items()},
    **{f"{family}{suffix}": module for family, module in _MODEL_MODULES.items() for suffix in _AUTO_CLASSES},
}

__all__ = [
    "GatedQwenConfig",
    "GatedQwenForCausalLM",
    "GatedQwenForQuestionAnswering",
    "GatedQwenForSequenceClassification",
    "GatedQwenForTokenClassification",
    "GatedQwenModel",
    "GatedQwenMoeConfig",
    "GatedQwenMoeForCausalLM",
    "GatedQwenMoeForQuestionAnswering",
    "GatedQwenMoeForSequenceClassification",
    "GatedQwenMoeForTokenClassification",
    "GatedQwenMoeModel",
    "__version__",
    "register_auto_classes",
]


def register_auto_classes() -> None:
    """Registers the config and model classes with transformers' Auto classes; calling it twice is harmless."""
    import transformers

    for family, module in _MODEL_MODULES.items():
        config_class = __getattr__(f"{family}Config")
        transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        for suffix, auto_class in _AUTO_CLASSES.items():
            model_class = getattr(importlib.import_module(module), f"{family}{suffix}")
            getattr(transformers, auto_class).register(config_class, model_class, exist_ok=True)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'gated_qwen' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


def _is_command() -> bool:
    """Whether this process is `gated-qwen`, or `python -m gated_qwen.cli`, as a launcher starts it."""
    words = sys.orig_argv
    called = Path(sys.argv[0] if sys.argv else "").name in ("gated-qwen", "gated-qwen.exe")
    return called or ("-m", "gated_qwen.cli") in zip(words, words[1:], strict=False)


# The command answers --help and wrong usage without loading torch, so its verbs register when they load a model.
if not _is_command():
    register_auto_classes()
