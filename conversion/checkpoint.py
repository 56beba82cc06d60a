"""Reading a checkpoint folder lazily: its config and the place, dtype and shape of every tensor, no weights yet."""

import json
import math
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

INDEX_NAME = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

# What travels with the weights unchanged. The index and quantisation files belong to the old weights and do not.
SIDE_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
    "generation_config.json",
    "LICENSE*",
)

DTYPE_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "BOOL": 1}
FLOAT_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
WRITTEN_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # those that a person can ask for


class CheckpointError(ValueError):
    """A checkpoint that cannot be used as it is; the message names the file, the field or the tensor and the mend."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: its file, the place of its first byte, its dtype as safetensors writes it, its shape.

    It may be a region of a larger tensor in the file.
    """

    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """A folder in the Hugging Face format: `config` as it stands in config.json, and `tensors` by name."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def load(self, name: str) -> "torch.Tensor":
        """Reads one tensor from its file.

        Raises:
            CheckpointError: the file has changed or broken since it was opened, or the tensor holds no floats.
        """
        import torch

        info = self.tensors[name]
        if info.dtype not in FLOAT_DTYPES:
            raise CheckpointError(f"{info.file.name}: tensor {name} is {info.dtype}; dequantise the weights first")
        tensor = torch.empty(info.shape, dtype=getattr(torch, FLOAT_DTYPES[info.dtype]))
        content = tensor.reshape(-1).view(torch.uint8).numpy()
        try:
            with info.file.open("rb") as file:
                file.seek(info.offset)
                count = file.readinto(content.data)
        except OSError as error:
            raise CheckpointError(f"{info.file}: tensor {name} cannot be read ({error})") from error
        if count != content.nbytes:
            raise CheckpointError(f"{info.file}: tensor {name} cannot be read (the file ends before it)")
        return tensor

    def side_files(self) -> list[Path]:
        """Tokenizer files, chat template, generation config and licence, for copying."""
        return sorted({path for pattern in SIDE_FILES for path in self.folder.glob(pattern)})


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads config.json of a model folder.

    Raises:
        CheckpointError: no folder, no config.json, or one that is not a JSON object.
    """
    folder = Path(folder)
    if folder.is_file():
        raise CheckpointError(f"{folder}: is a file; name the model folder")
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    if not (folder / "config.json").exists() and (folder / "adapter_config.json").exists():
        raise CheckpointError(f"{folder}: an adapter and not a model; put it into its base with gated-qwen merge")
    return read_json(folder / "config.json", "a model folder needs it; is this the folder that holds the weights?")


def open_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint folder without reading weights; every file's header is checked.

    Args:
        folder: a folder with config.json and safetensors weights, one file or shards with an index.

    Raises:
        CheckpointError: naming the file or tensor, and the mend: a missing folder, config, index or shard; a truncated
            file; an index that names files outside the folder or disagrees with its shards; pickled weights.
    """
    folder = Path(folder)
    config = read_config(folder)
    index_path, single = folder / INDEX_NAME, folder / "model.safetensors"
    if index_path.exists() and single.exists():
        raise CheckpointError(f"{folder}: both model.safetensors and {INDEX_NAME} are there; remove the stale one")
    if index_path.exists():
        tensors = _read_indexed(folder, index_path)
    elif single.exists():
        tensors = _read_header(single)
    else:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(_no_weights(folder))
        if len(files) > 1:
            raise CheckpointError(f"{folder}: {len(files)} safetensors files and no {INDEX_NAME}; restore the index")
        tensors = _read_header(files[0])
    return Checkpoint(folder, config, tensors)


def read_json(path: Path, mend: str) -> dict[str, Any]:
    """Reads a JSON object from a file; `mend` says what to do when there is none.

    Raises:
        CheckpointError: no such file, or not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; {mend}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def _no_weights(folder: Path) -> str:
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder / pickles[0]}: pickled weights are not read, since loading a pickle runs code; convert it to "
            "safetensors on a machine that you can lose, e.g. with the Hub's convert space or torch.load("
            "weights_only=True) and safetensors.torch.save_file"
        )
    return f"{folder}: config.json without weights; expected model.safetensors or shards with {INDEX_NAME}"


def _read_indexed(folder: Path, index_path: Path) -> dict[str, TensorInfo]:
    weight_map = read_json(index_path, "restore it").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: field weight_map is missing or empty; restore the index")
    for name, file in weight_map.items():
        # A name with a separator could lead out of the folder.
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\:]+\.safetensors", file):
            raise CheckpointError(
                f"{index_path}: {name} lies in {file!r}, which is not a safetensors file of the folder"
            )
    tensors: dict[str, TensorInfo] = {}
    for file in sorted(set(weight_map.values())):
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder / file}: shard named by {INDEX_NAME} is missing; download it again")
        header = _read_header(folder / file)
        for name, info in header.items():
            if name in tensors:
                raise CheckpointError(f"{folder / file}: tensor {name} also lies in {tensors[name].file.name}")
            tensors[name] = info
    if wrong := sorted(
        name for name, file in weight_map.items() if name not in tensors or tensors[name].file.name != file
    ):
        raise CheckpointError(
            f"{index_path}: {wrong[0]} is not in {weight_map[wrong[0]]}; the index and the shards disagree"
        )
    if extra := sorted(set(tensors) - set(weight_map)):
        raise CheckpointError(f"{index_path}: {extra[0]} lies in {tensors[extra[0]].file.name} but not in the index")
    return tensors


def _read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file; the library checks that the file is as long as its header says."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):  # checks that header and file agree
            pass
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        return {
            name: TensorInfo(path, 8 + length + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"]))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: truncated or not a safetensors file ({error}); download it again") from error
