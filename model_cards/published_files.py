"""Which files of a folder are published: what goes, what stays here, and what must not be there at all."""

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from gated_qwen.model_cards.unsafe_content import find_secret, holds_pickle, is_secret_name, secret_in

# Of this machine alone; .gitattributes is the Hub's own file, which says what it keeps as large files.
OF_THIS_MACHINE = (
    ".git",
    ".gitattributes",
    ".cache",
    ".huggingface",
    "__pycache__",
    "*.pyc",
    ".ipynb_checkpoints",
    ".DS_Store",
    "Thumbs.db",
    ".venv",
    "*.swp",
    "*~",
    ".*.partial-*",  # of a command of ours that was killed
)
# What trainers leave behind to be able to go on: of no use to who loads the model, and most of it pickled.
TRAINING_STATE = (
    "checkpoint-*",
    "global_step*",
    "optimizer*",
    "scheduler.*",
    "scaler.pt",
    "rng_state*",
    "random_states_*",
    "training_args.bin",
    "trainer_state.json",
    "pytorch_model_fsdp*",
    "events.out.tfevents*",
    "runs",
    "wandb",
)
LARGE_LEFTOVER = 200 * 10**6


@dataclass(frozen=True)
class PublishedFile:
    """One file to send: where it lies here, its path in the repository, its size in bytes."""

    source: Path
    path: str
    size: int


@dataclass(frozen=True)
class LeftOut:
    """A file or a folder that is not sent, and why."""

    path: str
    reason: str


def list_files(
    folder: Path, weights: Iterable[Path], *, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> tuple[list[PublishedFile], list[LeftOut]]:
    """Goes through a model folder and decides on every file.

    Args:
        folder: the model folder.
        weights: the files that the model's tensors lie in, which may be of any size.
        include: patterns such as `"trainer_state.json"` or `"logs/*"`: send what would be left out or refused as a
            leftover. Pickles, secrets and links are never sent.
        exclude: patterns of what is not sent.

    Returns:
        The files to send, by their path, and what stays here.

    Raises:
        ValueError: a link, a pickle, a secret or a leftover that nobody decided on; the message names the file.

    Example:
        >>> (tmp / "model").mkdir()
        >>> _ = (tmp / "model" / "config.json").write_text("{}")
        >>> _ = (tmp / "model" / "optimizer.pt").write_text("")
        >>> sent, left_out = list_files(tmp / "model", [])
        >>> [file.path for file in sent], [file.path for file in left_out]
        (['config.json'], ['optimizer.pt'])
    """
    sent: list[PublishedFile] = []
    left_out: list[LeftOut] = []
    known = {path.relative_to(folder).as_posix() for path in weights}
    for path, inside in _walk(folder):
        if _matches(path, exclude):
            left_out.append(LeftOut(path, "excluded"))
        elif _matches(path, OF_THIS_MACHINE):
            left_out.append(LeftOut(path, "belongs to this machine"))
        elif _matches(path, TRAINING_STATE) and not _matches(path, include):
            left_out.append(LeftOut(path, "state of a training run"))
        else:
            file = folder / path
            _check_name(file, path)
            _check_kind(file, folder)
            if file.is_dir():
                inside.append(path)
                continue
            _check_leftover(file, path, known, _matches(path, include))
            _check_content(file)
            sent.append(PublishedFile(file, path, file.stat().st_size))
    return sorted(sent, key=lambda file: file.path), sorted(left_out, key=lambda entry: entry.path)


def _walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Every entry with its path, and a list: a folder that is put into it is gone through as well."""
    inside = [""]
    while inside:
        for entry in sorted(os.listdir(folder / (parent := inside.pop()))):
            yield (f"{parent}/{entry}" if parent else entry), inside


def _matches(path: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern fits the path, its last part, or a folder that it lies in; a name as it stands fits too."""
    places = [path, *(str(place) for place in PurePosixPath(path).parents if place.name)]
    names = {name for place in places for name in (place, place.split("/")[-1])}
    return any(
        name == wanted or fnmatch(name, wanted)
        for wanted in (pattern.rstrip("/") for pattern in patterns)
        for name in names
    )


def _check_name(file: Path, path: str) -> None:
    """A name that the Hub or another system cannot hold, or that tells a secret itself."""
    if not path.isprintable() or "\\" in path:  # bytes that are no UTF-8 are not printable either
        raise ValueError(f"{file.parent / ascii(file.name)}: a name with signs that are not portable; rename the file")
    if kind := secret_in(path):
        raise ValueError(f"{file.parent}: the name of a file in it holds {kind}; rename the file")


def _check_kind(file: Path, folder: Path) -> None:
    if file.is_symlink():
        if not file.exists():
            raise ValueError(f"{file}: a link that leads nowhere; remove it")
        if not file.resolve().is_relative_to(folder.resolve()) or file.is_dir():
            raise ValueError(f"{file}: a link to {os.readlink(file)}; put what shall be sent in its place (cp -rL)")
    elif not (stat.S_ISREG(mode := file.lstat().st_mode) or stat.S_ISDIR(mode)):
        raise ValueError(f"{file}: neither a file nor a folder; remove it")


def _check_leftover(file: Path, path: str, weights: set[str], wanted: bool) -> None:
    if wanted or path in weights:
        return
    if "/" not in path and path.endswith(".safetensors"):
        raise ValueError(
            f"{file}: holds no tensor of the model (it is not in the index); remove it, or pass --exclude {path} or "
            f"--include {path}"
        )
    if file.stat().st_size > LARGE_LEFTOVER and file.suffix != ".gguf":
        raise ValueError(
            f"{file}: {file.stat().st_size / 1e6:,.0f} MB and not part of the model; pass --exclude {path} or "
            f"--include {path}"
        )


def _check_content(file: Path) -> None:
    if holds_pickle(file):
        raise ValueError(
            f"{file}: pickled, which runs code when it is loaded; keep it as safetensors, or pass --exclude "
            f"{file.name}"
        )
    if is_secret_name(file.name):
        raise ValueError(f"{file}: a file of this name holds secrets; remove it, or pass --exclude {file.name}")
    if (found := find_secret(file)) is not None:
        line, kind = found
        raise ValueError(f"{file}: line {line} holds {kind}; take it out, and revoke it if others have seen it")
