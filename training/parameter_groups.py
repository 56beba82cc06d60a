"""Optimiser groups in which the gates have a learning rate and a weight decay of their own."""

from typing import Any

from torch import nn

from gated_qwen.training.gates import gate_parameters


def parameter_groups(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    gate_learning_rate: float | None = None,
    gate_weight_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Every trainable parameter of a model, exactly once, in groups for a torch optimiser.

    Norms and biases are not decayed; the scores of a constant gate, although a vector, are the gate's weight and are.
    Works on a plain model and on one that PEFT has wrapped: adapters on a gate, and copies of a gate that PEFT trains,
    belong to the gate. A pair of tied parameters is one parameter.

    Args:
        model: any model; one without gates has no gate groups.
        learning_rate: of all but the gates.
        weight_decay: of matrices other than the gates'.
        gate_learning_rate: None is `learning_rate`.
        gate_weight_decay: None is `weight_decay`.

    Returns:
        list[dict]: `params`, `lr`, `weight_decay` and `name` (`weights`, `norms and biases`, `gates`, `gate biases`);
        no group is empty.

    Raises:
        ValueError: a negative rate or decay, or nothing to train.

    Example:
        >>> from gated_qwen import GatedQwenForCausalLM
        >>> model = GatedQwenForCausalLM.from_pretrained(llama_folder, gate_granularity="headwise")
        >>> groups = parameter_groups(model, learning_rate=1e-4, weight_decay=0.1, gate_learning_rate=1e-3)
        >>> [(group["name"], group["lr"], group["weight_decay"]) for group in groups]
        [('weights', 0.0001, 0.1), ('norms and biases', 0.0001, 0.0), ('gates', 0.001, 0.1)]
    """
    rates = (learning_rate, learning_rate if gate_learning_rate is None else gate_learning_rate)
    decays = (weight_decay, weight_decay if gate_weight_decay is None else gate_weight_decay)
    for name, values in (("learning rate", rates), ("weight decay", decays)):
        if min(values) < 0:
            raise ValueError(f"{name} {min(values)!r} is negative; it must be 0 or more")
    gates = {id(parameter) for parameter in gate_parameters(model).values()}
    names = {(False, True): "weights", (False, False): "norms and biases"}
    names |= {(True, True): "gates", (True, False): "gate biases"}
    found: dict[tuple[bool, bool], list[nn.Parameter]] = {key: [] for key in names}
    seen: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            # By name: a model that came as remote code has classes of its own.
            decayed = parameter.ndim > 1 or type(module).__name__ == "GatedQwenConstantGate"
            found[id(parameter) in gates, decayed].append(parameter)
    if not seen:
        raise ValueError("no parameter of the model is trainable (requires_grad); was everything frozen?")
    return [
        {
            "params": parameters,
            "lr": rates[is_gate],
            "weight_decay": decays[is_gate] if decayed else 0.0,
            "name": names[is_gate, decayed],
        }
        for (is_gate, decayed), parameters in found.items()
        if parameters
    ]
