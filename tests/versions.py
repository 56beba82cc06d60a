"""The versions of transformers that the remote code is tested on, each in a small cached environment.

An environment is a folder for PYTHONPATH. It holds one transformers and the few packages whose installed versions it
refuses; torch and everything else come from the environment that runs the tests.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

import transformers
from cache import build_once, cache_folder, offline

# transformers -> all that is installed with it, without dependencies. Before 1.0 huggingface-hub speaks through
# requests, afterwards through httpx.
_REQUESTS = (
    "requests==2.34.2",
    "urllib3==2.8.0",
    "charset-normalizer==3.5.3",
    "certifi==2026.10.19.post1",
    "idna==3.20",
)
_HTTPX = (
    "httpx==0.28.1",
    "httpcore==1.0.9",
    "h11==0.16.0",
    "anyio==4.16.0",
    "certifi==2026.10.19.post1",
    "idna==3.20",
)
PINS = {
    "4.57.6": ("transformers==4.57.6", "huggingface-hub==0.36.2", "tokenizers==0.22.2", *_REQUESTS),
    "5.0.0": ("transformers==5.0.0", "huggingface-hub==1.33.0", "tokenizers==0.22.2", *_HTTPX),
    "5.12.1": ("transformers==5.12.1", "huggingface-hub==1.33.0", "tokenizers==0.22.2", *_HTTPX),
}
INSTALLED = transformers.__version__
VERSIONS = tuple(dict.fromkeys((*PINS, INSTALLED)))
INSTALL_TIMEOUT_S = 600


class VersionUnavailable(RuntimeError):
    """A version of transformers is neither in the cache nor to be had now."""


def environment(version: str) -> Path | None:
    """The folder to put on PYTHONPATH for one of `VERSIONS`, installed when it is not cached; None for the installed.

    The folder's name carries a hash of its pins and of the interpreter, so a change of the table builds a new one.
    """
    if version == INSTALLED:
        return None
    pins = PINS[version]
    interpreter = f"{sys.implementation.cache_tag}-{sys.platform}"
    key = hashlib.sha256("\n".join((interpreter, *sorted(pins))).encode()).hexdigest()[:12]
    folder = cache_folder("transformers") / f"{version}-{key}"
    if offline() and not folder.is_dir():
        raise VersionUnavailable(
            f"transformers {version} is not in {folder}, and GATED_QWEN_OFFLINE=1 forbids to install it there."
        )
    return build_once(folder, lambda target: _install(version, pins, target))


def _install(version: str, pins: tuple[str, ...], target: Path) -> None:
    """Installs through pip, which honours the user's index, proxy and certificate settings."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--target", str(target), *pins]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        problem = f"pip: {said[-1].strip()}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"pip did not finish within {INSTALL_TIMEOUT_S} seconds"
    if problem:
        raise VersionUnavailable(
            f"transformers {version} could not be installed for the tests of older versions ({problem}): run them "
            "once with a network and pip (later runs use the cache), or set GATED_QWEN_OFFLINE=1 to skip them."
        )
