"""A fresh model folder from a preset, drawn and written tensor by tensor: the model is never in memory."""

import os
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gated_qwen
from gated_qwen.configuration.presets import preset
from gated_qwen.conversion.checkpoint import SIDE_FILES, WRITTEN_DTYPES, CheckpointError
from gated_qwen.conversion.experts import separated_shapes
from gated_qwen.conversion.families import causal_lm_class
from gated_qwen.conversion.folder import atomic_folder, check_target
from gated_qwen.conversion.plan import PlannedTensor, filled
from gated_qwen.conversion.retrofit import drawn
from gated_qwen.conversion.sources import live_shapes
from gated_qwen.conversion.writer import parse_size, write_description, write_weights

if TYPE_CHECKING:
    import torch

    from gated_qwen.conversion.families import GatedConfig


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
    begin: Callable[[int], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Path:
    """Writes a randomly initialised model of a preset's shape, ready to be trained.

    Weights have the distributions that the model class gives them, but are drawn one by one from the seed and their
    name, so they are not those of a model built in memory from the same seed.

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
        begin: called once with the number of bytes to come.
        progress: called with the number of bytes written since the last call.

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

    if dtype not in WRITTEN_DTYPES:
        raise ValueError(f"dtype {dtype!r} is not known; choose one of {', '.join(WRITTEN_DTYPES)}")
    shard_bytes = parse_size(max_shard_size)
    check_target(target, overwrite=overwrite)
    config = preset(preset_name, match_parameters=match_parameters, **(overrides or {}))
    side_files = _tokenizer_files(Path(tokenizer), config, overrides or {}) if tokenizer is not None else []
    config.dtype = dtype
    config.architectures = [causal_lm_class(config).__name__]
    tensors = initial_tensors(config, WRITTEN_DTYPES[dtype], seed)
    if begin is not None:
        begin(sum(tensor.nbytes for tensor in tensors))
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
        write_weights(temporary, tensors, shard_bytes, progress)
        write_description(temporary, config, side_files, recipe)
    return Path(target)


def initial_tensors(config: "GatedConfig", dtype: str, seed: int) -> list[PlannedTensor]:
    """The tensors of a fresh model by their names on disk, with the distributions of the class's `_init_weights`.

    Args:
        config: ours.
        dtype: as safetensors writes it, e.g. `"BF16"`.
        seed: of the normal tensors.
    """
    gate_std = config.initializer_range if config.gate_initializer_range is None else config.gate_initializer_range
    tensors = []
    for name, shape in separated_shapes(live_shapes(config)).items():
        is_gate = ".g_proj" in name
        if name.endswith("norm.weight"):
            tensors.append(filled(name, dtype, shape, 1.0))
        elif name.endswith(".bias") and not (is_gate and config.gate_input == "constant"):
            tensors.append(filled(name, dtype, shape))
        else:
            std = gate_std if is_gate else config.initializer_range
            make: Callable[[], torch.Tensor] = partial(drawn, name, dtype, shape, std, seed)
            if name == "model.embed_tokens.weight" and config.pad_token_id is not None:
                make = partial(_without_row, make, config.pad_token_id)
            tensors.append(PlannedTensor(name, dtype, shape, f"normal, standard deviation {std:g}", make))
    return tensors


def _without_row(make: "Callable[[], torch.Tensor]", row: int) -> "torch.Tensor":
    made = make()
    made[row] = 0  # the embedding of padding
    return made


def _tokenizer_files(folder: Path, config: "GatedConfig", overrides: dict[str, Any]) -> list[Path]:
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
