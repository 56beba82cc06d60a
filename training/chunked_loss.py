"""The causal language-modelling loss without the logits of all tokens at one time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from gated_qwen.training.packing import IGNORED


def chunked_loss(
    hidden_states: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    labels: torch.Tensor,
    *,
    chunk: int,
    counted: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Cross-entropy of the next token; the logits of `chunk` tokens exist at one time, in the backward pass too.

    Equal to the loss that transformers computes from all logits, up to the rounding of sums. A vocabulary of
    151,936 and 32,768 tokens make 20 GB of fp32 logits; 1,024 of them make 0.6 GB.

    Args:
        hidden_states: (B, T, C), after the final norm.
        head: the output embeddings, (..., C) -> (..., vocabulary).
        labels: (B, T) int64, not shifted; -100 where there is no target.
        chunk: tokens.
        counted: divide the sum by this number of targets, those of a whole accumulated batch; None: by those of
            `labels`.

    Returns:
        () fp32, in nats per target.

    Example:
        >>> head = torch.nn.Linear(8, 16, bias=False)
        >>> hidden, labels = torch.randn(2, 5, 8), torch.randint(16, (2, 5))
        >>> whole = cross_entropy(head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        >>> torch.allclose(chunked_loss(hidden, head, labels, chunk=3), whole)
        True
    """
    states = hidden_states[:, :-1].flatten(0, 1)
    targets = labels[:, 1:].flatten().to(states.device)
    total = states.new_zeros((), dtype=torch.float32)
    for first in range(0, len(targets), chunk):
        part = slice(first, first + chunk)
        total = total + checkpoint(_sum_of_losses, states[part], targets[part], head, use_reentrant=False)
    return total / (targets.ne(IGNORED).sum() if counted is None else counted)


def _sum_of_losses(states: torch.Tensor, targets: torch.Tensor, head: Any) -> torch.Tensor:
    return cross_entropy(head(states).float(), targets, ignore_index=IGNORED, reduction="sum")


@contextmanager
def loss_in_chunks(model: Any, chunk: int) -> Iterator[None]:
    """Makes a causal LM called with `labels` compute its loss in chunks; `logits` are its hidden states meanwhile.

    The head runs inside the model's own forward pass, so what is added to the loss there (a mixture's balancing loss)
    stays, and sharded parameters are gathered when they are needed.

    Args:
        model: a Hugging Face causal LM, alone or wrapped by PEFT.
        chunk: tokens whose logits exist at one time.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = model.get_output_embeddings()
    project, loss_function = head.forward, model.loss_function

    # The third place is the loss functions' of transformers, whose mixtures of experts fill it.
    def loss(
        logits: torch.Tensor, labels: torch.Tensor, vocab_size: Any = None, num_items_in_batch: Any = None, **_: Any
    ) -> torch.Tensor:
        return chunked_loss(logits, project, labels, chunk=chunk, counted=num_items_in_batch)

    head.forward, model.loss_function = (lambda hidden_states: hidden_states), loss
    try:
        yield
    finally:
        del head.forward
        model.loss_function = loss_function


@torch.no_grad()
def check_chunked_loss(model: Any) -> None:
    """Compares the loss in chunks with the model's own on a few tokens: no list of exceptions would be complete.

    Raises:
        ValueError: they differ, since the model changes its logits after the head (scaling, soft-capping), or it has
            no head of its own.
    """
    name, was_training = type(model).__name__, model.training
    if model.get_output_embeddings() is None:
        raise ValueError(f"loss.chunk: {name} has no output embeddings")
    ids = torch.arange(1, 9, device=model.device)[None] % model.get_output_embeddings().weight.shape[0]
    model.eval()  # two passes with dropout would differ
    own = model(input_ids=ids, labels=ids, use_cache=False).loss
    with loss_in_chunks(model, 3):
        chunked = model(input_ids=ids, labels=ids, use_cache=False).loss
    model.train(was_training)
    if not torch.allclose(own.float(), chunked.float(), rtol=max(1e-5, torch.finfo(model.dtype).eps)):
        raise ValueError(f"loss.chunk: {name} changes its logits after the head, which the loss in chunks does not do")
