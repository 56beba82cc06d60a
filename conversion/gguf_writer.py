"""Writing a gated model as one GGUF file that llama.cpp runs, tensor by tensor."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gated_qwen.conversion.folder import atomic_file
from gated_qwen.conversion.gguf_layout import ARCHITECTURES, check_gguf, gguf_keys, gguf_tensors
from gated_qwen.conversion.gguf_tokenizer import tokenizer_keys
from gated_qwen.conversion.plan import PlannedTensor

if TYPE_CHECKING:
    import numpy
    import torch

    from gated_qwen.conversion.families import GatedConfig

# The name of a type, and the number by which `general.file_type` says that most tensors have it.
FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
BLOCK = 32  # weights of one row that share a scale in Q8_0
LARGEST = {"F16": 65504.0, "Q8_0": 65504.0 * 127}  # the scale of a Q8_0 block is itself in f16
CHUNK = 1 << 22  # weights that are quantised at a time


def gguf_type(tensor: PlannedTensor, dtype: str) -> str:
    """The type of a tensor in the file, as GGUF names it.

    Matrices are stored in the file's type; in F32 are norms, whatever else has one dimension, the convolution of the
    appended layer, and routers, since a rounded one would choose other experts. Q8_0 cuts rows into blocks of 32, so a
    matrix whose rows do not divide is F32 there.

    Args:
        tensor: a tensor of `gguf_tensors`.
        dtype: a key of `FILE_TYPES`.
    """
    whole_blocks = dtype != "q8_0" or tensor.shape[-1] % BLOCK == 0
    kept = tensor.name.endswith(("ssm_conv1d.weight", "ffn_gate_inp.weight"))
    if len(tensor.shape) < 2 or kept or not whole_blocks:
        return "F32"
    return dtype.upper()


def write_gguf(
    file: Path,
    config: "GatedConfig",
    tensors: Mapping[str, PlannedTensor],
    *,
    dtype: str = "bf16",
    tokenizer_folder: Path | None,
    name: str,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Writes one GGUF file, with one tensor in memory at a time; `file` is absent or complete, whatever happens.

    Args:
        file: where to write; an existing file is replaced when the new one is complete.
        config: the model's config.
        tensors: the model's tensors by our names; `lm_head.weight` only when it is not tied.
        dtype: `"f32"`, `"f16"`, `"bf16"` or `"q8_0"`, the type of the matrices; the gate is rounded with the queries.
        tokenizer_folder: a folder with tokenizer files, or None for a file that takes token ids only.
        name: the model's name for people.
        progress: called with the bytes of each of `tensors` when it is ready.

    Raises:
        ValueError: the model, its tokenizer or its weights cannot be held, or `dtype` is unknown; the message names
            the field or the tensor, and all but a weight out of range is found before anything is written.
        RuntimeError: the `gguf` package is not installed.
    """
    if dtype not in FILE_TYPES:
        raise ValueError(f"GGUF type {dtype!r} is not known; choose one of {', '.join(sorted(FILE_TYPES))}")
    check_gguf(config)
    if progress is not None:
        tensors = {key: replace(tensor, make=partial(_report, tensor, progress)) for key, tensor in tensors.items()}
    plan = gguf_tensors(config, tensors)
    keys = {
        "general.type": "model",
        "general.name": name,
        "general.file_type": FILE_TYPES[dtype],
        "general.quantization_version": 2,
        **gguf_keys(config),
        **({"tokenizer.ggml.model": "none"} if tokenizer_folder is None else tokenizer_keys(tokenizer_folder, config)),
    }
    gguf = _import_gguf()
    import numpy

    with atomic_file(file) as temporary:
        writer = gguf.GGUFWriter(None, ARCHITECTURES[config.model_type])
        for key, value in keys.items():
            _add_key(writer, key, value)
        for tensor in plan:
            kind = gguf.GGMLQuantizationType[gguf_type(tensor, dtype)]
            nbytes = _nbytes(tensor, kind, gguf)
            writer.add_tensor_info(tensor.name, tensor.shape, numpy.dtype(numpy.float32), nbytes, raw_dtype=kind)
        try:
            writer.write_header_to_file(temporary)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in plan:
                writer.write_tensor_data(_encoded(tensor, gguf_type(tensor, dtype)))
        finally:
            writer.close()


def _report(tensor: PlannedTensor, progress: Callable[[int], None]) -> "torch.Tensor":
    made = tensor.make()
    progress(tensor.nbytes)
    return made


def _import_gguf() -> Any:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise RuntimeError("writing GGUF needs the gguf package: pip install gguf") from error
    logging.getLogger("gguf").setLevel(logging.WARNING)  # it announces every file
    return gguf


def _add_key(writer: Any, key: str, value: Any) -> None:
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    add.get(type(value), writer.add_array)(key, value)


def _nbytes(tensor: PlannedTensor, kind: Any, gguf: Any) -> int:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return int(tensor.elements // block * size)


def _encoded(tensor: PlannedTensor, kind: str) -> "numpy.ndarray":
    """The bytes of a tensor of the file; of one that has parts, made and rounded part by part."""
    import numpy

    if not tensor.parts:
        return encode(tensor.name, tensor.make(), kind)
    first = encode(tensor.name, tensor.parts[0].make(), kind)
    whole = numpy.empty((len(tensor.parts), *first.shape), dtype=first.dtype)
    whole[0] = first
    for number, part in enumerate(tensor.parts[1:], start=1):
        whole[number] = encode(tensor.name, part.make(), kind)
    return whole


def encode(name: str, tensor: "torch.Tensor", kind: str) -> "numpy.ndarray":
    """A tensor's bytes in a GGUF type, as an array whose memory is written as it stands.

    Args:
        name: for the error.
        tensor: (rows, columns) or (columns,), any floating-point dtype.
        kind: `"F32"`, `"F16"`, `"BF16"` or `"Q8_0"`.

    Raises:
        ValueError: the tensor has a value that the type cannot hold.
    """
    import torch

    if kind in LARGEST:
        largest = max(abs(bound.item()) for bound in torch.aminmax(tensor))
        if not largest <= LARGEST[kind]:
            raise ValueError(f"tensor {name}: {largest:g} does not fit into {kind}; write bf16 or f32")
    if kind == "Q8_0":
        return _quantize(tensor)
    if kind == "BF16":  # numpy has no such dtype
        return tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy()
    return tensor.to(torch.float16 if kind == "F16" else torch.float32).contiguous().numpy()


def _quantize(tensor: "torch.Tensor") -> "numpy.ndarray":
    """Q8_0 blocks, a few rows at a time: the quantiser needs several float32 copies of what it is given."""
    import gguf
    import numpy

    kind = gguf.GGMLQuantizationType.Q8_0
    rows, columns = tensor.shape
    block, size = gguf.GGML_QUANT_SIZES[kind]
    quantised = numpy.empty((rows, columns // block * size), dtype=numpy.uint8)
    step = max(1, CHUNK // columns)
    for start in range(0, rows, step):
        part = tensor[start : start + step].float().contiguous().numpy()
        quantised[start : start + step] = gguf.quants.quantize(part, kind)
    return quantised
