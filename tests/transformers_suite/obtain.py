"""Obtains transformers' own model tests when the suite runs, so that no copy of them is kept in this repository.

The wheel leaves them out; the source distribution of the same version carries the shared ones. It is downloaded once
with pip, and the files named in `FILES` and `NEWER_FILES` are kept in a cache, one for each such list:

    $GATED_QWEN_CACHE (default ~/.cache/gated-qwen)/transformers-tests/<version>-<hash>/transformers_own_tests/
"""

import hashlib
import importlib
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import transformers
from cache import build_once, cache_folder, offline
from transformers import testing_utils

from .stand_ins import install

# A name of its own: `tests`, as transformers calls it, is taken by whatever project runs this.
PACKAGE = "transformers_own_tests"
FILES = ("test_configuration_common.py", "test_modeling_common.py", "test_training_mixin.py")
# Not in every version that is supported.
NEWER_FILES = ("test_fsdp_mixin.py", "test_tensor_parallel_mixin.py", "test_expert_parallel_mixin.py")
DOWNLOAD_TIMEOUT_S = 600


class SuiteUnavailable(RuntimeError):
    """transformers' tests are neither in the cache nor to be had now."""


def obtain() -> Path:
    """Return the folder that holds `PACKAGE` for the installed transformers, downloading it when it is not cached."""
    version = transformers.__version__
    key = hashlib.sha256("\n".join(FILES + NEWER_FILES).encode()).hexdigest()[:8]
    home = cache_folder("transformers-tests") / f"{version}-{key}"
    if offline() and not home.is_dir():
        raise SuiteUnavailable(
            f"the tests of transformers {version} are not in {home}, and GATED_QWEN_OFFLINE=1 forbids a download"
        )
    return build_once(home, lambda target: _build(version, target / PACKAGE))


def _build(version: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as workspace:
        _extract(_download(version, Path(workspace)), folder)


def load(file: str) -> Any:
    """Import one of the files; None for one of `NEWER_FILES` that this version of transformers does not have."""
    home = obtain()
    if not (home / PACKAGE / file).exists():
        return None
    if str(home) not in sys.path:
        sys.path.append(str(home))
    install(PACKAGE)
    return importlib.import_module(f"{PACKAGE}.{file.removesuffix('.py')}")


def mark_names() -> set[str]:
    """The pytest marks that transformers puts on its tests; a strict pytest refuses those it has not been told of."""
    sources = [*(obtain() / PACKAGE).glob("*.py"), Path(testing_utils.__file__)]
    return {name for source in sources for name in re.findall(r"\bmark\.(\w+)", source.read_text(encoding="utf-8"))}


def _download(version: str, folder: Path) -> Path:
    """Fetch the source distribution through pip, which honours the user's index, proxy and certificate settings."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", "transformers", "--dest", str(folder), f"transformers=={version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)
        problem = done.stderr.strip() if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"pip did not finish within {DOWNLOAD_TIMEOUT_S} seconds"
    found = sorted(folder.glob("transformers-*.tar.gz"))
    if problem or not found:
        raise SuiteUnavailable(
            f"could not download the source distribution of transformers {version}, whose tests this suite runs.\n"
            f"Command: {' '.join(command)}\n{problem or 'pip downloaded no transformers-*.tar.gz'}\n"
            "Run the tests once with a network and pip (later runs use the cache), or set GATED_QWEN_OFFLINE=1 to "
            "skip this suite."
        )
    return found[0]


def _extract(sdist: Path, folder: Path) -> None:
    """Write the files into `folder`. Only names from our own list are written: no path in the archive is trusted."""
    folder.mkdir(parents=True)
    # transformers' tests execute this file to import the library "from source", so it has to exist, and be empty.
    (folder / "__init__.py").touch()
    top = sdist.name.removesuffix(".tar.gz")
    with tarfile.open(sdist) as archive:
        members = {member.name: member for member in archive if member.isreg()}
        for name in FILES + NEWER_FILES:
            member = members.get(f"{top}/tests/{name}")
            source = archive.extractfile(member) if member else None
            if source:
                (folder / name).write_bytes(source.read())
            elif name in FILES:
                raise SuiteUnavailable(
                    f"{sdist.name} carries no tests/{name}: this version of transformers ships other tests than the "
                    "suite expects, see FILES in tests/transformers_suite/obtain.py"
                )
