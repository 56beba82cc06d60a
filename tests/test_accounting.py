"""Counts made from a config equal those of the built model and those that the paper prints."""

import doctest
import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3Config, Qwen3ForCausalLM, StaticCache

from gated_qwen import GatedQwenConfig, GatedQwenForCausalLM
from gated_qwen.configuration import accounting
from gated_qwen.configuration.accounting import count_parameters, flops_per_token, kv_cache_bytes
from gated_qwen.configuration.presets import preset

POSITIONS = ("query", "key", "value", "attn_output", "dense_output")
SETS_OF_POSITIONS = [list(chosen) for size in range(6) for chosen in itertools.combinations(POSITIONS, size)]
OPTIONS = {
    "defaults": {},
    "head_shared": {"gate_head_shared": True},
    "constant gate": {"gate_input": "constant"},
    "first channels": {"gate_input_channels": 5},
    "gate bias": {"gate_bias": True},
    "first channels and gate bias": {"gate_input_channels": 1, "gate_bias": True},
    "output norm": {"attn_output_norm": True},
    "output activation": {"attn_output_activation": "silu"},
    "sandwich norm": {"sandwich_norm": True},
    "no q/k norm": {"use_qk_norm": False},
    "biases": {"attention_bias": True},
    "biases but on o": {"attention_bias": True, "attention_out_bias": False},
    "bias on o alone": {"attention_out_bias": True},
    "untied": {"tie_word_embeddings": False},
    "heads wider than the model": {"head_dim": 24},
    "all norms and biases, untied": {
        "attn_output_norm": True,
        "sandwich_norm": True,
        "attention_bias": True,
        "gate_bias": True,
        "tie_word_embeddings": False,
    },
}
PART_OF_MODULE = {
    "embed_tokens": "embedding",
    "lm_head": "lm_head",
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "attention"),
    **dict.fromkeys(("g_proj", "g_proj_query", "g_proj_key", "g_proj_value", "g_proj_dense"), "gate"),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj", "experts"), "mlp"),
    "gate": "router",  # Qwen3-MoE's name
}
PARTS = ("embedding", "attention", "gate", "mlp", "router", "norm", "lm_head")
EXPERTS = {
    "every layer": {},
    "a dense layer": {"mlp_only_layers": [0]},
    "every second layer": {"decoder_sparse_step": 2},
    "no sparse layer": {"decoder_sparse_step": 3, "output_router_logits": False, "router_z_loss_coef": 0.0},
    "one of three": {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 5},
}


def paper_moe_attention(**gate):
    """24 layers of width 2048 with 32 query and 4 key/value heads of 128: the attention of the paper's table 1."""
    shape = {"num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4}
    return GatedQwenConfig(**shape, head_dim=128, **gate)


def built_on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def parts_of(model):
    """Parameters of a built model, summed by the part that the name of the module belongs to."""
    parts = dict.fromkeys(PARTS, 0)
    for name, parameter in model.named_parameters():
        parts[PART_OF_MODULE.get(name.split(".")[-2], "norm")] += parameter.numel()
    return parts


def counted_parts(config):
    count = count_parameters(config)
    return {part: getattr(count, part) for part in PARTS}


# Parameters


@pytest.mark.parametrize(
    ("position", "granularity", "added"),
    [
        ("attn_output", "elementwise", 201_326_592),
        ("attn_output", "headwise", 1_572_864),
        ("value", "elementwise", 25_165_824),
        ("key", "elementwise", 25_165_824),
        ("query", "elementwise", 201_326_592),
        ("dense_output", "elementwise", 100_663_296),
        ("value", "headwise", 196_608),
    ],
)
def test_gate_has_the_parameters_of_the_papers_table_1(position, granularity, added):
    gated = count_parameters(paper_moe_attention(gate_positions=[position], gate_granularity=granularity))
    ungated = count_parameters(paper_moe_attention(gate_positions=[]))
    assert gated.gate == added
    assert gated.total - ungated.total == added


def test_sharing_scores_between_heads_saves_no_parameters():
    shared = paper_moe_attention(gate_positions=["attn_output"], gate_head_shared=True)
    assert count_parameters(shared).gate == 201_326_592  # table 1, row 12: 201 M


@pytest.mark.parametrize("granularity", ["elementwise", "headwise"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_count_equals_the_built_model_for_every_set_of_positions(granularity, options):
    for positions in SETS_OF_POSITIONS:
        if "dense_output" in positions and (granularity == "headwise" or options.get("gate_head_shared")):
            continue  # a gate on the dense output has no heads
        config = preset("tiny-elementwise", gate_positions=positions, gate_granularity=granularity, **options)
        model = built_on_meta(config)
        assert counted_parts(config) == parts_of(model), positions
        assert count_parameters(config).total == sum(p.numel() for p in model.parameters()), positions


@pytest.mark.parametrize("options", [{}, {"gate_positions": list(POSITIONS)}, {"sandwich_norm": True}], ids=str)
@pytest.mark.parametrize("experts", EXPERTS.values(), ids=EXPERTS.keys())
def test_count_of_experts_equals_the_built_model(experts, options):
    config = preset("tiny-moe-elementwise", **experts, **options)
    assert counted_parts(config) == parts_of(built_on_meta(config))


@pytest.mark.parametrize("experts", EXPERTS.values(), ids=EXPERTS.keys())
def test_active_parameters_are_those_that_get_a_gradient_from_one_token(experts):
    model = AutoModelForCausalLM.from_config(preset("tiny-moe-headwise", **experts, tie_word_embeddings=False))
    model.set_experts_implementation("eager")
    model(torch.tensor([[3]])).logits.square().sum().backward()
    used = 0
    for name, parameter in model.named_parameters():
        if "experts" in name:
            used += sum(expert.numel() for expert, grad in zip(parameter, parameter.grad, strict=True) if grad.any())
        else:
            used += parameter.numel()
    assert used == count_parameters(model.config).active


def test_active_parameters_of_a_dense_model_are_all_of_them():
    count = count_parameters(preset("dense-28l-headwise"))
    assert count.active == count.total


def test_an_ungated_config_counts_as_the_qwen3_of_its_shape():
    config = preset("tiny-baseline")
    qwen3 = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            tie_word_embeddings=True,
        )
    )
    assert count_parameters(config).total == sum(p.numel() for p in qwen3.parameters())


def test_a_tied_head_is_counted_once():
    tied = count_parameters(preset("tiny-headwise"))
    untied = count_parameters(preset("tiny-headwise", tie_word_embeddings=False))
    assert (tied.embedding, tied.lm_head) == (64 * 32, 0)
    assert (untied.embedding, untied.lm_head) == (64 * 32, 64 * 32)


def test_gate_share_is_the_gate_over_all_parameters():
    count = count_parameters(preset("tiny-headwise"))
    assert count.gate_share == pytest.approx(256 / 20_928)


# FLOPs


def test_flops_of_a_tiny_model_by_hand():
    flops = flops_per_token(preset("tiny-elementwise"), context_length=10)
    assert flops.projections == 2 * 2 * (32 * 32 + 32 * 16 + 32 * 16 + 32 * 32)
    assert flops.scores == 2 * 10 * 4 * 32
    assert flops.gate == 2 * (2 * 32 * 32 + 32)
    assert flops.mlp == 2 * 2 * 3 * 32 * 64
    assert flops.lm_head == 2 * 32 * 64
    assert flops.total == flops.projections + flops.scores + flops.gate + flops.mlp + flops.lm_head
    assert flops.gate_share == flops.gate / flops.total


def test_a_token_pays_for_its_own_experts_and_for_the_router():
    flops = flops_per_token(preset("tiny-moe-headwise", mlp_only_layers=[1]), context_length=10)
    assert flops.mlp == 2 * 3 * 32 * (2 * 16 + 64)  # two experts of width 16 in layer 0, an FFN of 64 in layer 1
    assert flops.router == 2 * 8 * 32


@pytest.mark.parametrize(
    "options",
    [
        {"gate_positions": []},
        {"gate_positions": ["attn_output"]},
        {"gate_positions": ["attn_output"], "gate_granularity": "headwise"},
        {"gate_positions": list(POSITIONS)},
        {"gate_positions": list(POSITIONS), "gate_input_channels": 3},
        {"gate_positions": list(POSITIONS), "gate_input": "constant"},
        {"tie_word_embeddings": False, "sandwich_norm": True, "attn_output_norm": True},
    ],
    ids=lambda options: " ".join(f"{key}={value}" for key, value in options.items()),
)
def test_matrix_flops_equal_what_torch_counts_in_a_forward_pass(options):
    tokens = 6
    config = preset("tiny-elementwise", **options)
    config._attn_implementation = "eager"  # multiplies the whole square, so that every token attends to all keys
    model = GatedQwenForCausalLM(config)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(tokens).unsqueeze(0), use_cache=False)
    rotary_angles = counter.get_flop_counts().get("GatedQwenForCausalLM.model.rotary_emb", {})
    elements = {"query": 32, "key": 16, "value": 16, "attn_output": 32, "dense_output": 32}
    gate_products = sum(2 * elements[position] for position in config.gate_positions)  # not counted by torch
    ours = tokens * (flops_per_token(config, context_length=tokens).total - gate_products)
    assert ours == counter.get_total_flops() - sum(rotary_angles.values())


def test_a_headwise_gate_costs_a_product_for_each_element_and_a_projection_row_for_each_head():
    flops = flops_per_token(preset("dense-28l-headwise"), context_length=4096)
    assert flops.gate == 28 * (2 * 2048 * 16 + 2048)
    assert flops.gate_share < 0.001


def test_only_the_attention_scores_grow_with_the_context():
    config = preset("dense-28l-elementwise")
    short, long = flops_per_token(config, 1000), flops_per_token(config, 3000)
    assert long.scores == 3 * short.scores
    assert long.total - short.total == long.scores - short.scores


def test_a_sliding_layer_attends_to_no_more_keys_than_its_window():
    config = preset("tiny-headwise", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert config.layer_types == ["full_attention", "sliding_attention"]
    assert flops_per_token(config, 100).scores == (100 + 8) * 4 * 32
    assert flops_per_token(config, 5).scores == (5 + 5) * 4 * 32


@pytest.mark.parametrize("length", [0, -1])
def test_flops_need_at_least_one_attended_key(length):
    with pytest.raises(ValueError, match=f"context_length must be at least 1.*got {length}"):
        flops_per_token(preset("tiny-headwise"), length)


# Cache


def cached_tokens(config, cache, tokens):
    model = GatedQwenForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        model(input_ids=torch.zeros(3, tokens, dtype=torch.long), past_key_values=cache, use_cache=True)
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))


def test_cache_of_the_28_layer_shape_takes_448_mebibytes_at_4096_tokens():
    assert kv_cache_bytes(preset("dense-28l-elementwise"), 4096) == 448 * 2**20


def test_cache_bytes_equal_a_filled_dynamic_cache():
    config = preset("tiny-headwise", gate_positions=["key", "value"])
    measured = cached_tokens(config, DynamicCache(config=config), tokens=20)
    assert kv_cache_bytes(config, 20, batch_size=3, bytes_per_element=2) == measured


def test_cache_bytes_of_sliding_layers_equal_a_static_cache():
    config = preset("tiny-headwise", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    measured = cached_tokens(config, StaticCache(config=config, max_cache_len=20), tokens=20)
    assert measured == (20 + 8) * 2 * 2 * 8 * 3 * 2
    assert kv_cache_bytes(config, 20, batch_size=3, bytes_per_element=2) == measured


def test_cache_of_any_transformers_config_can_be_counted():
    config = Qwen3Config(num_hidden_layers=2, num_key_value_heads=2, head_dim=8, num_attention_heads=4)
    assert kv_cache_bytes(config, 10, bytes_per_element=4) == 2 * 10 * 2 * 2 * 8 * 4


@pytest.mark.parametrize("wrong", [{"sequence_length": 0}, {"batch_size": 0}, {"bytes_per_element": -2}])
def test_cache_refuses_sizes_below_one_and_names_them(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        kv_cache_bytes(preset("tiny-headwise"), **{"sequence_length": 4, **wrong})


# What cannot be counted


def test_a_config_without_gate_fields_is_refused_with_their_names():
    with pytest.raises(AttributeError, match=r"count_parameters.*Qwen3Config lacks.*gate_positions.*GatedQwenConfig"):
        count_parameters(Qwen3Config())


def test_shared_experts_are_refused():
    config = preset("tiny-moe-headwise")
    config.shared_expert_intermediate_size = 16
    with pytest.raises(ValueError, match="count_parameters counts no shared experts"):
        count_parameters(config)
    with pytest.raises(ValueError, match="flops_per_token counts no shared experts"):
        flops_per_token(config, 4)


def test_experts_without_the_fields_to_count_them_are_refused():
    config = SimpleNamespace(**preset("tiny-headwise").to_dict(), num_experts=8)
    with pytest.raises(AttributeError, match="lacks: num_experts_per_tok, moe_intermediate_size, sparse_layers"):
        count_parameters(config)


def test_an_unknown_gate_position_is_refused_with_those_that_exist():
    config = SimpleNamespace(**{**preset("tiny-headwise").to_dict(), "gate_positions": ["output"]})
    with pytest.raises(ValueError, match="'output'; the gate positions are query, key, value, attn_output"):
        count_parameters(config)


@pytest.mark.parametrize("layer_type", ["linear_attention", "sliding_attention"])
def test_a_layer_whose_keys_are_not_known_is_refused(layer_type):
    fields = {
        **preset("tiny-headwise").to_dict(),
        "layer_types": ["full_attention", layer_type],
        "sliding_window": None,
    }
    with pytest.raises(ValueError, match=f"layer_types holds {layer_type}; with sliding_window=None"):
        kv_cache_bytes(SimpleNamespace(**fields), 4)


def test_any_object_with_the_fields_is_counted_and_absent_layer_types_mean_full_attention():
    config = SimpleNamespace(**{**preset("tiny-elementwise").to_dict(), "layer_types": None})
    assert count_parameters(config).total == 22_720
    assert kv_cache_bytes(config, 10) == 2 * 10 * 2 * 2 * 8 * 2


# The module


def test_accounting_loads_without_torch_or_transformers():
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1]); sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    path = Path(accounting.__file__)
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 0


def test_docstring_examples_run():
    result = doctest.testmod(accounting)
    assert (result.failed, result.attempted > 5) == (0, True)
