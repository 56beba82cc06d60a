"""One probed run of a tiny model, the full attention maps of the same run, and the comparison of the two."""

import copy

import pytest
import torch
from tiny import tokens

from gated_qwen.diagnostics.attention_probe import AttentionProbe

LENGTH, SKIP, HEAD, KEYS = 40, 8, 4, (0, 1, 5, 20)
SETTINGS = {"skip_queries": SKIP, "head_keys": HEAD, "keys": KEYS, "columns": "all"}
IDS = tokens(2, LENGTH)
SIDE = torch.ones(2, LENGTH, dtype=torch.long)
LEFT, RIGHT = SIDE.clone(), SIDE.clone()
LEFT[0, :7], RIGHT[0, -7:] = 0, 0
PACKED = torch.tensor([[*range(15), *range(LENGTH - 15)]]).expand(2, -1)
# name -> (arguments of the model, first and last column of each document by row)
INPUTS = {
    "plain": ({}, [[(0, LENGTH)], [(0, LENGTH)]]),
    "left padding": ({"attention_mask": LEFT}, [[(7, LENGTH)], [(0, LENGTH)]]),
    "right padding": ({"attention_mask": RIGHT}, [[(0, LENGTH - 7)], [(0, LENGTH)]]),
    "packed": ({"position_ids": PACKED, "use_cache": False}, [[(0, 15), (15, LENGTH)]] * 2),
}


@torch.no_grad()
def full_maps(model, ids=IDS, **arguments):
    """Layer -> weights (B, H, T, S) in float64, from an eager copy."""
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    maps = eager(ids, output_attentions=True, **arguments).attentions
    softmax_layers = [i for i, kind in enumerate(layer_types(model)) if kind != "linear_attention"]
    found = [weights.double() for weights in maps if weights is not None]
    return dict(zip(softmax_layers, found, strict=True))


def layer_types(model):
    config = model.config.get_text_config()
    return getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers


@torch.no_grad()
def probed(model, ids=IDS, settings=SETTINGS, **arguments):
    with AttentionProbe(model, **settings) as probe:
        model(ids, **arguments)
    return probe.statistics


def expected_layer(weights, documents):
    """What the full map (B, H, T, S) of one layer says, one query at a time."""
    heads = weights.shape[1]
    first, late, head, uniform = [], [], [], []
    keys = {key: [] for key in KEYS}
    columns = torch.zeros(heads, LENGTH, dtype=torch.float64)
    seen_by, reached = torch.zeros(LENGTH), torch.zeros(LENGTH)
    for row, spans in enumerate(documents):
        for begin, end in spans:
            reached[: end - begin] += 1
            for query in range(begin, end):
                row_of_map = weights[row, :, query]
                visible = row_of_map.gt(0).any(0).nonzero()[:, 0].tolist()
                first.append(row_of_map[:, begin])
                uniform.append(1 / len(visible) if begin in visible else 0.0)
                if query - begin >= SKIP:
                    late.append(row_of_map[:, begin])
                head.append(row_of_map[:, visible[:HEAD]].sum(1))
                for key in KEYS:
                    if begin + key in visible:
                        keys[key].append(row_of_map[:, begin + key])
                places = torch.tensor(visible) - begin
                columns[:, places] += row_of_map[:, visible]
                seen_by[places] += 1
    return {
        "first_token_share": torch.stack(first).mean(0),
        "first_token_share_skipped": torch.stack(late).mean(0),
        "head_share": torch.stack(head).mean(0),
        "key_shares": torch.stack([torch.stack(keys[key]).mean(0) for key in KEYS], dim=1),
        "uniform": sum(uniform) / len(uniform),
        "queries": len(first),
        "columns": columns / seen_by.clamp(min=1),
        "seen_by": seen_by,
        "documents": reached,
    }


def assert_layer_equals_map(statistics, layer, weights, documents, tolerance=1e-6):
    expected = expected_layer(weights, documents)
    summary = next(entry for entry in statistics.summary()["layers"] if entry["layer"] == layer)
    for name in ("first_token_share", "first_token_share_skipped", "head_share", "key_shares"):
        found = torch.tensor(summary["heads"][name], dtype=torch.float64)
        torch.testing.assert_close(found, expected[name], atol=tolerance, rtol=0)
    assert summary["first_token_share"] == pytest.approx(expected["first_token_share"].mean().item(), abs=tolerance)
    assert summary["uniform"] == pytest.approx(expected["uniform"], abs=1e-6)
    assert summary["excess"] == pytest.approx(summary["first_token_share"] - summary["uniform"])
    assert sum(summary["by_query"]["queries"]) == expected["queries"] == statistics.summary()["queries"]
    columns = statistics.columns[layer]
    length = min(len(columns.seen_by), LENGTH)
    assert columns.queries == expected["queries"]
    assert columns.seen_by[:length].tolist() == expected["seen_by"][:length].tolist()
    assert columns.documents[:length].tolist() == expected["documents"][:length].tolist()
    assert not columns.seen_by[length:].any() and not columns.documents[length:].any()
    found = columns.mass[:, :length] / columns.seen_by[:length]
    torch.testing.assert_close(found, expected["columns"][:, :length], atol=tolerance, rtol=0)


def assert_equal_statistics(found, expected):
    """The same sums, up to the rounding of another order of additions."""
    found, expected = found.summary(), expected.summary()
    assert_close_tree(found, expected)


def assert_close_tree(found, expected):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_close_tree(found[name], expected[name])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_close_tree(*pair)
    else:
        assert found == pytest.approx(expected, abs=1e-6)
