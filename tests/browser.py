"""A real browser without a window, for tests of pages: Debian's chromium, or Chrome.

Where none is installed such tests are skipped; with GATED_QWEN_BROWSER=required they fail instead.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
)


def browser() -> str:
    """The browser's command; without one the test is skipped, or fails where it is required."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        message = f"no browser found ({', '.join(NAMES)}); on Debian: apt-get install chromium"
        if os.environ.get("GATED_QWEN_BROWSER") == "required":
            pytest.fail(message)
        pytest.skip(message)
    return found


def open_page(page: Path, *options: str) -> tuple[str, list[str]]:
    """Opens a file; returns what the browser printed (with --dump-dom, the document) and its console's messages."""
    with tempfile.TemporaryDirectory() as profile:
        command = [browser(), *QUIET, f"--user-data-dir={profile}", *options, page.absolute().as_uri()]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return run.stdout, [line for line in run.stderr.splitlines() if "CONSOLE" in line]
