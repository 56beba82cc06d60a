"""Every test runs offline, on one thread and from the same seed."""

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_seed():
    torch.manual_seed(0)


@pytest.fixture
def run_command(monkeypatch, capfd):
    """Runs `gated-qwen ARGUMENTS` in this process; returns exit code, stdout and stderr."""
    import gated_qwen.cli

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["gated-qwen", *map(str, arguments)])
        monkeypatch.setattr(gated_qwen.cli.console, "debug", False)
        monkeypatch.setenv("COLUMNS", "200")
        try:
            gated_qwen.cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capfd.readouterr()
        return code, out, err

    return run
