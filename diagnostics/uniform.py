"""What attention that looks at nothing in particular puts on a key: the baseline without which a share means nothing.

A query that sees n keys and spreads its mass evenly puts 1/n on each. Averaged over the T queries of a causal document
that is H_T / T on the first token, H_T = 1 + 1/2 + ... + 1/T: 29 % at 10 tokens, 7.4 % at 64, 0.22 % at 4096.
"""

from __future__ import annotations

from torch import Tensor


def uniform_first_token_share(length: int, skip_queries: int = 0) -> float:
    """Mean share of the first token under even attention in a causal document of `length` tokens.

    Args:
        length: T, at least 1.
        skip_queries: m queries at the start that are left out of the mean, fewer than `length`.

    Returns:
        (H_T - H_m) / (T - m), a fraction.

    Raises:
        ValueError: no query is left.

    Example:
        >>> round(uniform_first_token_share(10), 3)
        0.293
    """
    if not 0 <= skip_queries < length:
        raise ValueError(f"of {length} queries none is left when the first {skip_queries} are skipped")
    return sum(1.0 / n for n in range(skip_queries + 1, length + 1)) / (length - skip_queries)


def uniform_share(visible: Tensor, keys: int | Tensor = 1) -> Tensor:
    """The mass of even attention on some keys: keys / visible, at most 1.

    Args:
        visible: (...) int64, how many keys each query sees.
        keys: how many of them are meant, a number or (...).

    Returns:
        (...) float32, 0 for a query that sees nothing.

    Example:
        >>> import torch
        >>> uniform_share(torch.tensor([1, 4, 8]), keys=4).tolist()
        [1.0, 1.0, 0.5]
    """
    return (keys / visible.clamp(min=1)).clamp(max=1.0) * (visible > 0)
