"""Where attention goes, by layer and head: shares of the first token, of chosen keys, of every key position.

All shares are fractions of a query's attention mass. A mean over queries is taken in each head, then over heads, then
over layers, as the paper averages its F-Attn; padding is in none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gated_qwen.diagnostics.accumulator_table import AccumulatorTable
from gated_qwen.diagnostics.accumulators import Moments, PerPosition, log_spaced_positions
from gated_qwen.diagnostics.column_masses import ColumnMasses

if TYPE_CHECKING:
    from typing_extensions import Self

COLUMN_MODES = ("off", "sample", "all")
TOP_COLUMNS = 8


@dataclass(frozen=True)
class AttentionSettings:
    """What an attention probe measures.

    Attributes:
        skip_queries: m; the `_skipped` numbers leave out queries at positions below m of their document.
        head_keys: n of the mass on the first n keys that a query sees.
        keys: positions in each document whose mass is measured.
        columns: every key position's mass: "off", from a "sample" of the queries, or from "all" of them.
        sink_threshold: mean share above which a key is a sink (epsilon of arXiv 2410.10781).
    """

    skip_queries: int = 64
    head_keys: int = 4
    keys: tuple[int, ...] = ()
    columns: str = "sample"
    sink_threshold: float = 0.3

    def __post_init__(self) -> None:
        if self.columns not in COLUMN_MODES:
            raise ValueError(f"columns={self.columns!r} is not allowed; one of {', '.join(COLUMN_MODES)}")
        if self.skip_queries < 0 or self.head_keys < 1 or any(key < 0 for key in self.keys):
            raise ValueError("skip_queries and keys must be at least 0, and head_keys at least 1")


@dataclass(frozen=True)
class LayerShares:
    """What one call of one layer's attention adds to the statistics.

    Attributes:
        position: (B, T) int64, of each query in its document.
        valid: (B, T) bool, False for padding; None: all are valid.
        first, head: (B, H, T), shares of the first token and of the first visible keys.
        uniform, head_uniform: (B, T), what even attention would give.
        keys: (B, H, T, N) shares of the chosen keys, with `keys_seen` (B, T, N) bool, and `key_uniform` (B, T).
    """

    position: Tensor
    valid: Tensor | None
    first: Tensor
    head: Tensor
    uniform: Tensor
    head_uniform: Tensor
    keys: Tensor
    keys_seen: Tensor
    key_uniform: Tensor


class AttentionStatistics:
    """Sums over queries of what an `AttentionProbe` saw; merges over batches and processes.

    Attributes:
        settings: what is measured.
        layers: layer -> (query heads, sliding window or None).
        table: the accumulators, named "LAYER/QUANTITY".
        columns: layer -> the mass of each key position.

    Example:
        >>> whole = AttentionStatistics(AttentionSettings(skip_queries=1, columns="off"))
        >>> whole.merge(AttentionStatistics.from_dict(whole.to_dict()))
        >>> whole.summary()["queries"]
        0
    """

    def __init__(self, settings: AttentionSettings | None = None) -> None:
        self.settings = settings or AttentionSettings()
        self.layers: dict[int, tuple[int, int | None]] = {}
        self.table = AccumulatorTable()
        self.columns: dict[int, ColumnMasses] = {}

    def update(self, layer: int, shares: LayerShares, sliding_window: int | None = None) -> None:
        """Adds what one layer's attention did in one call."""
        heads = shares.first.shape[1]
        self.layers[layer] = (heads, sliding_window)
        first, head = shares.first.transpose(1, 2), shares.head.transpose(1, 2)  # (B, T, H)
        late = shares.position >= self.settings.skip_queries
        late = late if shares.valid is None else late & shares.valid
        self._moments(layer, "first", [heads]).update(first, shares.valid)
        self._moments(layer, "first_skipped", [heads]).update(first, late)
        self._moments(layer, "head", [heads]).update(head, shares.valid)
        self._moments(layer, "uniform", []).update(shares.uniform, shares.valid)
        self._moments(layer, "uniform_skipped", []).update(shares.uniform, late)
        self._moments(layer, "head_uniform", []).update(shares.head_uniform, shares.valid)
        for n, key in enumerate(self.settings.keys):
            seen = shares.keys_seen[..., n] if shares.valid is None else shares.keys_seen[..., n] & shares.valid
            self._moments(layer, f"key {key}", [heads]).update(shares.keys[..., n].transpose(1, 2), seen)
            self._moments(layer, f"key_uniform {key}", []).update(shares.key_uniform, seen)
        self._by_query(layer, "first").update(shares.position, first.mean(-1), shares.valid)
        self._by_query(layer, "uniform").update(shares.position, shares.uniform, shares.valid)

    def columns_of(self, layer: int, heads: int) -> ColumnMasses:
        """The column masses of a layer, made on first use."""
        return self.columns.setdefault(layer, ColumnMasses(heads))

    def merge(self, other: AttentionStatistics) -> None:
        """Adds what `other` has seen: another batch, or another process.

        Raises:
            ValueError: it was taken with other settings.
        """
        if other.settings != self.settings:
            raise ValueError(f"statistics of {other.settings} cannot be merged into those of {self.settings}")
        self.layers.update(other.layers)
        self.table.merge(other.table)
        for layer, theirs in other.columns.items():
            self.columns_of(layer, len(theirs.mass)).merge(theirs)

    def to_dict(self) -> dict[str, Any]:
        """The exact state, ready for JSON; `from_dict` gives an equal object."""
        return {
            "settings": asdict(self.settings) | {"keys": list(self.settings.keys)},
            "layers": {str(layer): list(entry) for layer, entry in self.layers.items()},
            "table": self.table.to_dict(),
            "columns": {str(layer): columns.to_dict() for layer, columns in self.columns.items()},
        }

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Self:
        """The object that `to_dict` was called on."""
        settings = stored["settings"]
        restored = cls(AttentionSettings(**{**settings, "keys": tuple(settings["keys"])}))
        restored.layers = {int(layer): (entry[0], entry[1]) for layer, entry in stored["layers"].items()}
        restored.table = AccumulatorTable.from_dict(stored["table"])
        restored.columns = {int(layer): ColumnMasses.from_dict(entry) for layer, entry in stored["columns"].items()}
        return restored

    def summary(self) -> dict[str, Any]:
        """The section "attention" of a diagnosis, ready for JSON; null where nothing was measured."""
        layers = [self._layer_summary(layer) for layer in sorted(self.layers)]
        averaged = ("first_token_share", "first_token_share_skipped", "uniform", "uniform_skipped", "boost", "excess")
        mean = {name: _mean([layer[name] for layer in layers]) for name in (*averaged, "head_share", "head_uniform")}
        mean |= _against_uniform(mean["first_token_share"], mean["uniform"])
        measured = [layer for layer in layers if layer["first_token_share"] is not None]
        worst = max(measured, key=lambda layer: layer["first_token_share"], default=None)
        return {
            "queries": max((int(self.table[f"{layer}/uniform"].count) for layer in self.layers), default=0),
            "skip_queries": self.settings.skip_queries,
            "head_keys": self.settings.head_keys,
            "keys": list(self.settings.keys),
            "mean": mean,
            "worst_layer": worst and {"layer": worst["layer"], "first_token_share": worst["first_token_share"]},
            "layers": layers,
        }

    def _layer_summary(self, layer: int) -> dict[str, Any]:
        heads, sliding_window = self.layers[layer]
        by_head: dict[str, list[Any]] = {
            "first_token_share": self._head_means(layer, "first"),
            "first_token_share_skipped": self._head_means(layer, "first_skipped"),
            "head_share": self._head_means(layer, "head"),
            "key_shares": [list(row) for row in zip(*self._key_means(layer), strict=True)],
        }
        share, uniform = _mean(by_head["first_token_share"]), self._scalar_mean(layer, "uniform")
        return {
            "layer": layer,
            "query_heads": heads,
            "sliding_window": sliding_window,
            "first_token_share": share,
            "first_token_share_skipped": _mean(by_head["first_token_share_skipped"]),
            "uniform": uniform,
            "uniform_skipped": self._scalar_mean(layer, "uniform_skipped"),
            **_against_uniform(share, uniform),
            "head_share": _mean(by_head["head_share"]),
            "head_uniform": self._scalar_mean(layer, "head_uniform"),
            "key_shares": [_mean(means) for means in self._key_means(layer)],
            "key_uniform": [self._scalar_mean(layer, f"key_uniform {key}") for key in self.settings.keys],
            "heads": by_head,
            "by_query": self._by_query_summary(layer),
            "columns": self._columns_summary(layer),
        }

    def _by_query_summary(self, layer: int) -> dict[str, Any]:
        first, uniform = self._by_query(layer, "first"), self._by_query(layer, "uniform")
        used = int(uniform.count.nonzero().max()) + 1 if bool(uniform.count.any()) else 0
        return {
            "edges": first.edges[: used + 1],
            "queries": uniform.count[:used].tolist(),
            "first_token_share": _numbers(first.mean()[:used]),
            "uniform": _numbers(uniform.mean()[:used]),
        }

    def _columns_summary(self, layer: int) -> dict[str, Any] | None:
        if layer not in self.columns:
            return None
        columns, threshold = self.columns[layer], self.settings.sink_threshold
        shares = columns.shares()
        mean, sink_heads = shares.mean(0), (shares > threshold).sum(0)
        order = mean.argsort(descending=True, stable=True)
        sinks = [p for p in order.tolist() if sink_heads[p]]
        return {
            "queries_used": columns.queries,
            "exact": self.settings.columns == "all",
            "threshold": threshold,
            "top": [{"position": p, "share": float(mean[p])} for p in order[:TOP_COLUMNS].tolist() if mean[p] > 0],
            "sink_set": [{"position": p, "share": float(mean[p]), "heads": int(sink_heads[p])} for p in sinks],
        }

    def _moments(self, layer: int, name: str, shape: list[int]) -> Moments:
        return self.table.of(f"{layer}/{name}", lambda: Moments(shape))

    def _by_query(self, layer: int, name: str) -> PerPosition:
        return self.table.of(f"{layer}/by_query {name}", lambda: PerPosition(log_spaced_positions()))

    def _head_means(self, layer: int, name: str) -> list[float | None]:
        return _numbers(self.table[f"{layer}/{name}"].mean())

    def _key_means(self, layer: int) -> list[list[float | None]]:
        """By key, by head."""
        return [self._head_means(layer, f"key {key}") for key in self.settings.keys]

    def _scalar_mean(self, layer: int, name: str) -> float | None:
        return _numbers(self.table[f"{layer}/{name}"].mean().view(1))[0]


def _against_uniform(share: float | None, uniform: float | None) -> dict[str, float | None]:
    if share is None or not uniform:
        return {"boost": None, "excess": None}
    return {"boost": share / uniform, "excess": share - uniform}


def _numbers(values: Tensor) -> list[float | None]:
    """Floats, with None for NaN: nothing was measured."""
    return [value if value == value else None for value in values.tolist()]


def _mean(values: Sequence[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return sum(measured) / len(measured) if measured else None
