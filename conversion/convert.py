"""Converting a checkpoint: from any known family, to any target that can hold it, streamed and written whole."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gated_qwen
from gated_qwen.configuration.configuration_gated_qwen import GATE_GRANULARITIES
from gated_qwen.conversion import retrofit
from gated_qwen.conversion.checkpoint import FLOAT_DTYPES, WRITTEN_DTYPES, CheckpointError, open_checkpoint, read_json
from gated_qwen.conversion.families import SOURCES, causal_lm_class
from gated_qwen.conversion.folder import atomic_folder, check_apart, check_target
from gated_qwen.conversion.gguf_target import GGUF_DTYPES, plan_gguf, write_gguf_file
from gated_qwen.conversion.locate import resolve_source
from gated_qwen.conversion.plan import PlannedTensor
from gated_qwen.conversion.source_card import source_card
from gated_qwen.conversion.sources import GatedCheckpoint, read_gated
from gated_qwen.conversion.targets import TARGETS, Output, plan_target
from gated_qwen.conversion.verify import Verification, verify_folder
from gated_qwen.conversion.writer import PROVENANCE_NAME, parse_size, write_description, write_weights

if TYPE_CHECKING:
    from gated_qwen.conversion.families import GatedConfig


@dataclass(frozen=True)
class ConversionResult:
    """What a conversion wrote, or with `dry_run` would write."""

    target: Path
    family: str
    to: str
    parameters: int
    gate_parameters: int
    dtype: str
    plan: list[PlannedTensor] = field(repr=False)
    dry_run: bool
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    verification: Verification | None = None

    def to_dict(self) -> dict[str, Any]:
        """For printing as JSON; the plan, of a dry run only, as names, sources, rules, shapes and dtypes."""
        plan = [
            {"name": t.name, "sources": t.sources, "rule": t.rule, "shape": t.shape, "dtype": t.dtype}
            for t in (self.plan if self.dry_run else [])
        ]
        verification = None if self.verification is None else self.verification.to_dict()
        return {**vars(self), "target": str(self.target), "plan": plan, "verification": verification}


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    from_family: str | None = None,
    to: str = "gated_qwen",
    gate: str | None = None,
    start: str = "identity",
    seed: int = 0,
    dtype: str | None = None,
    gguf_type: str | None = None,
    identity_layer: bool = False,
    max_shard_size: str | int = "5GB",
    overwrite: bool = False,
    verify: bool = False,
    dry_run: bool = False,
    begin: Callable[[int], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> ConversionResult:
    """Converts a checkpoint to another layout, family or format.

    An ungated source (Llama, Qwen2, Qwen3, Qwen3-MoE) is given a gate first. With the default start its logits do not
    change by a bit in fp32 and bf16: the gate is zero and `o_proj` doubled. The authors of the paper saw no clear gain
    from further training of such a start (appendix A.7), so it is a safe starting point and not a promise.

    Args:
        source: a folder, a GGUF file (dequantised to fp32) or a Hub repository id.
        target: the folder, or for `to="gguf"` the file, to write; it appears when everything is written.
        from_family: one of `families.SOURCES`; None detects it from config.json.
        to: `"gated_qwen"`, `"official"`, `"qwen3_next"`, `"qwen3_5"`, `"qwen3"` or `"gguf"`; a mixture of experts
            becomes that family's mixture.
        gate: for an ungated source, `"headwise"` (None too) or `"elementwise"`.
        start: for an ungated source: `"identity"` (exact), `"open"` or `"random"`.
        seed: of a random start.
        dtype: `"float32"`, `"bfloat16"` or `"float16"` for all weights; None keeps each tensor's.
        gguf_type: for `to="gguf"`: `"bf16"` (None too), `"f32"`, `"f16"` or `"q8_0"`.
        identity_layer: for the native families, append a layer that adds nothing (for transformers before 5.15).
        max_shard_size: bytes, or a text such as `"5GB"`.
        overwrite: replace a non-empty `target`.
        verify: compare source and result before the result takes its place.
        dry_run: plan and check everything, and write nothing.
        begin: called once with the number of bytes to come.
        progress: called with the number of bytes done since the last call.

    Returns:
        ConversionResult: what was written.

    Raises:
        CheckpointError: the source is missing or broken, or holds what the target cannot.
        FileExistsError: `target` is not empty, and `overwrite` is off.
        ValueError: `target` is the source, or an option that is not understood.

    Example:
        >>> result = convert(llama_folder, tmp / "gated", gate="headwise")
        >>> result.family, result.gate_parameters
        ('llama', 256)
        >>> convert(tmp / "gated", tmp / "official", to="official").notes
        ()
    """
    _check_choices(from_family, to, gate, start, dtype, gguf_type)
    if to == "gguf" and (dtype is not None or identity_layer or verify):
        raise ValueError(
            "a GGUF file takes --gguf-type instead of --dtype, always has the identity layer and is not verified here "
            "(llama.cpp would have to run it, see docs/gguf.md): leave out --dtype, --identity-layer and --verify"
        )
    if to != "gguf" and gguf_type is not None:
        raise ValueError(f"--gguf-type is for GGUF files, and the target is {to}; use --dtype")
    gguf_type = gguf_type or "bf16"
    shard_bytes = parse_size(max_shard_size)
    source_path, target_path = Path(source), Path(target)
    check_apart(target_path, source_path)
    if to != "gguf":
        check_target(target_path, overwrite=overwrite)

    with resolve_source(source) as folder:
        checkpoint = open_checkpoint(folder)
        gated = read_gated(checkpoint, family=from_family, gate=gate, start=start, seed=seed)
        warnings = _warnings(gated)
        if to == "gguf":
            output = plan_gguf(gated, target_path, overwrite=overwrite)
        else:
            output = plan_target(gated, to, identity_layer=identity_layer)
            if dtype is not None:
                output = _in_dtype(output, WRITTEN_DTYPES[dtype])
        main_dtype = _main_dtype(output.tensors)
        verification = None
        if not dry_run:
            if begin is not None:
                begin(sum(tensor.nbytes for tensor in (gated.tensors.values() if to == "gguf" else output.tensors)))
            name = source_path.resolve().name if source_path.exists() else str(source)
            recipe = _recipe(name, folder, gated, to, dtype, warnings)
            if to == "gguf":
                write_gguf_file(target_path, gated, gguf_type, name, progress)
            else:
                with atomic_folder(target_path, overwrite=overwrite) as temporary:
                    with_nan = write_weights(temporary, output.tensors, shard_bytes, progress)
                    warnings += [f"tensor {name} holds NaN" for name in with_nan]
                    _set_dtype(output.config, FLOAT_DTYPES[main_dtype])
                    write_description(temporary, output.config, gated.side_files, recipe)
                    if verify:
                        exact = start == "identity"
                        verification = verify_folder(checkpoint, gated, temporary, to, exact, dtype)
    gates = [tensor for tensor in gated.tensors.values() if ".self_attn.g_proj" in tensor.name]
    return ConversionResult(
        target=target_path,
        family=gated.family,
        to=to,
        parameters=sum(tensor.elements for tensor in output.tensors),
        gate_parameters=sum(tensor.elements for tensor in gates),
        dtype=gguf_type if to == "gguf" else FLOAT_DTYPES[main_dtype],
        plan=output.tensors,
        dry_run=dry_run,
        notes=tuple(output.notes),
        warnings=tuple(warnings),
        verification=verification,
    )


def _check_choices(
    from_family: str | None, to: str, gate: str | None, start: str, dtype: str | None, gguf_type: str | None
) -> None:
    for name, value, allowed in (
        ("source family", from_family, (None, *SOURCES)),
        ("target", to, (*TARGETS, "gguf")),
        ("gate", gate, (None, *GATE_GRANULARITIES)),
        ("start", start, retrofit.STARTS),
        ("dtype", dtype, (None, *WRITTEN_DTYPES)),
        ("GGUF type", gguf_type, (None, *GGUF_DTYPES)),
    ):
        if value not in allowed:
            raise ValueError(f"{name} {value!r} is not known; choose one of {', '.join(c for c in allowed if c)}")


def _in_dtype(output: Output, dtype: str) -> Output:
    return Output(output.config, [tensor.as_dtype(dtype) for tensor in output.tensors], output.notes)


def _main_dtype(tensors: list[PlannedTensor]) -> str:
    """The dtype of most weights, which config.json names."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.elements
    return max(counts, key=lambda dtype: counts[dtype])


def _set_dtype(config: "GatedConfig | dict[str, Any]", dtype: str) -> None:
    if isinstance(config, dict):
        config["dtype"] = config["torch_dtype"] = dtype  # the old name is read by transformers before 4.56
    else:
        config.dtype = dtype
        config.architectures = config.architectures or [causal_lm_class(config).__name__]


def _warnings(gated: GatedCheckpoint) -> list[str]:
    warnings = list(gated.warnings)
    if any(tensor.dtype == "F16" and tensor.rule == "twice" for tensor in gated.tensors.values()):
        warnings.append("fp16 weights: the start is exact in fp32 and bf16; in fp16 small head outputs can lose bits")
    if not any(path.name.startswith("tokenizer") for path in gated.side_files):
        warnings.append("the source has no tokenizer files, so the result has none")
    return warnings


def _recipe(
    name: str, folder: Path, gated: GatedCheckpoint, to: str, dtype: str | None, warnings: list[str]
) -> dict[str, Any]:
    """How the result is made; the source's own record and its card's licence, where it has them, go along."""
    import torch
    import transformers

    source: dict[str, Any] = {"name": name, "family": gated.family}
    if (folder / PROVENANCE_NAME).exists():
        source["provenance"] = read_json(folder / PROVENANCE_NAME, "repair it or remove it")
    try:
        if card := source_card(folder):
            source["card"] = card
    except CheckpointError as error:  # no reason not to convert the weights
        warnings.append(str(error))
    return {
        "format": 1,
        "verb": "convert",
        "source": source,
        "to": to,
        "dtype": dtype or "as in the source",
        **gated.recipe,
        "versions": {
            "gated-qwen": gated_qwen.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
