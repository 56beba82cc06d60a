"""What a model folder says of itself: its shape, its gate, its context, and how it was made."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gated_qwen.configuration.context import smallest_factors, yarn_attention_factor
from gated_qwen.configuration.rope_schema import read_length, read_rope
from gated_qwen.conversion.checkpoint import read_config, read_json
from gated_qwen.conversion.inspection import GATE_DEFAULTS, CheckpointSummary, inspect_checkpoint
from gated_qwen.conversion.source_card import inherited_fields, source_card
from gated_qwen.conversion.writer import PROVENANCE_NAME

# Paper names of the gate positions, and what each acts on.
POSITIONS = {
    "query": "the queries (G4)",
    "key": "the keys (G3)",
    "value": "the values (G2)",
    "attn_output": "each head's attention output, before `o_proj` (G1)",
    "dense_output": "the output of `o_proj` (G5)",
}
# What a family of ours can add to attention beside a gate, in words.
OTHER_CHANGES = {
    "attn_output_norm": "RMSNorm on each head's attention output",
    "attn_output_activation": "{} on each head's attention output",
    "sandwich_norm": "RMSNorm on the output of each sub-layer",
}
PIPELINES = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModel": "feature-extraction",
}


@dataclass(frozen=True)
class Subject:
    """A folder that a card describes.

    Attributes:
        folder, config, summary: the folder, its config.json, and its weights in numbers.
        provenance: the content of provenance.json, or None.
        inherited: licence, languages, data sets and base model as the source's card has them.
    """

    folder: Path
    config: dict[str, Any]
    summary: CheckpointSummary
    provenance: dict[str, Any] | None
    inherited: dict[str, Any]

    @property
    def name(self) -> str:
        """The folder's name, as a repository's may be."""
        return re.sub(r"[^\w.-]+|--+|\.\.+", "-", self.folder.resolve().name, flags=re.ASCII).strip("-.") or "model"

    @property
    def gate(self) -> dict[str, Any] | None:
        """The gate's settings, those that a family does not write down filled in; None without a gate."""
        gate = self.summary.gate
        if gate is None:
            return None
        first: dict[str, Any] = {name: gate[name] for name in ("positions", "granularity") if name in gate}
        return {**first, **GATE_DEFAULTS, **gate}

    @property
    def remote_code(self) -> bool:
        return bool(self.config.get("auto_map"))

    @property
    def auto_class(self) -> str:
        return auto_class(self.config)

    @property
    def pipeline(self) -> str:
        """The Hub's name for what the saved class does."""
        return PIPELINES.get(self.auto_class, "text-generation")

    @property
    def quantised(self) -> str | None:
        """The method by which the weights are packed, so that their numbers are no parameters."""
        settings = _object(self.config.get("quantization_config"))
        return str(settings.get("quant_method", "an unknown method")) if settings else None

    @property
    def other_changes(self) -> list[str]:
        """What else was added to attention, in words."""
        return [words.format(value) for name, words in OTHER_CHANGES.items() if (value := self.config.get(name))]

    @property
    def tokenizer(self) -> bool:
        return any(self.folder.glob("tokenizer*"))

    @property
    def chat_template(self) -> bool:
        if (self.folder / "chat_template.jinja").exists():
            return True
        path = self.folder / "tokenizer_config.json"
        return path.exists() and "chat_template" in read_json(path, "repair it")

    def steps(self) -> list[dict[str, Any]]:
        """Every record of the provenance, oldest first: those of the sources, the folder's own, its later changes."""
        return list(_steps(self.provenance))

    def base_models(self) -> list[str]:
        """Repository ids of the nearest source that is on the Hub: its own, or the base that its card names."""
        for source in _sources(self.provenance):
            name = str(source.get("name"))
            if name.count("/") == 1:
                return [name]
            if known := inherited_fields(_object(source.get("card"))).get("base_model"):
                return list(known)
        return list(self.inherited.get("base_model", ()))

    def is_derived(self) -> bool:
        """Whether the weights come from another model, as far as the record knows; without a record they may."""
        return not any(step.get("verb") in ("new", "train") and not step.get("source") for step in self.steps())

    def datasets(self) -> list[str]:
        """Repository ids of what the recorded training runs read from the Hub."""
        found = []
        for step in self.steps():
            entries = _object(_object(step.get("recipe")).get("data")).get("train")
            found += [_object(entry).get("hub") for entry in (entries if isinstance(entries, list) else [])]
        return [name for name in dict.fromkeys(found) if isinstance(name, str)]

    def context(self) -> dict[str, Any]:
        """RoPE settings and lengths, with the YaRN factors that are enough for each length."""
        rope = read_rope(self.config)
        original = rope.get("original_max_position_embeddings")
        bases = [_bases(step) for step in self.steps() if step.get("verb") == "extend"]
        moved = [before for before, after in bases if before is not None and before != after]
        return {
            "length": read_length(self.config),
            "rope_type": rope["rope_type"],
            "rope_theta": rope["rope_theta"],
            "factor": rope.get("factor"),
            "original": original,
            "attention_factor": rope.get("attention_factor") or yarn_attention_factor(rope.get("factor") or 1.0),
            "smallest_factors": smallest_factors(self.config),
            "old_base": moved[0] if moved else None,
        }


def read_subject(folder: Path) -> Subject:
    """Reads a folder; no weights are loaded.

    Raises:
        CheckpointError: the folder is missing, broken, or of a family that is not understood.
    """
    summary = inspect_checkpoint(folder)
    provenance = None
    if (folder / PROVENANCE_NAME).exists():
        provenance = read_json(folder / PROVENANCE_NAME, "repair it or remove it")
    inherited = source_card(folder)
    for source in reversed(_sources(provenance)):  # the nearest source has the last word
        inherited |= inherited_fields(_object(source.get("card")))
    return Subject(folder, read_config(folder), summary, provenance, inherited)


def auto_class(config: dict[str, Any]) -> str:
    """The Auto class that loads the saved class.

    Example:
        >>> auto_class({"architectures": ["GatedQwenForCausalLM"]})
        'AutoModelForCausalLM'
    """
    import transformers

    named = config.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    for name, place in _object(config.get("auto_map")).items():
        if isinstance(place, str) and place.split(".")[-1] == architecture:
            return name
    name = f"AutoModelFor{architecture.partition('For')[2]}"
    return name if hasattr(transformers, name) else "AutoModel"


def gate_formula(gate: dict[str, Any]) -> str:
    """What a gate does, as one line of Markdown (paper, equations 5 to 8).

    Args:
        gate: the config's fields without their prefix `gate_`.

    Example:
        >>> gate_formula({**GATE_DEFAULTS, "positions": ["attn_output"], "granularity": "headwise"})[:25]
        "`Y' = Y * sigmoid(X W)`, "
    """
    activation = {"sigmoid": "sigmoid({})", "identity": "{}", "ns_sigmoid": "(0.5 + 0.5 sigmoid({}))"}
    scores = "b" if gate["input"] == "constant" else "X W" + (" + b" if gate["bias"] else "")
    if gate["head_shared"]:
        scores = f"mean over heads of ({scores})"
    value = activation.get(gate["activation"], gate["activation"] + "({})").format(scores)
    each = "one score for each head" if gate["granularity"] == "headwise" else "one score for each coordinate"
    sign = "*" if gate["operation"] == "multiply" else "+"
    channels = gate["input_channels"]
    meaning = f"X the {f'first {channels} channels of the ' if channels else ''}normalised hidden state"
    if gate["input"] == "constant":
        meaning = "b a learned parameter"
    return f"`Y' = Y {sign} {value}`, {each}; Y is what is gated, {meaning}."


def _sources(record: Any) -> list[dict[str, Any]]:
    """The source of a record, the source of that one, and so on."""
    sources = []
    while source := _object(_object(record).get("source")):
        sources.append(source)
        record = source.get("provenance")
    return sources


def _steps(record: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(record, dict):
        return
    yield from _steps(_object(record.get("source")).get("provenance"))
    later = record.get("steps")
    if "verb" in record and not (record["verb"] == "extend" and later):  # a list of changes alone has no first step
        yield {name: value for name, value in record.items() if name != "steps"}
    for step in later if isinstance(later, list) else ():
        yield from _steps(step)


def _bases(step: dict[str, Any]) -> list[Any]:
    """The RoPE base before and after a change of the context."""
    states = [_object(step.get(name)) for name in ("before", "after")]
    return [_object(state.get("rope_parameters")).get("rope_theta") for state in states]


def _object(value: Any) -> dict[str, Any]:
    """A JSON object, empty where there is none: the record is a file that anyone may have written."""
    return value if isinstance(value, dict) else {}
