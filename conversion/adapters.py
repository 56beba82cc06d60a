"""Rewriting an adapter for its base model in another layout, such that both pairs compute the same function.

A conversion of a weight W is W' = R W C with R on rows (fused queries and gates, doubled or with changed signs) and C
on columns (powers of two folded out of norms), so the update s B A of W becomes s (R B)(A C). What cannot be written
as an update of low rank is refused by name: merge it first (`gated-qwen merge`), then convert the model.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gated_qwen
from gated_qwen.conversion import layouts, retrofit
from gated_qwen.conversion.adapter_files import (
    Adapter,
    Update,
    adapter_record,
    described,
    read_adapter,
    side_files,
    write_adapter,
)
from gated_qwen.conversion.checkpoint import CheckpointError, open_checkpoint
from gated_qwen.conversion.families import FAMILIES
from gated_qwen.conversion.folder import check_apart, check_target
from gated_qwen.conversion.locate import resolve_source
from gated_qwen.conversion.sources import GatedCheckpoint, heads_of, read_gated
from gated_qwen.conversion.targets import plan_target

if TYPE_CHECKING:
    import torch

NATIVE = ("qwen3_next", "qwen3_5")
ADAPTER_TARGETS = ("gated_qwen", "official", *NATIVE)
# Projection -> the norm whose output it reads, within a layer.
READS = {
    **{f"self_attn.{name}": "input_layernorm" for name in ("q_proj", "k_proj", "v_proj", "g_proj")},
    **{f"mlp.{name}": "post_attention_layernorm" for name in ("gate_proj", "up_proj")},
}
MERGE_FIRST = "merge it into its base (gated-qwen merge) and convert the model"


@dataclass(frozen=True)
class AdapterResult:
    """What a conversion of an adapter wrote."""

    target: Path
    family: str
    to: str
    modules: int
    parameters: int


def convert_adapter(
    adapter: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str],
    to: str = "gated_qwen",
    from_family: str | None = None,
    gate: str | None = None,
    start: str = "identity",
    new_base: str | None = None,
    overwrite: bool = False,
) -> AdapterResult:
    """Rewrites a LoRA adapter of `base` for what `convert(base, ..., to=to)` makes of it.

    Base and adapter together give the same logits before and after. The options are those of that conversion.

    Args:
        adapter: a folder with adapter_config.json and adapter_model.safetensors.
        target: the adapter folder to write; it appears when everything is written.
        base: the model that the adapter was trained on: a folder, a GGUF file or a Hub repository id.
        to: `"gated_qwen"`, `"official"`, `"qwen3_next"` or `"qwen3_5"`.
        from_family: the base's family; None detects it from its config.json.
        gate: for an ungated base, the granularity of the gate that it was given.
        start: for an ungated base, the start that its gate was given.
        new_base: what adapter_config.json shall name as the base; None leaves it open.
        overwrite: replace a non-empty `target`.

    Raises:
        CheckpointError: the adapter is broken, or holds what the other layout cannot; the message names it.
        FileExistsError: `target` is not empty, and `overwrite` is off or it is not of this package.
        ValueError: an option that is not understood, or `target` lies in one of the sources.
    """
    if to not in ADAPTER_TARGETS:
        raise ValueError(
            f"target {to!r} takes no adapter; choose one of {', '.join(ADAPTER_TARGETS)}, or {MERGE_FIRST}"
        )
    adapter, target = Path(adapter), Path(target)
    check_apart(target, adapter, Path(base))
    check_target(target, overwrite=overwrite)
    read = original = read_adapter(adapter)
    with resolve_source(base) as folder:
        gated = read_gated(open_checkpoint(folder), family=from_family, gate=gate, start=start)
        read = _without_base_weights(read, gated)
        ours = _to_ours(read, gated, start)
        _check_fits(ours, gated)
        converted = _from_ours(ours, gated, to)
    config = {**read.config, "base_model_name_or_path": new_base, "revision": None, "auto_mapping": None}
    if to in NATIVE or _settings(converted) != _settings(read):
        config |= described(converted.updates, gated.config.num_hidden_layers, full_names=to in NATIVE)
    write_adapter(
        target,
        replace(converted, config=config),
        provenance=_recipe(adapter, original, Path(base), gated, to, start),
        side_files=side_files(adapter),
        overwrite=overwrite,
    )
    tensors = [tensor for update in converted.updates.values() for tensor in (update.a, update.b)]
    return AdapterResult(
        target=target,
        family=gated.family,
        to=to,
        modules=len(converted.updates),
        parameters=sum(tensor.numel() for tensor in [*tensors, *converted.others.values()]),
    )


def _recipe(folder: Path, adapter: Adapter, base: Path, gated: GatedCheckpoint, to: str, start: str) -> dict[str, Any]:
    """How the result was made."""
    made = {"gate": gated.config.gate_granularity, "start": start} if gated.family in FAMILIES else {}
    return {
        "format": 1,
        "verb": "convert-adapter",
        "adapter": adapter_record(folder, adapter.config),
        "base": {"name": base.resolve().name if base.exists() else str(base), "family": gated.family, **made},
        "to": to,
        "versions": {"gated-qwen": gated_qwen.__version__},
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _without_base_weights(adapter: Adapter, gated: GatedCheckpoint) -> Adapter:
    """Drops the copies of the base's embedding and head that PEFT saves beside their updates."""
    import torch

    others = dict(adapter.others)
    for name in [name for name in others if name.endswith(".base_layer.weight")]:
        own = name.replace(".base_layer.", ".")
        base = gated.tensors.get(own, gated.tensors["model.embed_tokens.weight"])  # a tied head is the embedding
        if not torch.equal(others.pop(name), base.make()):
            raise CheckpointError(f"tensor {name}: not the base's {own}; was the vocabulary resized? {MERGE_FIRST}")
    return replace(adapter, others=others)


def _check_fits(adapter: Adapter, gated: GatedCheckpoint) -> None:
    """Refuses updates of modules, in our layout, that the base does not have or has in another shape."""
    for name, update in adapter.updates.items():
        tied = name == "lm_head" and gated.config.tie_word_embeddings
        weight = gated.tensors.get("model.embed_tokens.weight" if tied else f"{name}.weight")
        rows, columns = update.b.shape[0], update.a.shape[1]
        shape = (columns, rows) if update.of_embedding else (rows, columns)
        if weight is None or tuple(weight.shape) != shape:
            has = "no such module" if weight is None else f"{tuple(weight.shape)}"
            raise CheckpointError(
                f"module {name}: the adapter updates a weight of shape {shape}, and the base has {has}; name the "
                "model of its training as the base"
            )


def _settings(adapter: Adapter) -> dict[str, tuple[int, float]]:
    return {name: (update.a.shape[0], update.scaling) for name, update in adapter.updates.items()}


def _to_ours(adapter: Adapter, gated: GatedCheckpoint, start: str) -> Adapter:
    """The adapter for the gated model in our layout."""
    if gated.family in FAMILIES:
        if retrofit.DOUBLED not in retrofit.RULES[start]:
            return adapter
        _refuse_others(adapter, lambda name: ".self_attn.o_proj." in name, "o_proj is doubled")
        return _map_rows(adapter, ".self_attn.o_proj", lambda rows: rows * 2, magnitude=lambda rows: rows * 2)
    if gated.family == "gated_qwen":
        return adapter
    rows_of = layouts.native_rows if gated.family in NATIVE else layouts.official_rows
    _refuse_experts(adapter, gated.family)
    _refuse_others(adapter, lambda name: ".self_attn.q_proj." in name, "q_proj is split into queries and gate")
    if gated.family in NATIVE:
        _refuse_others(adapter, lambda name: "norm" in name, "norm weights are stored with another offset")
    rows = rows_of(heads_of(gated.config))
    updates = {}
    for name, update in adapter.updates.items():
        updates[name] = update
        if name.endswith(".self_attn.q_proj"):
            if update.b.shape[0] != len(rows[0]) + len(rows[1]):
                raise CheckpointError(
                    f"module {name}: the adapter's update has {update.b.shape[0]} rows, and the base has "
                    f"{len(rows[0]) + len(rows[1])}; name the model of its training as the base"
                )
            gate_name = name.removesuffix("q_proj") + "g_proj"
            updates[name] = update.with_rows(lambda tensor: layouts.query_part(tensor, rows))
            updates[gate_name] = update.with_rows(lambda tensor: layouts.gate_part(tensor, rows))
    return replace(adapter, updates=updates)


def _from_ours(adapter: Adapter, gated: GatedCheckpoint, to: str) -> Adapter:
    """The adapter for the gated model as `to` writes it."""
    if to == "gated_qwen":
        return adapter
    planned = plan_target(gated, to)  # refuses a model that the family cannot hold
    _refuse_experts(adapter, to)
    if to == "qwen3_next" and (mlp := sorted(name for name in adapter.updates if ".mlp." in name)):
        raise CheckpointError(f"module {mlp[0]}: PEFT takes it for experts in every qwen3_next model; {MERGE_FIRST}")
    _refuse_others(
        adapter, lambda name: ".self_attn.q_proj." in name or ".g_proj" in name, f"the gate lies in q_proj in {to}"
    )
    heads = heads_of(gated.config)
    if to == "official":
        rows = layouts.official_rows(heads)
        return _fused(adapter, lambda query, gate: layouts.fuse(query, gate, rows), heads)
    _refuse_others(
        adapter,
        lambda name: not name.startswith("model.embed_tokens."),
        f"{to} stores norms and what reads them otherwise",
    )
    weights = {tensor.name: tensor for tensor in planned.tensors if tensor.name.endswith("norm.weight")}
    folded = {
        name: _fold(gated.tensors[name].make(), weight.make())
        for name, weight in weights.items()
        if name in gated.tensors
    }
    adapter = replace(adapter, updates={n: _refolded(n, update, folded) for n, update in adapter.updates.items()})
    return _fused(adapter, lambda query, gate: layouts.fuse_by_head(query, gate, heads), heads)


def _fold(weight: "torch.Tensor", shifted: "torch.Tensor") -> "torch.Tensor":
    """The signed power of two by which each channel of a norm was divided on its way to the native family, (C,)."""
    import torch

    ratio = weight.double() / (shifted.double() + 1.0)
    exponent = torch.log2(ratio.abs()).round()
    return torch.where(ratio.isfinite() & (ratio != 0), ratio.sign() * torch.exp2(exponent), torch.ones_like(ratio))


def _refolded(name: str, update: Update, folded: "dict[str, torch.Tensor]") -> Update:
    """An update in our layout with its columns, and for q and k the signs of its rows, as the base's are changed."""
    layer, _, part = name.partition(".self_attn.") if ".self_attn." in name else name.partition(".mlp.")
    part = name.removeprefix(f"{layer}.")
    norm = "model.norm" if name == "lm_head" else f"{layer}.{READS[part]}" if part in READS else None
    columns = folded.get(f"{norm}.weight")
    if columns is not None and bool((columns != 1).any()):
        if update.magnitude is not None:
            raise CheckpointError(
                f"module {name}: DoRA normalises rows, and powers of two were folded into this projection's columns; "
                f"{MERGE_FIRST}"
            )
        update = replace(update, a=update.a * columns.to(update.a.dtype))
    head_norm = (
        folded.get(f"{name.removesuffix('_proj')}_norm.weight") if part.endswith((".q_proj", ".k_proj")) else None
    )
    if head_norm is not None:
        signs = head_norm.sign().repeat(update.b.shape[0] // head_norm.shape[0])[:, None]
        update = replace(update, b=update.b * signs.to(update.b.dtype))
    return update


def _fused(
    adapter: Adapter, fuse: "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]", heads: layouts.Heads
) -> Adapter:
    """Moves the updates of g_proj into those of q_proj; the two ranks add up, each acting on its own rows."""
    updates = {name: update for name, update in adapter.updates.items() if not name.endswith(".g_proj")}
    layers = {name.rpartition(".")[0] for name in adapter.updates if name.endswith((".q_proj", ".g_proj"))}
    for attention in sorted(layers):
        query, gate = (adapter.updates.get(f"{attention}.{part}") for part in ("q_proj", "g_proj"))
        updates[f"{attention}.q_proj"] = _stacked(attention, query, gate, fuse, heads)
    return replace(adapter, updates=updates)


def _stacked(
    attention: str,
    query: Update | None,
    gate: Update | None,
    fuse: "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]",
    heads: layouts.Heads,
) -> Update:
    """The fused projection's update from those of its parts: A stacked, B block-diagonal in the fused row order."""
    import torch

    magnitude = None
    if any(update is not None and update.magnitude is not None for update in (query, gate)):
        if query is None or gate is None or query.magnitude is None or gate.magnitude is None:
            raise CheckpointError(
                f"module {attention}: DoRA on only one of q_proj and g_proj, which are fused; {MERGE_FIRST}"
            )
        magnitude = fuse(query.magnitude, gate.magnitude)
    present = [update for update in (query, gate) if update is not None]
    a = torch.cat([update.a for update in present])
    scaling = present[0].scaling
    blocks, first = [], 0
    for update, rows in ((query, heads.query_rows), (gate, heads.gate_rows)):
        block = a.new_zeros(rows, a.shape[0])
        if update is not None:
            # The other part's scaling is a factor of B; with the same alpha and rank it is 1.
            block[:, first : first + update.a.shape[0]] = update.b * (update.scaling / scaling)
            first += update.a.shape[0]
        blocks.append(block)
    return Update(a, fuse(*blocks), scaling, magnitude)


def _map_rows(
    adapter: Adapter,
    suffix: str,
    rows: "Callable[[torch.Tensor], torch.Tensor]",
    magnitude: "Callable[[torch.Tensor], torch.Tensor]",
) -> Adapter:
    updates = {
        name: replace(
            update, b=rows(update.b), magnitude=None if update.magnitude is None else magnitude(update.magnitude)
        )
        if name.endswith(suffix)
        else update
        for name, update in adapter.updates.items()
    }
    return replace(adapter, updates=updates)


def _refuse_others(adapter: Adapter, affected: Callable[[str], bool], reason: str) -> None:
    """Refuses weights that are saved whole, biases and updates of other kinds where the layouts differ."""
    if wrong := sorted(name for name in adapter.others if affected(name)):
        raise CheckpointError(f"tensor {wrong[0]}: not an update of low rank, and {reason}; {MERGE_FIRST}")


def _refuse_experts(adapter: Adapter, family: str) -> None:
    if adapter.config.get("target_parameters"):
        raise CheckpointError(
            f"adapter_config.json: target_parameters: {family} keeps experts otherwise; {MERGE_FIRST}"
        )
