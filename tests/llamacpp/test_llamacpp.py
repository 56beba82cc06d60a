"""The real llama.cpp computes what our model computes, and reads text as its tokenizer does.

Run with -s to see the figures that docs/gguf.md quotes.
"""

import math

import gguf
import pytest
import torch
from tiny import tiny_model
from transformers.utils import logging

xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp comes with: pip install xllamacpp")

from llama_server import LlamaServer  # noqa: E402
from trained_model import HELD_OUT, VOCAB, library_text, prefixes, small_tokenizer, trained_model  # noqa: E402

from gated_qwen.conversion import layouts  # noqa: E402
from gated_qwen.conversion.checkpoint import open_checkpoint  # noqa: E402
from gated_qwen.conversion.gguf_writer import write_gguf  # noqa: E402
from gated_qwen.conversion.layouts import concatenated_rows  # noqa: E402
from gated_qwen.conversion.plan import copied  # noqa: E402

logging.disable_progress_bar()

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn": YARN,
    "yarn, attention factor": {**YARN, "attention_factor": 1.3},
    "yarn, mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
}
TEXTS = [
    library_text(HELD_OUT)[:3000],
    "def f(x):\n    return x * 2  # 1234567 tabs\t\tand   spaces\r\n\r\n\n",
    "naïve café, Ünïcödé, Ελληνικά, русский, हिन्दी की कविता",
    "你好，世界。今天天气很好！日本語のテキスト、한국어 문장",
    "emoji 😀👩‍👩‍👧‍👦🇫🇷 and 🤷🏽‍♀️!",
    "I'LL don't they've it's we'd I'm  YOU'RE",
    "<|im_start|>user\n<think>\nhm</think>2+2=4<|im_end|>\n",
    " ",
    "\n",
    "trailing space ",
]


def with_rope(model, rope):
    """The model's weights under another RoPE setting."""
    model.config.rope_parameters = {**rope, "rope_theta": model.config.rope_theta}
    return model


def serve(model, folder, dtype="f32", tokenizer=None, exact=True):
    """llama.cpp with the model, which goes through a checkpoint folder and a GGUF file on the way."""
    model.save_pretrained(folder / "model")
    (tokenizer or small_tokenizer()).save_pretrained(folder / "model")
    checkpoint = open_checkpoint(folder / "model")
    tensors = {name: copied(checkpoint, name) for name in checkpoint.tensors}
    write_gguf(
        folder / "model.gguf", model.config, tensors, dtype=dtype, tokenizer_folder=folder / "model", name="tiny"
    )
    return LlamaServer(folder / "model.gguf", exact)


@torch.no_grad()
def compare(model, server):
    """The largest difference of log-probabilities, and the mean and the largest KL, over prefixes and vocabulary."""
    differences, divergences = [], []
    for ids in prefixes():
        ours = model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
        theirs = server.log_probabilities(ids, VOCAB).double()
        assert not theirs.isnan().any()
        differences.append((ours - theirs).abs().max().item())
        theirs = theirs.log_softmax(-1)  # rounding in fp32 leaves a sum that is not quite one
        divergences.append((ours.exp() * (ours - theirs)).sum().item())
    return max(differences), sum(divergences) / len(divergences), max(divergences)


def greedy(model, ids, count=24):
    return model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)[0, len(ids) :].tolist()


def report(what, difference, mean, largest):
    print(f"\n{what}: log-probabilities {difference:.1e}, KL {mean:.1e} in the mean, {largest:.1e} at most", end="")


@pytest.mark.parametrize("granularity", ["elementwise", "headwise"])
def test_the_trained_model_has_left_its_start(granularity):
    model, gates = trained_model(granularity, False), []
    for module in model.modules():
        if type(module).__name__ == "GatedQwenGateProjection":
            module.register_forward_hook(lambda module, args, scores: gates.append(scores.sigmoid()))
    with torch.no_grad():
        loss = model(torch.tensor([prefixes()[-1]]), labels=torch.tensor([prefixes()[-1]])).loss
    norms = torch.cat([weight for name, weight in model.named_parameters() if "norm" in name])
    print(f"\n{granularity}: loss {loss:.2f}, norms {norms.min():.2f} to {norms.max():.2f}", end="")
    print(f", gates {torch.cat(gates).min():.2f} to {torch.cat(gates).max():.2f}", end="")
    assert loss < math.log(VOCAB) - 0.5
    assert norms.std() > 0.1
    assert torch.cat(gates).std() > 0.05


@pytest.mark.parametrize("rope", ["default", "yarn"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("granularity", ["elementwise", "headwise"])
def test_fp32_gives_our_log_probabilities_and_greedy_tokens(granularity, tied, rope, tmp_path):
    model = with_rope(trained_model(granularity, tied), ROPES[rope])
    server = serve(model, tmp_path)
    figures = compare(model, server)
    report(f"f32, {granularity}, {'tied' if tied else 'untied'}, {rope}", *figures)
    assert figures[0] < 1e-4
    for ids in prefixes()[2::3]:
        assert server.greedy(ids, 24) == greedy(model, ids)


@pytest.mark.parametrize("rope", ["linear", "yarn, attention factor", "yarn, mscale"])
def test_every_rope_setting_that_is_not_refused_is_the_same_there(rope, tmp_path):
    model = with_rope(trained_model("elementwise", False), ROPES[rope])
    figures = compare(model, serve(model, tmp_path))
    report(f"f32, {rope}", *figures)
    assert figures[0] < 1e-4


@pytest.mark.parametrize(
    ("heads", "key_values", "dim", "size", "granularity"),
    [
        (4, 2, 8, 32, "headwise"),
        (6, 2, 12, 48, "elementwise"),
        (8, 2, 64, 64, "headwise"),
        (4, 2, 128, 96, "elementwise"),
    ],
)
def test_other_shapes_are_the_same_there(heads, key_values, dim, size, granularity, tmp_path):
    model = tiny_model(
        vocab_size=VOCAB,
        num_attention_heads=heads,
        num_key_value_heads=key_values,
        head_dim=dim,
        hidden_size=size,
        gate_granularity=granularity,
        max_position_embeddings=256,
        rope_parameters={**YARN, "rope_theta": 10000.0},
        eos_token_id=2,
    )
    figures = compare(model, serve(model, tmp_path))
    report(f"f32, {heads} heads on {key_values} of {dim}, random", *figures)
    assert figures[0] < 1e-4


def test_a_wrong_row_order_would_be_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(layouts, "native_rows", concatenated_rows)
    model = with_rope(trained_model("elementwise", False), ROPES["default"])
    assert compare(model, serve(model, tmp_path))[0] > 0.1


# The bounds are five times what was measured; the difference is to our model in fp32.
@pytest.mark.parametrize(
    ("dtype", "difference", "divergence"), [("f16", 0.01, 1.5e-6), ("bf16", 0.08, 5e-5), ("q8_0", 0.35, 6.5e-4)]
)
@pytest.mark.parametrize("granularity", ["elementwise", "headwise"])
def test_smaller_types_stay_close(granularity, dtype, difference, divergence, tmp_path):
    model = with_rope(trained_model(granularity, False), ROPES["default"])
    figures = compare(model, serve(model, tmp_path, dtype))
    report(f"{dtype}, {granularity}", *figures)
    assert figures[0] < difference
    assert figures[2] < divergence


def test_llama_cpps_own_settings_stay_close(tmp_path):
    model = with_rope(trained_model("elementwise", False), ROPES["default"])
    figures = compare(model, serve(model, tmp_path, exact=False))
    report("f32, keys and values cached in fp16 as by default", *figures)
    assert figures[0] < 0.01


@torch.no_grad()
def test_a_reused_cache_changes_nothing(tmp_path):
    """Going on from a prompt, and going back to a part of it, which the appended layer's state makes special."""
    model = with_rope(trained_model("elementwise", True), ROPES["default"])
    server, ids = serve(model, tmp_path), prefixes()[-1]
    for prompt in (ids, ids + [50, 51], ids[:60] + [70, 71, 72], ids):
        theirs = server.log_probabilities(prompt, VOCAB, reuse=True)
        assert (model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1) - theirs).abs().max() < 1e-4


@torch.no_grad()
def test_most_of_q8_0s_loss_is_not_the_gates(tmp_path):
    """Q8_0 on the gate alone and on all matrices, in our own model."""

    def rounded(model, chosen):
        copy = type(model)(model.config).eval()
        copy.load_state_dict(model.state_dict())
        kind = gguf.GGMLQuantizationType.Q8_0
        for name, weight in copy.named_parameters():
            if weight.ndim == 2 and chosen in name:
                weight.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind)))
        return copy

    model = with_rope(trained_model("elementwise", False), ROPES["default"])
    ids = torch.tensor([prefixes()[-1]])
    before = model(ids).logits.double().log_softmax(-1)
    loss = {}
    for chosen in ("g_proj", "q_proj", "weight"):
        after = rounded(model, chosen)(ids).logits.double().log_softmax(-1)
        loss[chosen] = (before.exp() * (before - after)).sum(-1).mean().item()
        print(f"\nq8_0 on {chosen}: KL {loss[chosen]:.1e}", end="")
    assert loss["g_proj"] < 0.5 * loss["weight"]


@pytest.mark.parametrize("pre", ["qwen2", "qwen35", "gpt-2", "smollm"])
def test_text_becomes_the_same_tokens(pre, tmp_path):
    tokenizer = small_tokenizer(pre)
    server = serve(with_rope(trained_model("elementwise", True), ROPES["default"]), tmp_path, tokenizer=tokenizer)
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert server.tokenize(text) == ids, text
        assert server.detokenize(ids) == tokenizer.decode(ids), text


def test_the_chat_template_and_the_end_token_arrive(tmp_path):
    server = serve(with_rope(trained_model("elementwise", True), ROPES["default"]), tmp_path)
    messages = [{"role": "user", "content": "Say hi"}]
    expected = small_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert server.apply_template(messages) == expected
    assert server.properties()["eos_token"] == "<|im_end|>"
