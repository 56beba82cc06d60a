"""The real llama.cpp computes what our mixture of experts computes, as its architecture `qwen35moe`."""

import pytest
import torch
from gated_folders import YARN
from tiny import tiny_model
from ungated import EXPERTS

pytest.importorskip("xllamacpp", reason="llama.cpp comes with: pip install xllamacpp")

from test_llamacpp import compare, greedy, report, serve  # noqa: E402
from trained_model import VOCAB, prefixes  # noqa: E402

from gated_qwen import GatedQwenMoeForCausalLM  # noqa: E402


def mixture(**fields):
    """A random mixture whose experts' rows fill Q8_0's blocks."""
    shape = {"vocab_size": VOCAB, "max_position_embeddings": 256, "eos_token_id": 2, "moe_intermediate_size": 64}
    return tiny_model(GatedQwenMoeForCausalLM, **{**EXPERTS, **shape, **fields})


@pytest.mark.parametrize("rope", ["default", "yarn"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("granularity", ["elementwise", "headwise"])
def test_fp32_gives_our_log_probabilities_and_greedy_tokens(granularity, tied, rope, tmp_path):
    ropes = {"default": {"rope_type": "default", "rope_theta": 1e4}, "yarn": YARN}
    model = mixture(gate_granularity=granularity, tie_word_embeddings=tied, rope_parameters=ropes[rope])
    server = serve(model, tmp_path)
    figures = compare(model, server)
    report(f"f32 mixture, {granularity}, {'tied' if tied else 'untied'}, {rope}", *figures)
    assert figures[0] < 1e-4
    ids = prefixes()[5]
    assert server.greedy(ids, 24) == greedy(model, ids)


def test_every_expert_is_in_its_place(tmp_path):
    """With two experts changed for each other in our model the same comparison sees it."""
    model = mixture()
    server = serve(model, tmp_path)
    with torch.no_grad():
        for layer in model.model.layers:
            for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                weight[[1, 4]] = weight[[4, 1]]
    assert compare(model, server)[0] > 0.1


@pytest.mark.parametrize("dtype", ["f16", "bf16", "q8_0"])
def test_smaller_types_run(dtype, tmp_path):
    """Rounding can choose other experts, so a single position may differ by much: the mean is bounded."""
    model = mixture()
    figures = compare(model, serve(model, tmp_path, dtype))
    report(f"{dtype} mixture", *figures)
    assert figures[1] < {"f16": 1e-3, "bf16": 1e-2, "q8_0": 5e-2}[dtype]
