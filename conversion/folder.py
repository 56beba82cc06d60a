"""Writing a model folder, or file, once and whole: built beside its place, synced to disk, then renamed."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_folder(target: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Yields a temporary folder beside `target` that becomes `target` when the block ends without an exception.

    An exception, or a kill, leaves `target` as it was. With `overwrite` the old folder is replaced as a whole, so
    nothing stale stays in it.

    Args:
        target: where the folder shall lie; its parent is created when missing.
        overwrite: allow a `target` that exists and is not empty.

    Raises:
        FileExistsError: `target` is a file, or a non-empty folder without `overwrite`.

    Example:
        >>> with atomic_folder(tmp / "model") as folder:
        ...     _ = (folder / "config.json").write_text("{}")
        >>> sorted(p.name for p in (tmp / "model").iterdir())
        ['config.json']
    """
    target = Path(target).absolute()
    check_target(target, overwrite=overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        yield temporary
        umask = _umask()
        temporary.chmod(0o777 & ~umask)  # mkdtemp makes the folder private, and safetensors its files
        for path in temporary.rglob("*"):
            if path.is_file() and path.stat().st_nlink > 1:
                continue  # a hard link shares its mode, and its place on disk, with a file that is not ours to change
            path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
            _sync(path)
        _sync(temporary)
        check_target(target, overwrite=overwrite)
        if target.exists():
            old = temporary.with_name(f"{temporary.name}.old")
            target.rename(old)
            temporary.rename(target)
            shutil.rmtree(old)
        else:
            temporary.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """Yields a name beside `target`; what lies there when the block ends without an exception becomes `target`.

    An exception, or a kill, leaves `target` as it was. The parent folder is created when missing.

    Example:
        >>> with atomic_file(tmp / "model.gguf") as file:
        ...     _ = file.write_bytes(b"GGUF")
        >>> [path.name for path in tmp.glob("*model.gguf*")]
        ['model.gguf']
    """
    target = Path(target).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, target)
        _sync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def check_target(target: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Refuses a target that must not be written, before any work is done.

    Raises:
        FileExistsError: `target` is a file, or a non-empty folder without `overwrite`.
    """
    target = Path(target)
    if target.is_symlink():
        raise FileExistsError(f"{target} is a link; name the folder that it leads to")
    if target.is_file():
        raise FileExistsError(f"{target} is a file; name a folder to write to")
    if existing := next((parent for parent in target.absolute().parents if parent.exists()), None):
        if not existing.is_dir():
            raise FileExistsError(f"{existing} is a file, so nothing can be written below it")
    if target.is_dir() and any(target.iterdir()):
        if not overwrite:
            raise FileExistsError(f"{target} is not empty; name another folder, or pass --overwrite to replace it")
        if not any((target / name).exists() for name in ("config.json", "model.safetensors", "provenance.json")):
            raise FileExistsError(f"{target} holds no model, and --overwrite would delete what it holds; name another")


def check_apart(target: Path, *sources: Path, mend: str = "name another folder") -> None:
    """Refuses a target that lies in one of its sources, or holds one of them; a source that is no path is passed over.

    Raises:
        ValueError: so it is; the error ends with `mend`.
    """
    there = target.resolve()
    for source in sources:
        here = source.resolve()
        if source.exists() and (here.is_relative_to(there) or there.is_relative_to(here)):
            raise ValueError(f"{target}: the target and {source} lie in each other; {mend}")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
