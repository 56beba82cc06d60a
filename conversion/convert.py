"""Giving an ungated model a gate: reads tensor by tensor, writes a complete folder that loads with remote code."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gated_qwen
from gated_qwen.configuration.configuration_gated_qwen import GATE_GRANULARITIES, GatedQwenConfig
from gated_qwen.conversion.checkpoint import FLOAT_DTYPES, Checkpoint, CheckpointError, open_checkpoint
from gated_qwen.conversion.families import detect_family, ungated_fields
from gated_qwen.conversion.folder import atomic_folder, check_target
from gated_qwen.conversion.retrofit import DOUBLED, GATE, double
from gated_qwen.conversion.source import resolve_source
from gated_qwen.conversion.writer import PlannedTensor, parse_size, write_description, write_weights

if TYPE_CHECKING:
    import torch

# Buffers that old releases saved and every version recomputes.
RECOMPUTED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class ConversionResult:
    """What a conversion wrote: the folder, the source's family, parameters in all and of the gate, warnings."""

    folder: Path
    family: str
    parameters: int
    gate_parameters: int
    dtype: str
    warnings: tuple[str, ...]


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    gate: str = "headwise",
    max_shard_size: str | int = "5GB",
    overwrite: bool = False,
    start: Callable[[int], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> ConversionResult:
    """Converts an ungated Llama, Qwen2 or Qwen3 model to a gated one that computes the same function.

    The gate is on the SDPA output (G1) and starts at zero with `o_proj` doubled, so logits are equal to the bit in
    fp32 and bf16. Dtypes are kept tensor by tensor. The authors of the paper saw no clear gain from further training
    of such a start (appendix A.7), so it is a safe starting point and not a promise.

    Args:
        source: a folder, a GGUF file (dequantised to fp32) or a Hub repository id.
        target: the folder to write; it appears when everything is written.
        gate: `"headwise"` or `"elementwise"`.
        max_shard_size: bytes, or a text such as `"5GB"`.
        overwrite: replace a non-empty `target`.
        start: called once with the number of bytes to come.
        progress: called with the number of bytes done since the last call.

    Returns:
        ConversionResult: what was written.

    Raises:
        CheckpointError: the source is missing, broken, gated already or of a family that cannot take the gate.
        FileExistsError: `target` is not empty, and `overwrite` is off.
        ValueError: `target` is the source, an unknown `gate` or a size that is not understood.

    Example:
        >>> result = convert(llama_folder, tmp / "gated", gate="headwise")
        >>> result.family, result.gate_parameters
        ('llama', 256)
    """
    if gate not in GATE_GRANULARITIES:
        raise ValueError(f"gate {gate!r} is not known; choose one of {', '.join(GATE_GRANULARITIES)}")
    shard_bytes = parse_size(max_shard_size)
    source_path, target_path = Path(source), Path(target)
    if source_path.exists():
        here, there = source_path.resolve(), target_path.resolve()
        if here.is_relative_to(there) or there.is_relative_to(here):
            raise ValueError(f"{target}: the target and the source lie in each other; name another folder")
    check_target(target_path, overwrite=overwrite)

    with resolve_source(source) as folder:
        checkpoint = open_checkpoint(folder)
        family = detect_family(checkpoint.config)
        # gate_initializer_range 0.0: gate weights that are missing at load time start at zero as well.
        fields = {**ungated_fields(checkpoint.config), "gate_positions": ["attn_output"], "gate_granularity": gate}
        config = GatedQwenConfig(**fields, gate_initializer_range=0.0, architectures=["GatedQwenForCausalLM"])
        tensors = plan_retrofit(checkpoint, config)
        dtypes = {tensor.dtype for tensor in tensors}
        main_dtype = next(tensor.dtype for tensor in tensors if tensor.name.endswith(DOUBLED))
        config.dtype = FLOAT_DTYPES[main_dtype]
        warnings = []
        if "F16" in dtypes:
            warnings.append(
                "fp16 weights: the start is exact in fp32 and bf16; in fp16 small head outputs can lose bits"
            )
        if not any(path.name.startswith("tokenizer") for path in checkpoint.side_files()):
            warnings.append("the source has no tokenizer files, so the result has none")
        if start is not None:
            start(sum(tensor.nbytes for tensor in tensors))
        with atomic_folder(target_path, overwrite=overwrite) as temporary:
            write_weights(temporary, tensors, shard_bytes, progress)
            recipe = _recipe(source_path.name, family.model_type, gate)
            write_description(temporary, config, checkpoint.side_files(), recipe)
    gate_parameters = sum(_elements(t.shape) for t in tensors if t.name.endswith(GATE))
    parameters = sum(_elements(t.shape) for t in tensors)
    return ConversionResult(
        target_path, family.model_type, parameters, gate_parameters, FLOAT_DTYPES[main_dtype], tuple(warnings)
    )


def plan_retrofit(checkpoint: Checkpoint, config: GatedQwenConfig) -> list[PlannedTensor]:
    """Says for every tensor of the gated model where it comes from; nothing is read yet.

    Raises:
        CheckpointError: a tensor is missing, unknown, of another shape, or not in a floating-point dtype.
    """
    expected = _expected_shapes(config)
    found = {name for name in checkpoint.tensors if not name.endswith(RECOMPUTED)}
    if config.tie_word_embeddings:
        found.discard("lm_head.weight")  # the same tensor under a second name
    if unknown := sorted(found - set(expected)):
        file = checkpoint.tensors[unknown[0]].file.name
        raise CheckpointError(f"{file}: tensor {unknown[0]} has no place in a causal language model of this family")
    tensors = []
    for name, shape in expected.items():
        if name.endswith(GATE):
            like = checkpoint.tensors[name.replace(GATE, DOUBLED)]
            tensors.append(PlannedTensor(name, like.dtype, shape, "zeros", partial(_zeros, shape, like.dtype)))
            continue
        if name not in found:
            raise CheckpointError(f"{checkpoint.folder}: tensor {name} is missing")
        info = checkpoint.tensors[name]
        if info.shape != shape:
            raise CheckpointError(
                f"{info.file.name}: tensor {name} has shape {info.shape}, config.json asks for {shape}"
            )
        if info.dtype not in FLOAT_DTYPES:
            raise CheckpointError(f"{info.file.name}: tensor {name} is {info.dtype}; dequantise the weights first")
        if name.endswith(DOUBLED):
            tensors.append(PlannedTensor(name, info.dtype, shape, "twice", partial(_doubled, checkpoint, name)))
        else:
            tensors.append(PlannedTensor(name, info.dtype, shape, "copy", partial(checkpoint.load, name)))
    return tensors


def _expected_shapes(config: GatedQwenConfig) -> dict[str, tuple[int, ...]]:
    import torch

    with torch.device("meta"):
        model = gated_qwen.GatedQwenForCausalLM(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return shapes


def _doubled(checkpoint: Checkpoint, name: str) -> "torch.Tensor":
    try:
        return double(checkpoint.load(name))
    except OverflowError as error:
        raise CheckpointError(f"{checkpoint.tensors[name].file.name}: tensor {name}: {error}") from error


def _zeros(shape: tuple[int, ...], dtype: str) -> "torch.Tensor":
    import torch

    return torch.zeros(shape, dtype=getattr(torch, FLOAT_DTYPES[dtype]))


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _recipe(source_name: str, family: str, gate: str) -> dict[str, Any]:
    import torch
    import transformers

    return {
        "format": 1,
        "verb": "convert",
        "source": {"name": source_name, "family": family},
        "gate": {"positions": ["attn_output"], "granularity": gate, "activation": "sigmoid", "start": "identity"},
        "rules": {DOUBLED: "twice the source", GATE: "zeros", "every other tensor": "copied bit for bit"},
        "versions": {
            "gated-qwen": gated_qwen.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
