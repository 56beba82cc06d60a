"""Changing the context of a model folder: a new folder that shares the weights, or config files replaced in place.

No weight changes, so none is read but the headers of safetensors files, which must be whole. In place every file is
replaced as a whole and config.json comes last: whenever it is interrupted, the folder holds the old config or the new
one, and the same command finishes the work.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import gated_qwen
from gated_qwen.configuration.context import change_context
from gated_qwen.configuration.frequencies import describe_context
from gated_qwen.configuration.rope_schema import read_length, read_rope
from gated_qwen.conversion.checkpoint import INDEX_NAME, CheckpointError, open_checkpoint, read_config
from gated_qwen.conversion.folder import atomic_folder, check_apart, check_target
from gated_qwen.conversion.replace import back_up, replace_file
from gated_qwen.conversion.writer import PROVENANCE_NAME

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Of subfolders: other formats' weights do not come along.
LEFT_OUT = ("__pycache__", ".*", *(f"*{suffix}" for suffix in WEIGHT_SUFFIXES))
# The families whose RoPE settings mean what is written here.
FAMILIES = (
    *("gated_qwen", "gated_qwen_moe", "llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"),
    *("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
)
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
_CHUNK = 16 * 2**20


@dataclass(frozen=True)
class Extension:
    """The folder written, its state before and after and its config, backups, weights shared or copied, warnings."""

    folder: Path
    before: dict[str, Any]
    after: dict[str, Any]
    config: dict[str, Any]
    backups: tuple[str, ...]
    linked: int
    copied: int
    warnings: tuple[str, ...]


def context_state(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """`describe_context` of a model folder, with the tokenizer's `model_max_length` (None where it has none).

    Raises:
        CheckpointError: no folder or no readable config.json.
        ValueError: RoPE settings that make no sense.

    Example:
        >>> state = context_state(llama_folder)
        >>> state["max_position_embeddings"], state["rope_theta"], state["model_max_length"]
        (512, 10000.0, None)
    """
    folder = Path(folder)
    tokenizer = _read_object(folder / TOKENIZER_CONFIG)
    config = read_config(folder)
    if config.get("model_type") not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise CheckpointError(
            f"{folder / 'config.json'}: model_type {config.get('model_type')!r} is not one of {known}"
        )
    return {**describe_context(config), "model_max_length": (tokenizer or {}).get("model_max_length")}


def extend(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    *,
    in_place: bool = False,
    overwrite: bool = False,
    start: Callable[[int], None] | None = None,
    progress: Callable[[int], None] | None = None,
    **changes: Any,
) -> Extension:
    """Changes RoPE base or scaling of a model folder, with lengths in config and tokenizer in step.

    Args:
        source: a model folder: ours, Llama, any Qwen; of another family when its RoPE settings are of a known type.
        target: the folder to write. Weight files are hard links to the source's where the file system allows it, and
            copies elsewhere; all other files are copied.
        in_place: change config.json, tokenizer_config.json and an existing provenance.json of `source` instead. The
            first two are kept as `NAME.bak`, or `NAME.bak1` and so on where that is taken.
        overwrite: replace a non-empty `target`.
        start: called once with the bytes to copy, when weights must be copied.
        progress: called with the bytes copied since the last call.
        changes: arguments of `gated_qwen.configuration.context.change_context`, e.g. `factor=4.0`.

    Returns:
        Extension: the states before and after.

    Raises:
        CheckpointError: `source` is missing, its config.json unreadable, a weights file cut short, or an index wrong.
        FileExistsError: `target` is not empty, and `overwrite` is off.
        ValueError: nonsense in `changes`, neither or both of `target` and `in_place`, target and source in each other.

    Example:
        >>> result = extend(llama_folder, tmp / "long", factor=4.0)
        >>> result.before["max_position_embeddings"], result.after["max_position_embeddings"]
        (512, 2048)
    """
    source = Path(source)
    if (target is None) == (not in_place):
        raise ValueError(f"{source}: name one place for the result, a folder to write or --in-place")
    before_config, before = read_config(source), context_state(source)
    if (source / INDEX_NAME).exists() or any(source.glob("*.safetensors")):
        open_checkpoint(source)  # a folder that no tool could load is not made into another one
    config = change_context(before_config, **changes)
    tokenizer, provenance = _read_object(source / TOKENIZER_CONFIG), _read_object(source / PROVENANCE_NAME)
    rescaled = read_rope(config)["rope_type"] != before["rope_type"]
    if tokenizer is not None and (rescaled or read_length(config) != before["max_position_embeddings"]):
        tokenizer = {**tokenizer, "model_max_length": read_length(config)}
    after = {**describe_context(config), "model_max_length": (tokenizer or {}).get("model_max_length")}
    files = {TOKENIZER_CONFIG: tokenizer} if tokenizer is not None else {}
    if provenance is not None or not in_place:
        files[PROVENANCE_NAME] = _with_step(provenance, source, changes, before, after)
    files["config.json"] = config  # last, since a folder with it counts as a model
    warnings = tuple(_warnings(source, before, after, changes))

    if target is None:
        backups = [back_up(source / name) for name in files if name != PROVENANCE_NAME]
        for name, content in files.items():
            replace_file(source / name, _json_bytes(content))
        return Extension(source, before, after, config, tuple(backups), 0, 0, warnings)

    target = Path(target)
    check_apart(target, source, mend="name another folder, or --in-place")
    check_target(target, overwrite=overwrite)
    with atomic_folder(target, overwrite=overwrite) as temporary:
        linked, copied = _share_files(source, temporary, set(files), start, progress)
        for name, content in files.items():
            (temporary / name).write_bytes(_json_bytes(content))
    return Extension(target, before, after, config, (), linked, copied, warnings)


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def _json_bytes(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _with_step(
    provenance: dict[str, Any] | None,
    source: Path,
    changes: dict[str, Any],
    before: dict[str, Any],
    after: dict[str, Any],
) -> dict[str, Any]:
    """The provenance record with this change appended to its list of steps."""
    record = provenance or {"format": 1, "verb": "extend", "source": {"name": source.resolve().name}}
    if not isinstance(record.get("steps", []), list):
        raise CheckpointError(
            f"{source / PROVENANCE_NAME}: steps is {record['steps']!r}; expected a list, or remove it"
        )
    names = ("rope_parameters", "max_position_embeddings")
    step = {
        "verb": "extend",
        "changes": {name: value for name, value in changes.items() if value is not None},
        "before": {name: before[name] for name in names},
        "after": {name: after[name] for name in names},
        "versions": {"gated-qwen": gated_qwen.__version__},
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    return {**record, "steps": [*record.get("steps", []), step]}


def _warnings(source: Path, before: dict[str, Any], after: dict[str, Any], changes: dict[str, Any]) -> Iterator[str]:
    if before["rope_theta"] != after["rope_theta"]:
        yield (
            f"the base went from {before['rope_theta']:g} to {after['rope_theta']:g}: a trained model must go on "
            "training at the new base before it is of use"
        )
    if changes.get("remove") and before["rope_type"] not in ("yarn", "dynamic"):
        yield f"the model may have been trained with {before['rope_type']} scaling: without it, it may be of no use"
    limit = (_read_object(source / GENERATION_CONFIG) or {}).get("max_length")
    if isinstance(limit, int) and 20 < limit < after["max_position_embeddings"]:  # 20 is the library's "not set"
        yield f"{GENERATION_CONFIG}: max_length {limit} still ends generation before the new length; change it there"


def _share_files(
    source: Path,
    folder: Path,
    rewritten: set[str],
    start: Callable[[int], None] | None,
    progress: Callable[[int], None] | None,
) -> tuple[int, int]:
    """Fills `folder` with the source's files but the rewritten ones; returns how many weight files are links, copies.

    Hidden files and backups stay behind.
    """
    weights, linked = [], 0
    for path in sorted(source.iterdir()):
        if path.name.startswith(".") or path.name in rewritten or _is_backup(path) or path.name == "__pycache__":
            continue
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns(*LEFT_OUT))
        elif path.suffix in WEIGHT_SUFFIXES:
            # A link into a download cache is copied: whoever wrote to the new file would change the cache.
            if not path.is_symlink() and _link(path, folder / path.name):
                linked += 1
            else:
                weights.append(path)
        else:
            shutil.copyfile(path, folder / path.name)
    if weights and start is not None:
        start(sum(path.stat().st_size for path in weights))
    for path in weights:
        with path.open("rb") as reader, (folder / path.name).open("wb") as writer:
            while chunk := reader.read(_CHUNK):
                writer.write(chunk)
                if progress is not None:
                    progress(len(chunk))
    return linked, len(weights)


def _link(path: Path, place: Path) -> bool:
    try:
        os.link(path, place)
    except OSError:  # another file system, one without links, or another owner's file
        return False
    return True


def _is_backup(path: Path) -> bool:
    return any(path.name.startswith(f"{name}.bak") for name in ("config.json", TOKENIZER_CONFIG))
