"""Presets have the shapes and sizes of their sources, and a matched FFN pays for the gate."""

import doctest
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import gated_qwen  # noqa: F401  (registers the Auto classes)
from gated_qwen.configuration import presets
from gated_qwen.configuration.accounting import count_parameters
from gated_qwen.configuration.presets import preset, preset_fields, preset_names

# Parameters of each preset, counted from the shapes: embedding, then layers * (attention, FFN, norms), then the last
# norm, then the gate. The released ones were also measured on the checkpoints: 1720.8 M, 1721.8 M and 1728.2 M.
TOTALS = {
    "dense-28l-baseline": 1_720_574_976,
    "dense-28l-headwise": 1_721_492_480,
    "dense-28l-elementwise": 1_838_015_488,
    "dense-48l-baseline": 1_705_735_680,
    "dense-48l-headwise": 1_706_915_328,
    "dense-48l-elementwise": 1_856_730_624,
    "released-1b-baseline": 1_720_837_120,
    "released-1b-headwise": 1_721_754_624,
    "released-1b-elementwise": 1_728_177_152,
    "moe-15a2b-baseline": 14_369_267_712,
    "moe-15a2b-headwise": 14_370_840_576,
    "moe-15a2b-elementwise": 14_570_594_304,
    "moe-15a2b-kv8": 14_419_599_360,
    "moe-15a2b-q48": 14_570_594_304,
    "moe-15a2b-experts132": 14_784_700_416,
    "tiny-baseline": 20_672,
    "tiny-headwise": 20_928,
    "tiny-elementwise": 22_720,
    "tiny-moe-baseline": 35_520,
    "tiny-moe-headwise": 35_776,
    "tiny-moe-elementwise": 37_568,
}
NO_ROUTER = {"output_router_logits": False, "router_z_loss_coef": 0.0}
SHAPES = ("dense-28l", "dense-48l", "released-1b")


def built_parameters(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_shape_has_its_variants():
    assert preset_names() == list(TOTALS)


@pytest.mark.parametrize("name", TOTALS)
def test_preset_builds_with_the_parameters_of_its_shape(name):
    assert built_parameters(preset(name)) == TOTALS[name]


def test_dense_shapes_are_those_of_the_papers_table_7():
    shared = {
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
        "use_qk_norm": True,
    }
    table_7 = {
        "dense-28l": {"num_hidden_layers": 28, "hidden_size": 2048, "intermediate_size": 6144, **shared},
        "dense-48l": {"num_hidden_layers": 48, "hidden_size": 1536, "intermediate_size": 4608, **shared},
    }
    for shape, fields in table_7.items():
        assert fields.items() <= preset_fields(f"{shape}-baseline").items()


def test_the_width_of_an_expert_follows_from_the_papers_totals():
    """What a token does not use, 15B less 2.54B, is 120 experts in each of 24 layers."""
    config = preset("moe-15a2b-baseline")
    width = (15e9 - 2.54e9) / (120 * 24 * 3 * 2048)
    assert config.moe_intermediate_size == round(width / 64) * 64 == 704
    count = count_parameters(config)
    assert count.total - count.active == pytest.approx(15e9 - 2.54e9, rel=0.001)
    assert count.total == pytest.approx(15e9, rel=0.05)


def test_the_mixture_has_the_attention_and_the_gates_of_the_papers_table_1():
    baseline, headwise, elementwise, kv8, q48, experts132 = (
        count_parameters(preset(f"moe-15a2b-{variant}"))
        for variant in ("baseline", "headwise", "elementwise", "kv8", "q48", "experts132")
    )
    assert (headwise.gate, elementwise.gate) == (1_572_864, 201_326_592)
    assert kv8.total - baseline.total == 24 * 2 * 2048 * 4 * 128
    assert q48.total - baseline.total == 24 * 2 * 2048 * 16 * 128
    assert experts132.total - baseline.total == 24 * 4 * (3 * 2048 * 704 + 2048)
    assert experts132.active - baseline.active == 24 * 4 * 2048  # the router's rows


def test_released_elementwise_has_the_narrower_ffn_of_its_checkpoint():
    widths = [preset_fields(f"released-1b-{v}")["intermediate_size"] for v in ("baseline", "headwise", "elementwise")]
    assert widths == [6144, 6144, 5504]


@pytest.mark.parametrize("name", [name for name in TOTALS if not name.startswith("tiny")])
def test_rope_is_that_of_the_papers_4k_stage(name):
    config = preset(name)
    assert config.max_position_embeddings == 4096
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("shape", [*SHAPES, "moe-15a2b", "tiny", "tiny-moe"])
def test_variants_differ_in_the_gate(shape):
    baseline, headwise, elementwise = (preset(f"{shape}-{v}") for v in ("baseline", "headwise", "elementwise"))
    assert baseline.gate_positions == []
    assert (headwise.gate_positions, headwise.gate_granularity) == (["attn_output"], "headwise")
    assert (elementwise.gate_positions, elementwise.gate_granularity) == (["attn_output"], "elementwise")


def test_tiny_has_more_query_than_key_value_heads_so_that_a_wrong_split_shows():
    fields = preset_fields("tiny-headwise")
    sizes = (
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_size",
        "num_hidden_layers",
        "vocab_size",
    )
    assert [fields[size] for size in sizes] == [4, 2, 8, 32, 2, 64]


@pytest.mark.parametrize("name", TOTALS)
def test_fields_are_json_and_the_callers_to_change(name):
    fields = preset_fields(name)
    assert json.loads(json.dumps(fields)) == fields
    fields["rope_parameters"]["rope_theta"] = 1.0
    fields["gate_positions"].append("value")
    assert preset_fields(name)["rope_parameters"]["rope_theta"] == 10000.0
    assert "value" not in preset_fields(name)["gate_positions"]


# Overrides


def test_overrides_replace_fields():
    config = preset("tiny-headwise", num_hidden_layers=3, gate_positions=["value"], num_labels=5)
    assert (config.num_hidden_layers, config.gate_positions, config.num_labels) == (3, ["value"], 5)
    assert config.layer_types == ["full_attention"] * 3


def test_overriding_does_not_change_the_preset_or_the_callers_values():
    positions = ["value"]
    preset("tiny-headwise", gate_positions=positions).gate_positions.append("key")
    assert positions == ["value"]
    assert preset("tiny-headwise").gate_positions == ["attn_output"]


@pytest.mark.parametrize("base", [{"rope_theta": 1e6}, {"rope_parameters": {"rope_theta": 1e6}}])
def test_the_rope_base_can_be_overridden_in_either_schema(base):
    assert preset("tiny-headwise", **base).rope_parameters == {"rope_type": "default", "rope_theta": 1e6}


def test_a_scaling_without_a_base_or_an_original_length_takes_those_of_the_preset():
    yarn = {"rope_type": "yarn", "factor": 4.0}
    config = preset("dense-28l-headwise", rope_parameters=yarn, max_position_embeddings=16384)
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert config.rope_parameters["original_max_position_embeddings"] == 4096
    assert yarn == {"rope_type": "yarn", "factor": 4.0}


def test_an_unknown_preset_is_refused_with_the_nearest_and_all_names():
    with pytest.raises(
        ValueError, match="unknown preset 'dense28-headwise'; did you mean 'dense-28l-headwise'"
    ) as error:
        preset("dense28-headwise")
    assert all(name in str(error.value) for name in preset_names())
    with pytest.raises(ValueError, match=r"unknown preset 'Zzz'\. The presets are dense-28l-baseline, "):
        preset_fields("Zzz")


@pytest.mark.parametrize(
    ("field", "nearest"),
    [("num_layers", "num_hidden_layers"), ("gate_position", "gate_positions"), ("intermediate", "intermediate_size")],
)
def test_an_unknown_field_is_refused_with_the_nearest(field, nearest):
    with pytest.raises(ValueError, match=f"unknown config field '{field}'; did you mean '{nearest}'"):
        preset("tiny-headwise", **{field: 1})


def test_the_model_type_is_not_a_field_to_override():
    with pytest.raises(ValueError, match="unknown config field 'model_type'"):
        preset("tiny-headwise", model_type="qwen3")


def test_a_value_that_the_config_refuses_is_refused_by_name():
    with pytest.raises(ValueError, match="gate_granularity='rowwise'"):
        preset("tiny-headwise", gate_granularity="rowwise")


# Matching the baseline's parameters


@pytest.mark.parametrize(
    ("name", "width", "total"),
    [
        ("dense-28l-headwise", 6144, 1_721_492_480),  # + 0.053 %: the gate alone is within the tolerance
        ("dense-28l-elementwise", 5456, 1_719_657_472),  # 16 * 341, - 0.053 %
        ("dense-48l-headwise", 4608, 1_706_915_328),  # + 0.069 %
        ("dense-48l-elementwise", 3920, 1_704_556_032),  # 16 * 245, - 0.069 %
        ("released-1b-headwise", 6144, 1_721_754_624),
        ("released-1b-elementwise", 5456, 1_719_919_616),
    ],
)
def test_matched_ffn_brings_the_built_model_within_a_thousandth_of_its_baseline(name, width, total):
    config = preset(name, match_parameters=True)
    baseline = TOTALS[f"{name.rpartition('-')[0]}-baseline"]
    assert config.intermediate_size == width
    assert built_parameters(config) == total
    assert abs(total - baseline) <= 0.001 * baseline


@pytest.mark.parametrize("shape", [*SHAPES, "moe-15a2b", "tiny", "tiny-moe"])
def test_matching_leaves_a_baseline_as_it_is(shape):
    name = f"{shape}-baseline"
    assert preset(name, match_parameters=True).to_dict() == preset(name).to_dict()


@pytest.mark.parametrize(("variant", "width"), [("headwise", 704), ("elementwise", 696), ("experts132", 680)])
def test_matched_experts_bring_the_mixture_near_its_baseline(variant, width):
    config = preset(f"moe-15a2b-{variant}", match_parameters=True)
    assert (config.moe_intermediate_size, config.intermediate_size) == (width, 6144)
    assert built_parameters(config) == pytest.approx(TOTALS["moe-15a2b-baseline"], rel=0.005)


def test_matching_without_experts_is_refused():
    with pytest.raises(ValueError, match="no layer has experts to narrow"):
        preset("tiny-moe-headwise", match_parameters=True, mlp_only_layers=[0, 1], **NO_ROUTER)


def test_a_field_of_the_other_family_is_refused():
    with pytest.raises(ValueError, match="unknown config field 'num_experts'"):
        preset("tiny-headwise", num_experts=4)
    assert preset("tiny-moe-headwise", num_experts=4).num_experts == 4


def test_matching_changes_the_ffn_width_and_nothing_else():
    matched, plain = preset("dense-28l-elementwise", match_parameters=True), preset("dense-28l-elementwise")
    assert {**matched.to_dict(), "intermediate_size": 6144} == plain.to_dict()


@pytest.mark.parametrize(
    ("name", "width", "parameters", "off"),
    [("tiny-headwise", 63, "20,736", "0.31%"), ("tiny-elementwise", 53, "20,608", "0.31%")],
)
def test_a_shape_too_small_to_match_is_refused_with_the_nearest_width(name, width, parameters, off):
    message = f"{name}: no intermediate_size.*baseline's 20,672; the nearest.*={width} with {parameters} .{off} off"
    with pytest.raises(ValueError, match=message):
        preset(name, match_parameters=True)


def test_matching_without_an_ffn_is_refused():
    with pytest.raises(ValueError, match="intermediate_size=0"):
        preset("tiny-headwise", match_parameters=True, intermediate_size=0)


def test_matching_follows_overrides_of_the_shape():
    smaller = {"num_hidden_layers": 12, "intermediate_size": 6000}
    config = preset("dense-28l-elementwise", match_parameters=True, **smaller)
    baseline = built_parameters(preset("dense-28l-baseline", **smaller))
    assert config.intermediate_size < 6000
    assert built_parameters(config) == pytest.approx(baseline, rel=0.001)


def test_matching_pays_for_added_gates_and_norms_too():
    added = {"gate_positions": ["query", "attn_output", "dense_output"], "gate_bias": True, "sandwich_norm": True}
    config = preset("dense-48l-elementwise", match_parameters=True, **added)
    assert built_parameters(config) == pytest.approx(TOTALS["dense-48l-baseline"], rel=0.001)


def test_a_sandwich_norm_counts_as_an_addition_to_the_baseline():
    with pytest.raises(ValueError, match="baseline's 20,672"):  # 128 norm weights are 0.6 % of the tiny shape
        preset("tiny-baseline", match_parameters=True, sandwich_norm=True)


def test_docstring_examples_run():
    result = doctest.testmod(presets)
    assert (result.failed, result.attempted > 3) == (0, True)
