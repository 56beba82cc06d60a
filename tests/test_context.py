"""RoPE base and YaRN on the content of a config.json: nothing guessed, nothing lost, frequencies as the paper says."""

import copy
import math

import pytest
import torch
from tiny import tiny_config, tiny_model, tokens
from transformers import CONFIG_MAPPING, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gated_qwen import GatedQwenConfig
from gated_qwen.configuration.context import (
    apply_yarn,
    change_context,
    remove_scaling,
    set_rope_theta,
    smallest_factors,
    yarn_attention_factor,
)
from gated_qwen.configuration.context_plan import CONTEXT_PLAN, context_stage, next_context_stage
from gated_qwen.configuration.engines import engine_settings
from gated_qwen.configuration.frequencies import describe_context, rope_frequencies, rotary_dim
from gated_qwen.configuration.rope_schema import read_rope

PLAIN = {"model_type": "qwen3", "head_dim": 128, "max_position_embeddings": 32768, "rope_theta": 1e6}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 8192
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 64,
        "long_factor": [1.0] * 16 + [2.0] * 16 + [4.0] * 32,
        "factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {**YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.0},
}


def with_scaling(name):
    return {**PLAIN, "rope_parameters": {**SCALINGS[name], "rope_theta": 1e6}}


# The base


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 1e4},
        {"rope_theta": 10000, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_theta": 1e4, "rope_scaling": None},
        {},
    ],
    ids=["old schema", "old schema, whole number", "new schema", "both", "nothing said"],
)
def test_a_base_change_is_one_value_in_every_place_and_adds_no_scaling(config):
    changed = set_rope_theta({"max_position_embeddings": 512, **config}, 1e6)
    assert changed["rope_theta"] == changed["rope_parameters"]["rope_theta"] == 1e6
    assert changed["rope_parameters"]["rope_type"] == "default" and changed["rope_scaling"] is None
    assert changed["max_position_embeddings"] == 512


@pytest.mark.parametrize("name", SCALINGS)
def test_a_base_change_passes_every_scaling_through(name):
    changed = set_rope_theta(with_scaling(name), 5e5)
    assert changed["rope_parameters"] == {**SCALINGS[name], "rope_theta": 5e5}
    assert changed["rope_scaling"] == SCALINGS[name] and changed["rope_theta"] == 5e5


def test_a_scaling_without_a_base_needs_one_and_a_base_change_gives_it():
    config = {"max_position_embeddings": 512, "rope_scaling": {"type": "linear", "factor": 2.0}}
    with pytest.raises(ValueError, match="config.json: rope_theta=None.*add rope_theta"):
        describe_context(config)
    assert set_rope_theta(config, 1e4)["rope_parameters"]["rope_theta"] == 1e4


def test_disagreeing_values_are_refused():
    for config in (
        {**PLAIN, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {**PLAIN, "rope_parameters": {**YARN, "rope_theta": 1e6}, "rope_scaling": {**YARN, "factor": 2.0}},
        {**PLAIN, "partial_rotary_factor": 0.5, "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}},
        {**PLAIN, "rope_scaling": YARN, "original_max_position_embeddings": 4096},
        {**PLAIN, "rope_scaling": {**YARN, "type": "linear"}},
    ):
        for change in (lambda c: set_rope_theta(c, 1e7), remove_scaling, lambda c: apply_yarn(c, factor=2.0)):
            with pytest.raises(ValueError, match="config.json: .*(different values|contradicts|keep one)"):
                change(config)


# YaRN: lengths, factor, original length


@pytest.mark.parametrize("how", [{"factor": 4}, {"to_length": 131072}, {"factor": 4.0, "to_length": 131072}])
def test_32k_to_128k_states_everything(how):
    extended = apply_yarn(PLAIN, **how)
    assert extended["rope_scaling"] == YARN and isinstance(extended["rope_scaling"]["factor"], float)
    assert extended["rope_parameters"] == {**YARN, "rope_theta": 1e6}
    assert extended["max_position_embeddings"] == 131072 and extended["rope_theta"] == 1e6


@pytest.mark.parametrize("length", [40960, 131072, 262144, 30000])
def test_a_length_that_does_not_tell_needs_the_original_said(length):
    config = {**PLAIN, "max_position_embeddings": length}
    with pytest.raises(ValueError, match=rf"max_position_embeddings={length}.*--original-length"):
        apply_yarn(config, factor=4.0)


def test_qwen3s_40960_becomes_131072_with_the_original_said():
    extended = apply_yarn({**PLAIN, "max_position_embeddings": 40960}, factor=4.0, original_length=32768)
    assert extended["rope_scaling"] == YARN and extended["max_position_embeddings"] == 131072


def test_a_scaled_model_is_refused_and_told_how():
    extended = apply_yarn(PLAIN, factor=4.0)
    with pytest.raises(ValueError, match="has YaRN already, factor 4.0 over 32768.*original_length=32768.*--remove"):
        apply_yarn(extended, factor=4.0)
    with pytest.raises(ValueError, match="original_length=131072: config.json says 32768.*--remove"):
        apply_yarn(extended, factor=4.0, original_length=131072)
    for name in ("linear", "dynamic", "llama3", "longrope"):
        with pytest.raises(ValueError, match=f"has {name} scaling.*--remove"):
            apply_yarn(with_scaling(name), factor=4.0, original_length=8192)


def test_a_new_factor_keeps_yarns_other_options_unless_given_anew():
    changed = apply_yarn(with_scaling("yarn"), factor=2.0, original_length=32768, beta_slow=1.0)
    assert changed["rope_scaling"] == {**SCALINGS["yarn"], "factor": 2.0, "beta_slow": 1.0}
    spelled_out = {**YARN, "attention_factor": yarn_attention_factor(4.0)}
    changed = apply_yarn({**PLAIN, "rope_scaling": spelled_out}, factor=2.0, original_length=32768)
    assert changed["rope_scaling"] == {**YARN, "factor": 2.0}  # the default follows the factor


def test_the_smallest_sufficient_factor():
    assert apply_yarn(PLAIN, to_length=65536)["rope_scaling"]["factor"] == 2.0
    assert apply_yarn(PLAIN, to_length=50000)["rope_scaling"]["factor"] == 50000 / 32768
    assert smallest_factors(apply_yarn(PLAIN, factor=3.0)) == {65536: 2.0, 98304: 3.0}
    assert smallest_factors(apply_yarn(PLAIN, factor=1.5)) == {49152: 1.5}
    assert smallest_factors(PLAIN) == {}


def test_factor_one_is_the_unscaled_model():
    for how in ({"factor": 1}, {"to_length": 32768}):
        assert apply_yarn(PLAIN, **how) == set_rope_theta(PLAIN, 1e6)
    assert apply_yarn(apply_yarn(PLAIN, factor=4.0), factor=1.0, original_length=32768) == set_rope_theta(PLAIN, 1e6)
    with pytest.raises(ValueError, match="attention_factor=1.2: factor 1.0 scales nothing"):
        apply_yarn(PLAIN, factor=1.0, attention_factor=1.2)


def test_factor_one_gives_the_same_logits_to_the_bit():
    plain = tiny_model()
    written = {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 512, "rope_theta": 1e4}
    applied = apply_yarn(plain.config.to_dict(), factor=1.0)["rope_parameters"]
    for rope in (written, applied):
        with torch.no_grad():
            assert torch.equal(plain(tokens(1, 16)).logits, tiny_model(rope_parameters=rope)(tokens(1, 16)).logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs a factor"),
        ({"factor": 0.5}, "factor=0.5: expected a number of 1.0 or more"),
        ({"factor": float("nan")}, "factor=nan"),
        ({"factor": True}, "factor=True"),
        ({"factor": "4"}, "factor='4'"),
        ({"factor": 3.3}, "no whole length"),
        ({"to_length": 4096}, "to_length=4096: below the original length 32768"),
        ({"to_length": 131072.0}, "to_length=131072.0: expected a whole number"),
        ({"factor": 4.0, "to_length": 65536}, "disagree"),
        ({"factor": 4.0, "original_length": 65536}, "above max_position_embeddings=32768"),
        ({"factor": 4.0, "original_length": 0}, "original_length=0"),
        ({"factor": 4.0, "beta_fast": 1.0, "beta_slow": 32.0}, "beta_fast.*beta_slow"),
        ({"factor": 4.0, "beta_slow": 0.0}, "beta_slow=0.0: expected a number above zero"),
        ({"factor": 4.0, "beta_fast": "fast"}, "beta_fast='fast'"),
        ({"factor": 4.0, "attention_factor": -1.0}, "attention_factor=-1.0"),
        ({"factor": 4.0, "truncate": "no"}, "truncate.*True or False"),
    ],
)
def test_yarn_nonsense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        apply_yarn(PLAIN, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing to change"),
        ({"rope_theta": 1.0}, "rope_theta=1.0: the base must be a number above 1"),
        ({"rope_theta": float("inf")}, "rope_theta=inf"),
        ({"rope_theta": True}, "rope_theta=True"),
        ({"train_length": 4096}, "goes with a new base"),
        ({"rope_theta": 1e6, "train_length": 0}, "train_length=0"),
        ({"beta_fast": 16.0}, "belongs to YaRN; add a factor"),
        ({"original_length": 4096}, "belongs to YaRN"),
        ({"remove": True, "factor": 2.0}, "remove: it goes with no other change"),
        ({"remove": True}, "no RoPE scaling, so there is nothing to remove"),
    ],
)
def test_changes_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        change_context(PLAIN, **options)


def test_a_length_that_is_missing_or_no_number_is_refused():
    for length in (None, "32768", 0, 32768.0, True):
        with pytest.raises(ValueError, match="config.json: max_position_embeddings"):
            apply_yarn({**PLAIN, "max_position_embeddings": length}, factor=4.0)


def test_base_and_yarn_together():
    changed = change_context({**PLAIN, "rope_theta": 1e4}, rope_theta=1e6, factor=4.0, truncate=False)
    assert changed["rope_parameters"] == {**YARN, "rope_theta": 1e6, "truncate": False}


# Taking it off


def test_yarn_taken_off_is_the_config_before():
    assert remove_scaling(apply_yarn(PLAIN, factor=4.0)) == set_rope_theta(PLAIN, 1e6)


def test_taking_off_restores_the_length_where_the_scaling_states_it():
    lengths = {name: remove_scaling(with_scaling(name))["max_position_embeddings"] for name in SCALINGS}
    assert lengths == {"linear": 32768, "dynamic": 32768, "llama3": 8192, "longrope": 8192, "yarn": 32768}
    for name in SCALINGS:
        assert remove_scaling(with_scaling(name))["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}


# Nothing lost, nothing left, nothing touched

NESTED = {
    "model_type": "qwen3_5",
    "rope_theta": 1e4,  # stale
    "rope_scaling": {"type": "linear", "factor": 8.0},  # stale
    "max_position_embeddings": 4096,  # stale
    "image_token_id": 7,
    "vision_config": {"rope_theta": 1e4},
    "text_config": {
        "model_type": "qwen3_5_text",
        "head_dim": 256,
        "max_position_embeddings": 262144,
        "a_key_of_somebody_else": [1],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    },
}


def test_a_nested_config_changes_inside_and_leaves_no_rival_outside():
    extended = apply_yarn(NESTED, factor=4.0, original_length=262144)
    block = extended["text_config"]
    assert block["rope_parameters"] == {
        **NESTED["text_config"]["rope_parameters"],
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 262144,
    }
    assert block["rope_scaling"] == {k: v for k, v in block["rope_parameters"].items() if k != "rope_theta"}
    assert (block["rope_theta"], block["max_position_embeddings"]) == (1e7, 1048576)
    assert block["partial_rotary_factor"] == 0.25 and block["a_key_of_somebody_else"] == [1]
    outside = {name: value for name, value in extended.items() if name != "text_config"}
    assert outside == {"model_type": "qwen3_5", "image_token_id": 7, "vision_config": {"rope_theta": 1e4}}


def test_a_nested_configs_removal_keeps_what_is_not_scaling():
    restored = remove_scaling(apply_yarn(NESTED, factor=4.0, original_length=262144))["text_config"]
    assert restored["rope_parameters"] == NESTED["text_config"]["rope_parameters"]
    assert restored["rope_scaling"]["mrope_section"] == [11, 11, 10]  # an old reader finds it here


def test_settings_beside_text_config_only_are_refused():
    config = {**NESTED, "text_config": {"head_dim": 256, "max_position_embeddings": 32768}}
    for change in (lambda: set_rope_theta(config, 1e6), lambda: apply_yarn(config, factor=2.0)):
        with pytest.raises(ValueError, match="beside text_config"):
            change()


def test_a_stale_original_length_of_its_own_never_stays():
    config = {**PLAIN, "original_max_position_embeddings": 32768}
    assert apply_yarn(config, factor=4.0)["original_max_position_embeddings"] == 32768
    assert "original_max_position_embeddings" not in set_rope_theta(config, 1e6)


def test_the_callers_config_is_not_touched_nor_shared():
    config = with_scaling("longrope")
    before = copy.deepcopy(config)
    changed = set_rope_theta(config, 5e6)
    changed["rope_parameters"]["long_factor"].append(None)
    changed["rope_scaling"]["short_factor"].append(None)
    assert config == before and len(changed["rope_scaling"]["long_factor"]) == 64
    before = copy.deepcopy(NESTED)
    apply_yarn(NESTED, factor=2.0, original_length=262144)["text_config"]["a_key_of_somebody_else"].append(2)
    assert before == NESTED


def test_unknown_keys_and_every_gate_field_survive():
    config = tiny_config(gate_granularity="headwise", gate_bias=False, a_key_of_somebody_else={"n": 0}).to_dict()
    extended = apply_yarn(config, factor=4.0)
    changed = ("rope_parameters", "rope_scaling", "max_position_embeddings")
    assert {k: v for k, v in extended.items() if k not in changed} == {
        k: v for k, v in config.items() if k not in changed
    }
    # What our own config class writes for the same settings is the same.
    written = GatedQwenConfig.from_dict(extended).to_dict()
    assert {name: written[name] for name in (*changed, "rope_theta")} == {
        name: extended[name] for name in (*changed, "rope_theta")
    }


def test_aliases_are_read_and_written_by_their_names():
    config = {**PLAIN, "rope_scaling": {"type": "yarn", "factor": 4, "attn_factor": 1, **{k: YARN[k] for k in YARN}}}
    assert set_rope_theta(config, 1e6)["rope_scaling"] == {**YARN, "attention_factor": 1.0}


# The paper's plan


def test_the_papers_plan_says_what_needs_training():
    config = {**PLAIN, "rope_theta": 1e4, "max_position_embeddings": 4096}
    seen = [(context_stage(config).name, True)]
    for _ in CONTEXT_PLAN[1:]:
        stage, config = next_context_stage(config)
        assert context_stage(config) == stage
        seen.append((stage.name, stage.needs_training))
    assert seen == [("4k", True), ("32k", True), ("128k", False)]
    assert config["rope_parameters"] == {**YARN, "rope_theta": 1e6} and config["max_position_embeddings"] == 131072
    with pytest.raises(ValueError, match="last stage"):
        next_context_stage(config)


@pytest.mark.parametrize("change", [{"rope_theta": 5e5}, {"max_position_embeddings": 40960}, {"rope_scaling": LLAMA3}])
def test_a_config_beside_the_plan_is_refused(change):
    assert context_stage({**PLAIN, **change}) is None
    with pytest.raises(ValueError, match="no stage of the paper's plan"):
        next_context_stage({**PLAIN, **change})


# Frequencies


def closed_form(dim, base, factor, original, truncate, fast=32.0, slow=1.0):
    """arXiv 2309.00071, section 3.2, with the ramp over the index as its authors' code has it."""
    low, high = (dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (fast, slow))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(dim // 2)]
    return [(1 - r) * base ** (-2 * i / dim) + r * base ** (-2 * i / dim) / factor for i, r in enumerate(ramp)]


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(
    ("dim", "base", "factor", "original"),
    [
        (64, 1e4, 2.0, 4096),
        (128, 1e6, 4.0, 32768),
        (128, 5e5, 8.0, 8192),
        (256, 1e7, 4.0, 262144),
        (16, 1e2, 4.0, 512),
    ],
)
def test_yarns_frequencies_equal_the_closed_form_and_the_librarys(dim, base, factor, original, truncate):
    config = {"head_dim": dim, "max_position_embeddings": original, "rope_theta": base}
    for options in ({}, {"beta_fast": 16.0, "beta_slow": 2.0}):
        extended = apply_yarn(config, factor=factor, original_length=original, truncate=truncate, **options)
        expected = closed_form(dim, base, factor, original, truncate, *options.values())
        ours = rope_frequencies(extended)
        assert ours.inv_freq == pytest.approx(expected, rel=1e-12)
        library = LlamaConfig(
            head_dim=dim,
            max_position_embeddings=extended["max_position_embeddings"],
            rope_parameters=extended["rope_parameters"],
        )
        inv_freq, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](library)
        assert inv_freq.tolist() == pytest.approx(ours.inv_freq, rel=1e-6)
        assert attention_factor == pytest.approx(ours.attention_factor, rel=1e-12)
        assert ours.kept + ours.blended + ours.interpolated == dim // 2


def test_the_upper_bound_of_the_blend_is_clamped():
    """Base 7 puts the bound of one turn at index 10 of D = 8: the ramp ends at 7, so that no frequency reaches it."""
    config = apply_yarn({"head_dim": 8, "max_position_embeddings": 512, "rope_theta": 7.0}, factor=4.0, beta_fast=64.0)
    assert rope_frequencies(config).interpolated_share == pytest.approx((0.0, 1 / 7, 2 / 7, 3 / 7))
    library = LlamaConfig(head_dim=8, max_position_embeddings=2048, rope_parameters=config["rope_parameters"])
    assert rope_frequencies(config).inv_freq == pytest.approx(ROPE_INIT_FUNCTIONS["yarn"](library)[0].tolist())


@pytest.mark.parametrize("length", [None, 8192, 32768, 65536])
@pytest.mark.parametrize("name", SCALINGS)
def test_every_scalings_frequencies_equal_the_librarys(name, length):
    config = with_scaling(name)
    library = LlamaConfig(head_dim=128, max_position_embeddings=32768, rope_parameters=config["rope_parameters"])
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[name](library, seq_len=length)
    ours = rope_frequencies(config, length)
    assert ours.inv_freq == pytest.approx(inv_freq.tolist(), rel=1e-6)
    assert ours.attention_factor == pytest.approx(attention_factor)


def test_attention_factor():
    assert rope_frequencies(apply_yarn(PLAIN, factor=4.0)).attention_factor == pytest.approx(1.13863, abs=5e-6)
    for value in (1.0, 1.5):
        extended = apply_yarn(PLAIN, factor=4.0, attention_factor=value)
        assert extended["rope_scaling"]["attention_factor"] == value
        assert rope_frequencies(extended).attention_factor == value
    config = {**PLAIN, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}
    library = LlamaConfig(head_dim=128, max_position_embeddings=131072, rope_parameters=read_rope(config))
    assert rope_frequencies(config).attention_factor == pytest.approx(ROPE_INIT_FUNCTIONS["yarn"](library)[1])


def test_counts_and_wavelengths():
    before, after = describe_context(PLAIN), describe_context(apply_yarn(PLAIN, factor=4.0))
    assert before["frequencies"] == {"kept": 64, "blended": 0, "interpolated": 0}
    assert after["frequencies"] == {"kept": 24, "blended": 16, "interpolated": 24}
    assert before["wavelengths"][0] == after["wavelengths"][0] == pytest.approx(2 * math.pi)
    assert after["wavelengths"][-1] == pytest.approx(4 * before["wavelengths"][-1])
    assert describe_context(with_scaling("linear"))["frequencies"] == {"kept": 0, "blended": 0, "interpolated": 64}
    assert describe_context(with_scaling("longrope"))["frequencies"]["kept"] == 64  # a short text's
    long = rope_frequencies(with_scaling("longrope"), 32768)
    assert (long.kept, long.blended, long.interpolated) == (16, 16, 32)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text"])
def test_the_rotated_width_is_the_librarys_where_the_config_is_silent(model_type):
    silent = {"model_type": model_type, "hidden_size": 2048, "num_attention_heads": 32}
    library = CONFIG_MAPPING[model_type](hidden_size=2048, num_attention_heads=32)
    head_dim = getattr(library, "head_dim", None) or 64
    assert rotary_dim(silent) == int(head_dim * library.rope_parameters.get("partial_rotary_factor", 1.0))
    with pytest.raises(ValueError, match="add head_dim"):
        rotary_dim({"model_type": "llama"})


# Engines


def test_engine_settings_hold_the_same_values_as_the_config():
    settings = engine_settings(apply_yarn(PLAIN, factor=4.0), "m")
    words = (
        '\'{"max_position_embeddings": 131072, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, '
        '"original_max_position_embeddings": 32768, "rope_theta": 1000000.0}}\''
    )
    assert settings["vLLM"]["folder"] == "vllm serve m --max-model-len 131072"
    assert settings["vLLM"]["override"] == f"vllm serve MODEL --max-model-len 131072 --hf-overrides {words}"
    assert settings["SGLang"]["override"].endswith(f"--context-length 131072 --json-model-override-args {words}")
    assert settings["llama.cpp"]["override"] == (
        "llama-server -m MODEL.gguf -c 131072 --rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 32768 "
        "--rope-freq-base 1000000"
    )
    assert all(engine["override"] is None for engine in engine_settings(PLAIN, "m").values())


def test_engine_settings_of_a_nested_config_are_nested():
    settings = engine_settings(apply_yarn(NESTED, factor=4.0, original_length=262144), "m")
    assert '\'{"text_config": {"max_position_embeddings": 1048576,' in settings["vLLM"]["override"]


def test_engine_settings_say_what_llama_cpp_cannot():
    options = {"beta_fast": 16.0, "truncate": False, "attention_factor": 1.0}
    settings = engine_settings({**apply_yarn(PLAIN, factor=4.0, **options), "auto_map": {"AutoConfig": "c.C"}}, "m")
    assert settings["vLLM"]["folder"].endswith(" --trust-remote-code")
    assert "--yarn-beta-fast 16" in settings["llama.cpp"]["override"]
    truncate, attention = settings["llama.cpp"]["notes"]
    assert "truncate" in truncate and "rope.scaling.attn_factor = 0.878" in attention
    assert engine_settings(with_scaling("llama3"), "m")["llama.cpp"]["override"] is None
    assert (
        "--rope-scaling linear --rope-scale 2" in engine_settings(with_scaling("linear"), "m")["llama.cpp"]["override"]
    )
