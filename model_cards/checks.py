"""All that is checked of a folder before anything of it is sent; nothing is asked of the Hub."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gated_qwen.conversion.checkpoint import INDEX_NAME, Checkpoint, open_checkpoint
from gated_qwen.conversion.families import official_gate_flags
from gated_qwen.model_cards.card import check_card, read_card
from gated_qwen.model_cards.published_files import LeftOut, PublishedFile, list_files
from gated_qwen.model_cards.remote_code import check_remote_code, refresh_remote_code
from gated_qwen.model_cards.subject import auto_class

CARD_NAME = "README.md"
ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class Publication:
    """A folder that may be sent: its files and card, the Auto class that loads it, and what one should know."""

    files: list[PublishedFile]
    left_out: list[LeftOut]
    card: str
    auto_class: str
    remote_code: bool
    notes: list[str] = field(default_factory=list)


def check_publication(
    folder: str | os.PathLike[str],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    refresh_code: bool = False,
) -> Publication:
    """Checks that a folder is a whole model with current code and a valid card, and holds nothing that must stay here.

    Args:
        folder: a model folder; config.json, safetensors weights and README.md are needed.
        include, exclude: patterns; see `list_files`.
        refresh_code: first write this package's current code and auto_map into the folder.

    Raises:
        ValueError: what is wrong, where, and the mend.
    """
    folder = Path(folder)
    if (folder / ADAPTER_CONFIG).exists() and not (folder / "config.json").exists():
        raise ValueError(f"{folder}: an adapter; push it with PEFT's push_to_hub, or gated-qwen merge it first")
    checkpoint = open_checkpoint(folder)
    _check_names(checkpoint)
    config = load_config(checkpoint)
    ours = type(config).__module__.split(".")[0] == "gated_qwen"
    if ours and refresh_code:
        refresh_remote_code(folder, type(config))
        checkpoint = open_checkpoint(folder)
    notes = check_tensors(checkpoint, config)
    if ours:
        check_remote_code(folder, type(config))
    notes += check_tokenizer(folder, config)
    card = read_card(folder / CARD_NAME)
    check_card(card, folder)
    weights = {info.file for info in checkpoint.tensors.values()}
    files, left_out = list_files(folder, weights, include=include, exclude=exclude)
    sent = {file.path for file in files}
    _check_complete(sent, checkpoint, [*weights, folder / CARD_NAME])
    if ADAPTER_CONFIG in sent:
        raise ValueError(
            f"{folder / ADAPTER_CONFIG}: an adapter beside a model; where PEFT is installed, transformers loads the "
            "adapter's base instead of these weights; remove it, or pass --exclude 'adapter_*'"
        )
    return Publication(files, left_out, card, auto_class(checkpoint.config), ours, notes)


def load_config(checkpoint: Checkpoint) -> Any:
    """The config object of a folder, of this package or of transformers; code in the folder is not run.

    Raises:
        ValueError: the config cannot be loaded, or nothing can load the model.
    """
    from transformers import AutoConfig

    import gated_qwen

    gated_qwen.register_auto_classes()
    file = checkpoint.folder / "config.json"
    if flags := official_gate_flags(checkpoint.config):
        raise ValueError(
            f"{file}: {flags[0]} marks the official layout, which transformers cannot load; convert it with "
            "gated-qwen convert and push the result"
        )
    try:
        return AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
    except Exception as error:  # transformers and its checks raise whatever comes
        reason = error.__cause__ if type(error).__name__.startswith("StrictDataclass") and error.__cause__ else error
        if "trust_remote_code" in str(error) or "does not recognize" in str(error):
            reason = ValueError(f"model_type {checkpoint.config.get('model_type')!r} is not known here")
        raise ValueError(f"{file}: {' '.join(str(reason).split())}") from error


def check_tensors(checkpoint: Checkpoint, config: Any) -> list[str]:
    """Compares the tensors in the files with those of the model, by name and shape, without reading them.

    The model is built on the meta device; where transformers writes tensors in another form than it computes with
    (experts one by one), its own conversion says what must be in the files.

    Returns:
        What could not be checked.

    Raises:
        ValueError: a tensor that is missing, too many, or of another shape.
    """
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    file = checkpoint.folder / "config.json"
    if checkpoint.config.get("quantization_config"):
        return ["the weights are quantised, so their names and shapes were not compared with the model"]
    named = checkpoint.config.get("architectures")
    if not named or not isinstance(named, list):
        raise ValueError(f'{file}: architectures is missing; name the class of the model, as ["GatedQwenForCausalLM"]')
    try:
        with torch.device("meta"):
            model: Any = getattr(transformers, auto_class(checkpoint.config)).from_config(config)
    except Exception as error:  # a config that contradicts itself raises whatever comes
        raise ValueError(f"{file}: no model can be built from it ({' '.join(str(error).split())})") from error
    if type(model).__name__ != named[0]:
        raise ValueError(
            f"{file}: architectures names {named[0]}, and its model_type has {type(model).__name__}; serving engines "
            "choose the class by this name"
        )
    expected = {
        name: tuple(value.shape) for name, value in revert_weight_conversion(model, model.state_dict()).items()
    }
    found = {name: info.shape for name, info in checkpoint.tensors.items()}
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    for name, shape in expected.items():
        if name not in found and name not in tied:
            raise ValueError(f"{checkpoint.folder}: tensor {name} is missing; save the model again")
        if name in found and found[name] != shape:
            raise ValueError(
                f"{checkpoint.tensors[name].file}: tensor {name} has shape {list(found[name])}, and config.json asks "
                f"for {list(shape)}; save config and weights together"
            )
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    for name in sorted(set(found) - set(expected)):
        if not any(re.search(pattern, name) for pattern in ignored):
            raise ValueError(
                f"{checkpoint.tensors[name].file}: tensor {name} is not part of {type(model).__name__}, so whoever "
                "loads the model loses it; does config.json belong to these weights?"
            )
    return []


def check_tokenizer(folder: Path, config: Any) -> list[str]:
    """Loads the tokenizer if there is one; code that it brings is not run.

    Returns:
        What one should know: there is no tokenizer, or it was not checked.

    Raises:
        ValueError: the tokenizer does not load, or has more tokens than the model.
    """
    from transformers import AutoTokenizer

    if not any(folder.glob("tokenizer*")):
        return ["there is no tokenizer in the folder, so the model's pipeline will not work from its name alone"]
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the libraries that read tokenizers raise whatever comes
        if "trust_remote_code" in str(error):
            return ["the tokenizer runs code of its own, so it was not loaded"]
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"{folder}: the tokenizer does not load ({reason})") from error
    vocab_size = config.get_text_config(decoder=True).vocab_size
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"{folder}: the tokenizer has {len(tokenizer):,} tokens and the model a vocabulary of {vocab_size:,}; "
            "resize the model's embeddings, or put its own tokenizer there"
        )
    return []


def _check_names(checkpoint: Checkpoint) -> None:
    """A lone file of any name can be opened here, and nobody else finds it."""
    if not (checkpoint.folder / INDEX_NAME).exists():
        for path in {info.file for info in checkpoint.tensors.values()}:
            if path.name != "model.safetensors":
                raise ValueError(f"{path}: transformers looks for model.safetensors; rename the file")


def _check_complete(sent: set[str], checkpoint: Checkpoint, needed: Sequence[Path]) -> None:
    """Patterns must not take away what the model needs."""
    names = {path.relative_to(checkpoint.folder).as_posix() for path in needed} | {"config.json"}
    if missing := sorted(names - sent):
        raise ValueError(f"{checkpoint.folder / missing[0]}: the model needs it, and --exclude leaves it out")
