"""Attention that also returns the log-sum-exp of each query's scores, without a matrix of all queries by all keys.

The fused kernels behind `scaled_dot_product_attention` compute l_i = log sum_j exp(s_ij) for their backward pass. With
it the attention weight of any single pair is exp(s_ij - l_i), so a few columns or rows of the map cost a few dot
products.

Shapes: B batch, T queries, S keys, H query heads, K key/value heads, D head_dim of queries and keys, E of values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

BLOCK_BYTES = 2**26  # of scores, or of an additive mask, that exist at one time

# (query, key, value (B, H, ., D), additive mask or None, scale, causal) -> output (B, H, T, D), logsumexp (B, H, T)
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, float, bool], tuple[Tensor, Tensor]]


def attention_with_logsumexp(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """softmax(scale Q K^T + mask) V, by a fused kernel where one can do it and block by block where none can.

    Args:
        query: (B, H, T, D).
        key, value: (B, K, S, D) and (B, K, S, E), K a divisor of H.
        mask: (B or 1, H or 1, T, S), bool (True: visible) or additive.
        scale: factor on the scores.
        causal: query i sees keys 0 to i; only without `mask`.
        softcap: c of scores c tanh(s / c), before the mask (Gemma 2).
        sink_logits: (H,) logits that join each query's denominator and have no value (gpt-oss); the weights on the
            keys then sum to less than one.
        dropout: probability of dropping a weight; it acts on the output alone.

    Returns:
        The output (B, H, T, E), which carries gradients, and the log-sum-exp (B, H, T), float32 (float64 for float64
        inputs), which does not. A query that sees no key has output 0 and an arbitrary log-sum-exp.

    Example:
        >>> query, key, value = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> output, logsumexp = attention_with_logsumexp(query, key, value, scale=0.5, causal=True)
        >>> share = torch.exp(0.5 * (query * key[:, :, :1]).sum(-1) - logsumexp)  # of each query on the first key
        >>> torch.allclose(share[:, :, 0], torch.ones(1, 2))  # the first query sees nothing else
        True
    """
    kernel = None if softcap is not None or sink_logits is not None else fused_kernel(query, key, value, mask)
    if kernel is None:
        return blocked_attention(
            query,
            key,
            value,
            mask,
            scale=scale,
            causal=causal,
            softcap=softcap,
            sink_logits=sink_logits,
            dropout=dropout,
        )
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # the kernels take grouped heads in some versions only
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if dropout > 0:
        with torch.no_grad():
            _, logsumexp = _in_blocks(kernel, query, key, value, mask, scale, causal)
        dropped = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale
        )
        return dropped, logsumexp
    output, logsumexp = _in_blocks(kernel, query, key, value, mask, scale, causal)
    return output, logsumexp.detach()


def blocked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    dropout: float = 0.0,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """The reference of `attention_with_logsumexp`, and its fallback: exact softmax, some queries at a time.

    Args:
        compute_dtype: of scores and sums, float32 or float64; float64 inputs are always computed in float64.
        query, key, value, mask, scale, causal, softcap, sink_logits, dropout: as `attention_with_logsumexp`.

    Returns:
        As `attention_with_logsumexp`; the log-sum-exp is in the dtype of the sums.
    """
    compute_dtype = torch.promote_types(compute_dtype, query.dtype)
    batch, heads, length, _ = query.shape
    keys, values = key.to(compute_dtype), value.to(compute_dtype)
    outputs, sums = [], []
    for rows in query_blocks(length, batch * heads * key.shape[2] * compute_dtype.itemsize):
        scores = capped_scores(query[:, :, rows].to(compute_dtype), keys, scale, softcap)
        bias = mask_rows(mask, rows, causal, key.shape[2], compute_dtype, query.device)
        sees_none = None
        if bias is not None:
            scores = scores + bias
            # Such a query gets any finite scores, since the gradient of a log-sum-exp of nothing is NaN.
            sees_none = scores.detach().amax(-1, keepdim=True).isneginf()
            scores = scores.masked_fill(sees_none, 0)
        logsumexp = scores.logsumexp(-1)
        if sink_logits is not None:
            logsumexp = torch.logaddexp(logsumexp, sink_logits.to(compute_dtype)[None, :, None])
        weights = torch.exp(scores - logsumexp[..., None])
        if sees_none is not None:
            weights = weights.masked_fill(sees_none, 0)
        weights = functional.dropout(weights, dropout)
        grouped = weights.view(batch, key.shape[1], -1, key.shape[2])  # (B, K, G * rows, S)
        outputs.append((grouped @ values).view(batch, heads, -1, value.shape[-1]))
        sums.append(logsumexp.detach())
    return torch.cat(outputs, dim=2).to(query.dtype), torch.cat(sums, dim=2)


def capped_scores(query: Tensor, key: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """Scores (B, H, T, S) of queries (B, H, T, D) and keys (B, K, S, D), capped where asked, before any mask."""
    batch, heads, length, dim = query.shape
    grouped = query.reshape(batch, key.shape[1], -1, dim)  # (B, K, G * T, D)
    if key.shape[2] < grouped.shape[2]:  # the scale goes on the smaller factor
        key = scale * key
    else:
        grouped = scale * grouped
    scores = (grouped @ key.transpose(-1, -2)).view(batch, heads, length, -1)
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def query_blocks(length: int, bytes_per_query: int) -> list[slice]:
    """Consecutive slices of `length` queries, each of at most `BLOCK_BYTES`."""
    size = max(1, BLOCK_BYTES // max(1, bytes_per_query))
    return [slice(first, min(first + size, length)) for first in range(0, length, size)]


def mask_rows(
    mask: Tensor | None, rows: slice, causal: bool, keys: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """The additive mask (B or 1, H or 1, rows, S) of some queries, in `dtype`; None where they see every key."""
    if mask is None:
        if not causal:
            return None
        index = torch.arange(keys, device=device)
        mask = (index <= index[rows, None])[None, None]
    else:
        mask = mask[:, :, rows]
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(~mask, float("-inf"))


def fused_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Kernel | None:
    """The fused kernel that takes these tensors and gives a log-sum-exp; None: there is none."""
    same_shape = query.shape[-1] == key.shape[-1] == value.shape[-1]
    same_dtype = query.dtype == key.dtype == value.dtype
    learned_mask = mask is not None and mask.requires_grad
    if not (same_shape and same_dtype) or learned_mask or 0 in query.shape:
        return None
    if query.device.type == "cpu":
        return _cpu_flash
    if query.device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(query.device)
        return cuda_kernel(query.dtype, query.shape[-1], capability, masked=mask is not None)
    return None


def cuda_kernel(dtype: torch.dtype, head_dim: int, capability: tuple[int, int], *, masked: bool) -> Kernel | None:
    """Which CUDA kernel takes this: flash (half precision, no mask), else the memory-efficient one, else None."""
    half = dtype in (torch.float16, torch.bfloat16)
    if half and not masked and head_dim % 8 == 0 and head_dim <= 256 and capability >= (8, 0):
        return _cuda_flash
    aligned = head_dim % (8 if half else 4) == 0
    if aligned and (dtype in (torch.float16, torch.float32) or (half and capability >= (8, 0))):
        return _cuda_efficient
    return None


def _in_blocks(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Runs a kernel; under a mask for some queries at a time, so that no large mask is made additive as a whole."""
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    if mask is None:
        return kernel(query, key, value, None, scale, causal)
    length, keys = query.shape[2], key.shape[2]
    blocks = query_blocks(length, mask.shape[0] * mask.shape[1] * keys * query.element_size())
    parts = []
    for rows in blocks:
        bias = mask_rows(mask, rows, causal, keys, query.dtype, query.device)
        parts.append(kernel(query[:, :, rows], key, value, bias, scale, False))
    if len(parts) == 1:
        return parts[0]
    return torch.cat([output for output, _ in parts], dim=2), torch.cat([sums for _, sums in parts], dim=2)


def _cpu_flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, logsumexp = flash(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
    return output, logsumexp


def _cuda_flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    output, logsumexp, *_ = flash(query, key, value, 0.0, causal, False, scale=scale)
    return output, logsumexp[:, :, : query.shape[2]]


def _cuda_efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    bias = None if mask is None else _aligned_bias(mask, query.shape[0], query.shape[1])
    output, logsumexp, *_ = efficient(query, key, value, bias, True, 0.0, causal, scale=scale)
    if mask is not None:  # queries that see no key
        output = output.masked_fill(mask.isneginf().all(-1, keepdim=True), 0)
    return output, logsumexp[:, :, : query.shape[2]]  # the kernel pads its rows


def _aligned_bias(mask: Tensor, batch: int, heads: int) -> Tensor:
    """The mask expanded to (B, H, T, S), on rows whose length in memory is a multiple of 16 as the kernel asks."""
    keys = mask.shape[-1]
    padded = functional.pad(mask, (0, -keys % 16))
    return padded.expand(batch, heads, -1, -1)[..., :keys]
