"""The `--set FIELD=VALUE` option."""

import json
from typing import Any

import typer


def read_assignments(texts: list[str] | None) -> dict[str, Any]:
    """Reads FIELD=VALUE texts; a value is JSON, or else a plain string.

    Raises:
        typer.BadParameter: a text without a field or an equals sign.

    Example:
        >>> read_assignments(["num_hidden_layers=4", "gate_bias=True", "hidden_act=gelu"])
        {'num_hidden_layers': 4, 'gate_bias': True, 'hidden_act': 'gelu'}
    """
    return dict(_read(text) for text in texts or [])


def _read(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"--set {text}: write FIELD=VALUE, e.g. --set num_hidden_layers=4")
    value = {"True": "true", "False": "false", "None": "null"}.get(value, value)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
