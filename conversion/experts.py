"""Where the experts of a mixture lie: a tensor for each expert and projection, or all of a layer's in two.

    per expert  mlp.experts.{e}.gate_proj.weight (I, C)   mlp.experts.{e}.up_proj.weight (I, C)
                mlp.experts.{e}.down_proj.weight (C, I)
    fused       mlp.experts.gate_up_proj (E, 2I, C): of each expert its gate rows, then its up rows
                mlp.experts.down_proj (E, C, I)

E experts of width I in a model of width C. Qwen3-MoE, Qwen3-Next and our own folders are per expert, Qwen3.5-MoE is
fused, and so is a live model of transformers 5. In the fused tensors each expert's matrices are contiguous, so either
is read and written matrix by matrix, and a layer's experts are never in memory together.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gated_qwen.conversion.checkpoint import DTYPE_BYTES, FLOAT_DTYPES, Checkpoint, CheckpointError, TensorInfo
from gated_qwen.conversion.plan import PlannedTensor, stacked

if TYPE_CHECKING:
    import torch

# Fused tensor -> the projections that it holds of each expert, in order.
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# The Qwen3-Next family has a shared expert in every sparse layer. A model of ours that becomes one of that family gets
# one of zeros: the narrowest that still splits over 32 ranks and fills a block of the usual quantisations.
SHARED_WIDTH = 32
# Qwen3.5's mixtures, and so llama.cpp's: chosen weights scaled to a sum of 1, experts in every layer.
QWEN3_5_FIELDS: dict[str, Any] = {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1}
SHARED_EXPERT = ".mlp.shared_expert"  # its gate's name begins likewise
_FUSED_NAME = re.compile(r"(?P<prefix>(?:.*\.)?mlp\.experts\.)(?P<fused>gate_up_proj|down_proj)")
_EXPERT_NAME = re.compile(r".*\.mlp\.experts\.(?P<expert>\d+)\.\w+_proj\.weight")

Matrix = tuple[str, tuple[int, ...]]


def matrices(name: str, shape: tuple[int, ...]) -> list[Matrix] | None:
    """Names and shapes of the matrices in a fused tensor, in the order of its bytes; None for any other tensor.

    Example:
        >>> matrices("model.layers.0.mlp.experts.gate_up_proj", (2, 6, 4))[:2]
        [('model.layers.0.mlp.experts.0.gate_proj.weight', (3, 4)),
         ('model.layers.0.mlp.experts.0.up_proj.weight', (3, 4))]
    """
    match = _FUSED_NAME.fullmatch(name)
    if match is None:
        return None
    projections = FUSED[match["fused"]]
    if len(shape) != 3 or 0 in shape or shape[1] % len(projections):
        raise CheckpointError(f"tensor {name} has shape {shape}; experts of one layer are (experts, rows, columns)")
    part = (shape[1] // len(projections), shape[2])
    return [(f"{match['prefix']}{e}.{p}.weight", part) for e in range(shape[0]) for p in projections]


def is_expert(name: str) -> bool:
    """Whether a tensor belongs to experts that a router chooses."""
    return ".mlp.experts." in name


def fused_shapes(count: int, width: int, model_width: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the two fused tensors of a layer, by their short names."""
    return {"gate_up_proj": (count, 2 * width, model_width), "down_proj": (count, model_width, width)}


def count_experts(names: Mapping[str, object]) -> int:
    """How many experts the layers of a per-expert checkpoint have at most."""
    return 1 + max((int(match["expert"]) for name in names if (match := _EXPERT_NAME.fullmatch(name))), default=-1)


def count_fused(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """How many experts the layers of a live model have at most."""
    return max((shape[0] for name, shape in shapes.items() if _FUSED_NAME.fullmatch(name)), default=0)


def separated_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes of a live model's tensors under the names that they have on disk, one for each expert."""
    result: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        result |= dict(matrices(name, shape) or [(name, shape)])
    return result


def separated(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with fused experts as one tensor for each expert and projection: regions of the same files."""
    tensors: dict[str, TensorInfo] = {}
    for name, info in checkpoint.tensors.items():
        parts = matrices(name, info.shape)
        if parts is not None and info.dtype not in FLOAT_DTYPES:
            raise CheckpointError(f"{info.file.name}: tensor {name} is {info.dtype}; dequantise the weights first")
        tensors |= {name: info} if parts is None else dict(_regions(info, parts))
    return replace(checkpoint, tensors=tensors)


def _regions(info: TensorInfo, parts: list[Matrix]) -> Iterator[tuple[str, TensorInfo]]:
    offset = info.offset
    for name, shape in parts:
        yield name, replace(info, offset=offset, shape=shape)
        offset += math.prod(shape) * DTYPE_BYTES[info.dtype]


def fused(
    tensors: Mapping[str, PlannedTensor], prefix: str, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, PlannedTensor]:
    """The fused tensors of one layer, to be written matrix by matrix.

    Args:
        tensors: all of the layer's experts, under per-expert names.
        prefix: of the layer's experts, `"model.layers.0.mlp.experts."`.
        shapes: of the fused tensors, by their short names.
    """
    result = {}
    for short, shape in shapes.items():
        name = f"{prefix}{short}"
        parts = [tensors[part] for part, _ in matrices(name, shape) or []]
        rule = f"of each expert {' and '.join(FUSED[short])}: {parts[0].rule}"
        result[name] = stacked(name, parts, rule, shape)
    return result


def live_state(
    state: Mapping[str, "torch.Tensor"], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, "torch.Tensor"]:
    """A state dict for a live model whose tensors have `shapes`, from tensors under their names on disk."""
    import torch

    live = {}
    for name, shape in shapes.items():
        parts = matrices(name, shape)
        live[name] = state[name] if parts is None else torch.stack([state[p] for p, _ in parts]).view(shape)
    return live
