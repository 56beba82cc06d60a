"""Saved models of ours for conversions, and what is compared of folders."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny import tiny_model, tokens
from transformers import AutoModelForCausalLM

from gated_qwen import GatedQwenForCausalLM, GatedQwenMoeForCausalLM

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e6}
# target -> class of a dense model, class of a mixture
NATIVE = {
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextForCausalLM"),
}


def ours(folder: Path, dtype: torch.dtype = torch.float32, **fields) -> GatedQwenForCausalLM:
    """A saved model of ours, a mixture if it has experts, whose norms spread over 0.1 to 2.5, one in five negative."""
    model_class = GatedQwenMoeForCausalLM if "num_experts" in fields else GatedQwenForCausalLM
    model = tiny_model(model_class, **fields)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.1, 2.5)
                parameter[::5] *= -1
    model.to(dtype).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(tokens(2, 12), use_cache=False).logits


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def assert_same_weights(one: Path, other: Path) -> None:
    one, other = weights(one), weights(other)
    assert set(one) == set(other)
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name
