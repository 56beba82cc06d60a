"""The results page: its tables and pictures are drawn from the JSON, its words are written by hand."""

import re
from pathlib import Path
from typing import Any

from plots import draw
from tables import tables

PLACE = re.compile(r"(?P<begin><!-- table: (?P<name>[\w-]+) -->\n).*?(?P<end><!-- end of table -->)", re.DOTALL)


def write_report(results: dict[str, Any], page: Path, images: Path) -> None:
    """Puts the tables into their places on the page, and draws the pictures.

    Args:
        results: the content of the JSON file.
        page: Markdown with `<!-- table: NAME -->` and `<!-- end of table -->` around each table.
        images: the folder of the pictures.

    Raises:
        ValueError: the page has a place for a table that there is not.
    """
    page.write_text(with_tables(page.read_text(encoding="utf-8"), tables(results), str(page)), encoding="utf-8")
    draw(results, images)


def with_tables(text: str, found: dict[str, str], name: str = "the page") -> str:
    """The text with each table in its place.

    Example:
        >>> with_tables("<!-- table: a -->\\nold\\n<!-- end of table -->", {"a": "new"})
        '<!-- table: a -->\\nnew\\n<!-- end of table -->'
    """

    def filled(place: re.Match[str]) -> str:
        if place["name"] not in found:
            raise ValueError(f"{name}: there is no table {place['name']}; there are {', '.join(found)}")
        return f"{place['begin']}{found[place['name']]}\n{place['end']}"

    return PLACE.sub(filled, text)
