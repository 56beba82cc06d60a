"""A LoRA configuration that knows the names of this model's modules, the gates among them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gated_qwen.configuration.configuration_gated_qwen import GATE_MODULES

if TYPE_CHECKING:
    from peft import LoraConfig

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
# transformers 5 keeps the experts of a layer in two parameters of three dimensions, not in Linear modules.
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
ROUTER = "mlp.gate"
TARGETS = ("attention", "mlp", "experts", "router")
GATES = ("lora", "full", "none")


def lora_config(
    model_or_config: Any,
    *,
    rank: int = 16,
    alpha: float | None = None,
    gate: str = "lora",
    targets: Sequence[str] = ("attention", "mlp", "experts"),
    **options: Any,
) -> "LoraConfig":
    """A `peft.LoraConfig` for a gated model; use it with `peft.get_peft_model`.

    The update of an adapted weight W is alpha / rank * B A, with A (rank, in) and B (out, rank) (arXiv 2106.09685).
    A headwise gate has one row per head, so to train it whole (`gate="full"`) costs less than most ranks.

    Args:
        model_or_config: a gated model, or its config.
        rank: of every update.
        alpha: None is twice the rank.
        gate: `"lora"` adapts every gate, `"full"` trains a copy of it, which is saved in the adapter, and `"none"`
            leaves the gates as they are.
        targets: any of `"attention"`, `"mlp"` (dense MLPs), `"experts"` (nothing in a dense model) and `"router"` (a
            trained copy, saved in the adapter).
        options: more fields of `LoraConfig`, e.g. `use_dora=True`; `modules_to_save` is added to.

    Raises:
        ValueError: not a gated model of this package, an unknown choice, or a combination that PEFT cannot do.

    Example:
        >>> from gated_qwen import GatedQwenConfig
        >>> config = lora_config(GatedQwenConfig(), rank=8, gate="full", targets=["attention"])
        >>> sorted(config.target_modules), config.modules_to_save
        (['k_proj', 'o_proj', 'q_proj', 'v_proj'], ['g_proj'])
    """
    from peft import LoraConfig

    config = getattr(model_or_config, "config", model_or_config)
    _check(config, gate, targets)
    gates = [GATE_MODULES[position] for position in config.gate_positions]
    modules = [*ATTENTION] if "attention" in targets else []
    if "mlp" in targets and _has_dense_layers(config):
        modules += MLP
    if gate == "lora":
        modules += gates
    saved = [*(options.pop("modules_to_save", None) or [])]
    if gate == "full":
        saved += gates
    parameters = []
    if getattr(config, "num_experts", None):
        parameters = [*EXPERTS] if "experts" in targets else []
        saved += [ROUTER] if "router" in targets else []
    if parameters and options.get("lora_dropout"):
        raise ValueError(
            f"lora_dropout={options['lora_dropout']!r}: PEFT has no dropout on experts; leave it out, or leave "
            "'experts' out of targets"
        )
    fields: dict[str, Any] = {
        "r": rank,
        "lora_alpha": 2 * rank if alpha is None else alpha,
        "target_modules": modules,
        "modules_to_save": list(dict.fromkeys(saved)) or None,
        "task_type": "CAUSAL_LM",
        **({"target_parameters": parameters} if parameters else {}),
        **options,
    }
    return LoraConfig(**fields)


def _check(config: Any, gate: str, targets: Sequence[str]) -> None:
    if not hasattr(config, "gate_positions"):
        raise ValueError(
            f"a {getattr(config, 'model_type', type(config).__name__)} model has no gate modules of its own: its "
            "gate, if any, lies in q_proj, so LoraConfig(target_modules=['q_proj', ...]) adapts both"
        )
    if gate not in GATES:
        raise ValueError(f"gate={gate!r} is not known; choose one of {', '.join(GATES)}")
    if isinstance(targets, str) or (unknown := sorted(set(targets) - set(TARGETS))):
        wrong = targets if isinstance(targets, str) else unknown[0]
        raise ValueError(f"targets: {wrong!r} is not understood; give a list of any of {', '.join(TARGETS)}")
    if gate == "lora" and config.gate_positions and config.gate_input == "constant":
        raise ValueError("gate='lora': a constant gate is one vector, which has no rank to lower; use gate='full'")


def _has_dense_layers(config: Any) -> bool:
    """Whether some layer's MLP is no mixture of experts, by the rule of transformers' Qwen3-MoE."""
    if not getattr(config, "num_experts", None):
        return True
    step = getattr(config, "decoder_sparse_step", 1)
    dense = set(getattr(config, "mlp_only_layers", None) or [])
    return any(layer in dense or (layer + 1) % step for layer in range(config.num_hidden_layers))
