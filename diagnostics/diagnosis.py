"""The diagnosis of a model as JSON: its schema, and reading and writing it. Nothing here needs torch.

A file holds one diagnosis, or a list of them. What a reader relies on is checked when it is read: version, sections,
types, and that lists of heads, keys and bins have the lengths that they declare. Unknown fields are kept.
"""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gated_qwen.conversion.folder import atomic_file

SCHEMA = "gated-qwen/diagnosis"
SCHEMA_VERSION = 1
Diagnosis = dict[str, Any]

# The schema as data. A number is finite or null (nothing was measured, or it was not finite); a count is an integer.
NUMBER, COUNT, TEXT, FLAG = "a number or null", "an integer", "a text", "true or false"
KINDS = ("residual", "attention_output", "ffn_output")


def _optional(shape: Any) -> tuple[Any]:
    return (shape,)


_QUANTILES = {str: NUMBER}
_EXTREME = {"value": NUMBER, "sequence": COUNT, "position": COUNT, "token_id": _optional(COUNT), "channel": COUNT}
_BLOCK = {"index": COUNT, "max": NUMBER, "median": NUMBER, "ratio": NUMBER, "quantiles": _QUANTILES, "top": [_EXTREME]}
_MAXIMA = {"mean_of_layer_maxima": NUMBER, "max_over_layers": NUMBER, "max_index": _optional(COUNT)}
_SHARES = (
    "first_token_share",
    "first_token_share_skipped",
    "uniform",
    "uniform_skipped",
    "boost",
    "excess",
    "head_share",
)
_CLASS = {"mean": NUMBER, "quantiles": _QUANTILES, "tokens": COUNT}
SHAPE = {
    "model": {
        "name": TEXT,
        "model_type": TEXT,
        "layers": COUNT,
        "query_heads": COUNT,
        "key_value_heads": COUNT,
        "head_dim": COUNT,
        "hidden_size": COUNT,
        "parameters": COUNT,
        "dtype": TEXT,
        "attention": TEXT,
        "gate": _optional({}),
    },
    "input": {
        "text": TEXT,
        "sha256": TEXT,
        "tokens": COUNT,
        "sequences": COUNT,
        "length": COUNT,
        "chunk": _optional(COUNT),
        "first_token": TEXT,
        "offset": COUNT,
        "mask_policy": TEXT,
        "averaging": TEXT,
    },
    "settings": {},
    "versions": {str: TEXT},
    "measured": TEXT,
    "cost": {"seconds": NUMBER, "peak_bytes": _optional(COUNT)},
    "attention": {
        "queries": COUNT,
        "skip_queries": COUNT,
        "head_keys": COUNT,
        "keys": [COUNT],
        "mean": dict.fromkeys(_SHARES, NUMBER),
        "worst_layer": _optional({"layer": COUNT, "first_token_share": NUMBER}),
        "layers": [
            {
                "layer": COUNT,
                "query_heads": COUNT,
                "sliding_window": _optional(COUNT),
                **dict.fromkeys(_SHARES, NUMBER),
                "key_shares": [NUMBER],
                "heads": {"first_token_share": [NUMBER], "head_share": [NUMBER]},
                "by_query": {"edges": [COUNT], "queries": [COUNT], "first_token_share": [NUMBER], "uniform": [NUMBER]},
                "columns": _optional(
                    {
                        "queries_used": COUNT,
                        "exact": FLAG,
                        "threshold": NUMBER,
                        "top": [{"position": COUNT, "share": NUMBER}],
                        "sink_set": [{"position": COUNT, "share": NUMBER, "heads": COUNT}],
                    }
                ),
            }
        ],
    },
    "activations": {
        "tokens": COUNT,
        "summary": dict.fromkeys(KINDS, _MAXIMA),
        **{kind: [_BLOCK] for kind in KINDS},
    },
    "gates": _optional(
        {
            "tokens": COUNT,
            "thresholds": [NUMBER],
            "summary": {
                str: {"mean": NUMBER, "mean_of_layer_means": NUMBER, "dead_heads": COUNT, "always_open_heads": COUNT}
            },
            "layers": [
                {
                    "layer": COUNT,
                    "position": TEXT,
                    "granularity": TEXT,
                    "activation": TEXT,
                    "operation": TEXT,
                    "mean": NUMBER,
                    "std": NUMBER,
                    "min": NUMBER,
                    "max": NUMBER,
                    "quantiles": _QUANTILES,
                    "histogram": {"edges": [NUMBER], "counts": [COUNT]},
                    "by_class": {str: _CLASS},
                    "heads": _optional(
                        {
                            "mean": [NUMBER],
                            "min": [NUMBER],
                            "max": [NUMBER],
                            "dead": [COUNT],
                            "always_open": [COUNT],
                        }
                    ),
                    "sparsity": _optional(
                        {name: [NUMBER] for name in ("pre_gate", "mean_scaled", "gated", "norm_matched")}
                    ),
                    "written": _optional({"first_token_share": [NUMBER], "written_share": [NUMBER]}),
                }
            ],
        }
    ),
    "routers": _optional(
        {
            "tokens": COUNT,
            "summary": {
                "mean_entropy": NUMBER,
                "max_load": {"layer": COUNT, "value": NUMBER},
                "unused_experts": COUNT,
            },
            "layers": [
                {
                    "layer": COUNT,
                    "experts": COUNT,
                    "experts_per_token": NUMBER,
                    "load": [NUMBER],
                    "max_load": NUMBER,
                    "entropy": NUMBER,
                    "balance": NUMBER,
                }
            ],
        }
    ),
}


def read_diagnoses(path: str | os.PathLike[str]) -> list[Diagnosis]:
    """Reads a file that holds one diagnosis or a list of them.

    Raises:
        ValueError: not JSON, of another version, or a field is missing or of a wrong type; the message names the file
            and the field.
        OSError: the file cannot be read.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a diagnosis, since it is no JSON ({error})") from error
    found = content if isinstance(content, list) else [content]
    if not found:
        raise ValueError(f"{path}: the list of diagnoses is empty; write it with gated-qwen diagnose --out")
    for index, diagnosis in enumerate(found):
        check_diagnosis(diagnosis, f"{path}" if len(found) == 1 else f"{path}: number {index + 1}")
    return found


def write_diagnoses(path: str | os.PathLike[str], diagnoses: Sequence[Diagnosis]) -> None:
    """Writes one diagnosis, or a list of several, at once: an interruption leaves what was there.

    Example:
        >>> write_diagnoses(tmp / "empty.json", [{"schema": "example", "value": float("nan")}])
        >>> print((tmp / "empty.json").read_text())
        {
          "schema": "example",
          "value": null
        }
        <BLANKLINE>
    """
    content = finite(list(diagnoses) if len(diagnoses) != 1 else diagnoses[0])
    with atomic_file(Path(path)) as file:
        file.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def check_diagnosis(content: Any, where: str) -> None:
    """Refuses what is not a diagnosis of this version.

    Args:
        content: parsed JSON.
        where: the file's name for the message.

    Raises:
        ValueError: naming the first field that is missing or wrong.
    """
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f'{where}: not a diagnosis: its "schema" is not "{SCHEMA}"')
    if content.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"{where}: schema_version is {content.get('schema_version')!r}, and this release reads {SCHEMA_VERSION}; "
            "measure again, or use the release that wrote it"
        )
    _check(content, SHAPE, where)
    for number, layer in enumerate(content["attention"]["layers"]):
        place = f"{where}: attention.layers[{number}]"
        for name, shares in layer["heads"].items():
            if name != "key_shares":
                _check_length(shares, layer["query_heads"], f"{place}.heads.{name}")
        query_bins = len(layer["by_query"]["edges"]) - 1
        for name in ("queries", "first_token_share", "uniform"):
            _check_length(layer["by_query"][name], query_bins, f"{place}.by_query.{name}")
    for number, layer in enumerate((content["gates"] or {"layers": []})["layers"]):
        place = f"{where}: gates.layers[{number}]"
        _check_length(layer["histogram"]["counts"], len(layer["histogram"]["edges"]) - 1, f"{place}.histogram.counts")
        for name, values in (layer["sparsity"] or {}).items():
            _check_length(values, len(content["gates"]["thresholds"]), f"{place}.sparsity.{name}")


def finite(value: Any) -> Any:
    """A copy in which NaN and infinities, which JSON does not have, are None."""
    if isinstance(value, dict):
        return {name: finite(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check(value: Any, shape: Any, where: str) -> None:
    """Compares with a shape: a dict has at least these keys (`str`: any), a list one entry, a tuple is optional."""
    if isinstance(shape, tuple):
        if value is not None:
            _check(value, shape[0], where)
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise ValueError(f"{where} is {_shortened(value)}; a list is expected")
        for index, entry in enumerate(value):
            _check(entry, shape[0], f"{where}[{index}]")
    elif isinstance(shape, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{where} is {_shortened(value)}; an object is expected")
        joint = "." if ": " in where else ": "
        for name, inner in shape.items():
            if name is str:
                for key, entry in value.items():
                    _check(entry, inner, f"{where}{joint}{key}")
            elif name not in value:
                raise ValueError(f"{where}{joint}{name} is missing; measure again with gated-qwen diagnose")
            else:
                _check(value[name], inner, f"{where}{joint}{name}")
    elif not _is(value, shape):
        raise ValueError(f"{where} is {_shortened(value)}; {shape} is expected")


def _is(value: Any, kind: str) -> bool:
    if kind == TEXT:
        return isinstance(value, str)
    if kind == FLAG:
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    if kind == COUNT:
        return isinstance(value, int)
    return value is None or (isinstance(value, (int, float)) and math.isfinite(value))


def _check_length(values: Any, length: int, where: str) -> None:
    if isinstance(values, list) and len(values) != length:
        raise ValueError(f"{where} has {len(values)} entries; {length} are expected")


def _shortened(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
