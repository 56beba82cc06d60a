"""Rows hold every token of every document once, and their labels and positions keep documents apart."""

import random

import pytest

from gated_qwen.training.packing import IGNORED, one_document_a_row, pack

BOS, EOS, PAD = 1, 2, 0


def random_documents(seed):
    choose = random.Random(seed)
    return [[choose.randrange(3, 50) for _ in range(choose.choice([0, 1, 2, 3, 7, 8, 9, 40]))] for _ in range(12)]


def without_special(tokens):
    return [token for token in tokens if token not in (BOS, EOS, PAD)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("boundaries", [True, False])
@pytest.mark.parametrize("bos", [None, BOS])
def test_no_token_is_lost_and_every_row_is_full(seed, boundaries, bos):
    documents = random_documents(seed)
    rows = list(pack(documents, 8, bos=bos, eos=EOS, boundaries=boundaries, pad=PAD))
    assert all(len(values) == 8 for row in rows for values in row.values())
    kept = [token for row in rows for token in without_special(row["input_ids"])]
    assert kept == [token for document in documents for token in document]
    assert sum(row["input_ids"].count(EOS) for row in rows) == len(documents)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("bos", [None, BOS])
def test_targets_are_exactly_the_tokens_with_a_predecessor_in_their_piece(seed, bos, every):
    for row in pack(random_documents(seed), 8, bos=bos, bos_every_piece=every, eos=EOS, pad=PAD):
        for token, label, position in zip(*row.values(), strict=True):
            assert label == (token if position > 0 and token != PAD else IGNORED)
        starts = [place for place, position in enumerate(row["position_ids"]) if position == 0]
        assert starts[0] == 0
        for place, position in enumerate(row["position_ids"]):
            assert position == place - max(start for start in starts if start <= place)
        if bos is not None and every:
            assert all(row["input_ids"][start] in (BOS, PAD) for start in starts)


def test_without_boundaries_documents_run_on():
    (row,) = pack([[5, 6], [7]], 8, eos=EOS, boundaries=False, pad=PAD)
    assert row == {"input_ids": [5, 6, 2, 7, 2, 0, 0, 0], "labels": [IGNORED, 6, 2, 7, 2, *[IGNORED] * 3]}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("every", [True, False])
def test_a_document_a_row_loses_nothing_and_stays_in_its_length(seed, every):
    documents = random_documents(seed)
    rows = list(one_document_a_row(documents, 8, bos=BOS, bos_every_piece=every, eos=EOS))
    assert all(1 < len(row["input_ids"]) <= 8 or not every for row in rows)
    kept = [token for row in rows for token in without_special(row["input_ids"])]
    assert kept == [token for document in documents for token in document]
