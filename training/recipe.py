"""The recipe of a training run: one YAML file, read strictly.

    model: {preset: tiny-headwise}                 # or source: a folder or Hub id, to train on
    tokenizer: {train: {vocab_size: 8192}}         # or source: a folder or Hub id
    data:
      train: [{text: "corpus/*.txt"}]              # or parquet, json, hub
      length: 1024
    gate: {learning_rate: 1e-3}                    # the gates' own group
    loss: {chunk: 1024}
    trainer: {max_steps: 1000, learning_rate: 4e-3}

The last section holds fields of transformers' `TrainingArguments` by their own names, so whatever its documentation
says holds here.
"""

import dataclasses
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gated_qwen.training.schema import read_section

SHIPPED = Path(__file__).with_name("recipes")
# The run decides these itself.
_TAKEN = {
    "output_dir": "pass --out instead",
    "resume_from_checkpoint": "pass --resume instead",
    "remove_unused_columns": "the batches hold what the model takes",
    "prediction_loss_only": "the logits of an evaluation are never kept",
    "disable_tqdm": "the command has a bar of its own",
    # transformers shifts the labels of its own models only: with ours every token would be its own target.
    "label_smoothing_factor": "transformers does not smooth the loss of a model that is not its own",
    "use_liger_kernel": "its kernels do not know gated models; loss.chunk saves the memory of the logits",
    "parallelism_config": "a recipe trains data parallel, or sharded by the launcher's config",
    "hub_token": "a recipe is published with its model; log in with `hf auth login` instead",
    "push_to_hub": "push the finished folder with `gated-qwen push`, which checks it first",
}


@dataclass
class ModelSection:
    """What is trained: a fresh model of a `preset`, or the model in `source`, a folder or Hub id.

    Attributes:
        preset: a name of `gated-qwen new list`.
        source: a model to continue with; an ungated one is trained as it is (`gated-qwen convert` gives it gates).
        revision: of a Hub id.
        set: config fields to change; for a `source` only those that leave the weights' shapes as they are.
        match_parameters: shrink the FFN of a preset to the ungated baseline's total.
        attention: the attention implementation, as transformers names it.
        dtype: of the parameters; `trainer.bf16` computes in bf16 beside parameters in fp32.
    """

    preset: str | None = None
    source: str | None = None
    revision: str | None = None
    set: dict[str, Any] = field(default_factory=dict)
    match_parameters: bool = False
    attention: str = "sdpa"
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if (self.preset is None) == (self.source is None):
            raise ValueError("preset: name a preset or a source, one of the two")
        if self.source is not None and self.match_parameters:
            raise ValueError("match_parameters: only a preset can be shrunk; a source has its weights")


@dataclass
class TokenizerTraining:
    """A byte-level BPE learned from the training text.

    Attributes:
        vocab_size: tokens, the special ones included.
        characters: how much of the text is read for it.
    """

    vocab_size: int
    characters: int = 50_000_000

    def __post_init__(self) -> None:
        if self.vocab_size < 260:
            raise ValueError("vocab_size: at least 260: 256 bytes and four special tokens")


@dataclass
class TokenizerSection:
    """A tokenizer from `source`, a folder or Hub id, or one that is trained. Neither: that of the model's source."""

    source: str | None = None
    revision: str | None = None
    train: TokenizerTraining | None = None

    def __post_init__(self) -> None:
        if self.source is not None and self.train is not None:
            raise ValueError("train: name a source or train one, one of the two")


@dataclass
class TextSource:
    """Documents from text, parquet or json files (paths or patterns), or from a dataset on the Hub.

    Attributes:
        text, parquet, json: files; text documents are whole files, `paragraph`s or `line`s, as `sample_by` says.
        hub: a dataset's id, with its `config`, `split` and `revision`.
        column: where the text is.
        streaming: read while training, without a copy on disk.
        limit: take only the first documents.
    """

    text: str | None = None
    parquet: str | None = None
    json: str | None = None
    hub: str | None = None
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    column: str = "text"
    sample_by: Literal["document", "paragraph", "line"] = "document"
    streaming: bool = False
    limit: int | None = None

    def __post_init__(self) -> None:
        if sum(value is not None for value in (self.text, self.parquet, self.json, self.hub)) != 1:
            raise ValueError("text: name one of text, parquet, json and hub")
        if self.hub is None:
            for name in ("config", "revision"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}: only a dataset on the Hub (hub) has one")
        if self.text is None and self.sample_by != "document":
            raise ValueError("sample_by: only text files are cut into documents; the others have a document a row")
        if self.limit is not None and self.limit < 1:
            raise ValueError("limit: at least 1 document")


@dataclass
class DataSection:
    """Where the text comes from and how it becomes rows.

    Attributes:
        train, evaluation: sources, one after the other.
        length: tokens in a row.
        packing: `documents` fills rows and keeps documents apart by `position_ids`; `concatenated` fills rows and lets
            them see each other; `none` gives each document rows of its own, padded.
        bos: put the tokenizer's BOS before every piece of a document (`piece`), before every document
            (`document`) or nowhere (`none`).
        eos: put EOS after every document.
    """

    train: list[TextSource]
    length: int
    evaluation: list[TextSource] = field(default_factory=list)
    packing: Literal["documents", "concatenated", "none"] = "documents"
    bos: Literal["piece", "document", "none"] = "piece"
    eos: bool = True

    def __post_init__(self) -> None:
        if not self.train:
            raise ValueError("train: name at least one source")
        if self.length < 2:
            raise ValueError("length: at least 2 tokens, since the first one is not predicted")
        if len({source.streaming for source in self.train}) > 1:
            raise ValueError("train: stream all sources or none")
        if any(source.streaming for source in self.evaluation):
            raise ValueError("evaluation: it is read anew every time and cannot be streamed; set limit instead")


@dataclass
class GateSection:
    """The gates' own parameter group; None: as all others.

    Attributes:
        learning_rate: peak learning rate of the gates.
        weight_decay: of the gates.
        train_only: freeze everything else.
    """

    learning_rate: float | None = None
    weight_decay: float | None = None
    train_only: bool = False


@dataclass
class LossSection:
    """How the loss is computed.

    Attributes:
        chunk: tokens whose logits exist at one time; None: the model's own loss, on all logits at once.
    """

    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise ValueError("chunk: at least 1 token")


@dataclass
class DiagnosticsSection:
    """Probes on a fixed batch during training.

    Attributes:
        every: steps between two measurements.
        sequences: rows of the evaluation data (the training data without one) that make the batch.
    """

    every: int
    sequences: int = 4

    def __post_init__(self) -> None:
        if self.every < 1 or self.sequences < 1:
            raise ValueError("every: at least 1 step and 1 sequence")


@dataclass
class Recipe:
    """A whole run; the sections say more."""

    model: ModelSection
    data: DataSection
    tokenizer: TokenizerSection = field(default_factory=TokenizerSection)
    gate: GateSection = field(default_factory=GateSection)
    loss: LossSection = field(default_factory=LossSection)
    diagnostics: DiagnosticsSection | None = None
    trainer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, mend in _TAKEN.items():
            if name in self.trainer:
                raise ValueError(f"trainer.{name}: {mend}")
        if self.model.preset is not None and self.tokenizer.source is None and self.tokenizer.train is None:
            raise ValueError("tokenizer: a fresh model needs a tokenizer: name its source, or train one")
        if self.trainer.get("metric_for_best_model") not in (None, "loss", "eval_loss"):
            raise ValueError("trainer.metric_for_best_model: an evaluation measures the loss only; write loss")
        if not self.data.evaluation:
            for name in ("eval_strategy", "eval_on_start", "load_best_model_at_end"):
                if self.trainer.get(name) not in (None, False, "no"):
                    raise ValueError(f"trainer.{name}: there is nothing to evaluate on; name data.evaluation")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def shipped_recipes() -> list[str]:
    """The names of the recipes that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load_recipe(path: str | os.PathLike[str], changes: dict[str, Any] | None = None) -> Recipe:
    """Reads and checks a recipe.

    Args:
        path: a YAML file, or the name of a shipped recipe.
        changes: values for single fields by their path, such as `{"trainer.max_steps": 10}`.

    Raises:
        FileNotFoundError: no such file or name.
        ValueError: not YAML, an unknown field, or a value that it cannot have; the error names file and field.

    Example:
        >>> file = tmp / "recipe.yaml"
        >>> _ = file.write_text('''
        ... model: {preset: tiny-headwise}
        ... tokenizer: {train: {vocab_size: 400}}
        ... data: {train: [{text: corpus.txt}], length: 64}
        ... trainer: {learning_rate: 1e-3}
        ... ''')
        >>> load_recipe(file, {"data.length": 32}).data.length
        32
    """
    import yaml

    file = Path(path)
    if not file.is_file() and (SHIPPED / f"{path}.yaml").is_file():
        file = SHIPPED / f"{path}.yaml"
    if not file.is_file():
        raise FileNotFoundError(f"{path}: no such recipe; the shipped ones are {', '.join(shipped_recipes())}")

    class Loader(yaml.SafeLoader):
        """Takes `1e-3` for a number, as YAML 1.2 and every reader do, wherever it stands; YAML 1.1 wants `1.0e-3`."""

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )
    try:
        values = yaml.load(file.read_text(encoding="utf-8"), Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not a YAML file ({' '.join(str(error).split())})") from error
    try:
        for name, value in (changes or {}).items():
            _change(values, name, value)
        return read_section(Recipe, values)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _change(values: Any, name: str, value: Any) -> None:
    """Sets the field at a path such as `data.train.0.text`."""
    *sections, last = name.split(".")
    for section in sections:
        if isinstance(values, list) and section.isdigit() and int(section) < len(values):
            values = values[int(section)]
        elif isinstance(values, dict):
            values = values.setdefault(section, {})
        else:
            raise ValueError(f"{name}: there is no field {section} to set it in")
    if isinstance(values, list) and last.isdigit() and int(last) < len(values):
        values[int(last)] = value
    elif isinstance(values, dict):
        values[last] = value
    else:
        raise ValueError(f"{name}: there is no such field to set")
