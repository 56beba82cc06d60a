"""Loading what is to be measured."""

from pathlib import Path
from typing import Any

DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_model(
    path: str, *, dtype: str = "auto", device: str | None = None, trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """Loads any Hugging Face causal LM and its tokenizer; a gated one needs no remote code.

    Args:
        path: a folder, or a Hub repository id.
        dtype: one of `DTYPES`; `auto` is that of the weights.
        device: as torch names it; None: the first GPU if there is one, else the CPU.
        trust_remote_code: run the code that a folder of another family brings along.

    Raises:
        ValueError: no such folder or dtype, no tokenizer, or a model that needs remote code without
            `trust_remote_code`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gated_qwen import register_auto_classes

    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: choose from {', '.join(DTYPES)}")
    folder = Path(path)
    check_folder(path)
    register_auto_classes()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (ValueError, OSError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(f"{path}: runs code of its own; pass --trust-remote-code if you trust it") from error
        if folder.is_dir() and not any(folder.glob("tokenizer*")):
            raise ValueError(f"{path}: no tokenizer files; copy those of the source model there") from error
        raise
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return model.to(device).eval(), tokenizer


def check_folder(path: str) -> None:
    """Refuses a path that is no folder and cannot be an `owner/name` on the Hub, before the Hub is asked for it.

    Raises:
        ValueError: so it is.
    """
    folder = Path(path)
    if (folder.is_absolute() or path.startswith(".") or path.count("/") != 1) and not folder.is_dir():
        raise ValueError(f"{path}: no such folder")


def model_settings(model: Any) -> dict[str, Any]:
    """What of a model changes its results and can be told from outside: two runs that differ here are not one run."""
    config = model.config.get_text_config(decoder=True)
    return {
        "model_type": config.model_type,
        "max_position_embeddings": getattr(config, "max_position_embeddings", None),
        "rope_parameters": getattr(config, "rope_parameters", None),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": config._attn_implementation,
    }


def environment(model: Any) -> dict[str, str]:
    """Versions and device, which are recorded but may change between a run and its resumption."""
    import torch
    import transformers

    from gated_qwen import __version__

    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else str(model.device)
    versions = {"gated_qwen": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {**versions, "device": device}
