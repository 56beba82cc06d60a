"""A mixture of experts with gated attention in float64, written from the equations with loops over tokens and experts.

Everything but the experts is `reference`. Routing is that of the sparsely gated mixture (arXiv 1701.06538, equations 1
and 3) with the softmax before the choice, experts are SwiGLU, and the losses are those of Switch Transformer
(arXiv 2101.03961) and ST-MoE (arXiv 2202.08906).
"""

import math

import torch
from reference import feed_forward, sigmoid
from reference import logits as dense_logits


def softmax(scores):
    shares = [math.exp(s - max(scores)) for s in scores]
    return [share / sum(shares) for share in shares]


def expert(x, gate_up, down):
    """SwiGLU of one token x (C,): W_down (silu(W_gate x) * W_up x), the first half of `gate_up` being W_gate."""
    gate, up = gate_up[: len(gate_up) // 2] @ x, gate_up[len(gate_up) // 2 :] @ x
    return down @ (gate * sigmoid(gate) * up)


class Mixture:
    """The FFN of every layer for `reference.logits`; it keeps the router's logits of the sparse layers."""

    def __init__(self, config):
        self.config = config
        self.router_logits = []  # for each token of each sparse layer a list of E numbers

    def __call__(self, x, weights, prefix):
        layer = int(prefix.rsplit(".", 1)[1])
        if layer in self.config.mlp_only_layers or (layer + 1) % self.config.decoder_sparse_step:
            return feed_forward(x, weights, prefix)
        rows = []
        for token in x:
            scores = (weights[f"{prefix}.mlp.gate.weight"] @ token).tolist()
            self.router_logits.append(scores)
            shares = chosen(scores, self.config.num_experts_per_tok)
            whole = sum(shares.values()) if self.config.norm_topk_prob else 1
            rows.append(
                sum(
                    share
                    / whole
                    * expert(token, *(weights[f"{prefix}.mlp.experts.{name}"][e] for name in PROJECTIONS))
                    for e, share in shares.items()
                )
            )
        return torch.stack(rows)


PROJECTIONS = ("gate_up_proj", "down_proj")


def chosen(scores, count):
    """Expert -> probability for the `count` most probable experts."""
    shares = softmax(scores)
    return {e: shares[e] for e in sorted(range(len(shares)), key=lambda e: -shares[e])[:count]}


def run(input_ids, weights, config):
    """Logits (T, V) of one sequence, and the router's logits of its tokens in all sparse layers."""
    mixture = Mixture(config)
    return dense_logits(input_ids, weights, config, mixture), mixture.router_logits


def load_balancing_loss(router_logits, config):
    """E * sum over experts of (assignments per token) * (mean probability): Switch equations 4 to 6, k assignments."""
    count, experts = len(router_logits), config.num_experts
    assigned, probability = [0] * experts, [0] * experts
    for scores in router_logits:
        for e in chosen(scores, config.num_experts_per_tok):
            assigned[e] += 1 / count
        for e, share in enumerate(softmax(scores)):
            probability[e] += share / count
    return experts * sum(f * p for f, p in zip(assigned, probability, strict=True))


def z_loss(router_logits):
    """Mean of log(sum of exp)^2: ST-MoE equation 5."""
    return sum(math.log(sum(map(math.exp, scores))) ** 2 for scores in router_logits) / len(router_logits)


def cross_entropy(logits, labels):
    """Mean of -log p(next token) over the sequence."""
    return -torch.stack(
        [row.log_softmax(-1)[label] for row, label in zip(logits[:-1], labels[1:], strict=True)]
    ).mean()
