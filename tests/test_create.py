"""A fresh folder holds what the model class would draw, and is written without building the model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gated_folders import weights
from tiny import EVERY_POSITION, tiny_config
from transformers import AutoModelForCausalLM
from ungated import EXPERTS

from gated_qwen import GatedQwenConfig, GatedQwenMoeConfig
from gated_qwen.conversion.create import create, initial_tensors
from gated_qwen.conversion.experts import live_state
from gated_qwen.conversion.families import causal_lm_class

VARIANTS = {
    "default": (GatedQwenConfig, {}),
    "every position, biases": (GatedQwenConfig, {"gate_positions": EVERY_POSITION, "gate_bias": True}),
    "attention biases, no q/k norm": (GatedQwenConfig, {"attention_bias": True, "use_qk_norm": False}),
    "constant gates": (GatedQwenConfig, {"gate_positions": EVERY_POSITION, "gate_input": "constant"}),
    "gates of their own width": (GatedQwenConfig, {"gate_initializer_range": 0.3, "gate_granularity": "headwise"}),
    "gates of zeros": (GatedQwenConfig, {"gate_initializer_range": 0.0}),
    "norms everywhere": (GatedQwenConfig, {"sandwich_norm": True, "attn_output_norm": True}),
    "padding, tied": (GatedQwenConfig, {"pad_token_id": 3, "tie_word_embeddings": True}),
    "mixture": (GatedQwenMoeConfig, EXPERTS),
    "mixture with a dense layer": (GatedQwenMoeConfig, {**EXPERTS, "mlp_only_layers": [0], "initializer_range": 0.1}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_has_the_distribution_that_the_class_gives_it(variant):
    config_class, fields = VARIANTS[variant]
    config = tiny_config(config_class, **fields)
    model = causal_lm_class(config)(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    made = {tensor.name: tensor.make() for tensor in initial_tensors(config, "F32", seed=0)}
    if config.tie_word_embeddings:
        assert "lm_head.weight" not in made
        made["lm_head.weight"] = made["model.embed_tokens.weight"]
    drawn = live_state(made, shapes)
    assert set(drawn) == set(shapes)
    for name, expected in model.state_dict().items():
        found = drawn[name]
        assert found.shape == expected.shape and found.dtype == torch.float32
        if expected.unique().numel() == 1:
            assert torch.equal(found, expected), f"{name}: all {expected.flatten()[0]}"
            continue
        assert torch.equal(found == 0, expected == 0), f"{name}: the row of padding"
        error = 4 / expected.numel() ** 0.5  # four standard deviations of the ratio of two estimates
        width = float(expected.std())
        assert float(found.std()) == pytest.approx(width, rel=error), name
        assert abs(float(found.mean())) < error * width, name


def test_tensors_are_drawn_independently_of_each_other():
    made = {
        tensor.name: tensor.make() for tensor in initial_tensors(tiny_config(GatedQwenMoeConfig, **EXPERTS), "F32", 0)
    }
    one, other = (made[f"model.layers.0.mlp.experts.{expert}.up_proj.weight"] for expert in (0, 1))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("preset", ["tiny-headwise", "tiny-moe-elementwise"])
def test_the_seed_and_the_shards_decide_nothing_else(preset, tmp_path):
    create(preset, tmp_path / "one", seed=1)
    create(preset, tmp_path / "same", seed=1, max_shard_size="20KB")
    create(preset, tmp_path / "other", seed=2)
    one, same, other = (weights(tmp_path / name) for name in ("one", "same", "other"))
    assert all(torch.equal(tensor, same[name]) for name, tensor in one.items())
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_folder_is_ready_to_be_trained(dtype, tmp_path):
    create("tiny-moe-headwise", tmp_path / "fresh", dtype=dtype)
    assert json.loads((tmp_path / "fresh" / "config.json").read_text())["dtype"] == dtype
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "fresh", dtype="auto", output_loading_info=True)
    assert model.dtype == getattr(torch, dtype) and not report["missing_keys"] and not report["unexpected_keys"]
    tokens = torch.arange(12).reshape(1, 12)
    model.float()(tokens, labels=tokens).loss.backward()
    assert all(layer.self_attn.g_proj.weight.grad.any() for layer in model.model.layers)


MEASURE = """
import sys
from gated_qwen.conversion.create import create

def status(field):
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith(field)).split()[1])

create("tiny-moe-headwise", sys.argv[1])  # everything that is loaded once is loaded
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
before = status("VmRSS")
wide = {"hidden_size": 1024, "moe_intermediate_size": 256, "num_experts": 128, "vocab_size": 8192}
create("tiny-moe-headwise", sys.argv[2], dtype="bfloat16", overrides=wide)
print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures memory as Linux counts it")
def test_the_model_is_never_in_memory(tmp_path):
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "warm"), str(tmp_path / "fresh")]
    growth = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    size = sum(path.stat().st_size for path in (tmp_path / "fresh").glob("*.safetensors"))
    assert size > 400e6 and growth < size / 3, f"{growth / 1e6:.0f} MB for a model of {size / 1e6:.0f} MB"
