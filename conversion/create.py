"""A fresh model folder from a preset."""

import os
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gated_qwen
from gated_qwen.configuration.presets import preset
from gated_qwen.conversion.checkpoint import SIDE_FILES, CheckpointError
from gated_qwen.conversion.folder import atomic_folder, check_target
from gated_qwen.conversion.writer import write_description

if TYPE_CHECKING:
    from gated_qwen.configuration.configuration_gated_qwen import GatedQwenConfig

DTYPES = ("float32", "bfloat16", "float16")


def create(
    preset_name: str,
    target: str | os.PathLike[str],
    *,
    overrides: dict[str, Any] | None = None,
    match_parameters: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    tokenizer: str | os.PathLike[str] | None = None,
    max_shard_size: str = "5GB",
    overwrite: bool = False,
) -> Path:
    """Writes a randomly initialised model of a preset's shape, ready to be trained.

    Args:
        preset_name: one of `gated_qwen.configuration.presets.preset_names()`.
        target: the folder to write.
        overrides: config fields to set on top of the preset.
        match_parameters: shrink the FFN so that the total stays that of the ungated baseline, as the paper did.
        dtype: `"float32"`, `"bfloat16"` or `"float16"`.
        seed: of the initial weights.
        tokenizer: a folder whose tokenizer files are copied.
        max_shard_size: a text such as `"5GB"`.
        overwrite: replace a non-empty `target`.

    Returns:
        Path: `target`.

    Raises:
        ValueError: an unknown preset, field, value or dtype.
        FileExistsError: `target` is not empty, and `overwrite` is off.
        CheckpointError: `tokenizer` has no tokenizer files.

    Example:
        >>> folder = create("tiny-headwise", tmp / "fresh")
        >>> (folder / "config.json").exists()
        True
    """
    import torch

    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not known; choose one of {', '.join(DTYPES)}")
    check_target(target, overwrite=overwrite)
    config = preset(preset_name, match_parameters=match_parameters, **(overrides or {}))
    side_files = _tokenizer_files(Path(tokenizer), config, overrides or {}) if tokenizer is not None else []
    config.dtype = dtype
    config.architectures = ["GatedQwenForCausalLM"]
    torch.manual_seed(seed)
    model = gated_qwen.GatedQwenForCausalLM(config).to(getattr(torch, dtype))
    recipe = {
        "format": 1,
        "verb": "new",
        "preset": preset_name,
        "overrides": overrides or {},
        "match_parameters": match_parameters,
        "seed": seed,
        "versions": {"gated-qwen": gated_qwen.__version__, "torch": torch.__version__},
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    with atomic_folder(target, overwrite=overwrite) as temporary:
        model.save_pretrained(temporary, max_shard_size=max_shard_size)
        write_description(temporary, model.config, side_files, recipe)
    return Path(target)


def _tokenizer_files(folder: Path, config: "GatedQwenConfig", overrides: dict[str, Any]) -> list[Path]:
    """The files to copy; the config takes the tokenizer's special ids, unless they were set."""
    from transformers import AutoTokenizer

    wanted = [pattern for pattern in SIDE_FILES if pattern not in ("generation_config.json", "LICENSE*")]
    files = sorted({path for pattern in wanted for path in folder.glob(pattern)})
    if not any(path.name.startswith("tokenizer") for path in files):
        raise CheckpointError(f"{folder}: no tokenizer files (tokenizer.json, tokenizer_config.json) in this folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the libraries that read tokenizers raise whatever comes
        raise CheckpointError(f"{folder}: the tokenizer cannot be read ({' '.join(str(error).split())})") from error
    if len(tokenizer) > config.vocab_size:
        raise CheckpointError(
            f"{folder}: the tokenizer has {len(tokenizer)} tokens and the model vocab_size={config.vocab_size}; add "
            f"--set vocab_size={len(tokenizer)}"
        )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if name not in overrides:
            setattr(config, name, getattr(tokenizer, name))
    return files
