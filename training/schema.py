"""Reading a mapping into dataclasses: every field known, every value of its type, every error with its path."""

import dataclasses
import types
import typing
from difflib import get_close_matches
from typing import Any, TypeVar

Section = TypeVar("Section")


def read_section(section: type[Section], values: Any, path: str = "") -> Section:
    """Builds a dataclass from a mapping, and its dataclass fields from the mappings inside.

    A text that is a number is taken for one where a number is wanted, since YAML reads `1e-3` as text.

    Args:
        section: a dataclass whose fields are annotated with `str`, `int`, `float`, `bool`, `dict[str, Any]`, lists,
            `Literal`s, other dataclasses, or unions of these.
        values: the mapping.
        path: the field that holds it, for the errors.

    Raises:
        ValueError: an unknown or missing field, or a value of another type; it begins with the path of the field.

    Example:
        >>> @dataclasses.dataclass
        ... class Data:
        ...     length: int
        ...     share: float = 0.5
        >>> read_section(Data, {"length": 8, "share": "1e-2"}, "data")
        Data(length=8, share=0.01)
        >>> read_section(Data, {"lenght": 8}, "data")
        Traceback (most recent call last):
        ValueError: data.lenght: no such field; did you mean length?
    """
    if not isinstance(values, dict):
        raise ValueError(f"{path or 'the recipe'}: write fields and values, found {_shown(values)}")
    hints = typing.get_type_hints(section)
    fields = {field.name: field for field in dataclasses.fields(section)}  # type: ignore[arg-type]
    for name in values:
        check_name(name, fields, path)
    read = {name: read_value(hints[name], value, join(path, name)) for name, value in values.items()}
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in read:
            raise ValueError(f"{join(path, name)}: this field is required")
    try:
        return section(**read)
    except ValueError as error:  # a check of the dataclass itself, which names its field
        raise ValueError(join(path, str(error))) from None


def check_name(name: Any, known: typing.Iterable[str], path: str) -> None:
    """Refuses a field that does not exist, with the one that was meant.

    Raises:
        ValueError: `name` is not one of `known`.
    """
    known = list(known)
    if name not in known:
        near = get_close_matches(str(name), known, n=1)
        mend = f"did you mean {near[0]}?" if near else f"choose from {', '.join(sorted(known))}"
        raise ValueError(f"{join(path, str(name))}: no such field; {mend}")


def read_value(kind: Any, value: Any, path: str) -> Any:
    """Checks one value against its annotation, and converts numbers.

    Raises:
        ValueError: the value is not of the kind.
    """
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _read_union(typing.get_args(kind), value, path)
    if origin is typing.Literal:
        if value not in typing.get_args(kind):
            raise ValueError(
                f"{path}: choose from {', '.join(map(str, typing.get_args(kind)))}, found {_shown(value)}"
            )
        return value
    if origin is list:
        if not isinstance(value, list):
            raise ValueError(f"{path}: write a list, found {_shown(value)}")
        return [read_value(typing.get_args(kind)[0], entry, f"{path}[{i}]") for i, entry in enumerate(value)]
    if dataclasses.is_dataclass(kind):
        return read_section(kind, value, path)  # type: ignore[arg-type]
    if kind is Any:
        return value
    return _read_plain(origin or kind, value, path)


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _read_union(kinds: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    for kind in kinds[:-1]:
        structured = dataclasses.is_dataclass(kind) or typing.get_origin(kind) in (dict, list)
        if structured and not isinstance(value, (dict, list)):
            continue
        try:
            return read_value(kind, value, path)
        except ValueError:
            if structured and isinstance(value, (typing.get_origin(kind) or dict)):
                raise  # it was meant as this one: its own error says more
    return read_value(kinds[-1], value, path)


def _read_plain(kind: type, value: Any, path: str) -> Any:
    if kind in (int, float) and not isinstance(value, bool):
        try:
            number = float(value) if isinstance(value, (int, float, str)) else None
        except ValueError:
            number = None
        if number is not None and (kind is float or number == int(number)):
            return kind(number)
    elif isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool):
        return value
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false", dict: "fields and values"}
    raise ValueError(f"{path}: write {names.get(kind, kind.__name__)}, found {_shown(value)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
