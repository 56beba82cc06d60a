"""A planned tensor: what it will be and how it is made, before anything is read."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from gated_qwen.conversion.checkpoint import DTYPE_BYTES, FLOAT_DTYPES, Checkpoint, CheckpointError, TensorInfo

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written: name, dtype as safetensors writes it, shape, the rule in words, and how it is made.

    `copy_of` names the region of a file that holds the tensor's bytes unchanged, where there is one. The bytes of
    `parts`, where there are any, follow each other in this tensor, so it can be written without being made whole.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    rule: str
    make: Callable[[], "torch.Tensor"]
    sources: tuple[str, ...] = ()
    copy_of: TensorInfo | None = None
    parts: tuple["PlannedTensor", ...] = ()

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * DTYPE_BYTES[self.dtype]

    def renamed(self, name: str) -> "PlannedTensor":
        """The same tensor under another name."""
        return replace(self, name=name)

    def as_dtype(self, dtype: str) -> "PlannedTensor":
        """The tensor rounded to another floating-point dtype."""
        if dtype == self.dtype:
            return self
        rule = f"{self.rule}, as {dtype}"
        if self.parts:
            return stacked(self.name, [part.as_dtype(dtype) for part in self.parts], rule, self.shape)
        return replace(self, dtype=dtype, rule=rule, make=partial(_cast, self.name, self.make, dtype), copy_of=None)


def copied(checkpoint: Checkpoint, source: str, name: str | None = None) -> PlannedTensor:
    """A tensor of the source, bit for bit."""
    info = checkpoint.tensors[source]
    make = partial(checkpoint.load, source)
    return PlannedTensor(name or source, info.dtype, info.shape, "copy", make, (source,), info)


def derived(
    name: str,
    sources: "tuple[PlannedTensor, ...]",
    function: Callable[..., "torch.Tensor"],
    rule: str,
    shape: tuple[int, ...] | None = None,
) -> PlannedTensor:
    """A tensor computed from others by a pure function; the first one's dtype (fp32 wins) and, unless given, shape."""
    first = sources[0]
    halves = first.dtype in ("BF16", "F16")
    dtype = "F32" if halves and any(source.dtype == "F32" for source in sources) else first.dtype
    names = tuple(source for planned in sources for source in planned.sources)
    make = partial(_apply, name, function, sources)
    return PlannedTensor(name, dtype, shape or first.shape, rule, make, names)


def stacked(name: str, parts: list[PlannedTensor], rule: str, shape: tuple[int, ...]) -> PlannedTensor:
    """A tensor whose bytes are those of `parts`, one after the other; where their dtypes differ, in the widest.

    Args:
        name: of the whole.
        parts: tensors of any shapes with as many elements together as the whole has.
        rule: in words.
        shape: of the whole.
    """
    dtypes = {part.dtype for part in parts}
    dtype = dtypes.pop() if len(dtypes) == 1 else max((*dtypes, "F32"), key=lambda dtype: DTYPE_BYTES[dtype])
    parts = [part.as_dtype(dtype) for part in parts]
    names = tuple(source for part in parts for source in part.sources)
    return PlannedTensor(name, dtype, shape, rule, partial(_stack, parts, shape), names, parts=tuple(parts))


def filled(name: str, dtype: str, shape: tuple[int, ...], value: float = 0.0) -> PlannedTensor:
    """A tensor that holds one value."""
    rule = "zeros" if value == 0 else f"all {value:g}"
    return PlannedTensor(name, dtype, shape, rule, partial(_full, shape, dtype, value))


def torch_dtype(dtype: str) -> "torch.dtype":
    """torch's dtype for safetensors' name of a floating-point dtype, e.g. `"BF16"`."""
    import torch

    result: torch.dtype = getattr(torch, FLOAT_DTYPES[dtype])
    return result


def _apply(name: str, function: Callable[..., "torch.Tensor"], sources: tuple[PlannedTensor, ...]) -> "torch.Tensor":
    try:
        return function(*(planned.make() for planned in sources))
    except OverflowError as error:
        raise CheckpointError(f"tensor {name}: {error}") from error


def _stack(parts: list[PlannedTensor], shape: tuple[int, ...]) -> "torch.Tensor":
    import torch

    whole = torch.empty(math.prod(shape), dtype=torch_dtype(parts[0].dtype))
    for part, place in zip(parts, whole.split([part.elements for part in parts]), strict=True):
        place.copy_(part.make().reshape(-1))
    return whole.view(shape)


def _cast(name: str, make: Callable[[], "torch.Tensor"], dtype: str) -> "torch.Tensor":
    made = make()
    cast = made.to(torch_dtype(dtype))
    if bool((cast.isinf() & ~made.isinf()).any()):
        raise CheckpointError(f"tensor {name}: a weight exceeds the range of {FLOAT_DTYPES[dtype]}")
    return cast


def _full(shape: tuple[int, ...], dtype: str, value: float) -> "torch.Tensor":
    import torch

    return torch.full(shape, value, dtype=torch_dtype(dtype))
