"""A GGUF file of each known family converts like the folder that transformers makes of it."""

import gguf
import numpy as np
import pytest
import torch
from tiny import tokens
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from gated_qwen import GatedQwenForCausalLM
from gated_qwen.conversion.checkpoint import CheckpointError
from gated_qwen.conversion.convert import convert

HIDDEN, FFN, HEADS, KV_HEADS, LAYERS, VOCAB = 32, 48, 4, 2, 2, 64


def write_gguf(path, architecture):
    """A random fp32 model of `architecture` with a byte-pair tokenizer of single characters."""
    rng = np.random.default_rng(0)
    dim = 128 if architecture == "qwen3" else HIDDEN // HEADS  # transformers takes Qwen3's head_dim to be 128
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|end|>", "01", *[chr(ord("0") + i) for i in range(VOCAB - 2)]])
    writer.add_token_types([3] + [1] * (VOCAB - 1))
    writer.add_token_merges(["0 1"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)

    def add(name, *shape):
        writer.add_tensor(name, (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32))

    def add_norm(name, size):
        writer.add_tensor(name, np.exp(0.4 * rng.standard_normal(size)).astype(np.float32))

    add("token_embd.weight", VOCAB, HIDDEN)
    add("output.weight", VOCAB, HIDDEN)
    add_norm("output_norm.weight", HIDDEN)
    for i in range(LAYERS):
        add_norm(f"blk.{i}.attn_norm.weight", HIDDEN)
        add_norm(f"blk.{i}.ffn_norm.weight", HIDDEN)
        for name, rows in (("q", HEADS * dim), ("k", KV_HEADS * dim), ("v", KV_HEADS * dim)):
            add(f"blk.{i}.attn_{name}.weight", rows, HIDDEN)
            if architecture == "qwen2":
                writer.add_tensor(f"blk.{i}.attn_{name}.bias", rng.standard_normal(rows).astype(np.float32))
        add(f"blk.{i}.attn_output.weight", HIDDEN, HEADS * dim)
        if architecture == "qwen3":
            add_norm(f"blk.{i}.attn_q_norm.weight", dim)
            add_norm(f"blk.{i}.attn_k_norm.weight", dim)
        add(f"blk.{i}.ffn_gate.weight", FFN, HIDDEN)
        add(f"blk.{i}.ffn_up.weight", FFN, HIDDEN)
        add(f"blk.{i}.ffn_down.weight", HIDDEN, FFN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_becomes_a_gated_model_with_the_same_logits(architecture, tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, architecture)
    result = convert(path, tmp_path / "gated", gate="elementwise")
    assert result.family == architecture and not result.warnings
    before = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    after = GatedQwenForCausalLM.from_pretrained(result.target)
    with torch.no_grad():
        assert torch.equal(before(tokens(2, 12)).logits, after(tokens(2, 12)).logits)
    assert AutoTokenizer.from_pretrained(result.target)("345")["input_ids"] == [5, 6, 7]


def test_a_folder_with_one_gguf_file_is_read_and_with_two_is_ambiguous(tmp_path):
    (tmp_path / "models").mkdir()
    write_gguf(tmp_path / "models" / "a.gguf", "llama")
    assert convert(tmp_path / "models", tmp_path / "gated").family == "llama"
    write_gguf(tmp_path / "models" / "b.gguf", "llama")
    with pytest.raises(CheckpointError, match="2 GGUF files"):
        convert(tmp_path / "models", tmp_path / "again")


def test_a_truncated_gguf_file_is_refused(tmp_path):
    write_gguf(tmp_path / "whole.gguf", "llama")
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "whole.gguf").read_bytes()[:3000])
    with pytest.raises(CheckpointError, match="cut.gguf: cannot be read as GGUF"):
        convert(tmp_path / "cut.gguf", tmp_path / "gated")
    assert not (tmp_path / "gated").exists()
