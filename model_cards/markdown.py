"""Markdown made of values that come from files: everything is escaped unless a filter says what it is.

Paths of this machine are cut to their last part wherever a value stands.
"""

import json
import re
from pathlib import Path
from typing import Any

import jinja2

from gated_qwen.model_cards.local_paths import mask_paths

TEMPLATES = Path(__file__).parent
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~$])")


class Markdown(str):
    """Text that is Markdown already and is not escaped again."""


def escape(value: object) -> Markdown:
    """Escapes a value so that Markdown and HTML show it as it is, on one line.

    Example:
        >>> print(escape("<b> | [a](b)"))
        &lt;b&gt; \\| \\[a\\]\\(b\\)
    """
    if isinstance(value, Markdown):
        return value
    text = mask_paths(" ".join(str(value).split()))
    text = _SPECIAL.sub(r"\\\1", text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return Markdown(text.replace("://", "&#58;//").replace("@", "&#64;"))  # no link that nobody wrote


def code(value: object) -> Markdown:
    """A code span; a value that cannot stand in one is escaped instead.

    Example:
        >>> print(code("gated_qwen"))
        `gated_qwen`
    """
    text = mask_paths(" ".join(str(value).split()))
    if not text or "`" in text or "|" in text or "<!--" in text:
        return escape(value)
    return Markdown(f"`{text}`")


def json_block(value: object) -> Markdown:
    """A fenced block of JSON, word for word; comment marks are written as JSON escapes, which read back the same.

    Example:
        >>> print(json_block({"verb": "new"}))
        ```json
        {
          "verb": "new"
        }
        ```
    """
    text = (
        json.dumps(mask_paths(value), indent=2, ensure_ascii=False)
        .replace("<!--", "\\u003c!--")
        .replace("-->", "--\\u003e")
    )
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return Markdown(f"{fence}json\n{text}\n{fence}")


def number(value: float | None, digits: int = 4) -> Markdown:
    """A number with so many significant digits and commas; a dash for what was not measured.

    Example:
        >>> print(number(134670528), number(0.0478), number(None))
        134,670,528 0.0478 -
    """
    if value is None:
        return Markdown("-")
    if isinstance(value, int):
        return Markdown(f"{value:,}")
    if value and not 1e-4 <= abs(value) < 1e9:
        return Markdown(f"{value:.{digits}g}")
    text = f"{value:.{digits}g}" if abs(value) < 10 ** (digits - 1) else f"{value:,.0f}"
    return Markdown(text)


def percent(value: float | None) -> Markdown:
    """A share of 0 to 1 as a percentage.

    Example:
        >>> print(percent(0.31042), percent(0.00115), percent(None))
        31 % 0.115 % -
    """
    return Markdown("-" if value is None else f"{100 * value:.3g} %")


def render(template: str, values: dict[str, Any]) -> str:
    """Fills in a template of this folder; a value that the template names and `values` lacks is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        finalize=escape,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # that is for HTML; `finalize` escapes for Markdown
    )
    environment.filters |= {
        "plain": Markdown,
        "code": code,
        "json_block": json_block,
        "number": number,
        "percent": percent,
    }
    text = environment.get_template(template).render(values)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
