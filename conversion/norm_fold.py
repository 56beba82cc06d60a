"""Folding powers of two and signs out of norm weights, so that storing weight - 1 rounds as little as possible.

The function stays what it is, to the bit; what moves, and why, is in norms.py.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING

from gated_qwen.conversion import norms
from gated_qwen.conversion.plan import PlannedTensor, derived
from gated_qwen.conversion.sources import GatedCheckpoint

if TYPE_CHECKING:
    import torch


# Every projection of a layer but the two that write to the residual stream.
_READS_NORM = re.compile(
    r"(?P<layer>model\.layers\.\d+\.)(?P<part>self_attn|mlp)\.(?:experts\.\d+\.)?"
    r"(?:[qkvg]_proj|gate_proj|up_proj|gate)\.weight"
)


def folded(source: GatedCheckpoint) -> GatedCheckpoint:
    """The same function with every norm weight, as far as possible, such that weight - 1 is exact."""
    tensors = dict(source.tensors)
    factor_of: Callable[[str], torch.Tensor] = cache(lambda name: norms.fold_factors(source.tensors[name].make()))
    if any(tensor.dtype == "F16" for tensor in tensors.values()):
        return source  # fp16 has too few exponents: the columns would lose bits
    for layer in range(source.config.num_hidden_layers):
        _fold_query_key(tensors, source.tensors, f"model.layers.{layer}.self_attn.")
    for norm, projections in _readers(source).items():
        get = partial(factor_of, norm)
        if bool((get() == 1).all()):  # nothing to fold: what reads the norm is copied as it is
            continue
        tensors[norm] = derived(norm, (tensors[norm],), partial(_divided, factor=get), "powers of two folded out")
        for name in projections:
            rule = f"{tensors[name].rule}, columns times powers of two"
            tensors[name] = derived(name, (tensors[name],), partial(_scaled_columns, factor=get), rule)
    return GatedCheckpoint(source.config, tensors, source.family, source.side_files, source.recipe, source.warnings)


def _readers(source: GatedCheckpoint) -> dict[str, list[str]]:
    """Which projections read each norm: in a mixture the router and every expert's gate and up projections as well."""
    readers: dict[str, list[str]] = {}
    for name in source.tensors:
        if match := _READS_NORM.fullmatch(name):
            norm = "input_layernorm" if match["part"] == "self_attn" else "post_attention_layernorm"
            readers.setdefault(f"{match['layer']}{norm}.weight", []).append(name)
    if not source.config.tie_word_embeddings:
        readers["model.norm.weight"] = ["lm_head.weight"]
    return readers


def _fold_query_key(tensors: dict[str, PlannedTensor], original: Mapping[str, PlannedTensor], prefix: str) -> None:
    """Trades powers of two between q_norm and k_norm and moves signs into the rows of q_proj and k_proj."""
    norm = {part: original[f"{prefix}{part}_norm.weight"] for part in ("q", "k")}
    signs = {part: cache(lambda part=part: norms.row_signs(norm[part].make())) for part in norm}
    factor = cache(lambda: norms.pair_factors(norm["q"].make().abs(), norm["k"].make().abs()))
    for part, divide in (("q", True), ("k", False)):
        name = norm[part].name
        function = partial(_traded, factor=factor, divide=divide)
        tensors[name] = derived(name, (norm[part],), function, "powers of two traded")
        for kind in ("weight", "bias"):
            projection = f"{prefix}{part}_proj.{kind}"
            if projection in tensors:
                rule = f"{tensors[projection].rule}, signs of the norm in its rows"
                function = partial(_signed_rows, signs=signs[part])
                tensors[projection] = derived(projection, (tensors[projection],), function, rule)


def _divided(weight: "torch.Tensor", factor: Callable[[], "torch.Tensor"]) -> "torch.Tensor":
    return weight / factor()


def _scaled_columns(weight: "torch.Tensor", factor: Callable[[], "torch.Tensor"]) -> "torch.Tensor":
    return weight * factor().to(weight.dtype)


def _traded(weight: "torch.Tensor", factor: Callable[[], "torch.Tensor"], divide: bool) -> "torch.Tensor":
    scale = factor().to(weight.dtype)
    return weight.abs() / scale if divide else weight.abs() * scale


def _signed_rows(weight: "torch.Tensor", signs: Callable[[], "torch.Tensor"]) -> "torch.Tensor":
    per_head = signs().to(weight.dtype)  # (D,), the same for every head
    rows = per_head.repeat(weight.shape[0] // per_head.shape[0])
    return weight * rows.reshape(-1, *[1] * (weight.ndim - 1))


def norm_note(folded: GatedCheckpoint) -> str:
    """Says what storing weight - 1 does to these norms; reads them, since they are small."""
    rounded, total, largest, where = 0, 0, 0.0, set()
    for name, tensor in folded.tensors.items():
        if name.endswith("norm.weight"):
            weight = tensor.make()
            error = norms.relative_error(weight)
            count = int((~norms.is_exact(weight)).sum())
            rounded, total, largest = rounded + count, total + weight.numel(), max(largest, float(error.max()))
            if count:
                where.add(re.sub(r"layers\.\d+", "layers.*", name))
    folding = "norms are stored as weight - 1, after powers of two were folded into the projections that read them: "
    if not rounded:
        return folding + "every norm weight is stored exactly"
    return folding + (
        f"{rounded} of {total} norm weights are rounded, by at most {100 * largest:.2g}% of the weight, since they "
        f"could not be folded: {', '.join(sorted(where))}"
    )
