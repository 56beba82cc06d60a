"""A GGUF file holds the model's tensors under llama.cpp's names, all that it must say, and is whole or absent."""

import json
import os
import signal
import sys
import weakref
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tiny import tiny_config, tiny_model
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from gated_qwen.conversion.gguf_layout import check_gguf, gguf_keys, gguf_tensors, rope_keys
from gated_qwen.conversion.gguf_tokenizer import tokenizer_keys
from gated_qwen.conversion.gguf_writer import write_gguf
from gated_qwen.conversion.plan import PlannedTensor

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}


def planned(model):
    """The model's tensors as a conversion plans them."""
    tied = ["lm_head.weight"] if model.config.tie_word_embeddings else []
    return {
        name: PlannedTensor(name, "F32", tuple(tensor.shape), "copy", lambda tensor=tensor: tensor.clone())
        for name, tensor in model.state_dict().items()
        if name not in tied
    }


def write(model, folder, dtype="f32", tokenizer=None, **arguments):
    """Writes the model and returns what gguf's own reader finds: values by key, and tensors by name."""
    file = folder / "model.gguf"
    write_gguf(file, model.config, planned(model), dtype=dtype, tokenizer_folder=tokenizer, name="tiny", **arguments)
    reader = gguf.GGUFReader(file)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    return keys, {tensor.name: tensor for tensor in reader.tensors}


def values(tensor):
    """A tensor of a file in fp32, in torch's order of dimensions."""
    return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))


def byte_level(vocab=64, eos="<|end|>", **parts):
    """A byte-level BPE of single characters and one merge; `parts` replace what the tokenizers library calls so."""
    alphabet = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())[: vocab - 4], "01"]
    backend = Tokenizer(models.BPE({text: i for i, text in enumerate(alphabet)}, [("0", "1")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    for name, value in parts.items():
        setattr(backend, name, value)
    backend.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)


def saved(tokenizer, folder):
    tokenizer.save_pretrained(folder)
    return folder


# What the file says.


def test_the_keys_describe_the_model_with_the_appended_layer(tmp_path):
    keys, _ = write(tiny_model(rms_norm_eps=1e-5), tmp_path)
    assert keys["general.architecture"] == "qwen35" and keys["general.name"] == "tiny"
    described = {name.removeprefix("qwen35."): value for name, value in keys.items() if name.startswith("qwen35.")}
    epsilon = described.pop("attention.layer_norm_rms_epsilon")
    assert epsilon == pytest.approx(1e-5)
    assert described == {
        "block_count": 3,
        "context_length": 512,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "vocab_size": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 8,
        "attention.value_length": 8,
        "attention.recurrent_layers": [False, False, True],
        "rope.dimension_count": 8,
        "rope.dimension_sections": [2, 1, 1, 0],
        "rope.freq_base": 10000.0,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 128,
        "ssm.inner_size": 128,
        "ssm.group_count": 1,
        "ssm.time_step_rank": 1,
    }


def test_every_rotary_pair_belongs_to_a_section_that_has_the_text_position():
    """llama.cpp gives pair i to section i % 3 when i < 3 * sections[i % 3], otherwise to a position that is 0."""
    for dim in range(2, 260, 2):
        sections = gguf_keys(tiny_config(head_dim=dim))["qwen35.rope.dimension_sections"]
        assert sum(sections) == dim // 2
        assert all(pair < 3 * sections[pair % 3] for pair in range(dim // 2))


def test_yarn_says_its_factor_length_and_attention_factor():
    assert rope_keys(tiny_config(rope_parameters=YARN)) == {
        "rope.freq_base": 10000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
        "rope.scaling.attn_factor": 1.0,
    }
    given = rope_keys(tiny_config(rope_parameters={**YARN, "attention_factor": 1.3}))
    assert given["rope.scaling.attn_factor"] == pytest.approx(1.3 / (0.1 * np.log(4.0) + 1.0))


@pytest.mark.parametrize(("dtype", "number"), [("f32", 0), ("f16", 1), ("q8_0", 7), ("bf16", 32)])
def test_matrices_have_the_files_type_and_all_else_is_f32(dtype, number, tmp_path):
    keys, tensors = write(tiny_model(intermediate_size=64), tmp_path, dtype)
    assert keys["general.file_type"] == number
    for name, tensor in tensors.items():
        matrix = len(tensor.shape) == 2 and "conv1d" not in name
        assert tensor.tensor_type == (Kind[dtype.upper()] if matrix else Kind.F32), name


def test_rows_that_do_not_divide_into_blocks_stay_f32_in_q8_0(tmp_path):
    _, tensors = write(tiny_model(), tmp_path, "q8_0")  # intermediate_size 48
    assert tensors["blk.0.ffn_down.weight"].tensor_type == Kind.F32
    assert tensors["blk.0.ffn_up.weight"].tensor_type == Kind.Q8_0


# Tensors.


@pytest.mark.parametrize("granularity", ["elementwise", "headwise"])
def test_query_and_gate_rows_alternate_by_head(granularity, tmp_path):
    model = tiny_model(gate_granularity=granularity)
    _, tensors = write(model, tmp_path)
    for layer in range(2):
        attention = model.model.layers[layer].self_attn
        fused = values(tensors[f"blk.{layer}.attn_q.weight"])
        assert fused.shape == (2 * 4 * 8, 32)
        for h in range(4):
            for d in range(8):
                gate_row = h * 8 + d if granularity == "elementwise" else h
                assert torch.equal(fused[h * 16 + d], attention.q_proj.weight[h * 8 + d])
                assert torch.equal(fused[h * 16 + 8 + d], attention.g_proj.weight[gate_row])


@pytest.mark.parametrize("tied", [False, True])
def test_fp32_holds_every_other_tensor_bit_for_bit(tied, tmp_path):
    model = tiny_model(tie_word_embeddings=tied)
    _, tensors = write(model, tmp_path)
    expected = {
        "token_embd.weight": model.model.embed_tokens.weight,
        "output_norm.weight": model.model.norm.weight,
        **({} if tied else {"output.weight": model.lm_head.weight}),
    }
    for i, layer in enumerate(model.model.layers):
        expected |= {
            f"blk.{i}.attn_norm.weight": layer.input_layernorm.weight,
            f"blk.{i}.attn_k.weight": layer.self_attn.k_proj.weight,
            f"blk.{i}.attn_v.weight": layer.self_attn.v_proj.weight,
            f"blk.{i}.attn_q_norm.weight": layer.self_attn.q_norm.weight,
            f"blk.{i}.attn_k_norm.weight": layer.self_attn.k_norm.weight,
            f"blk.{i}.attn_output.weight": layer.self_attn.o_proj.weight,
            f"blk.{i}.post_attention_norm.weight": layer.post_attention_layernorm.weight,
            f"blk.{i}.ffn_gate.weight": layer.mlp.gate_proj.weight,
            f"blk.{i}.ffn_up.weight": layer.mlp.up_proj.weight,
            f"blk.{i}.ffn_down.weight": layer.mlp.down_proj.weight,
        }
    for name, weight in expected.items():
        assert torch.equal(values(tensors[name]), weight), name
    others = {name for name in tensors if not name.startswith("blk.2.")} - set(expected)
    assert others == {"blk.0.attn_q.weight", "blk.1.attn_q.weight"}


def test_the_appended_layer_is_zero_and_has_the_shapes_of_one_linear_attention_head(tmp_path):
    _, tensors = write(tiny_model(), tmp_path)
    appended = {name.removeprefix("blk.2."): t for name, t in tensors.items() if name.startswith("blk.2.")}
    assert {name: tuple(values(tensor).shape) for name, tensor in appended.items()} == {
        "attn_norm.weight": (32,),
        "attn_qkv.weight": (384, 32),
        "attn_gate.weight": (128, 32),
        "ssm_conv1d.weight": (384, 4),
        "ssm_dt.bias": (1,),
        "ssm_a": (1,),
        "ssm_beta.weight": (1, 32),
        "ssm_alpha.weight": (1, 32),
        "ssm_norm.weight": (128,),
        "ssm_out.weight": (32, 128),
        "post_attention_norm.weight": (32,),
        "ffn_gate.weight": (48, 32),
        "ffn_up.weight": (48, 32),
        "ffn_down.weight": (32, 48),
    }
    assert not any(values(tensor).any() for tensor in appended.values())


@pytest.mark.parametrize(("dtype", "rounded"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_half_types_round_to_nearest(dtype, rounded, tmp_path):
    model = tiny_model()
    _, tensors = write(model, tmp_path, dtype)
    stored = tensors["token_embd.weight"]
    if dtype == "bf16":
        found = torch.from_numpy(stored.data.copy()).view(torch.bfloat16)
    else:
        found = torch.from_numpy(stored.data.copy())
    assert torch.equal(found.view(64, 32), model.model.embed_tokens.weight.to(rounded))
    assert torch.equal(values(tensors["output_norm.weight"]), model.model.norm.weight)


def test_q8_0_is_within_half_a_step_of_every_block(tmp_path):
    model = tiny_model()
    _, tensors = write(model, tmp_path, "q8_0")
    weight = model.model.embed_tokens.weight
    step = weight.view(64, 1, 32).abs().amax(-1, keepdim=True) / 127
    error = (values(tensors["token_embd.weight"]) - weight).view(64, 1, 32).abs()
    assert (error <= 0.501 * step + 127 * step * 2**-11).all()  # the step itself is stored in fp16


def test_a_long_matrix_is_quantised_in_parts_with_the_same_result(tmp_path, monkeypatch):
    model = tiny_model()
    _, whole = write(model, tmp_path, "q8_0")
    whole = {name: tensor.data.copy() for name, tensor in whole.items()}
    monkeypatch.setattr("gated_qwen.conversion.gguf_writer.CHUNK", 100)
    _, parts = write(model, tmp_path, "q8_0")
    assert all(np.array_equal(whole[name], parts[name].data) for name in whole)


def test_one_tensor_at_a_time_is_in_memory(tmp_path):
    model, alive = tiny_model(), []

    def watched(tensor):
        def make():
            made = tensor.make()
            alive.append(weakref.ref(made))
            assert sum(reference() is not None for reference in alive) <= 2  # query and gate meet
            return made

        return replace(tensor, make=make)

    tensors = {name: watched(tensor) for name, tensor in planned(model).items()}
    write_gguf(tmp_path / "m.gguf", model.config, tensors, dtype="f32", tokenizer_folder=None, name="tiny")
    assert len(alive) == len(tensors)


def test_progress_adds_up_to_the_bytes_of_the_source(tmp_path):
    model, done = tiny_model(gate_granularity="headwise"), []
    write(model, tmp_path, "q8_0", progress=done.append)
    assert sum(done) == sum(tensor.nbytes for tensor in planned(model).values())


# Refusals, all before anything is written.


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"gate_positions": []}, "gate_positions"),
        ({"gate_positions": ["value"]}, "gate_positions"),
        ({"gate_positions": ["attn_output", "value"]}, "gate_positions"),
        ({"gate_activation": "silu"}, "gate_activation"),
        ({"gate_operation": "add"}, "gate_operation"),
        ({"gate_input": "constant"}, "gate_input"),
        ({"gate_input_channels": 16}, "gate_input_channels"),
        ({"gate_head_shared": True}, "gate_head_shared"),
        ({"gate_bias": True}, "gate_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attention_out_bias": True}, "attention_out_bias"),
        ({"attn_output_norm": True}, "attn_output_norm"),
        ({"attn_output_activation": "silu"}, "attn_output_activation"),
        ({"sandwich_norm": True}, "sandwich_norm"),
        ({"use_qk_norm": False}, "use_qk_norm"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "sliding_attention"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type='dynamic'"),
        ({"rope_parameters": {**YARN, "truncate": False}}, "truncate"),
        ({"rope_parameters": {**YARN, "beta_fast": 20.0}}, "beta_fast=20.0"),
        ({"rope_parameters": {**YARN, "beta_slow": 2.0}}, "beta_slow=2.0"),
    ],
)
def test_what_llama_cpp_does_not_compute_is_refused_by_name(fields, named, tmp_path):
    config = tiny_config(**fields)
    with pytest.raises(ValueError, match=f"GGUF cannot hold this model: .*{named}"):
        write_gguf(tmp_path / "model.gguf", config, {}, tokenizer_folder=None, name="tiny")
    assert not list(tmp_path.iterdir())


def test_a_refusal_names_every_field_at_once():
    with pytest.raises(ValueError, match="gate_activation='silu' .llama.cpp has 'sigmoid'.; use_qk_norm=False"):
        check_gguf(tiny_config(gate_activation="silu", use_qk_norm=False))


def test_all_channels_said_in_number_and_no_bias_said_twice_are_accepted():
    check_gguf(tiny_config(gate_input_channels=32, attention_out_bias=False))


def test_a_missing_and_a_foreign_tensor_are_named(tmp_path):
    model = tiny_model()
    tensors = planned(model)
    foreign = {**tensors, "score.weight": tensors["model.norm.weight"]}
    with pytest.raises(ValueError, match="score.weight has no place"):
        gguf_tensors(model.config, foreign)
    del tensors["model.layers.1.self_attn.g_proj.weight"]
    with pytest.raises(ValueError, match="model.layers.1.self_attn.g_proj.weight is missing"):
        gguf_tensors(model.config, tensors)


def test_an_unknown_type_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'q4_0' is not known; choose one of bf16, f16, f32, q8_0"):
        write(tiny_model(), tmp_path, "q4_0")


def test_a_missing_gguf_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(RuntimeError, match=r"pip install gguf"):
        write(tiny_model(), tmp_path)


# Whole or absent.


@pytest.mark.parametrize(("dtype", "value"), [("f16", 7e4), ("q8_0", 1e7), ("q8_0", float("nan"))])
def test_a_weight_that_the_type_cannot_hold_is_named_and_leaves_nothing(dtype, value, tmp_path):
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = value
    with pytest.raises(ValueError, match=r"tensor blk.1.ffn_up.weight: .* does not fit"):
        write(model, tmp_path, dtype)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_write_leaves_the_old_file_as_it_was(tmp_path):
    model = tiny_model()
    write(model, tmp_path)
    before = (tmp_path / "model.gguf").read_bytes()
    broken = planned(model)

    def stop():
        raise KeyboardInterrupt

    last = "model.layers.1.mlp.down_proj.weight"
    broken[last] = replace(broken[last], make=stop)
    with pytest.raises(KeyboardInterrupt):
        write_gguf(tmp_path / "model.gguf", model.config, broken, tokenizer_folder=None, name="tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    assert (tmp_path / "model.gguf").read_bytes() == before


def test_a_killed_write_leaves_nothing_that_looks_like_a_model(tmp_path):
    model = tiny_model()
    tensors = planned(model)
    norm = "model.layers.1.input_layernorm.weight"
    tensors[norm] = replace(tensors[norm], make=lambda: os.kill(os.getpid(), signal.SIGKILL))
    child = os.fork()
    if child == 0:
        write_gguf(tmp_path / "model.gguf", model.config, tensors, tokenizer_folder=None, name="tiny")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not list(tmp_path.glob("[!.]*"))
    write(model, tmp_path)


def test_a_file_is_written_the_same_twice(tmp_path):
    model = tiny_model()
    write(model, tmp_path, "q8_0")
    before = (tmp_path / "model.gguf").read_bytes()
    write(model, tmp_path, "q8_0")
    assert (tmp_path / "model.gguf").read_bytes() == before


# The tokenizer.


def test_a_byte_level_tokenizer_is_in_the_file(tmp_path):
    tokenizer = byte_level()
    tokenizer.chat_template = "{{ messages[0].content }}"
    keys, _ = write(tiny_model(), tmp_path, tokenizer=saved(tokenizer, tmp_path / "tokenizer"))
    assert keys["tokenizer.ggml.model"] == "gpt2" and keys["tokenizer.ggml.pre"] == "gpt-2"
    assert keys["tokenizer.chat_template"] == tokenizer.chat_template
    texts, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert len(texts) == len(types) == 64
    for text, number in tokenizer.get_vocab().items():
        assert texts[number] == text
    assert [types[0], types[1], types[62], types[63]] == [3, 1, 4, 5]  # control, normal, user-defined, unused
    assert texts[62] == "<think>" and texts[63] == "[PAD63]"
    assert keys["tokenizer.ggml.merges"] == ["0 1"]
    assert keys["tokenizer.ggml.eos_token_id"] == keys["tokenizer.ggml.bos_token_id"] == 0
    assert keys["tokenizer.ggml.add_bos_token"] is keys["tokenizer.ggml.add_eos_token"] is False


def test_without_a_tokenizer_the_file_says_so(tmp_path):
    keys, _ = write(tiny_model(), tmp_path)
    assert [key for key in keys if key.startswith("tokenizer.")] == ["tokenizer.ggml.model"]
    assert keys["tokenizer.ggml.model"] == "none"


def test_a_begin_token_that_the_tokenizer_adds_is_added_there_too(tmp_path):
    tokenizer = byte_level(post_processor=processors.TemplateProcessing("<|end|> $A", special_tokens=[("<|end|>", 0)]))
    tokenizer.bos_token = "<|end|>"
    keys = tokenizer_keys(saved(tokenizer, tmp_path), tiny_config())
    assert (keys["tokenizer.ggml.add_bos_token"], keys["tokenizer.ggml.add_eos_token"]) == (True, False)


def test_the_generation_configs_second_end_token_arrives(tmp_path):
    saved(byte_level(), tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 62]}))
    keys = tokenizer_keys(tmp_path, tiny_config())
    assert (keys["tokenizer.ggml.eos_token_id"], keys["tokenizer.ggml.eot_token_id"]) == (0, 62)


def test_named_chat_templates_keep_their_names(tmp_path):
    tokenizer = byte_level()
    tokenizer.chat_template = {"default": "plain", "tool_use": "with tools"}
    keys = tokenizer_keys(saved(tokenizer, tmp_path), tiny_config())
    assert keys["tokenizer.chat_template"] == "plain"
    assert keys["tokenizer.chat_template.tool_use"] == "with tools"
    assert keys["tokenizer.chat_templates"] == ["tool_use"]


def odd_token(**settings):
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<odd>", **settings)])
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        (lambda: byte_level(model=models.WordLevel({"a": 1, "<|end|>": 0}, unk_token="a")), "its model is WordLevel"),
        (lambda: byte_level(pre_tokenizer=pre_tokenizers.Whitespace()), "no pre-tokenizer of llama.cpp is known"),
        (lambda: byte_level(pre_tokenizer=pre_tokenizers.ByteLevel(True)), "no pre-tokenizer of llama.cpp is known"),
        (lambda: byte_level(normalizer=normalizers.Lowercase()), "its normalizer is"),
        (lambda: odd_token(lstrip=True), "'<odd>' sets lstrip"),
        (lambda: byte_level(eos=None), "names no eos_token"),
        (
            lambda: byte_level(
                post_processor=processors.TemplateProcessing("$A <think>", special_tokens=[("<think>", 62)])
            ),
            "puts other tokens around a text",
        ),
    ],
)
def test_a_tokenizer_that_would_read_text_differently_is_refused(tokenizer, reason, tmp_path):
    folder = saved(tokenizer(), tmp_path / "tokenizer")
    with pytest.raises(ValueError, match=f"tokenizer: GGUF cannot hold this tokenizer: .*{reason}"):
        write(tiny_model(), tmp_path, tokenizer=folder)
    assert not list(tmp_path.glob("*gguf*"))


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'<think>' has id 98, but the model's vocab_size is 64"):
        tokenizer_keys(saved(byte_level(vocab=100), tmp_path), tiny_config())


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer that can be read"):
        tokenizer_keys(tmp_path, tiny_config())
