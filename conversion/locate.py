"""Finding the source of a conversion: a folder, a GGUF file, or a repository on the Hub."""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gated_qwen.conversion.checkpoint import SIDE_FILES, CheckpointError
from gated_qwen.conversion.families import FAMILIES
from gated_qwen.conversion.source_card import CARD_NAME, card_text, gguf_card


@contextmanager
def resolve_source(source: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a folder in the Hugging Face format for a folder, a GGUF file or a Hub repository id.

    A GGUF file is dequantised to fp32 into a temporary folder that goes when the block ends. From the Hub only JSON,
    safetensors and tokenizer files are fetched, never code.

    Args:
        source: an existing path, or a repository id such as `Qwen/Qwen3-0.6B`.

    Raises:
        CheckpointError: there is no such path or repository, or the file is not a GGUF of a known family.
    """
    path = Path(source)
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if (path / "config.json").exists() or not files:
            yield path
            return
        if len(files) > 1:
            raise CheckpointError(f"{path}: {len(files)} GGUF files; name one of them")
        path = files[0]
    if path.is_file():
        with tempfile.TemporaryDirectory(prefix="gated-qwen-gguf-") as folder:
            dequantize_gguf(path, Path(folder))
            yield Path(folder)
    elif re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", str(source)) and not path.parent.exists():
        yield _download(str(source))
    else:
        raise CheckpointError(f"{source}: no such folder or file")


def dequantize_gguf(file: Path, folder: Path) -> None:
    """Writes a GGUF file of a dense family as a Hugging Face folder: fp32 weights, config, tokenizer, chat template.

    A README.md says the licence and the origin, where the file names them.

    Raises:
        CheckpointError: not a GGUF file, an architecture that cannot be given a gate, or the `gguf` extra is missing.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise CheckpointError(f"{file}: not a GGUF file (a folder or a .gguf file is expected)")
    if (architecture := _architecture(file)) in ("qwen35", "qwen35moe"):
        raise CheckpointError(
            f"{file}: architecture {architecture!r} is an export; convert the folder that it was made from"
        )
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        config = AutoConfig.from_pretrained(**where)
        if config.model_type == "qwen3_moe":  # transformers 5.24 reads such a file with experts of one width only
            raise CheckpointError(f"{file}: a mixture of experts; convert the folder that it was made from")
        if config.model_type not in FAMILIES:
            raise CheckpointError(
                f"{file}: architecture {config.model_type!r} cannot be given a gate; known: {', '.join(FAMILIES)}"
            )
        # Without GgufConfig(dequantize=True) the model counts as quantised and cannot be saved.
        model = AutoModelForCausalLM.from_pretrained(
            **where, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except ImportError as error:
        raise CheckpointError(
            f"{file}: reading GGUF needs more packages: pip install gguf sentencepiece protobuf accelerate ({error})"
        ) from error
    except CheckpointError:
        raise
    except Exception as error:  # the libraries that read GGUF and its tokenizer raise whatever comes
        raise CheckpointError(f"{file}: cannot be read as GGUF ({' '.join(str(error).split())})") from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if card := card_text(gguf_card(file)):
        (folder / CARD_NAME).write_text(card, encoding="utf-8")


def _architecture(file: Path) -> str | None:
    """The architecture that a GGUF file names in its first key, where ours and llama.cpp's writers put it."""
    with file.open("rb") as stream:
        head = stream.read(96)
    key = b"general.architecture"
    place = head.find(key)
    if place < 0:
        return None
    text = head[place + len(key) :]  # type (4 bytes), length (8), characters
    return text[12 : 12 + int.from_bytes(text[4:12], "little")].decode("utf-8", "replace")


def _download(repo_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = [*SIDE_FILES, CARD_NAME, "additional_chat_templates/*", "config.json"]
    wanted += ["*.safetensors", "*.safetensors.index.json"]
    try:
        return Path(snapshot_download(repo_id, allow_patterns=wanted, ignore_patterns=["*.py", "*/*.safetensors"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{repo_id}: no such folder, and the Hub did not give it ({reason})") from error
