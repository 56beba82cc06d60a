"""The config accepts both RoPE schemas, loses nothing, and refuses what has no meaning."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from tiny import TINY_FIELDS, tiny_config, tiny_model, tokens

from gated_qwen import GatedQwenConfig, GatedQwenForCausalLM
from gated_qwen.configuration.configuration_gated_qwen import GATE_FIELDS, normalize_rope_parameters

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def without_rope(**fields):
    return GatedQwenConfig(**{**{k: v for k, v in TINY_FIELDS.items() if k != "rope_parameters"}, **fields})


# RoPE in both schemas


def test_the_old_and_the_new_schema_give_the_same_config():
    old = without_rope(rope_theta=1e6, rope_scaling=YARN)
    new = without_rope(rope_parameters={**YARN, "rope_theta": 1e6})
    both = without_rope(rope_parameters={**YARN, "rope_theta": 1e6}, rope_theta=1e6, rope_scaling=YARN)
    assert old.to_dict() == new.to_dict() == both.to_dict()
    assert old.rope_theta == old.rope_parameters["rope_theta"] == 1e6


def test_config_json_holds_one_base_in_every_place(tmp_path):
    without_rope(rope_theta=1e6, rope_scaling=YARN).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["rope_theta"] == saved["rope_parameters"]["rope_theta"] == 1e6
    assert "rope_theta" not in saved["rope_scaling"]
    assert saved["rope_scaling"] == {k: v for k, v in saved["rope_parameters"].items() if k != "rope_theta"}


def test_the_callers_dict_is_not_touched():
    for key in ("rope_scaling", "rope_parameters"):
        given = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32768, "rope_theta": 1000000}
        before = copy.deepcopy(given)
        config = without_rope(**{key: given})
        config.rope_theta = 5e5
        config.rope_parameters["factor"] = 8.0
        assert given == before


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_theta": 1e4, "rope_scaling": {**YARN, "rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_parameters": YARN, "rope_scaling": {**YARN, "factor": 2.0}},
    ],
    ids=["theta and parameters", "theta and scaling", "parameters and scaling"],
)
def test_disagreeing_values_are_refused(fields):
    with pytest.raises(ValueError, match="different values|contradicts"):
        without_rope(**fields)


def test_type_and_rope_type_are_read_and_must_agree():
    for spelling in ({"type": "yarn"}, {"rope_type": "yarn"}, {"type": "yarn", "rope_type": "yarn"}):
        scaling = {**{k: v for k, v in YARN.items() if k != "rope_type"}, **spelling}
        assert without_rope(rope_theta=1e6, rope_scaling=scaling).rope_parameters["rope_type"] == "yarn"
    with pytest.raises(ValueError, match="contradicts"):
        without_rope(rope_theta=1e6, rope_scaling={**YARN, "type": "linear"})
    with pytest.raises(ValueError, match="choose one of default, linear, dynamic, yarn"):
        without_rope(rope_theta=1e6, rope_scaling={"rope_type": "ntk", "factor": 2.0})


def test_whole_numbers_are_stored_as_floats():
    parameters = without_rope(rope_theta=1000000, rope_scaling={**YARN, "factor": 4}).rope_parameters
    assert isinstance(parameters["factor"], float) and isinstance(parameters["rope_theta"], float)


def test_the_alias_attn_factor_is_mapped():
    assert normalize_rope_parameters({**YARN, "rope_theta": 1e6, "attn_factor": 1.0})["attention_factor"] == 1.0
    with pytest.raises(ValueError, match="attn_factor"):
        normalize_rope_parameters({**YARN, "rope_theta": 1e6, "attn_factor": 1.0, "attention_factor": 1.2})


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}, "original_max_position_embeddings"),
        ({**YARN, "factor": 0.5, "rope_theta": 1e6}, "factor"),
        ({**YARN, "factor": float("nan"), "rope_theta": 1e6}, "factor"),
        ({**YARN, "factor": "4", "rope_theta": 1e6}, "factor"),
        ({**YARN, "rope_theta": -1.0}, "base"),
        ({**YARN, "rope_theta": 1e6, "beta_fast": 1, "beta_slow": 32}, "beta_slow"),
        ({**YARN, "rope_theta": 1e6, "attention_factor": 0.0}, "attention_factor"),
        ({**YARN, "rope_theta": 1e6, "truncate": "no"}, "truncate"),
        ({"factor": 4.0, "rope_theta": 1e6}, "rope_type"),
        ({"rope_type": "default", "factor": 4.0, "rope_theta": 1e6}, "does not scale"),
        ({"rope_type": "longrope", "original_max_position_embeddings": 64, "rope_theta": 1e6}, "short_factor"),
        ({"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        (YARN, "rope_theta"),
        ("yarn", "expected a dict"),
    ],
)
def test_rope_nonsense_is_refused_with_the_field_named(rope, message):
    with pytest.raises(ValueError, match=message):
        without_rope(rope_parameters=rope)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        {
            "rope_type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        {**YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_every_scaling_survives_save_and_reload(rope, tmp_path):
    config = without_rope(rope_parameters={**rope, "rope_theta": 1e6})
    config.save_pretrained(tmp_path)
    assert GatedQwenConfig.from_pretrained(tmp_path).rope_parameters == {**rope, "rope_theta": 1e6}


# The base is carried through every change of a built config


def test_setting_the_base_changes_the_one_place_that_counts():
    config = without_rope(rope_theta=1e4, rope_scaling=YARN)
    config.rope_theta = 1e6
    assert config.rope_parameters == {**YARN, "rope_theta": 1e6}


@pytest.mark.parametrize("attribute", ["rope_scaling", "rope_parameters"])
def test_setting_a_scaling_without_a_base_keeps_the_base(attribute):
    config = without_rope(rope_theta=1e6, max_position_embeddings=32768)
    setattr(config, attribute, {"rope_type": "yarn", "factor": 4})
    # The config was unscaled, so the length that it had is the original one.
    assert config.rope_parameters == {**YARN, "rope_theta": 1e6}
    setattr(config, attribute, {"rope_type": "yarn", "factor": 2})
    assert config.rope_parameters == {**YARN, "factor": 2.0, "rope_theta": 1e6}
    setattr(config, attribute, None)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}


def test_setting_nonsense_leaves_the_config_as_it_was():
    config = without_rope(rope_theta=1e6, rope_scaling=YARN)
    with pytest.raises(ValueError):
        config.rope_parameters = {"rope_type": "yarn", "factor": 0.1}
    assert config.rope_parameters == {**YARN, "rope_theta": 1e6}


def test_a_base_change_changes_the_frequencies_after_reload_in_a_new_process(tmp_path):
    """On a saved model, 1e4 -> 1e6: inv_freq is 1e6^(-2i/D)."""
    model = tiny_model()
    model.config.rope_theta = 1e6
    model.save_pretrained(tmp_path)
    code = """
import json, sys
from transformers import AutoModelForCausalLM
import gated_qwen
print(json.dumps(AutoModelForCausalLM.from_pretrained(sys.argv[1]).model.rotary_emb.inv_freq.tolist()))
"""
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    actual = torch.tensor(json.loads(run.stdout.splitlines()[-1]))
    expected = torch.tensor([1e6 ** (-2 * i / 8) for i in range(4)])
    assert (actual - expected).abs().max() < 1e-7


def test_yarn_frequencies_equal_the_closed_form():
    """arXiv 2309.00071, section 3.2: ramp over the number of rotations in the original length."""
    import math

    dim, base, factor, original = 8, 1e6, 4.0, 64
    config = without_rope(
        rope_parameters={**YARN, "original_max_position_embeddings": original, "rope_theta": base},
        max_position_embeddings=256,
    )
    rotary = GatedQwenForCausalLM(config).model.rotary_emb
    low, high = (dim * math.log(original / (r * 2 * math.pi)) / (2 * math.log(base)) for r in (32, 1))
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    expected = []
    for i in range(dim // 2):
        kept = 1 - min(max((i - low) / (high - low), 0.0), 1.0)
        frequency = base ** (-2 * i / dim)
        expected.append(frequency * kept + frequency / factor * (1 - kept))
    assert torch.allclose(rotary.inv_freq, torch.tensor(expected), rtol=1e-6)
    assert rotary.attention_scaling == pytest.approx(0.1 * math.log(4) + 1)


def test_factor_one_is_the_unscaled_model_to_the_bit():
    plain, scaled = tiny_model(), tiny_model(rope_parameters={**YARN, "factor": 1.0, "rope_theta": 1e4})
    with torch.no_grad():
        assert torch.equal(plain(tokens(1, 16)).logits, scaled(tokens(1, 16)).logits)


# Nothing is lost


ODD_VALUES = {
    "gate_positions": ["value", "attn_output"],
    "gate_granularity": "headwise",
    "gate_head_shared": True,
    "gate_activation": "ns_sigmoid",
    "gate_operation": "add",
    "gate_input_channels": 7,
    "gate_bias": True,
    "gate_initializer_range": 0.0,
    "attn_output_norm": True,
    "attn_output_activation": "silu",
    "sandwich_norm": True,
    "use_qk_norm": False,
    "attention_bias": True,
    "attention_out_bias": False,
    "architectures": ["GatedQwenForCausalLM"],
    "dtype": "bfloat16",
    "a_key_of_somebody_else": {"nested": [1, 2]},
}


@pytest.mark.parametrize("fields", [ODD_VALUES, {"gate_positions": [], "gate_initializer_range": None}])
def test_every_field_survives_every_way_of_copying(fields, tmp_path):
    config = tiny_config(**fields)
    config.save_pretrained(tmp_path)
    copies = {
        "from_dict": GatedQwenConfig.from_dict(config.to_dict()),
        "deepcopy": copy.deepcopy(config),
        "json": GatedQwenConfig(**json.loads(config.to_json_string())),
        "diff": GatedQwenConfig(**config.to_diff_dict()),
        "file": GatedQwenConfig.from_pretrained(tmp_path),
    }
    for name, other in copies.items():
        for field, value in fields.items():
            if field == "dtype":
                assert other.dtype in (torch.bfloat16, "bfloat16"), name
            else:
                assert getattr(other, field) == value, (name, field)


def test_config_json_states_every_gate_field_at_its_default(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert set(GATE_FIELDS) <= set(saved)


def test_a_fresh_default_is_not_shared_between_configs():
    tiny_config().gate_positions.append("value")
    assert tiny_config().gate_positions == ["attn_output"]


# Nonsense is refused


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gate_positions": ["output"]}, "gate_positions.*query, key, value, attn_output, dense_output"),
        ({"gate_positions": "attn_output"}, "gate_positions.*expected a list"),
        ({"gate_positions": None}, "gate_positions"),
        ({"gate_positions": ["value", "value"]}, "once"),
        ({"gate_granularity": "per_head"}, "gate_granularity.*elementwise, headwise"),
        ({"gate_activation": "relu"}, "gate_activation.*sigmoid, silu, ns_sigmoid, softplus, identity"),
        ({"gate_operation": "divide"}, "gate_operation.*multiply, add"),
        ({"gate_input": "query"}, "gate_input.*hidden_states, constant"),
        ({"gate_input_channels": 0}, "gate_input_channels.*1 to hidden_size=32"),
        ({"gate_input_channels": 33}, "gate_input_channels.*1 to hidden_size=32"),
        ({"gate_input_channels": 2.5}, "gate_input_channels"),
        ({"gate_input_channels": True}, "gate_input_channels"),
        ({"gate_bias": "yes"}, "gate_bias.*True or False"),
        ({"gate_initializer_range": -0.1}, "gate_initializer_range"),
        ({"gate_initializer_range": float("inf")}, "gate_initializer_range"),
        ({"gate_positions": ["dense_output"], "gate_granularity": "headwise"}, "dense_output has no heads"),
        ({"gate_positions": ["dense_output"], "gate_head_shared": True}, "dense_output has no heads"),
        ({"gate_input": "constant", "gate_input_channels": 4}, "constant gate reads no channels"),
        ({"gate_input": "constant", "gate_bias": True}, "constant gate is its own bias"),
        ({"attn_output_activation": "swish"}, "attn_output_activation"),
        ({"attention_out_bias": "yes"}, "attention_out_bias"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3.*must divide num_attention_heads=4"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0"),
        ({"intermediate_size": 0}, "intermediate_size=0"),
        ({"gate_positon": ["value"]}, "gate_positon.*no such field"),
        ({"headwise_attn_output_gate": True}, "official release layout.*converted"),
        ({"headwise_attn_output_gate": True, "elementwise_attn_output_gate": True}, "official release layout"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
    ],
)
def test_a_wrong_value_is_refused_with_field_value_and_what_is_allowed(fields, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**fields)


@pytest.mark.parametrize(
    "fields", [{"head_dim": 7}, {"head_dim": None}, {"use_sliding_window": True, "sliding_window": 0}]
)
def test_a_wrong_field_of_qwen3s_is_refused_by_name_whichever_library_check_finds_it(fields):
    with pytest.raises(ValueError, match=f"GatedQwenConfig: .*{list(fields)[-1]}"):
        tiny_config(**fields)


def test_a_wrong_value_set_later_is_refused_when_the_model_is_built():
    config = tiny_config()
    config.gate_granularity = "per_head"
    with pytest.raises(ValueError, match="gate_granularity"):
        GatedQwenForCausalLM(config)


def test_a_wrong_value_given_to_from_pretrained_is_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="gate_activation"):
        GatedQwenForCausalLM.from_pretrained(tmp_path, gate_activation="relu")
