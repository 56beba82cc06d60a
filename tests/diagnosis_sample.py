"""A made-up diagnosis of any shape, complete and from a seed, for tests of what reads diagnoses."""

import math
from random import Random

from gated_qwen.diagnostics.diagnosis import KINDS, SCHEMA, SCHEMA_VERSION

LENGTH = 4096
QUANTILES = ("0.5", "0.9", "0.99", "0.999", "0.9999")


def diagnosis_sample(name="sample", layers=6, heads=4, gated=True, experts=0, seed=0):
    """One diagnosis: sinks and massive activations without a gate, hardly any with one; with `experts`, routers."""
    random = Random(seed)
    attention = [_attention_layer(random, layer, heads, gated) for layer in range(layers)]
    worst = max(attention, key=lambda layer: layer["first_token_share"])
    shares = ("first_token_share", "first_token_share_skipped", "uniform", "uniform_skipped", "boost", "excess")
    mean = {key: sum(layer[key] for layer in attention) / layers for key in (*shares, "head_share")}
    blocks = {
        kind: [_block(random, index, layers, gated, kind) for index in range(layers + (kind == "residual"))]
        for kind in KINDS
    }
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "model": {
            "name": name,
            "model_type": "gated_qwen" if gated else "llama",
            "layers": layers,
            "query_heads": heads,
            "key_value_heads": max(heads // 2, 1),
            "head_dim": 64,
            "hidden_size": 64 * heads,
            "parameters": 134_670_528,
            "dtype": "float32",
            "attention": "sdpa",
            "gate": {"positions": ["attn_output"], "granularity": "headwise"} if gated else None,
        },
        "input": {
            "text": "jargon.txt",
            "sha256": "40dfb4b9" * 8,
            "tokens": 2 * LENGTH,
            "sequences": 2,
            "length": LENGTH,
            "chunk": None,
            "first_token": "<s>",
            "offset": 0,
            "mask_policy": "causal; no padding",
            "averaging": "mean over layers of mean over heads of mean over queries",
        },
        "settings": {"skip_queries": 64, "columns": "sample"},
        "versions": {"gated_qwen": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"},
        "measured": "2026-11-30",
        "cost": {"seconds": 12.5, "peak_bytes": 1_234_567_890},
        "attention": {
            "queries": 2 * LENGTH,
            "skip_queries": 64,
            "head_keys": 4,
            "keys": [0, 1],
            "mean": mean,
            "worst_layer": {"layer": worst["layer"], "first_token_share": worst["first_token_share"]},
            "layers": attention,
        },
        "activations": {
            "tokens": 2 * LENGTH,
            "kinds": list(KINDS),
            "summary": {kind: _maxima(blocks[kind][kind == "residual" :]) for kind in KINDS},
            **blocks,
        },
        "gates": _gates(random, layers, heads, attention) if gated else None,
        "routers": _routers(random, layers, experts) if experts else None,
    }


def _routers(random, layers, experts):
    found = []
    for layer in range(layers):
        load = [random.random() for _ in range(experts)]
        load = [value / sum(load) for value in load]
        found.append(
            {
                "layer": layer,
                "experts": experts,
                "experts_per_token": 2,
                "load": load,
                "max_load": max(load) * experts,
                "unused": [],
                "probability": load,
                "entropy": 0.9,
                "balance": 1.1,
            }
        )
    worst = max(found, key=lambda entry: entry["max_load"])
    most = {"layer": worst["layer"], "value": worst["max_load"]}
    return {
        "tokens": 2 * LENGTH,
        "summary": {"mean_entropy": 0.9, "max_load": most, "unused_experts": 0},
        "layers": found,
    }


def _attention_layer(random, layer, heads, gated):
    scale = 0.05 if gated else 0.25 + 0.35 * math.sin(math.pi * (layer + 1) / (layer + 4))
    shares = [min(0.98, scale * random.lognormvariate(0, 0.5)) for _ in range(heads)]
    share = sum(shares) / heads
    edges = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, LENGTH]
    queries = [2 * (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    uniform = [sum(1 / (i + 1) for i in range(a, b)) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    mean_uniform = sum(1 / (i + 1) for i in range(LENGTH)) / LENGTH
    return {
        "layer": layer,
        "query_heads": heads,
        "sliding_window": None,
        "first_token_share": share,
        "first_token_share_skipped": share * 0.98,
        "uniform": mean_uniform,
        "uniform_skipped": mean_uniform / 2,
        "boost": share / mean_uniform,
        "excess": share - mean_uniform,
        "head_share": min(1.0, share * 1.2),
        "key_shares": [share, share / 9],
        "heads": {
            "first_token_share": shares,
            "first_token_share_skipped": shares,
            "head_share": [min(1.0, 1.2 * value) for value in shares],
            "key_shares": [[value, value / 9] for value in shares],
        },
        "by_query": {
            "edges": edges,
            "queries": queries,
            "first_token_share": [max(share, u) for u in uniform],
            "uniform": uniform,
        },
        "columns": {
            "queries_used": 128,
            "exact": False,
            "threshold": 0.3,
            "top": [{"position": 0, "share": share}, {"position": 17, "share": share / 9}],
            "sink_set": [{"position": 0, "share": share, "heads": sum(s > 0.3 for s in shares)}]
            if share > 0.3
            else [],
        },
    }


def _block(random, index, layers, gated, kind):
    massive = 90.0 if gated else 1000.0 * (kind != "attention_output") + 60.0
    largest = 1.0 if (index == 0 and kind == "residual") else massive * random.lognormvariate(0, 0.4)
    median = 0.1 + 0.02 * index
    return {
        "index": index,
        "max": largest,
        "median": median,
        "ratio": largest / median,
        "quantiles": {q: median * 2.0**i for i, q in enumerate(QUANTILES)},
        "top": [
            {"value": -largest, "sequence": 0, "position": 0, "token_id": 1, "token": "<s>", "channel": 45},
            {"value": largest / 2, "sequence": 1, "position": 0, "token_id": 1, "token": "<s>", "channel": 123},
        ],
    }


def _maxima(blocks):
    largest = max(blocks, key=lambda block: block["max"])
    mean = sum(block["max"] for block in blocks) / len(blocks)
    return {"mean_of_layer_maxima": mean, "max_over_layers": largest["max"], "max_index": largest["index"]}


def _gates(random, layers, heads, attention):
    thresholds = [1e-4, 1e-3, 1e-2, 1e-1, 1.0]
    found = []
    for layer in range(layers):
        means = [min(0.99, 0.12 * random.lognormvariate(0, 0.6)) for _ in range(heads)]
        counts = [int(2000 * math.exp(-bin_ / (4 + layer % 5))) + random.randrange(20) for bin_ in range(50)]
        mean = sum(means) / heads
        quantiles = dict(zip(QUANTILES, (0.05, 0.3, 0.7, 0.9, 0.95), strict=True))
        by_class = {name: {"mean": mean, "quantiles": quantiles, "tokens": 100} for name in ("first", "early", "rest")}
        shares = attention[layer]["heads"]["first_token_share"]
        gated = [1 - math.exp(-30 * tau) for tau in thresholds]
        found.append(
            {
                "layer": layer,
                "position": "attn_output",
                "granularity": "headwise",
                "activation": "sigmoid",
                "operation": "multiply",
                "mean": mean,
                "std": 0.1,
                "min": 1e-6,
                "max": 0.99,
                "quantiles": quantiles,
                "histogram": {"edges": [bin_ / 50 for bin_ in range(51)], "counts": counts},
                "by_class": by_class,
                "heads": {
                    "mean": means,
                    "min": [value / 10 for value in means],
                    "max": [min(1.0, value * 4) for value in means],
                    "dead": [0] if layer == 1 else [],
                    "always_open": [],
                },
                "sparsity": {
                    "pre_gate": [1 - math.exp(-4 * tau) for tau in thresholds],
                    "mean_scaled": [1 - math.exp(-20 * tau) for tau in thresholds],
                    "gated": gated,
                    "norm_matched": [1 - math.exp(-6 * tau) for tau in thresholds],
                },
                "written": {
                    "first_token_share": shares,
                    "written_share": [share * mean for share, mean in zip(shares, means, strict=True)],
                },
            }
        )
    overall = sum(layer["mean"] for layer in found) / layers
    dead = sum(len(layer["heads"]["dead"]) for layer in found)
    summary = {"mean": overall, "mean_of_layer_means": overall, "dead_heads": dead, "always_open_heads": 0}
    return {
        "tokens": 2 * LENGTH,
        "thresholds": thresholds,
        "dead_below": 0.01,
        "open_above": 0.99,
        "summary": {"attn_output": summary},
        "layers": found,
    }
