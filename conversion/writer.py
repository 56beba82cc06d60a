"""Writing a model folder: weights in shards, then side files, code, provenance and, last, config.json."""

import inspect
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gated_qwen.conversion.checkpoint import DTYPE_BYTES, INDEX_NAME, CheckpointError
from gated_qwen.conversion.families import causal_lm_class
from gated_qwen.conversion.plan import PlannedTensor, torch_dtype

if TYPE_CHECKING:
    import torch

    from gated_qwen.conversion.families import GatedConfig

PROVENANCE_NAME = "provenance.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
COPY_CHUNK = 2**20
WRITE_CHUNK = 2**30  # a single write takes less than 2 GiB


def parse_size(size: str | int) -> int:
    """Bytes of a size such as `"5GB"` (decimal) or `"512MiB"` (binary).

    Raises:
        ValueError: not a size.

    Example:
        >>> parse_size("5GB"), parse_size("1MiB")
        (5000000000, 1048576)
    """
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    text = str(size).strip().upper()
    for unit, factor in units.items():
        if text.endswith(unit) and text[: -len(unit)].strip().isdigit():
            return _positive(int(text[: -len(unit)]) * factor, size)
    if text.isdigit():
        return _positive(int(text), size)
    raise ValueError(f"shard size {size!r} is not understood; write for example 5GB or 512MiB")


def _positive(value: int, size: str | int) -> int:
    if value < 1:
        raise ValueError(f"shard size {size!r} must be above zero; write for example 5GB")
    return value


def plan_shards(tensors: Iterable[PlannedTensor], max_shard_size: int) -> list[list[PlannedTensor]]:
    """Splits tensors, in order, into shards of at most `max_shard_size` bytes (one tensor may exceed it alone)."""
    shards: list[list[PlannedTensor]] = [[]]
    room = max_shard_size
    for tensor in tensors:
        if shards[-1] and tensor.nbytes > room:
            shards.append([])
            room = max_shard_size
        shards[-1].append(tensor)
        room -= tensor.nbytes
    return shards


def write_weights(
    folder: Path, tensors: list[PlannedTensor], max_shard_size: int, progress: Callable[[int], None] | None = None
) -> list[str]:
    """Writes safetensors shards, and the index when there are several.

    The library's writer wants a whole shard in memory. Here every tensor has its place from the start, and two threads
    fill the places: what is copied unchanged goes over in chunks, and a tensor of parts is written part by part, so at
    most two computed tensors or parts are in memory.

    Args:
        folder: an existing folder.
        tensors: what to write.
        max_shard_size: bytes; a larger tensor gets a shard of its own.
        progress: called with the bytes of each tensor when it is written.

    Returns:
        list[str]: names of tensors that hold NaN.
    """
    shards = plan_shards(tensors, max_shard_size)
    weight_map: dict[str, str] = {}
    with_nan: list[str] = []
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with_nan += _write_shard(folder / file, shard, progress)
        weight_map |= {tensor.name: file for tensor in shard}
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(t.nbytes for t in tensors)},
            "weight_map": dict(sorted(weight_map.items())),
        }
        write_json(folder / INDEX_NAME, index)
    return with_nan


def _write_shard(path: Path, shard: list[PlannedTensor], progress: Callable[[int], None] | None) -> list[str]:
    """One safetensors file: eight bytes of header length, the header as JSON, then the tensors without gaps."""
    # Widest dtypes first, as the library does, so that every tensor is aligned.
    shard = sorted(shard, key=lambda tensor: (-DTYPE_BYTES[tensor.dtype], tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places: list[int] = []
    end = 0
    for tensor in shard:
        places.append(end)
        end += tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [places[-1], end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.flush()
        base = file.tell()
        file.truncate(base + end)
        with_nan: set[str] = set()

        def write(name: str, part: PlannedTensor, place: int) -> None:
            put = _copy_region if part.copy_of is not None else _write_tensor
            if put(part, file.fileno(), base + place):
                with_nan.add(name)
            if progress is not None:
                progress(part.nbytes)

        pool = ThreadPoolExecutor(max_workers=2)
        try:
            for future in [pool.submit(write, *job) for job in _jobs(shard, places)]:
                future.result()
        finally:  # after a failure what has not begun is not begun
            pool.shutdown(cancel_futures=True)
    return sorted(with_nan)


def _jobs(shard: list[PlannedTensor], places: list[int]) -> Iterator[tuple[str, PlannedTensor, int]]:
    """What is written in one go, and where: a tensor or, of one that has parts, each of them."""
    for tensor, place in zip(shard, places, strict=True):
        for part in tensor.parts or (tensor,):
            yield tensor.name, part, place
            place += part.nbytes


def _copy_region(tensor: PlannedTensor, target: int, place: int) -> bool:
    """Copies a tensor's bytes from file to file through a buffer that stays in the processor's cache; True for NaN."""
    import torch

    source = tensor.copy_of
    assert source is not None
    buffer = bytearray(min(COPY_CHUNK, tensor.nbytes))
    has_nan = False
    with source.file.open("rb") as file:
        done = 0
        while done < tensor.nbytes:
            chunk = memoryview(buffer)[: tensor.nbytes - done]
            count = os.preadv(file.fileno(), [chunk], source.offset + done)
            if count != len(chunk):
                raise CheckpointError(f"{source.file}: shorter than its header says; download it again")
            _write_all(target, chunk, place + done)
            has_nan = has_nan or holds_nan(torch.frombuffer(chunk, dtype=torch_dtype(tensor.dtype)))
            done += count
    return has_nan


def _write_tensor(tensor: PlannedTensor, target: int, place: int) -> bool:
    """Makes and writes a tensor; True if it holds NaN."""
    import torch

    made = tensor.make().contiguous()
    if made.shape != tensor.shape:
        raise CheckpointError(f"tensor {tensor.name}: made with shape {tuple(made.shape)}, planned {tensor.shape}")
    _write_all(target, made.reshape(-1).view(torch.uint8).numpy().data, place)
    return holds_nan(made)


def holds_nan(tensor: "torch.Tensor") -> bool:
    """Whether a tensor holds NaN. A sum is many times faster than a search, and only a NaN sum needs the search."""
    return bool(tensor.sum().isnan()) and bool(tensor.isnan().any())


def _write_all(target: int, content: memoryview, place: int) -> None:
    while content:
        written = os.pwrite(target, content[:WRITE_CHUNK], place)
        content, place = content[written:], place + written


def write_description(
    folder: Path,
    config: "GatedConfig | dict[str, Any]",
    side_files: Iterable[Path],
    provenance: dict[str, Any],
) -> None:
    """Writes all that stands beside the weights: side files, generation config, remote code, provenance, config.json.

    Args:
        folder: an existing folder.
        config: our config object, with its dtype set: the code is written too; or the content of config.json for
            another family.
        side_files: files or folders to copy unchanged; a generation_config.json among them wins over a fresh one.
        provenance: a JSON object that says how the model was made.
    """
    from transformers import GenerationConfig

    for path in side_files:
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        else:
            shutil.copyfile(path, folder / path.name)
    write_json(folder / PROVENANCE_NAME, provenance)
    if not (folder / "generation_config.json").exists():
        values = config if isinstance(config, dict) else config.to_dict()
        GenerationConfig(**{name: values.get(name) for name in TOKEN_IDS}).save_pretrained(folder)
    if isinstance(config, dict):
        write_json(folder / "config.json", config)
    else:
        for code in _model_code(config):
            shutil.copyfile(code, folder / code.name)
        config.save_pretrained(folder)  # also copies the config's own code


def _model_code(config: "GatedConfig") -> list[Path]:
    """The file of the model's class and the files that it imports by name, as a load with remote code needs them."""
    from transformers.dynamic_module_utils import get_relative_import_files

    code = inspect.getfile(causal_lm_class(config))
    return [Path(path) for path in (code, *get_relative_import_files(code))]


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
