"""Checking a conversion: logits on text where both sides can run, else the inverse conversion, tensor by tensor."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gated_qwen
from gated_qwen.conversion.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from gated_qwen.conversion.sources import GatedCheckpoint, read_gated

if TYPE_CHECKING:
    import torch

# Prose that no model has been tuned on to please us.
TEXT = (
    "The printing press spread through Europe in the second half of the fifteenth century. Within fifty years it had "
    "made books cheap enough for a merchant to own, and had turned spelling, which had been each scribe's own affair, "
    "into something about which readers could disagree. "
)
RUNNABLE = ("llama", "qwen2", "qwen3", "qwen3_moe", "gated_qwen", "qwen3_next", "qwen3_5")
# Largest difference that rounding explains, as a share of the largest logit.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.1}


@dataclass(frozen=True)
class Verification:
    """How a result was checked: `method` is `"logits"` or `"tensors"`.

    For logits: the largest and the mean absolute difference, the share of positions whose most likely token is the
    same, the dtype and what was read. For tensors: how many are equal bit for bit, and how many of these were rounded
    to another dtype before.
    """

    method: str
    max_difference: float | None = None
    mean_difference: float | None = None
    agreement: float | None = None
    dtype: str | None = None
    text: str | None = None
    tensors: int | None = None
    rounded: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.method == "tensors":
            rounding = f", {self.rounded} of them rounded to another dtype" if self.rounded else ""
            return f"{self.tensors} tensors equal bit for bit after the inverse conversion{rounding}"
        return (
            f"logits of {self.text} in {self.dtype}: max difference {self.max_difference:.3g}, mean "
            f"{self.mean_difference:.3g}, same most likely token at {self.agreement:.1%} of positions"
        )


def verify_folder(
    checkpoint: Checkpoint, gated: GatedCheckpoint, result: Path, to: str, exact: bool, dtype: str | None = None
) -> Verification:
    """Compares a written folder with its source.

    Args:
        checkpoint: the source.
        gated: the source as a gated model.
        result: the folder that was written.
        to: its family.
        exact: the function was to stay what it is (no perturbing start).
        dtype: compare in this dtype; None: in the source's.

    Raises:
        CheckpointError: the two differ by more than rounding explains; the result is not put in its place.
    """
    if gated.family in RUNNABLE and to in RUNNABLE:
        return _compare_logits(checkpoint, result, exact, dtype)
    return _compare_tensors(gated, result, to)


def _compare_logits(checkpoint: Checkpoint, result: Path, exact: bool, wanted: str | None) -> Verification:
    tokens, text = _tokens(checkpoint)
    first, dtype = _logits(checkpoint.folder, tokens, wanted)
    second, _ = _logits(result, tokens, dtype)
    difference = (first - second).abs()
    agreement = (first.argmax(-1) == second.argmax(-1)).float().mean()
    largest, limit = float(difference.max()), TOLERANCE[dtype] * float(first.abs().max())
    if not math.isfinite(largest):
        raise CheckpointError("verification failed: the result's logits, or the source's, are not finite")
    if exact and largest > limit:
        raise CheckpointError(
            f"verification failed: logits differ by {largest:.3g}, and rounding in {dtype} explains {limit:.3g}; if "
            "the origin of the source is in doubt, see inspect --layout-check"
        )
    return Verification("logits", largest, float(difference.mean()), float(agreement), dtype, text)


def _tokens(checkpoint: Checkpoint) -> "tuple[torch.Tensor, str]":
    import torch
    from transformers import AutoTokenizer

    gated_qwen.register_auto_classes()
    if any(path.name.startswith("tokenizer") for path in checkpoint.side_files()):
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=False)
        return tokenizer(TEXT, return_tensors="pt")["input_ids"], "a paragraph of prose"
    vocab_size = (checkpoint.config.get("text_config") or checkpoint.config)["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (1, 64), generator=generator), "64 random tokens (no tokenizer in the source)"


def _logits(folder: Path, tokens: "torch.Tensor", dtype: str | None) -> "tuple[torch.Tensor, str]":
    import torch
    from transformers import AutoModelForCausalLM

    gated_qwen.register_auto_classes()
    wanted = "auto" if dtype is None else getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=wanted, trust_remote_code=False)
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits.float()
    return logits, str(model.dtype).removeprefix("torch.")


def _compare_tensors(gated: GatedCheckpoint, result: Path, to: str) -> Verification:
    """Reads the result back: every tensor must be the one that it was made from, or zeros that were added."""
    import torch

    back = read_gated(open_checkpoint(result), family=to).tensors
    if missing := sorted(set(gated.tensors) - set(back)):
        raise CheckpointError(f"verification failed: tensor {missing[0]} did not come back from the {to} layout")
    rounded = 0
    for name, tensor in back.items():
        made = tensor.make()
        rounded += name in gated.tensors and tensor.dtype != gated.tensors[name].dtype
        expected = gated.tensors[name].make().to(made.dtype) if name in gated.tensors else torch.zeros_like(made)
        if not torch.equal(made.view(torch.uint8), expected.contiguous().view(torch.uint8)):
            raise CheckpointError(f"verification failed: tensor {name} is not the same after the inverse conversion")
    return Verification("tensors", tensors=len(back), rounded=rounded)
