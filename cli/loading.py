"""Loading a model to look into: folders that transformers can load, and those that it cannot, by way of a copy."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def loaded_model(
    path: str, *, dtype: str = "auto", device: str | None = None, trust_remote_code: bool = False
) -> Iterator[tuple[Any, Any]]:
    """Yields model and tokenizer of a folder, a GGUF file or a Hub repository id.

    A GGUF file, and a folder in the official release's layout, are converted into a temporary folder that goes when
    the block ends.

    Args:
        path, dtype, device, trust_remote_code: as `evaluation.loading.load_model`.

    Raises:
        ValueError: as `load_model`, or what is there cannot be converted.
    """
    from gated_qwen.evaluation.loading import load_model

    with _loadable(path) as folder:
        yield load_model(folder, dtype=dtype, device=device, trust_remote_code=trust_remote_code)


def display_name(path: str) -> str:
    """What results call the model: a folder's own name, or the repository id."""
    return Path(path).resolve().name if Path(path).exists() else path


@contextmanager
def _loadable(path: str) -> Iterator[str]:
    if not Path(path).exists():
        yield path  # a repository id, or what load_model refuses
        return
    from gated_qwen.conversion.checkpoint import read_config
    from gated_qwen.conversion.convert import convert
    from gated_qwen.conversion.families import official_gate_flags
    from gated_qwen.conversion.locate import resolve_source

    with resolve_source(path) as folder, tempfile.TemporaryDirectory(prefix="gated-qwen-") as temporary:
        if official_gate_flags(read_config(folder)):
            copy = Path(temporary, "model")
            convert(folder, copy)
            folder = copy
        yield str(folder)
