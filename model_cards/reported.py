"""The variants of the gated attention paper (arXiv 2505.06708) as config fields, with the figures that it reports.

The figures are the paper's, for its mixture of experts of 15B parameters (24 layers of width 2048, 32 query and 4
key/value heads of 128, 128 experts) after 400B tokens. Nothing here was measured by this project.
"""

from dataclasses import dataclass, field
from typing import Any

# What a gate's size depends on in that model.
PAPER_SHAPE: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
PAPER_EXPERTS = 128
# RULER, in percent: (length, model) -> before and after YaRN x4, as reported; None where the model had no such length.
REPORTED_RULER = {
    ("32k", "baseline"): (79.50, 37.94),
    ("32k", "gated"): (79.77, 72.88),
    ("128k", "baseline"): (None, 31.65),
    ("128k", "gated"): (None, 58.82),
}


@dataclass(frozen=True)
class Variant:
    """One row of the paper.

    Attributes:
        title: in the paper's words.
        fields: of `GatedQwenConfig`.
        perplexity, first_token_share, max_activation, mean_gate: as reported; None where no figure is at hand.
        gate_parameters: as reported for the shape of `PAPER_SHAPE`.
        note: what the paper says of it without a figure.
    """

    title: str
    fields: dict[str, Any] = field(default_factory=dict)
    perplexity: float | None = None
    first_token_share: float | None = None
    max_activation: float | None = None
    mean_gate: float | None = None
    gate_parameters: int | None = None
    note: str | None = None


VARIANTS = {
    "baseline": Variant("no gate", {"gate_positions": []}, 6.026, 0.467, 1053),
    "g1-elementwise": Variant(
        "G1, gate on the attention output, elementwise", {}, 5.761, 0.048, 94, 0.116, 201_326_592
    ),
    "g1-headwise": Variant(
        "G1, gate on the attention output, headwise",
        {"gate_granularity": "headwise"},
        *(5.792, 0.073, 98, 0.172, 1_572_864),
    ),
    "g1-head-shared": Variant(
        "G1, gate on the attention output, shared by the heads", {"gate_head_shared": True}, 5.801, 0.301, 286
    ),
    "g1-ns-sigmoid": Variant(
        "G1, non-sparse sigmoid (0.5 + 0.5 sigmoid)",
        {"gate_activation": "ns_sigmoid"},
        *(5.900, 0.451, None, 0.653),
    ),
    "g1-multiplicative-silu": Variant(
        "G1, multiplied with SiLU", {"gate_activation": "silu"}, note="The paper reports it as worse than the sigmoid."
    ),
    "g1-additive-silu": Variant(
        "G1, added SiLU", {"gate_operation": "add", "gate_activation": "silu"}, perplexity=5.821
    ),
    "g1-additive-identity": Variant(
        "G1, added without an activation", {"gate_operation": "add", "gate_activation": "identity"}, perplexity=5.882
    ),
    "g2-elementwise": Variant(
        "G2, gate on the values, elementwise",
        {"gate_positions": ["value"]},
        *(5.820, 0.297, 125, 0.221, 25_165_824),
    ),
    "g3-elementwise": Variant("G3, gate on the keys, elementwise", {"gate_positions": ["key"]}, perplexity=6.016),
    "g4-elementwise": Variant("G4, gate on the queries, elementwise", {"gate_positions": ["query"]}, perplexity=5.981),
    "g5-elementwise": Variant(
        "G5, gate on the dense output",
        {"gate_positions": ["dense_output"]},
        perplexity=6.017,
        gate_parameters=100_663_296,
    ),
    "output-rmsnorm": Variant(
        "no gate, RMSNorm on each head's attention output",
        {"gate_positions": [], "attn_output_norm": True},
        perplexity=5.847,
    ),
    "output-silu": Variant(
        "no gate, SiLU on the attention output",
        {"gate_positions": [], "attn_output_activation": "silu"},
        perplexity=5.975,
    ),
}
