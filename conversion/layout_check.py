"""Telling the layouts of a fused `q_proj` apart: shapes cannot, the loss on text can."""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gated_qwen.conversion import layouts, norms
from gated_qwen.conversion.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from gated_qwen.conversion.experts import live_state
from gated_qwen.conversion.families import causal_lm_class, detect_source
from gated_qwen.conversion.plan import PlannedTensor
from gated_qwen.conversion.sources import GatedCheckpoint, heads_of, is_norm, read_gated

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LayoutLoss:
    """The mean loss in nats per token of a text under one layout and one reading of the norms."""

    layout: str
    norms: str
    loss: float


def check_layouts(folder: str | os.PathLike[str], text: str, max_tokens: int = 512) -> list[LayoutLoss]:
    """Tries every layout on a fused checkpoint and measures the loss on a text, best first.

    Both readings of the norms, weight and 1 + weight, are tried with each layout. Uniform guessing costs
    ln(vocabulary) nats.

    Args:
        folder: a checkpoint with query and gate rows in one `q_proj`, and its tokenizer.
        text: real text of the kind that the model was trained on.
        max_tokens: only so many tokens of it are read.

    Raises:
        CheckpointError: the checkpoint is not fused, or has no tokenizer.
    """
    from transformers import AutoTokenizer

    checkpoint = open_checkpoint(folder)
    family = detect_source(checkpoint.config)
    if family not in ("official", "qwen3_next", "qwen3_5"):
        raise CheckpointError(f"{folder}: {family} has no fused q_proj, so there is no layout to check")
    if not any(path.name.startswith("tokenizer") for path in checkpoint.side_files()):
        raise CheckpointError(f"{folder}: no tokenizer files; the layout check reads text")
    tokenizer = AutoTokenizer.from_pretrained(Path(folder), trust_remote_code=False)
    tokens = tokenizer(text, return_tensors="pt")["input_ids"][:, :max_tokens]
    if tokens.shape[1] < 2:
        raise ValueError(f"the text for the layout check has {tokens.shape[1]} tokens; it needs two at least")
    source = read_gated(checkpoint, family=family)
    losses = []
    for layout, rows_of in layouts.LAYOUTS.items():
        for reading in ("weight", "1 + weight"):
            tensors = _reread(checkpoint, source, rows_of(heads_of(source.config)), reading)
            losses.append(LayoutLoss(layout, reading, _loss(source, tensors, tokens)))
    return sorted(losses, key=lambda entry: math.inf if math.isnan(entry.loss) else entry.loss)


def _reread(
    checkpoint: Checkpoint, source: GatedCheckpoint, rows: layouts.Rows, reading: str
) -> dict[str, PlannedTensor]:
    """The source's tensors with q_proj split by other rows and the norms read as said."""
    tensors = {}
    for name, tensor in source.tensors.items():
        make = tensor.make
        if len(tensor.sources) == 1 and ".self_attn.q_proj." in tensor.sources[0]:
            part = rows[1] if ".g_proj." in name else rows[0]
            make = _part_maker(checkpoint, tensor.sources[0], part)
        elif is_norm(name):
            make = _norm_maker(checkpoint, tensor.sources[0], reading)
        tensors[name] = replace(tensor, make=make, copy_of=None)
    return tensors


def _part_maker(checkpoint: Checkpoint, name: str, rows: list[int]):  # type: ignore[no-untyped-def]
    return lambda: checkpoint.load(name)[rows]


def _norm_maker(checkpoint: Checkpoint, name: str, reading: str):  # type: ignore[no-untyped-def]
    return lambda: checkpoint.load(name) if reading == "weight" else norms.unshift(checkpoint.load(name))


def _loss(source: GatedCheckpoint, tensors: dict[str, PlannedTensor], tokens: "torch.Tensor") -> float:
    import torch

    with torch.device("meta"):
        model = causal_lm_class(source.config)(source.config)
    model.to_empty(device="cpu")
    state = {name: tensor.make().float() for name, tensor in tensors.items()}
    if source.config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    model.load_state_dict(live_state(state, shapes), assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(source.config)
    with torch.no_grad():
        return float(model.eval()(tokens, labels=tokens, use_cache=False).loss)
