"""Reading a text that a measurement names."""

import hashlib
import os
from pathlib import Path


def read_text(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Returns the text of a UTF-8 file and the SHA-256 of its bytes.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not UTF-8.

    Example:
        >>> _ = (tmp / "text.txt").write_bytes(b"caf\\xe9")
        >>> read_text(tmp / "text.txt")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: ...text.txt: not UTF-8 text (byte 3)
    """
    content = Path(path).read_bytes()
    try:
        return content.decode(), hashlib.sha256(content).hexdigest()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.start})") from error
