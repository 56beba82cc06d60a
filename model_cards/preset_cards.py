"""Cards of the presets and of the paper's variants; `python -m gated_qwen.model_cards.preset_cards` writes them anew.

They lie in `presets/` and `variants/` beside this file, and a test compares them with what is made here.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from gated_qwen import GatedQwenConfig
from gated_qwen.configuration.accounting import ParameterCount, count_parameters
from gated_qwen.configuration.presets import preset, preset_fields, preset_names
from gated_qwen.conversion.source_card import INHERITED
from gated_qwen.model_cards.markdown import Markdown, number, render
from gated_qwen.model_cards.metadata import LIBRARY, TAGS
from gated_qwen.model_cards.reported import PAPER_EXPERTS, PAPER_SHAPE, REPORTED_RULER, VARIANTS, Variant
from gated_qwen.model_cards.subject import PIPELINES, gate_formula

SHAPE_ROWS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "FFN width": "intermediate_size",
    "experts": "num_experts",
    "experts per token": "num_experts_per_tok",
    "expert width": "moe_intermediate_size",
    "query heads": "num_attention_heads",
    "key/value heads": "num_key_value_heads",
    "head width": "head_dim",
    "vocabulary": "vocab_size",
    "longest text": "max_position_embeddings",
}
VARIANT_FIELDS = ("gate_", "attn_output_", "sandwich_norm")
REPORTED_ROWS = {
    "perplexity": "perplexity",
    "attention on the first token": "first_token_share",
    "largest activation": "max_activation",
    "mean gate score": "mean_gate",
}


def reference_cards() -> dict[str, str]:
    """The text of every card by its path below this folder.

    Example:
        >>> sorted(reference_cards())[-1]
        'variants/output-silu.md'
    """
    presets = {f"presets/{name}.md": _preset_card(name) for name in preset_names()}
    return presets | {f"variants/{name}.md": _variant_card(name) for name in VARIANTS}


def write_reference_cards(folder: Path) -> None:
    """Writes every card below a folder, and removes those of presets and variants that are no more."""
    cards = reference_cards()
    for kind in ("presets", "variants"):
        (folder / kind).mkdir(exist_ok=True)
        for stale in {path for path in (folder / kind).glob("*.md") if f"{kind}/{path.name}" not in cards}:
            stale.unlink()
    for name, text in cards.items():
        (folder / name).write_text(text, encoding="utf-8")


def _preset_card(name: str) -> str:
    config = preset(name)
    count = count_parameters(config)
    chosen = {key: value for key, value in preset_fields(name).items() if key.startswith(VARIANT_FIELDS)}
    shape = {label: getattr(config, field, None) for label, field in SHAPE_ROWS.items()}
    values = {
        "title": f"The preset {name}",
        "preset": name,
        "shape": {label: value for label, value in shape.items() if value is not None},
        "parts": _parts(count),
        "matched": _matched(name, config),
    }
    variant = _reported_variant(config)
    return _card(name, config, chosen, {**values, **_reported(VARIANTS[variant] if variant else None)})


def _parts(count: ParameterCount) -> dict[str, int]:
    parts = {part.name.replace("_", " "): getattr(count, part.name) for part in fields(count)}
    dense = count.active == count.total
    return {name: value for name, value in parts.items() if not (dense and name in ("active", "router"))}


def _matched(name: str, config: Any) -> dict[str, Any] | None:
    """FFN or expert width and total of a preset that pays for its gate, where there is such a width."""
    if not config.gate_positions:
        return None
    try:
        matched = preset(name, match_parameters=True)
    except ValueError:  # too small a shape for the tolerance
        return None
    field, what = ("moe_intermediate_size", "experts are") if _experts(config) else ("intermediate_size", "FFN is")
    return {"what": what, "width": getattr(matched, field), "total": count_parameters(matched).total}


def _variant_card(name: str) -> str:
    variant = VARIANTS[name]
    config = GatedQwenConfig(**PAPER_SHAPE, **variant.fields)
    values = {
        "title": f"A variant of the gated attention paper: {variant.title}",
        "arguments": ", ".join(f"{key}={value!r}" for key, value in variant.fields.items()),
        "gate_parameters": count_parameters(config).gate,
        **_reported(variant),
    }
    if name == "g1-elementwise":
        values["ruler"] = [
            {"length": length, "model": model, "before": number(before), "after": number(after)}
            for (length, model), (before, after) in REPORTED_RULER.items()
        ]
    return _card(name, config, variant.fields or {"gate_positions": config.gate_positions}, values)


def _card(name: str, config: Any, chosen: dict[str, Any], values: dict[str, Any]) -> str:
    gate = {field.removeprefix("gate_"): getattr(config, field) for field in config.to_dict() if "gate_" in field[:5]}
    empty = dict.fromkeys(("shape", "parts", "matched", "ruler", "preset", "arguments", "gate_parameters"))
    body = render(
        "reference_template.md",
        {
            **empty,
            **values,
            "name": name,
            "fields": chosen,
            "formula": Markdown(gate_formula(gate)) if config.gate_positions else "",
            "paper": PAPER_SHAPE,
        },
    )
    pipeline = PIPELINES["AutoModelForCausalLM"]
    data = ModelCardData(license="apache-2.0", library_name=LIBRARY, pipeline_tag=pipeline, tags=list(TAGS))
    return f"---\n{data.to_yaml(original_order=list(INHERITED))}\n---\n\n{body}"


def _reported_variant(config: Any) -> str | None:
    """The variant whose figures the paper reports for this very shape: its mixture of experts."""
    shape = {name: getattr(config, name) for name in PAPER_SHAPE}
    if _experts(config) != PAPER_EXPERTS or shape != PAPER_SHAPE:
        return None
    own = config.to_dict()
    for name, variant in VARIANTS.items():
        other = GatedQwenConfig(**variant.fields).to_dict()
        if all(own[field] == other[field] for field in own if field.startswith(VARIANT_FIELDS) and field in other):
            return name
    return None


def _experts(config: Any) -> int | None:
    return getattr(config, "num_experts", None)


def _reported(variant: Variant | None) -> dict[str, Any]:
    if variant is None:
        return {"reported": [], "note": None}
    baseline = VARIANTS["baseline"]
    rows = [
        {"label": label, "this": number(getattr(variant, field)), "baseline": number(getattr(baseline, field))}
        for label, field in REPORTED_ROWS.items()
        if getattr(variant, field) is not None
    ]
    return {"reported": rows, "note": variant.note}


if __name__ == "__main__":
    write_reference_cards(Path(__file__).parent)
