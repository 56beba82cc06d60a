"""The mass of each key position: planted sinks are found, late keys are no sinks, a sample stands for all queries."""

import pytest
import torch
from probe_models import probe_model
from probe_runs import LENGTH, SIDE, probed
from tiny import tokens

from gated_qwen.diagnostics.attention_statistics import AttentionSettings, AttentionStatistics
from gated_qwen.diagnostics.column_masses import MIN_QUERIES, ColumnMasses, sampling_weights


def test_the_column_of_a_planted_sink_is_found():
    """Two heads over 40 tokens; head 0 puts 0.5 on position 3 from there on, the rest of both is even."""
    weights = torch.ones(2, LENGTH, LENGTH).tril()
    weights = weights / weights.sum(-1, keepdim=True)
    weights[0, 3:] *= 0.5 / (1 - weights[0, 3:, 3:4])
    weights[0, 3:, 3] = 0.5
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    statistics = AttentionStatistics(AttentionSettings(columns="all"))
    statistics.layers[0] = (2, None)
    columns = statistics.columns_of(0, 2)
    columns.add_rows(weights, visible, torch.arange(LENGTH), torch.ones(LENGTH, dtype=torch.long))
    columns.add_documents(torch.arange(LENGTH))
    found = statistics._columns_summary(0)
    assert [(sink["position"], sink["heads"]) for sink in found["sink_set"]] == [(3, 1)]
    even = sum(1 / n for n in range(4, LENGTH + 1)) / (LENGTH - 3)
    assert found["sink_set"][0]["share"] == pytest.approx((0.5 + even) / 2, abs=1e-6)
    assert found["top"][0]["position"] == 3 and found["exact"] and found["queries_used"] == LENGTH


def test_keys_that_few_queries_see_are_no_sinks():
    """The last token of a document has all of its own query's mass, as far as one can see."""
    columns = ColumnMasses(1)
    columns.add_rows(torch.eye(LENGTH)[None], torch.eye(LENGTH, dtype=torch.bool), torch.arange(LENGTH), SIDE[0])
    columns.add_rows(
        torch.zeros(1, LENGTH, LENGTH), torch.ones(LENGTH, LENGTH).tril().bool(), torch.arange(LENGTH), SIDE[0]
    )
    columns.add_documents(torch.arange(LENGTH))
    shares = columns.shares()[0]
    counted = columns.used >= MIN_QUERIES
    assert (shares[~counted] == 0).all() and (shares[counted] > 0).all() and not counted[LENGTH - 1]


@pytest.mark.parametrize("length", [384, 1024, 4096])
def test_a_sample_takes_no_late_key_for_a_sink(length):
    """Every query looks at itself alone, so each sampled query gives its own key a share of 1."""
    position = torch.arange(length)
    weights = sampling_weights(position)
    queries = weights.nonzero()[:, 0]
    statistics = AttentionStatistics(AttentionSettings(columns="sample"))
    statistics.layers[0] = (1, None)
    columns = statistics.columns_of(0, 1)
    columns.add_documents(position)
    columns.add_rows(torch.eye(length)[None, queries], position <= queries[:, None], position, weights[queries])
    assert statistics._columns_summary(0)["sink_set"] == []


def test_each_sampled_query_stands_for_those_it_was_taken_from():
    weights = sampling_weights(torch.arange(8192))
    assert weights[:64].tolist() == [1] * 64
    assert weights.sum() == 8192 and (weights > 0).sum() == 64 + (512 - 64) // 16 + (8192 - 512) // 128


def test_the_sample_estimates_all_columns():
    model = probe_model("qwen3")
    ids = tokens(1, 1024)
    every = probed(model, ids, {"columns": "all"}).columns[0]
    sample = probed(model, ids, {"columns": "sample"}).columns[0]
    assert every.queries == 1024 and sample.queries == 64 + (512 - 64) // 16 + (1024 - 512) // 128
    assert sample.seen_by[:64].tolist() == every.seen_by[:64].tolist()
    error = (sample.shares() - every.shares())[:, :64].abs().mean() / every.shares()[:, :64].mean()
    assert 0 < error < 0.2  # an unweighted sample, which prefers early queries, is off by more than 1
