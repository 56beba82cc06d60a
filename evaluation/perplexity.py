"""Perplexity by position at any length: the logits of a whole document never exist at one time.

32,768 tokens times a vocabulary of 151,936 are 20 GB of fp32 logits, and a loss on them makes copies. Here the decoder
runs once without its head, and head and loss run over chunks of positions: 256 of them are 156 MB.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

CHECKED_TOKENS = 32


@dataclass(frozen=True)
class Perplexity:
    """The negative log-likelihood (NLL) of one document, in nats per token.

    Attributes:
        tokens: how many tokens the window has; its first one is not predicted.
        nll: mean over the `tokens` - 1 predicted ones.
        buckets: (first position, position after the last, mean NLL) of each run of positions, counted from 0.
    """

    tokens: int
    nll: float
    buckets: tuple[tuple[int, int, float], ...]

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)


@torch.no_grad()  # and not inference_mode, in which quanto's 4-bit weights fail
def position_nll(
    model: Any,
    input_ids: Sequence[int] | torch.Tensor,
    *,
    chunk: int = 256,
    progress: Callable[[int], None] = lambda positions: None,
) -> torch.Tensor:
    """The NLL of every token of one document given all before it.

    Memory beyond the model's own: the hidden states (N, C), and the logits and log-probabilities of one chunk.

    Args:
        model: any Hugging Face causal LM whose logits are its output embeddings applied to the last hidden state.
        input_ids: (N,) token ids, N at least 2.
        chunk: positions whose logits exist at one time.
        progress: called with the number of positions done, after each chunk.

    Returns:
        (N - 1,) fp32 on the CPU; entry i belongs to token i + 1. In nats.

    Raises:
        ValueError: fewer than 2 tokens, or the model changes its logits after the head (scaling, soft-capping), so
            that head and hidden states do not give them, or a loss is not finite.
    """
    ids = torch.as_tensor(input_ids, dtype=torch.long, device=model.device).flatten()
    if len(ids) < 2:
        raise ValueError("perplexity needs at least 2 tokens")
    head = model.get_output_embeddings()
    _check_head(model, head, ids[:CHECKED_TOKENS])
    hidden = _last_hidden_state(model, ids[:-1])
    nll = torch.empty(len(ids) - 1)
    for first in range(0, len(nll), chunk):
        last = min(first + chunk, len(nll))
        logits = head(hidden[first:last]).float()
        nll[first:last] = cross_entropy(logits, ids[first + 1 : last + 1], reduction="none")
        progress(last - first)
    if not nll.isfinite().all():
        position = int((~nll.isfinite()).nonzero()[0]) + 1
        raise ValueError(f"the loss of token {position} is not finite in {model.dtype}; try float32 or bfloat16")
    return nll


def measure_perplexity(
    model: Any,
    input_ids: Sequence[int] | torch.Tensor,
    *,
    buckets: int = 8,
    chunk: int = 256,
    progress: Callable[[int], None] = lambda positions: None,
) -> Perplexity:
    """Perplexity of one document, and its mean NLL over runs of positions of equal length.

    Args:
        model, input_ids, chunk, progress: as `position_nll`.
        buckets: how many runs.

    Raises:
        ValueError: as `position_nll`.

    Example:
        >>> from transformers import LlamaForCausalLM
        >>> model = LlamaForCausalLM.from_pretrained(llama_folder)
        >>> result = measure_perplexity(model, [1, 2, 3, 4, 5, 6, 7, 8, 9], buckets=2)
        >>> [(first, last) for first, last, nll in result.buckets]
        [(1, 5), (5, 9)]
    """
    nll = position_nll(model, input_ids, chunk=chunk, progress=progress).double()
    edges = [round(i * len(nll) / buckets) for i in range(buckets + 1)]
    runs = tuple((a + 1, b + 1, nll[a:b].mean().item()) for a, b in zip(edges, edges[1:], strict=False) if b > a)
    return Perplexity(len(nll) + 1, nll.mean().item(), runs)


def _last_hidden_state(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """(N, C), after the final norm."""
    hidden: torch.Tensor = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    return hidden


def _check_head(model: Any, head: Any, ids: torch.Tensor) -> None:
    """Compares the head's logits of a few tokens with the model's own: no list of exceptions would be complete."""
    name = type(model).__name__
    if head is None or model.base_model is model:
        raise ValueError(f"{name} has no output embeddings on top of a base model, so its logits cannot be chunked")
    wanted = model(input_ids=ids[None], use_cache=False).logits[0].float()
    found = head(_last_hidden_state(model, ids)).float()
    tolerance = max(1e-5, 2 * torch.finfo(model.dtype).eps) * wanted.abs().max()
    if wanted.shape != found.shape or not torch.allclose(wanted, found, rtol=0.0, atol=float(tolerance)):
        raise ValueError(
            f"{name} changes its logits after the head (scaling or soft-capping), which the chunked loss does not do"
        )
