"""Training the gates alone: which parameters they are, freezing the rest, and a file of their weights."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gated_qwen.configuration.configuration_gated_qwen import GATE_FIELDS, GATE_MODULES
from gated_qwen.conversion.folder import atomic_file

# What a gate's file says about the gate that it belongs to; how it was initialised does not matter.
DESCRIBED = tuple(name for name in GATE_FIELDS if name != "gate_initializer_range")


def gate_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of every gate, of a plain model or one that PEFT has wrapped, by their full name.

    Adapters on a gate and trainable copies of it (PEFT's `modules_to_save`) lie inside the gate's module and count.

    Example:
        >>> from gated_qwen import GatedQwenForCausalLM
        >>> model = GatedQwenForCausalLM.from_pretrained(llama_folder, gate_granularity="headwise")
        >>> list(gate_parameters(model))[0]
        'model.layers.0.self_attn.g_proj.weight'
    """
    names = set(GATE_MODULES.values())
    return {name: parameter for name, parameter in model.named_parameters() if names & set(name.split("."))}


def freeze_all_but_gates(model: nn.Module) -> list[str]:
    """Makes the gates trainable and everything else not.

    Args:
        model: a gated model, not wrapped by PEFT.

    Returns:
        list[str]: names of the parameters that stay trainable.

    Raises:
        ValueError: the model has no gate, so nothing could learn.

    Example:
        >>> from gated_qwen import GatedQwenForCausalLM
        >>> model = GatedQwenForCausalLM.from_pretrained(llama_folder, gate_granularity="headwise")
        >>> len(freeze_all_but_gates(model)), sum(p.numel() for p in model.parameters() if p.requires_grad)
        (2, 256)
    """
    gates = gate_parameters(model)
    if not gates:
        raise ValueError(
            "the model has no gate to train; its config's gate_positions is empty, or it is another family"
        )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in gates.values():
        parameter.requires_grad_(True)
    return list(gates)


def save_gates(model: nn.Module, file: str | os.PathLike[str]) -> None:
    """Writes the gates' weights, and no others, as a safetensors file that says which gate they belong to.

    Args:
        model: a gated model, not wrapped by PEFT (which saves what it trains by itself).
        file: e.g. `gates.safetensors`; it appears whole or not at all.

    Raises:
        ValueError: the model has no gate.
    """
    from safetensors.torch import save_file

    gates = {name: parameter.detach().contiguous() for name, parameter in gate_parameters(model).items()}
    if not gates:
        raise ValueError("the model has no gate to save")
    metadata = {"format": "pt", "gate": json.dumps(_description(model))}
    with atomic_file(Path(file)) as temporary:
        save_file(gates, temporary, metadata=metadata)


def load_gates(model: nn.Module, file: str | os.PathLike[str]) -> None:
    """Puts the weights of a file that `save_gates` wrote into a model's gates, which keep their dtype and device.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file belongs to another gate: its config fields, names or shapes differ, which is said; nothing
            has been changed.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(file).is_file():
        raise FileNotFoundError(f"{file}: no such file; save_gates writes it")
    try:
        with safe_open(file, framework="pt") as reader:
            described = json.loads((reader.metadata() or {}).get("gate", "{}"))
            saved = {name: reader.get_tensor(name) for name in reader.keys()}
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{file}: not a file of gates ({error}); write it with save_gates") from error
    for name, value in _description(model).items():
        if described.get(name) != value:
            raise ValueError(f"{file}: made for {name}={described.get(name)!r}, but the model has {value!r}")
    gates = gate_parameters(model)
    if differing := sorted(gates.keys() ^ saved.keys()):
        raise ValueError(
            f"{file}: tensor {differing[0]} is in only one of file and model; they are of different depth"
        )
    for name, parameter in gates.items():
        if saved[name].shape != parameter.shape:
            raise ValueError(
                f"{file}: tensor {name} has shape {tuple(saved[name].shape)}, the model's {tuple(parameter.shape)}"
            )
    with torch.no_grad():
        for name, parameter in gates.items():
            parameter.copy_(saved[name])


def _description(model: Any) -> dict[str, Any]:
    return {name: getattr(model.config, name) for name in DESCRIBED}
