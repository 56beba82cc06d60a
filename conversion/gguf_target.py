"""The GGUF target as `convert` sees it: a file instead of a folder, checked before anything is written."""

from collections.abc import Callable
from pathlib import Path

from gated_qwen.conversion.sources import GatedCheckpoint
from gated_qwen.conversion.targets import Output

GGUF_DTYPES = ("f32", "f16", "bf16", "q8_0")


def plan_gguf(gated: GatedCheckpoint, target: Path, *, overwrite: bool) -> Output:
    """Refuses what llama.cpp cannot run, and a target that must not be written.

    Raises:
        ValueError: naming the field that GGUF cannot hold.
        FileExistsError: the file exists, and `overwrite` is off, or it is a folder.
    """
    from gated_qwen.conversion.gguf_layout import check_gguf

    check_gguf(gated.config)
    if target.is_dir():
        raise FileExistsError(f"{target} is a folder; name the GGUF file to write, e.g. {target / 'model.gguf'}")
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists; name another file, or pass --overwrite to replace it")
    return Output({}, list(gated.tensors.values()), ["GGUF of architecture qwen35, with an identity recurrent layer"])


def write_gguf_file(
    target: Path,
    gated: GatedCheckpoint,
    gguf_type: str,
    name: str,
    progress: Callable[[int], None] | None,
) -> None:
    """Writes the file beside its place and renames it."""
    from gated_qwen.conversion.gguf_writer import write_gguf

    tokenizers = [path.parent for path in gated.side_files if path.name == "tokenizer.json"]
    target.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(
        target,
        gated.config,
        gated.tensors,
        dtype=gguf_type,
        tokenizer_folder=tokenizers[0] if tokenizers else None,
        name=name,
        progress=progress,
    )
