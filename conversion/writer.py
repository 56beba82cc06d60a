"""Writing a gated model folder: weights in shards, then side files, code, provenance and, last, config.json."""

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gated_qwen.conversion.checkpoint import DTYPE_BYTES, INDEX_NAME

if TYPE_CHECKING:
    import torch

    from gated_qwen.configuration.configuration_gated_qwen import GatedQwenConfig

PROVENANCE_NAME = "provenance.json"


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the output: its name, dtype, shape, the rule that makes it in words, and the function that does."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    rule: str
    make: Callable[[], "torch.Tensor"]

    @property
    def nbytes(self) -> int:
        count = DTYPE_BYTES[self.dtype]
        for size in self.shape:
            count *= size
        return count


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
    raise ValueError(f"size {size!r} is not understood; write for example 5GB or 512MiB")


def _positive(value: int, size: str | int) -> int:
    if value < 1:
        raise ValueError(f"size {size!r} must be above zero")
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
) -> None:
    """Writes safetensors shard by shard, with one shard in memory at a time, and the index when there are several.

    Args:
        folder: an existing folder.
        tensors: what to write, in order.
        max_shard_size: bytes.
        progress: called with the number of bytes of each tensor when it is ready.
    """
    from safetensors.torch import save_file

    shards = plan_shards(tensors, max_shard_size)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        content: dict[str, torch.Tensor] = {}
        for tensor in shard:
            content[tensor.name] = tensor.make().contiguous()
            weight_map[tensor.name] = file
            if progress is not None:
                progress(tensor.nbytes)
        save_file(content, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(t.nbytes for t in tensors)},
            "weight_map": dict(sorted(weight_map.items())),
        }
        write_json(folder / INDEX_NAME, index)


def write_description(
    folder: Path, config: "GatedQwenConfig", side_files: Iterable[Path], provenance: dict[str, Any]
) -> None:
    """Writes all that stands beside the weights: side files, generation config, remote code, provenance, config.json.

    Args:
        folder: an existing folder.
        config: the model's config, with its dtype set.
        side_files: files or folders to copy unchanged; a generation_config.json among them wins over a fresh one.
        provenance: a JSON object that says how the model was made.
    """
    from transformers import GenerationConfig

    from gated_qwen import modeling_gated_qwen

    for path in side_files:
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        else:
            shutil.copyfile(path, folder / path.name)
    if not (folder / "generation_config.json").exists():
        GenerationConfig.from_model_config(config).save_pretrained(folder)
    code = Path(modeling_gated_qwen.__file__)
    shutil.copyfile(code, folder / code.name)
    write_json(folder / PROVENANCE_NAME, provenance)
    config.save_pretrained(folder)  # also copies the config's own code


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
