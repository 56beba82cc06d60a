"""The model computes what the paper's equations say, for every variant, against a float64 reference of our own."""

import itertools

import pytest
import reference
import torch
from tiny import tiny_model, tokens

ALL_POSITIONS = ["query", "key", "value", "attn_output", "dense_output"]
HEAD_POSITIONS = ALL_POSITIONS[:-1]

VARIANTS = {
    # placement
    **{f"{position} elementwise": {"gate_positions": [position]} for position in ALL_POSITIONS},
    **{
        f"{position} headwise": {"gate_positions": [position], "gate_granularity": "headwise"}
        for position in HEAD_POSITIONS
    },
    "all five positions": {"gate_positions": ALL_POSITIONS, "gate_bias": True, "attention_bias": True},
    "four positions, headwise": {"gate_positions": HEAD_POSITIONS, "gate_granularity": "headwise", "gate_bias": True},
    "no gate": {"gate_positions": []},
    # sharing
    "head-shared elementwise": {"gate_head_shared": True},
    "head-shared headwise": {"gate_head_shared": True, "gate_granularity": "headwise"},
    "head-shared value": {"gate_head_shared": True, "gate_positions": ["value"]},
    # activation and operation
    **{
        f"{operation} {activation}": {"gate_activation": activation, "gate_operation": operation, "gate_bias": True}
        for operation in ("multiply", "add")
        for activation in ("sigmoid", "silu", "ns_sigmoid", "softplus", "identity")
    },
    "add on the dense output": {
        "gate_positions": ["dense_output"],
        "gate_operation": "add",
        "gate_activation": "silu",
    },
    # input
    "constant elementwise": {"gate_input": "constant"},
    "constant headwise": {"gate_input": "constant", "gate_granularity": "headwise"},
    "constant everywhere": {"gate_input": "constant", "gate_positions": ALL_POSITIONS},
    "first 5 channels": {"gate_input_channels": 5},
    "first 5 channels everywhere": {"gate_input_channels": 5, "gate_positions": ALL_POSITIONS, "gate_bias": True},
    # without a gate, or beside it
    "output norm, no gate": {"gate_positions": [], "attn_output_norm": True},
    "output norm and gate": {"attn_output_norm": True},
    "SiLU, no gate": {"gate_positions": [], "attn_output_activation": "silu"},
    "norm, SiLU and gate": {"attn_output_norm": True, "attn_output_activation": "silu"},
    "sandwich norm": {"sandwich_norm": True},
    # families
    "no q/k norm": {"use_qk_norm": False},
    "biases on q, k, v and o": {"attention_bias": True},
    "biases on q, k, v only": {"attention_bias": True, "attention_out_bias": False, "use_qk_norm": False},
    "bias on o only": {"attention_out_bias": True},
    "tied embeddings": {"tie_word_embeddings": True},
    "another base": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
}


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("heads", [(4, 2), (6, 2)], ids=["H4 K2", "H6 K2"])
def test_logits_equal_the_float64_reference(fields, heads):
    fields = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], **fields}
    model = tiny_model(seed=1, **fields)
    input_ids = tokens(1, 9)
    expected = reference.logits(input_ids[0], model.state_dict(), model.config)
    with torch.no_grad():
        actual = model(input_ids).logits[0].double()
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()


def test_every_variant_is_a_function_of_its_own():
    """A field that is read and then ignored would pass against a reference that ignores it too."""
    input_ids = tokens(1, 9)
    outputs = {}
    for name, fields in VARIANTS.items():
        with torch.no_grad():
            outputs[name] = tiny_model(seed=1, **fields)(input_ids).logits
    for name, other in itertools.combinations(outputs, 2):
        assert not torch.allclose(outputs[name], outputs[other], atol=1e-4), (name, other)


def test_gate_fields_change_the_function_of_the_same_weights():
    """Fields without parameters of their own: the same state dict gives other logits under each value."""
    input_ids = tokens(1, 9)
    base = tiny_model(seed=1)
    variants = [
        {},
        {"gate_head_shared": True},
        *[{"gate_activation": activation} for activation in ("silu", "ns_sigmoid", "softplus", "identity")],
        {"gate_operation": "add"},
        {"attn_output_activation": "silu"},
    ]
    outputs = []
    for fields in variants:
        model = tiny_model(**fields)
        model.load_state_dict(base.state_dict())
        with torch.no_grad():
            outputs.append(model(input_ids).logits)
    for one, other in itertools.combinations(range(len(variants)), 2):
        assert not torch.allclose(outputs[one], outputs[other], atol=1e-3), (variants[one], variants[other])
