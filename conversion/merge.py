"""Merging an adapter into its base model: PEFT does the sums, and the result is a complete model folder."""

import os
import warnings
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import gated_qwen
from gated_qwen.conversion.adapter_files import (
    PREFIX,
    WEIGHTS_NAME,
    adapter_record,
    copy_side_files,
    method_of,
    read_adapter_config,
    read_adapter_tensors,
    side_files,
)
from gated_qwen.conversion.checkpoint import CheckpointError, open_checkpoint, read_config, read_json
from gated_qwen.conversion.families import official_gate_flags
from gated_qwen.conversion.folder import atomic_folder, check_apart, check_target
from gated_qwen.conversion.locate import resolve_source
from gated_qwen.conversion.source_card import source_card
from gated_qwen.conversion.writer import PROVENANCE_NAME, parse_size, write_json

# The Auto class of each PEFT task.
AUTO_CLASSES = {
    None: "AutoModelForCausalLM",
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
}


@dataclass(frozen=True)
class MergeResult:
    """What a merge wrote."""

    target: Path
    base: str
    adapter: str
    method: str
    parameters: int
    dtype: str
    tie_word_embeddings: bool
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For printing as JSON."""
        return {**asdict(self), "target": str(self.target)}


def merge_adapter(
    adapter: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    max_shard_size: str | int = "5GB",
    overwrite: bool = False,
    trust_remote_code: bool = False,
) -> MergeResult:
    """Merges an adapter folder (LoRA with all its variants, and whatever else PEFT can merge) into its base model.

    The base is loaded whole, on the CPU, and stays as it is on disk. Where the base ties its head to its embedding and
    the adapter changes one of them, the result has a head of its own and says so in its config.

    Args:
        adapter: a folder with adapter_config.json and adapter_model.safetensors.
        target: the model folder to write; it appears when everything is written.
        base: the model that the adapter was trained on, a folder or a Hub repository id; None takes the one that
            adapter_config.json names.
        dtype: `"float32"`, `"bfloat16"` or `"float16"` for the merged weights; None keeps the base's.
        max_shard_size: bytes, or a text such as `"5GB"`.
        overwrite: replace a non-empty `target`.
        trust_remote_code: run the code of a base model that is not of this package.

    Raises:
        CheckpointError: the adapter or the base is missing, broken, or of a kind that cannot be merged.
        FileExistsError: `target` is not empty, and `overwrite` is off.
        ValueError: an option that is not understood, or `target` is one of the sources.
    """
    import torch

    adapter, target = Path(adapter), Path(target)
    config = read_adapter_config(adapter)
    _check_kind(config)
    base = base or config.get("base_model_name_or_path")
    if not base or not isinstance(base, str | os.PathLike):
        raise CheckpointError(f"{adapter}: adapter_config.json names no base model; give it with --base")
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise ValueError(f"dtype {dtype!r} is not known; choose one of float32, bfloat16, float16")
    shard_size = parse_size(max_shard_size)
    check_apart(target, adapter, Path(base))
    check_target(target, overwrite=overwrite)
    with resolve_source(base) as folder:
        model = _load_base(folder, config, trust_remote_code)
        tied = bool(getattr(model.config, "tie_word_embeddings", False))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of ties, which are dealt with here
            merged = _merge(model, adapter, config)
        notes: list[str] = []
        recipe = _recipe(folder, str(base), adapter, config, dtype, notes)
        if tied and not merged.config.tie_word_embeddings:
            notes.append("the adapter changes the embedding or the head, so the result's head is no longer tied to it")
        if dtype is not None:
            merged = merged.to(getattr(torch, dtype))
        _check_finite(merged)
        with atomic_folder(target, overwrite=overwrite) as temporary:
            merged.save_pretrained(temporary, max_shard_size=shard_size)
            # What came with the adapter, e.g. a tokenizer with new tokens, goes above the base's.
            copy_side_files([*side_files(folder), *side_files(adapter)], temporary)
            write_json(temporary / PROVENANCE_NAME, recipe)
    return MergeResult(
        target=target,
        base=str(base),
        adapter=str(adapter),
        method=method_of(config),
        parameters=sum(parameter.numel() for parameter in merged.parameters()),
        dtype=str(merged.dtype).removeprefix("torch."),
        tie_word_embeddings=bool(getattr(merged.config, "tie_word_embeddings", False)),
        notes=tuple(notes),
    )


def _check_kind(config: dict[str, Any]) -> None:
    """Refuses what cannot be merged before PEFT loads it: some kinds name further files to load."""
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    kind = config["peft_type"]
    mergeable = {
        peft_type.value
        for peft_type, tuner in PEFT_TYPE_TO_TUNER_MAPPING.items()
        if hasattr(tuner, "merge_and_unload") and peft_type.value != "XLORA"
    }
    if kind not in mergeable:
        raise CheckpointError(f"adapter_config.json: peft_type {kind!r}: this kind of adapter cannot be merged")
    task = config.get("task_type")
    if not isinstance(task, str | None) or task not in AUTO_CLASSES:
        known = ", ".join(filter(None, AUTO_CLASSES))
        raise CheckpointError(f"adapter_config.json: task_type {task!r} is not merged; known: {known}")


def _load_base(folder: Path, adapter_config: dict[str, Any], trust_remote_code: bool) -> Any:
    import transformers

    config = read_config(folder)
    if official_gate_flags(config):
        raise CheckpointError(
            f"{folder}: transformers cannot load the official layout; convert base and adapter to gated_qwen first"
        )
    if config.get("quantization_config"):
        raise CheckpointError(
            "config.json: quantization_config: an adapter is not merged into quantised weights; give the unquantised "
            "base with --base"
        )
    open_checkpoint(folder)  # refuses broken files, pickles and paths out of the folder
    gated_qwen.register_auto_classes()
    auto_class = getattr(transformers, AUTO_CLASSES[adapter_config.get("task_type")])
    return auto_class.from_pretrained(folder, dtype="auto", use_safetensors=True, trust_remote_code=trust_remote_code)


def _merge(model: Any, adapter: Path, config: dict[str, Any]) -> Any:
    """The base with the adapter merged in; a tied pair of which one has changed is untied."""
    import torch
    from peft import PeftModel

    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    head = model.get_output_embeddings()
    if tied and head is not None:
        # Merged in place, an update of one of the two would be one of the other as well.
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False
    try:
        wrapped = PeftModel.from_pretrained(model, str(adapter))
    except Exception as error:  # PEFT raises whatever a config of wrong values brings about
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{adapter}: does not fit its base model ({reason[:300]})") from error
    kept_tied = tied and bool(config.get("ensure_weight_tying"))  # PEFT trained both as one
    _check_all_used(wrapped, adapter, "lm_head." if kept_tied else None)
    try:
        merged = wrapped.merge_and_unload()
    except (RuntimeError, ValueError) as error:  # a kind of update that the base's modules have no place for
        raise CheckpointError(f"{adapter}: cannot be merged ({' '.join(str(error).split())})") from error
    embedding, head = merged.get_input_embeddings(), merged.get_output_embeddings()
    if tied and head is not None and (kept_tied or torch.equal(head.weight, embedding.weight)):
        head.weight = embedding.weight
        merged.config.tie_word_embeddings = True
    return merged


def _check_all_used(wrapped: Any, adapter: Path, ignored: str | None) -> None:
    """Refuses an adapter of which the base has no place for a part: PEFT would leave that part out without a word."""
    from peft import get_peft_model_state_dict

    def placed(with_embeddings: bool) -> set[str]:
        state = get_peft_model_state_dict(wrapped, save_embedding_layers=with_embeddings)
        return {name.removeprefix(PREFIX) for name in state}

    saved = read_adapter_tensors(adapter).keys()
    for names, problem in ((saved - placed(True), "has no place in the base"), (placed(False) - saved, "is missing")):
        wrong = sorted(name for name in names if not (ignored and name.startswith(ignored)))
        if wrong:
            raise CheckpointError(
                f"{adapter / WEIGHTS_NAME}: tensor {wrong[0]} {problem}; give the model of its training with --base"
            )


def _check_finite(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if not bool(parameter.detach().sum().isfinite()) and not bool(parameter.detach().isfinite().all()):
            raise CheckpointError(f"tensor {name}: the merged weight is not finite; is the adapter broken?")


def _recipe(
    folder: Path, base: str, adapter: Path, config: dict[str, Any], dtype: str | None, notes: list[str]
) -> dict[str, Any]:
    """How the result was made; the base's own record and its card's licence, where it has them, go along."""
    import peft
    import torch
    import transformers

    path = Path(base)
    source: dict[str, Any] = {"name": path.resolve().name if path.exists() else base}
    if (folder / PROVENANCE_NAME).exists():
        source["provenance"] = read_json(folder / PROVENANCE_NAME, "repair it or remove it")
    try:
        if card := source_card(folder):
            source["card"] = card
    except CheckpointError as error:  # no reason not to merge
        notes.append(str(error))
    return {
        "format": 1,
        "verb": "merge",
        "source": source,
        "adapter": adapter_record(adapter, config),
        "dtype": dtype or "as in the source",
        "versions": {
            "gated-qwen": gated_qwen.__version__,
            "peft": peft.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
