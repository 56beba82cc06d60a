"""Whole attention maps of a short prompt, and their picture: the paper's heat maps."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gated_qwen.configuration.picture import check_plot
from gated_qwen.conversion.folder import atomic_file
from gated_qwen.diagnostics.attention_interface import AttentionCall, watch_attention
from gated_qwen.diagnostics.attention_kernels import capped_scores
from gated_qwen.diagnostics.decoder import decoder_body
from gated_qwen.diagnostics.visible_keys import is_visible

LONGEST_PROMPT = 512  # tokens: a map is length x length for each layer and head, and no picture shows more
NAMED_TOKENS = 40  # up to so many, tokens are written at the axes
MOST_PANELS = 64


@torch.no_grad()
def attention_maps(
    model: nn.Module, input_ids: Sequence[int] | Tensor, layers: Sequence[int] | None = None
) -> dict[int, Tensor]:
    """The attention weights of one short prompt, whatever attention implementation the model was loaded with.

    Args:
        model: a Hugging Face causal LM, in the mode in which it is to be seen.
        input_ids: (T,) token ids, at most `LONGEST_PROMPT`.
        layers: which; None: every layer of softmax attention.

    Returns:
        By layer, (H, T, T) float32 on the CPU: row i holds the weights of query i, which sum to 1.

    Raises:
        ValueError: the prompt is empty or too long, or a layer has no softmax attention.

    Example:
        >>> from transformers import LlamaForCausalLM
        >>> model = LlamaForCausalLM.from_pretrained(llama_folder).eval()
        >>> maps = attention_maps(model, [1, 2, 3, 4], layers=[1])
        >>> maps[1].shape, maps[1][0, 0].tolist()
        (torch.Size([4, 4, 4]), [1.0, 0.0, 0.0, 0.0])
    """
    ids = torch.as_tensor(input_ids, dtype=torch.long).flatten()
    if not 1 <= len(ids) <= LONGEST_PROMPT:
        raise ValueError(
            f"the prompt has {len(ids):,} tokens; maps are drawn for 1 to {LONGEST_PROMPT}, and gated-qwen diagnose "
            "measures any length"
        )
    maps: dict[int, Tensor] = {}
    seen = []

    def keep(call: AttentionCall) -> None:
        seen.append(call.layer)
        if layers is None or call.layer in layers:
            maps[call.layer] = _weights(call).cpu()

    with watch_attention(model, keep):
        body = decoder_body(model)
        body(input_ids=ids[None].to(next(body.parameters()).device), use_cache=False)
    if missing := sorted(set(layers or ()) - set(maps)):
        raise ValueError(f"layer {missing[0]} has no softmax attention; those that do: {', '.join(map(str, seen))}")
    return maps


def draw_attention_maps(
    maps: dict[int, Tensor],
    tokens: Sequence[str],
    file: str | os.PathLike[str],
    title: str,
    heads: Sequence[int] | None = None,
) -> None:
    """Draws one row of panels for each layer: queries downwards, keys to the right, and one colour scale from 0 to 1.

    Args:
        maps: as `attention_maps` returns them.
        tokens: T texts for the axes; they are left out beyond `NAMED_TOKENS`.
        file: where to write; the ending says how.
        title: above the panels.
        heads: one panel for each; None: one panel with their mean.

    Raises:
        ValueError: a head that is not there, more than `MOST_PANELS` panels; or as `check_plot`.
        FileNotFoundError: as `check_plot`.
    """
    check_plot(file)
    panels = [panel for layer in sorted(maps) for panel in _panels(layer, maps[layer], heads)]
    columns = len(heads) if heads else min(4, len(panels))
    if not 1 <= len(panels) <= MOST_PANELS:
        raise ValueError(
            f"{len(panels)} panels of layers and heads; 1 to {MOST_PANELS} fit on a picture: choose fewer"
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    size = 3.0 if len(tokens) > NAMED_TOKENS else min(8.0, max(3.0, 0.22 * len(tokens)))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(1.3 + size * columns, 0.6 + (size + 0.35) * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize="medium", parse_math=False)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, (name, weights, share) in zip(axes, panels, strict=False):
        # Small weights are most of a map: the square root of the scale makes them visible.
        image = axis.imshow(
            _blank_future(weights).numpy(), cmap="magma_r", norm=PowerNorm(0.5, 0.0, 1.0), interpolation="nearest"
        )
        axis.set_title(f"{name}: first token {share:.1%}", fontsize="small", loc="left")
        _name_tokens(axis, tokens)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.colorbar(image, ax=list(axes), label="attention weight (square-root scale)", shrink=0.6)
    with atomic_file(Path(file)) as partial:
        figure.savefig(partial, dpi=130, format=Path(file).suffix[1:].lower())


def _panels(layer: int, weights: Tensor, heads: Sequence[int] | None) -> list[tuple[str, Tensor, float]]:
    """(name, map (T, T), mean share of the first token) of each panel of a layer."""
    if heads is None:
        mean = weights.mean(0)
        return [(f"layer {layer}", mean, float(mean[:, 0].mean()))]
    if wrong := [head for head in heads if not 0 <= head < len(weights)]:
        raise ValueError(f"head {wrong[0]}: layer {layer} has heads 0 to {len(weights) - 1}")
    return [(f"layer {layer}, head {head}", weights[head], float(weights[head, :, 0].mean())) for head in heads]


def _blank_future(weights: Tensor) -> Tensor:
    """The map (T, T) with NaN, which is not painted, at the keys after each query."""
    return weights.masked_fill(torch.ones_like(weights, dtype=torch.bool).triu(1), float("nan"))


def _name_tokens(axis: Any, tokens: Sequence[str]) -> None:
    if len(tokens) > NAMED_TOKENS:
        axis.set_xlabel("key", fontsize="small")
        axis.set_ylabel("query", fontsize="small")
        axis.tick_params(labelsize="small")
        return
    names = [token.replace("\n", "\\n") for token in tokens]
    axis.set_xticks(range(len(names)), names, rotation=90, fontsize="x-small", parse_math=False)
    axis.set_yticks(range(len(names)), names, fontsize="x-small", parse_math=False)


def _weights(call: AttentionCall) -> Tensor:
    """(H, T, T) from the scores and their log-sum-exp: exp(s_ij - l_i)."""
    scores = capped_scores(call.query.float(), call.key.float(), call.scale, call.softcap)[0]
    length = scores.shape[-1]
    visible = torch.ones(length, length, dtype=torch.bool, device=scores.device).tril()
    if call.mask is not None:
        visible = is_visible(call.mask[0])
        if call.mask.dtype != torch.bool:
            scores = scores + call.mask[0].float()
    return torch.exp(scores - call.logsumexp[0, :, :, None].float()).masked_fill(~visible, 0.0)
