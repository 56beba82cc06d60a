"""Row by row: where each layout keeps query and gate, and that taking apart and putting together are inverse."""

import pytest
import torch

from gated_qwen.conversion.layouts import (
    LAYOUTS,
    Heads,
    fuse,
    gate_part,
    native_rows,
    official_rows,
    query_part,
    repeat_headwise,
)
from gated_qwen.conversion.norms import fold_factors, is_exact, pair_factors, shift, unshift

SHAPES = [Heads(H, K, D, g) for H, K in ((4, 2), (8, 2), (6, 3)) for D in (2, 8) for g in ("headwise", "elementwise")]


@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_official_rows_are_where_the_rule_says(heads):
    """For each KV head: the query rows of its group, then the gate rows of its group."""
    H, D, G = heads.query, heads.dim, heads.query // heads.key_value
    query, gate = official_rows(heads)
    for h in range(H):
        kv, j = h // G, h % G
        if heads.granularity == "headwise":
            per = G * D + G
            assert gate[h] == kv * per + G * D + j
        else:
            per = 2 * G * D
            assert gate[h * D : (h + 1) * D] == [kv * per + G * D + j * D + d for d in range(D)]
        assert query[h * D : (h + 1) * D] == [kv * per + j * D + d for d in range(D)]


@pytest.mark.parametrize("heads", [s for s in SHAPES if s.granularity == "elementwise"], ids=str)
def test_native_rows_are_where_the_rule_says(heads):
    """For each query head: its query rows, then its gate rows."""
    query, gate = native_rows(heads)
    for h in range(heads.query):
        for d in range(heads.dim):
            assert query[h * heads.dim + d] == h * 2 * heads.dim + d
            assert gate[h * heads.dim + d] == h * 2 * heads.dim + heads.dim + d


@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_row_has_one_place_and_the_way_back_is_bit_identical(layout, heads):
    rows = LAYOUTS[layout](heads)
    total = heads.query_rows + heads.gate_rows
    assert sorted(rows[0] + rows[1]) == list(range(total))
    for shape in ((total, 3), (total,)):
        fused = torch.randn(shape)
        assert torch.equal(fuse(query_part(fused, rows), gate_part(fused, rows), rows), fused)


def test_layouts_of_one_shape_disagree_unless_there_is_one_head_a_group():
    """With 1 < K < H a wrong split cannot pass; with K = H official and native elementwise are the same."""
    for K, same in ((2, False), (4, True)):
        heads = Heads(4, K, 2, "elementwise")
        assert (official_rows(heads) == native_rows(heads)) is same


def test_headwise_rows_are_repeated_head_by_head():
    assert repeat_headwise(torch.tensor([[1.0], [2.0]]), 3).flatten().tolist() == [1, 1, 1, 2, 2, 2]


# Norms


def weights(dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.exp(1.5 * torch.randn(4096, generator=generator))
    weight[::7] *= -1
    weight[:3] = torch.tensor([0.0, 1.0, 0.5])
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_fold_makes_every_shift_exact(dtype):
    weight = weights(dtype)
    assert not is_exact(weight).all()
    factor = fold_factors(weight)
    folded = weight / factor
    assert is_exact(folded).all()
    assert torch.equal(unshift(shift(folded)), folded)
    assert torch.equal(folded * factor, weight)
    assert torch.equal(torch.frexp(factor.abs().float())[0], torch.full_like(factor, 0.5).float()), "powers of two"


def test_what_is_exact_already_is_left_alone():
    weight = torch.tensor([0.5, 0.75, 1.0, 1.5, 3.0, 100.0, 0.0], dtype=torch.bfloat16)
    assert torch.equal(fold_factors(weight), torch.ones_like(weight))


def test_pair_factors_are_shared_by_rotary_pairs_and_lower_the_error():
    query, key = weights(torch.bfloat16)[:64].abs(), weights(torch.bfloat16)[64:128].abs()
    factor = pair_factors(query, key)
    assert torch.equal(factor[:32], factor[32:])
    assert torch.equal((query / factor) * factor, query) and torch.equal((key * factor) / factor, key)
    before = is_exact(query).sum() + is_exact(key).sum()
    assert is_exact(query / factor).sum() + is_exact(key * factor).sum() > before
