"""Replacing single files as a whole: whoever reads one, or cuts the power, finds the old content or the new."""

import os
import shutil
import tempfile
from pathlib import Path


def back_up(path: Path) -> str:
    """Keeps a copy of a file under the first free name `NAME.bak`, `NAME.bak1`, ...; an earlier backup stays.

    Returns:
        The backup's name.

    Raises:
        OSError: the file cannot be read, or its folder not be written.

    Example:
        >>> file = tmp / "config.json"
        >>> _ = file.write_text("{}")
        >>> back_up(file), back_up(file)
        ('config.json.bak', 'config.json.bak1')
    """
    temporary = _write_beside(path, path.read_bytes())
    try:
        number = 0
        while True:
            backup = path.with_name(f"{path.name}.bak{number or ''}")
            try:
                os.link(temporary, backup)  # fails where the name is taken, and appears whole
                return backup.name
            except FileExistsError:
                number += 1
            except OSError:  # a file system without links
                if not backup.exists():
                    shutil.copyfile(temporary, backup)
                    return backup.name
                number += 1
    finally:
        temporary.unlink()


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file's content in one step, synced to disk; its mode stays.

    Raises:
        OSError: the file does not exist, or its folder cannot be written; the old content is still there.

    Example:
        >>> file = tmp / "config.json"
        >>> _ = file.write_text("old")
        >>> replace_file(file, b"new")
        >>> file.read_text()
        'new'
    """
    temporary = _write_beside(path, content)
    try:
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_beside(path: Path, content: bytes) -> Path:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.partial-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, path.stat().st_mode & 0o777)
    except BaseException:
        os.unlink(name)
        raise
    return Path(name)
