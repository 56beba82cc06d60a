"""Where the tests keep what they download, each thing in a folder that appears whole or not at all."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def offline() -> bool:
    """Whether the user said that nothing may be downloaded, and that what needs it may be skipped."""
    return os.environ.get("GATED_QWEN_OFFLINE") == "1"


def cache_folder(name: str) -> Path:
    """`$GATED_QWEN_CACHE/name`, below `~/.cache/gated-qwen` where the variable is not set."""
    root = os.environ.get("GATED_QWEN_CACHE") or Path("~", ".cache", "gated-qwen")
    return Path(root).expanduser().resolve() / name


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Returns `folder`, which `build` fills when it does not exist yet.

    `build` is given an empty folder beside it, which is renamed in one step once it returns: an interrupted or failed
    build leaves nothing under the final name, and of two runs at the same time the slower one keeps the other's.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as workspace:
        built = Path(workspace, "built")
        built.mkdir()
        build(built)
        try:
            built.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    return folder
