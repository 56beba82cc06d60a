"""Whether a picture can be drawn; asked before the work whose result it shows."""

import os
from pathlib import Path

SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(file: str | os.PathLike[str]) -> None:
    """Refuses a picture that cannot be drawn, before any work is done.

    Raises:
        ValueError: the file's ending is not one of `SUFFIXES`, or matplotlib is missing.
        FileNotFoundError: its folder does not exist.
    """
    file = Path(file)
    if file.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{file}: the picture's ending must be one of {', '.join(SUFFIXES)}")
    if not file.absolute().parent.is_dir():
        raise FileNotFoundError(f"{file.parent}: no such folder for the picture")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(f"{file}: drawing needs matplotlib: pip install matplotlib") from None
