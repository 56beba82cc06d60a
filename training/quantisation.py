"""Which modules a quantiser should leave alone: the gates and the head, in each tool's own way of naming them.

Every tool has a rule of its own for matching names, and a list that another tool would take can match nothing without
a word. One user's perplexity went from 10 to 65 with a quantised gate.
"""

import re
from typing import Any

from gated_qwen.configuration.configuration_gated_qwen import GATE_MODULES

# Output heads of the causal model and of the task heads; a name that a model does not have does no harm.
HEADS = ("lm_head", "score", "qa_outputs")
ROUTER = "mlp.gate"
TOOLS = ("bitsandbytes", "quanto", "torchao", "gptq", "compressed-tensors")
FUSED = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")


def skip_modules(model_or_config: Any, tool: str = "bitsandbytes") -> list[str]:
    """The modules that a quantiser should spare: every gate projection, the router of an MoE model, and the heads.

    A list given to a quantiser replaces its own default, which is why the heads are in it. A constant gate is a
    parameter and not a Linear module, so no tool quantises it.

    | tool | where the list goes | how names are matched |
    | --- | --- | --- |
    | `bitsandbytes` | `BitsAndBytesConfig(llm_int8_skip_modules=...)`, 4 bit as well | end of the module's name |
    | `quanto` | `QuantoConfig(modules_to_not_convert=...)` | end of the module's name |
    | `torchao` | `TorchAoConfig(..., modules_to_not_convert=...)` | regular expression, from the start of the name |
    | `gptq` | GPTQModel's `QuantizeConfig(dynamic={pattern: {} for pattern in ...})` | `-:` and a regular expression |
    | `compressed-tensors` | `ignore` of a recipe | `re:` and a regular expression |

    Args:
        model_or_config: a gated model, its config, or the content of its config.json.
        tool: one of `TOOLS`.

    Raises:
        ValueError: the tool is not known, or the model's gate lies inside q_proj (the official release and the Qwen3.5
            exports), where it cannot be spared alone.

    Example:
        >>> from gated_qwen import GatedQwenConfig
        >>> skip_modules(GatedQwenConfig(), "quanto")
        ['g_proj', 'lm_head', 'score', 'qa_outputs']
        >>> skip_modules(GatedQwenConfig(), "torchao")[0]
        '.*\\\\.g_proj'
    """
    if tool not in TOOLS:
        raise ValueError(f"tool {tool!r} is not known; choose one of {', '.join(TOOLS)}")
    config = getattr(model_or_config, "config", model_or_config)
    fields = config if isinstance(config, dict) else config.to_dict()
    if "gate_positions" not in fields:
        _refuse(fields)
    gates = [GATE_MODULES[position] for position in fields["gate_positions"]]
    if fields["gate_input"] == "constant":
        gates = []
    inner = [*gates, *([ROUTER] if fields.get("num_experts") else [])]
    if tool in ("bitsandbytes", "quanto"):
        return [*inner, *HEADS]
    patterns = [rf".*\.{re.escape(name)}" for name in inner]
    if tool == "torchao":
        return [*patterns, *HEADS]  # a head's name stands at the start
    prefix = {"gptq": "-:", "compressed-tensors": "re:"}[tool]
    return [f"{prefix}{pattern}$" for pattern in patterns] + [f"{prefix}{name}$" for name in HEADS]


def _refuse(fields: dict[str, Any]) -> None:
    model_type = fields.get("model_type")
    flags = fields.get("headwise_attn_output_gate") or fields.get("elementwise_attn_output_gate")
    if flags or model_type in FUSED:
        raise ValueError(
            f"config.json: model_type {model_type!r}: the gate's rows lie inside q_proj, so it can be spared only "
            "together with the queries: name q_proj in the list, or quantise the gated_qwen model"
        )
    raise ValueError(f"config.json: model_type {model_type!r} has no gate to spare; the tool's default list will do")
