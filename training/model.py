"""The model of a run: fresh from a preset, or an existing one to go on with."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint

from gated_qwen.training.checkpoints import SHARDS
from gated_qwen.training.gates import freeze_all_but_gates, gate_parameters
from gated_qwen.training.recipe import ModelSection, Recipe

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def build_model(recipe: Recipe, tokenizer: Any, seed: int) -> Any:
    """Builds or loads what the recipe trains, with fp32 or bf16 parameters as it says.

    Args:
        recipe: a recipe.
        tokenizer: the run's tokenizer; a fresh model takes its vocabulary size and special ids from it, unless the
            recipe sets them.
        seed: of a fresh model's weights.

    Returns:
        A Hugging Face causal LM.

    Raises:
        ValueError: a preset or source that cannot be trained as it is; `check_model` finds what else may be wrong.
    """
    model = _fresh(recipe, tokenizer, seed) if recipe.model.preset is not None else _existing(recipe)
    if recipe.gate.train_only:
        freeze_all_but_gates(model)
    return model


def check_model(recipe: Recipe, tokens: int) -> Any:
    """Builds the recipe's model without memory for its weights: a fault shows before hours of tokenising.

    Args:
        recipe: a recipe.
        tokens: of its tokenizer.

    Returns:
        The model, on torch's meta device.

    Raises:
        ValueError: an unknown preset, field or attention implementation, a source that cannot be trained as it is, a
            vocabulary smaller than the tokenizer's, rows longer than the model's positions, or settings of gates that
            it lacks.
    """
    from transformers import AutoModelForCausalLM

    wanted = recipe.model
    config = source_config(wanted) if wanted.source is not None else _preset_config(wanted, vocab_size=tokens)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=wanted.attention)
    except (ValueError, ImportError) as error:
        if wanted.attention not in str(error) and not isinstance(error, ImportError):
            raise ValueError(f"model: {' '.join(str(error).split())}") from error
        raise ValueError(f"model.attention: {' '.join(str(error).split())}") from error
    config = model.config.get_text_config(decoder=True)
    if tokens > config.vocab_size:
        raise ValueError(f"model.set.vocab_size: the model has {config.vocab_size} tokens and the tokenizer {tokens}")
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and recipe.data.length > limit:
        raise ValueError(
            f"data.length: rows of {recipe.data.length} tokens do not fit max_position_embeddings={limit}; set "
            "model.set.max_position_embeddings for a fresh model, or extend a source with `gated-qwen extend`"
        )
    gate = recipe.gate
    settings = {"learning_rate": gate.learning_rate, "weight_decay": gate.weight_decay, "train_only": gate.train_only}
    for name, value in settings.items():
        if value not in (None, False) and not gate_parameters(model):
            raise ValueError(f"gate.{name}: the model has no gate; leave it out, or give it one (gate_positions)")
    return model


def load_trained(checkpoint: Path, recipe: Recipe, tokenizer: Any) -> Any:
    """The model of a run's own checkpoint, in one piece though it be kept in FSDP2's shards."""
    from transformers import AutoModelForCausalLM

    wanted = recipe.model
    if (shards := checkpoint / SHARDS).is_dir():
        model = build_model(recipe, tokenizer, seed=0)
        torch.distributed.checkpoint.load({"model": model.state_dict()}, checkpoint_id=shards, no_dist=True)
        return model
    return AutoModelForCausalLM.from_pretrained(
        checkpoint, attn_implementation=wanted.attention, dtype=getattr(torch, wanted.dtype)
    )


def _fresh(recipe: Recipe, tokenizer: Any, seed: int) -> Any:
    wanted = recipe.model
    config = _preset_config(
        wanted, vocab_size=len(tokenizer), **{name: getattr(tokenizer, name) for name in TOKEN_IDS}
    )
    torch.manual_seed(seed)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(
        config, attn_implementation=wanted.attention, dtype=getattr(torch, wanted.dtype)
    )


def _preset_config(wanted: ModelSection, **defaults: Any) -> Any:
    from gated_qwen.configuration.presets import preset

    assert wanted.preset is not None
    try:
        return preset(wanted.preset, match_parameters=wanted.match_parameters, **{**defaults, **wanted.set})
    except ValueError as error:
        raise ValueError(f"model: {error}") from error


def _existing(recipe: Recipe) -> Any:
    from transformers import AutoModelForCausalLM

    wanted = recipe.model
    load: Any = AutoModelForCausalLM.from_pretrained  # typed as if it returned the model alone
    try:
        model, report = load(
            wanted.source,
            revision=wanted.revision,
            config=source_config(wanted),
            attn_implementation=wanted.attention,
            dtype=getattr(torch, wanted.dtype),
            output_loading_info=True,
        )
    except OSError as error:
        raise ValueError(f"model.source: {' '.join(str(error).split())}") from error
    lost = [name for name in report["unexpected_keys"] if "g_proj" in name]
    for names, what in ((report["missing_keys"], "is missing and would start at random"), (lost, "would be left out")):
        if names:
            raise ValueError(f"model.source: {min(names)} of {wanted.source} {what}: config and weights differ")
    return model


def source_config(wanted: ModelSection) -> Any:
    """The config of a recipe's source, with the recipe's changes; cheap, so that a wrong source is refused at once.

    Raises:
        ValueError: there is no model, its layout is another one, or it cannot be changed so.
    """
    from transformers import AutoConfig

    source = str(wanted.source)
    _check_folder(source)
    try:
        config = AutoConfig.from_pretrained(source, revision=wanted.revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(f"model.source: {source} needs code of its own, which is not run here") from error
        raise ValueError(f"model.source: {' '.join(str(error).split())}") from error
    _check_layout(config, source)
    return _changed(config, wanted.set, source)


def _changed(config: Any, changes: dict[str, Any], source: str) -> Any:
    """A config with other values, checked by its own class."""
    for name in changes:
        if not hasattr(config, name):
            raise ValueError(f"model.set.{name}: {source} has no such config field")
    if {"rope_theta", "rope_scaling", "rope_parameters"} & changes.keys():
        raise ValueError("model.set: `gated-qwen extend` changes the positions of a source")
    try:
        return type(config).from_dict({**config.to_dict(), **changes}) if changes else config
    except ValueError as error:
        raise ValueError(f"model.set: {error}") from error


def _check_folder(source: str) -> None:
    """Refuses a path at which no model is, which transformers would take for a Hub id."""
    folder = Path(source)
    if not folder.exists():
        if source.startswith(("/", ".", "~")) or source.count("/") != 1:
            raise ValueError(f"model.source: {source}: there is no such folder")
    elif (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ValueError(
            f"model.source: {source} is an adapter; run `gated-qwen merge {source} OUT` and name OUT, or train the "
            "adapter on with PEFT"
        )
    elif not (folder / "config.json").is_file():
        raise ValueError(f"model.source: {source} holds no config.json; name the folder of a model")


def _check_layout(config: Any, source: str) -> None:
    """The official layout says qwen3, and transformers would load it with a wrong q_proj."""
    if getattr(config, "headwise_attn_output_gate", False) or getattr(config, "elementwise_attn_output_gate", False):
        raise ValueError(
            f"model.source: {source} is in the official layout; run `gated-qwen convert {source} OUT` and name OUT"
        )
