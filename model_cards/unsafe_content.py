"""What must not be published: files that run code when they are read, and secrets."""

import bz2
import gzip
import lzma
import mmap
import pickletools
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

PICKLE_NAMES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt", "*.joblib", "*.dill", "*.distcp", "*.t7")
SECRET_NAMES = (
    ".env",
    ".env.*",
    "*.env",
    ".netrc",
    "_netrc",
    ".npmrc",
    ".pypirc",
    ".git-credentials",
    ".htpasswd",
    "id_rsa*",
    "id_dsa*",
    "id_ecdsa*",
    "id_ed25519*",
    "*.pem",
    "*.key",
    "*.p12",
    "*.pfx",
    "*.kdbx",
    "stored_tokens",
)
PICKLE_OPCODES = frozenset(ord(opcode.code) for opcode in pickletools.opcodes)
COMPRESSED: dict[bytes, Callable[[Path], Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
# What reading an archive raises that is broken, encrypted, or packed in a way not known here.
UNREADABLE = (
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    tarfile.TarError,
)
# What each looks like; a pattern that begins with plain letters is searched for many times faster.
SECRETS = {
    "a Hugging Face token": rb"hf_[A-Za-z0-9]{30,}",
    "a token of a Hugging Face organization": rb"api_org_[A-Za-z0-9]{30,}",
    "an API key": rb"sk[-_](?:(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{30,}|[a-f0-9]{32,})",
    "a GitHub token": rb"gh[pousr]_[A-Za-z0-9]{36,}",
    "a fine-grained GitHub token": rb"github_pat_[A-Za-z0-9_]{50,}",
    "a GitLab token": rb"glpat-[A-Za-z0-9_-]{20,}",
    "a Slack token": rb"xox[abprs]-[A-Za-z0-9-]{20,}",
    "an AWS key": rb"A(?:KI|SI)A[A-Z0-9]{16}(?![A-Za-z0-9])",
    "a Google key": rb"AIza[A-Za-z0-9_-]{35}",
    "a private key": rb"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----",
}
PART_OF_A_WORD = re.compile(rb"[A-Za-z0-9]")
MIN_DISTINCT = 10  # a placeholder such as hf_xxxx... repeats itself; a key does not
SEARCHED = 64 * 2**20  # bytes of a binary file; the metadata of a GGUF file comes first
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def holds_pickle(path: Path) -> bool:
    """Whether a file is pickled, by its name or by its first bytes; archives and compressed files are looked into.

    Example:
        >>> import pickle
        >>> _ = (tmp / "notes.txt").write_bytes(pickle.dumps([1]))
        >>> holds_pickle(tmp / "notes.txt")
        True
    """
    with path.open("rb") as file:
        start = file.read(512)
    if _is_pickle(path.name, start):
        return _is_pickle(path.name, b"") or not _is_safetensors(path)
    try:
        return any(_is_pickle(name, inside) for name, inside in _members(path, start))
    except UNREADABLE:
        return False


def _is_pickle(name: str, start: bytes) -> bool:
    """By its name; or protocol 2 or later: a mark, the protocol, and an instruction; or a NumPy array of objects."""
    if any(fnmatch(name.lower(), pattern) for pattern in PICKLE_NAMES):
        return True
    if start.startswith(b"\x93NUMPY"):
        return b"|O" in start  # a pickle behind its header
    return len(start) > 2 and start[0] == 0x80 and 2 <= start[1] <= 5 and start[2] in PICKLE_OPCODES


def _members(path: Path, start: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and first bytes of what lies in an archive, or behind a compression; nothing for another file."""
    for mark, opener in COMPRESSED.items():
        if start.startswith(mark):
            with opener(path) as file:
                start = file.read(512)
            yield path.stem, start
    if start[257:262] == b"ustar":
        with tarfile.open(path) as archive:
            for entry in archive:
                file = archive.extractfile(entry) if entry.isreg() else None
                yield entry.name, file.read(512) if file else b""
    elif start.startswith(b"PK\x03\x04"):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                yield name, _zip_member(archive, name)


def _zip_member(archive: zipfile.ZipFile, name: str) -> bytes:
    try:
        with archive.open(name) as member:
            return member.read(512)
    except UNREADABLE:
        return b""


def _is_safetensors(path: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False


def is_secret_name(name: str) -> bool:
    """Whether a file of this name usually holds keys or passwords."""
    return any(fnmatch(name.lower(), pattern) for pattern in SECRET_NAMES)


def find_secret(path: Path) -> tuple[int, str] | None:
    """Looks for keys and tokens in a file: a text, the header of safetensors weights, the beginning of a binary file.

    Returns:
        The number of the line and what stands there, never the secret itself; None where there is nothing.

    Example:
        >>> text = "import os" + chr(10) + "token = 'hf_" + "aBcDeFgHiJ1234567890" * 2
        >>> _ = (tmp / "train.py").write_text(text)
        >>> find_secret(tmp / "train.py")
        (2, 'a Hugging Face token')
    """
    if path.stat().st_size == 0:
        return None
    with _text(path) as content:
        found = [(place, kind) for kind, pattern in SECRETS.items() for place in _places(pattern, content)]
        if not found:
            return None
        place, kind = min(found)
        return content[:place].count(b"\n") + 1, kind


def secret_in(text: str) -> str | None:
    """What kind of key or token stands in a text, such as the name of a file.

    Example:
        >>> secret_in("run-hf_" + "aBcDeFgHiJ1234567890" * 2)
        'a Hugging Face token'
    """
    content = text.encode(errors="replace")
    return next((kind for kind, pattern in SECRETS.items() if any(True for _ in _places(pattern, content))), None)


def _places(pattern: bytes, content: bytes | mmap.mmap) -> Iterator[int]:
    for match in re.finditer(pattern, content):
        start = match.start()
        if PART_OF_A_WORD.match(content[max(0, start - 1) : start]):
            continue
        if len(set(match[0])) >= MIN_DISTINCT:
            yield start


@contextmanager
def _text(path: Path) -> Iterator[bytes | mmap.mmap]:
    """What is searched of a file: all of a text, the header of safetensors, the beginning of a binary one."""
    with path.open("rb") as file:
        start = file.read(8192)
        file.seek(0)
        if path.suffix == ".safetensors" and len(start) >= 8:
            file.seek(8)
            yield file.read(min(struct.unpack("<Q", start[:8])[0], 100_000_000))
        elif start.startswith(UTF16_MARKS):  # as shells of Windows write it
            yield file.read(SEARCHED).decode("utf-16", errors="replace").encode()
        elif b"\0" in start:
            yield file.read(SEARCHED)
        else:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                yield content
