"""Paths of the machine where a model was made, which a card must not tell."""

import re
from typing import Any

# What may be shortened without harm: an absolute path of two parts or more, or one that begins with a drive or share.
_PART = r"[^\s/\"'`<>|,;:]+"
_ABSOLUTE = re.compile(
    rf"(?<![\w.:/~\\-])(?:file:///?(?:{_PART}/?)+|~(?:/{_PART})+/?|(?:/{_PART}){{2,}}/?)"
    r"|(?:\b[A-Za-z]:|\\)\\[^\s\"'`<>|,;]+"
)
# What must not be published: places where people keep their files.
LOCAL_PATH = re.compile(
    r"file://|(?<![\w./:-])(~/|/(home|Users|root|tmp|mnt|private|var)/|[A-Za-z]:\\)|\\\\[\w.-]+\\\w"
)


def mask_paths(value: Any) -> Any:
    """The same JSON value with every absolute path cut to its last part.

    Example:
        >>> mask_paths({"data": "/home/me/prose.txt", "url": "https://a.b/c/d", "model": "owner/name"})
        {'data': '.../prose.txt', 'url': 'https://a.b/c/d', 'model': 'owner/name'}
    """
    if isinstance(value, dict):
        return {mask_paths(name): mask_paths(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [mask_paths(entry) for entry in value]
    if isinstance(value, str):
        return _ABSOLUTE.sub(_last_part, value)
    return value


def _last_part(path: re.Match[str]) -> str:
    return ".../" + re.split(r"[/\\]", path[0].rstrip("/\\"))[-1]
