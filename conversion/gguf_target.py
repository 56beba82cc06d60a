"""The GGUF target as `convert` sees it: a file instead of a folder, checked before anything is written."""

from collections.abc import Callable
from pathlib import Path

from gated_qwen.conversion.gguf_layout import ARCHITECTURES, check_gguf, gguf_tensors
from gated_qwen.conversion.sources import GatedCheckpoint
from gated_qwen.conversion.targets import Output

GGUF_DTYPES = ("f32", "f16", "bf16", "q8_0")


def plan_gguf(gated: GatedCheckpoint, target: Path, *, overwrite: bool) -> Output:
    """Refuses what llama.cpp cannot run, and a target that must not be written.

    Raises:
        ValueError: naming the field that GGUF cannot hold, or what of the tokenizer.
        FileExistsError: the file exists, and `overwrite` is off, or it is a folder.
    """
    check_gguf(gated.config)
    if target.is_dir():
        raise FileExistsError(f"{target} is a folder; name the GGUF file to write, e.g. {target / 'model.gguf'}")
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists; name another file, or pass --overwrite to replace it")
    notes = [f"architecture {ARCHITECTURES[gated.config.model_type]}, with an identity recurrent layer"]
    folder = tokenizer_folder(gated)
    if folder is None:
        notes.append(
            "no tokenizer: llama.cpp's server does not run the file; it takes token ids through the library only"
        )
    else:
        from gated_qwen.conversion.gguf_tokenizer import tokenizer_keys

        tokenizer_keys(folder, gated.config)
    return Output({}, gguf_tensors(gated.config, gated.tensors), notes)


def tokenizer_folder(gated: GatedCheckpoint) -> Path | None:
    """The folder of the source's tokenizer files, if it has any."""
    folders = [path.parent for path in gated.side_files if path.name.startswith(("tokenizer", "vocab"))]
    return folders[0] if folders else None


def write_gguf_file(
    target: Path,
    gated: GatedCheckpoint,
    gguf_type: str,
    name: str,
    progress: Callable[[int], None] | None,
) -> None:
    """Writes the file beside its place and renames it."""
    from gated_qwen.conversion.gguf_writer import write_gguf

    folder = tokenizer_folder(gated)
    write_gguf(
        target, gated.config, gated.tensors, dtype=gguf_type, tokenizer_folder=folder, name=name, progress=progress
    )
