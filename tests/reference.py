"""A decoder with gated attention in float64, written from the paper's equations with loops over heads.

It shares no code with the library: weights come as a plain dict of tensors, and every step is spelled out. Slow, for
tiny shapes only. Equation numbers are those of arXiv 2505.06708 (and of RMSNorm, RoPE and SwiGLU where named).
"""

import math

import torch


def rms_norm(x, weight, eps):
    """RMSNorm (arXiv 1910.07467): x / rms(x) * weight."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def linear(x, weights, name):
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def rotate(x, base):
    """RoPE (arXiv 2104.09864), half-split: in x (T, D) position t turns the pair (i, i + D/2) by t / base^(2i/D)."""
    length, dim = x.shape
    out = torch.empty_like(x)
    for t in range(length):
        for i in range(dim // 2):
            angle = t / base ** (2 * i / dim)
            a, b = x[t, i], x[t, i + dim // 2]
            out[t, i] = a * math.cos(angle) - b * math.sin(angle)
            out[t, i + dim // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


ACTIVATIONS = {
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "ns_sigmoid": lambda x: 0.5 + 0.5 * sigmoid(x),
    "softplus": lambda x: torch.log1p(torch.exp(x)),
    "identity": lambda x: x,
}


def gate_scores(x, weights, name, config, rows):
    """Raw scores (T, rows): a projection of the first n channels of x, or a learned constant."""
    if config.gate_input == "constant":
        return weights[f"{name}.bias"].expand(x.shape[0], rows)
    channels = config.gate_input_channels or x.shape[1]
    return linear(x[:, :channels], weights, name)


def gate_heads(states, x, weights, name, config):
    """Gates states, a list of (T, D) by head (equation 5: Y' = Y * act(X W)), with every variant of table 1."""
    heads, dim = len(states), states[0].shape[1]
    width = dim if config.gate_granularity == "elementwise" else 1
    scores = gate_scores(x, weights, name, config, heads * width)
    by_head = [scores[:, h * width : (h + 1) * width] for h in range(heads)]
    if config.gate_head_shared:
        by_head = [sum(by_head) / heads] * heads
    gates = [ACTIVATIONS[config.gate_activation](s) for s in by_head]
    if config.gate_operation == "multiply":
        return [y * g for y, g in zip(states, gates, strict=True)]
    return [y + g for y, g in zip(states, gates, strict=True)]


def attention(x, weights, prefix, config):
    """Causal attention of x (T, C), one head at a time (equations 1 to 4), with gates at G1 to G5."""
    name = f"{prefix}.self_attn"
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def split(y, count):
        return [y[:, h * dim : (h + 1) * dim] for h in range(count)]

    queries = split(linear(x, weights, f"{name}.q_proj"), heads)
    keys = split(linear(x, weights, f"{name}.k_proj"), kv_heads)
    values = split(linear(x, weights, f"{name}.v_proj"), kv_heads)
    if "query" in config.gate_positions:
        queries = gate_heads(queries, x, weights, f"{name}.g_proj_query", config)
    if "key" in config.gate_positions:
        keys = gate_heads(keys, x, weights, f"{name}.g_proj_key", config)
    if "value" in config.gate_positions:
        values = gate_heads(values, x, weights, f"{name}.g_proj_value", config)
    if config.use_qk_norm:
        queries = [rms_norm(q, weights[f"{name}.q_norm.weight"], config.rms_norm_eps) for q in queries]
        keys = [rms_norm(k, weights[f"{name}.k_norm.weight"], config.rms_norm_eps) for k in keys]
    queries = [rotate(q, config.rope_theta) for q in queries]
    keys = [rotate(k, config.rope_theta) for k in keys]

    outputs = []
    length = x.shape[0]
    for h in range(heads):
        kv = h // (heads // kv_heads)
        rows = []
        for t in range(length):
            s = torch.stack([queries[h][t] @ keys[kv][j] / math.sqrt(dim) for j in range(t + 1)])
            p = torch.exp(s - s.max())
            p = p / p.sum()
            rows.append(sum(p[j] * values[kv][j] for j in range(t + 1)))
        outputs.append(torch.stack(rows))
    if config.attn_output_norm:
        norm = weights[f"{name}.attn_output_norm.weight"]
        outputs = [rms_norm(y, norm, config.rms_norm_eps) for y in outputs]
    if config.attn_output_activation is not None:
        outputs = [ACTIVATIONS[config.attn_output_activation](y) for y in outputs]
    if "attn_output" in config.gate_positions:
        outputs = gate_heads(outputs, x, weights, f"{name}.g_proj", config)
    dense = linear(torch.cat(outputs, dim=1), weights, f"{name}.o_proj")
    if "dense_output" in config.gate_positions:
        g = ACTIVATIONS[config.gate_activation](
            gate_scores(x, weights, f"{name}.g_proj_dense", config, config.hidden_size)
        )
        dense = dense * g if config.gate_operation == "multiply" else dense + g
    return dense


def feed_forward(x, weights, prefix):
    """SwiGLU (arXiv 2002.05202): W_down (silu(W_gate x) * W_up x)."""
    gate = linear(x, weights, f"{prefix}.mlp.gate_proj")
    return linear(
        gate * sigmoid(gate) * linear(x, weights, f"{prefix}.mlp.up_proj"), weights, f"{prefix}.mlp.down_proj"
    )


def logits(input_ids, weights, config, mlp=feed_forward):
    """Logits (T, V) of one sequence of token ids; weights is a state dict of the causal language model."""
    weights = {name: tensor.detach().double() for name, tensor in weights.items()}
    eps = config.rms_norm_eps
    x = weights["model.embed_tokens.weight"][input_ids]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        y = attention(rms_norm(x, weights[f"{prefix}.input_layernorm.weight"], eps), weights, prefix, config)
        if config.sandwich_norm:
            y = rms_norm(y, weights[f"{prefix}.attn_sandwich_layernorm.weight"], eps)
        x = x + y
        y = mlp(rms_norm(x, weights[f"{prefix}.post_attention_layernorm.weight"], eps), weights, prefix)
        if config.sandwich_norm:
            y = rms_norm(y, weights[f"{prefix}.mlp_sandwich_layernorm.weight"], eps)
        x = x + y
    x = rms_norm(x, weights["model.norm.weight"], eps)
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return x @ weights[head].T
