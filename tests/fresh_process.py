"""Calls functions in a Python process of its own: a machine with torch and transformers and nothing of ours.

The package and transformers' optional companions cannot be imported there, nothing is on stdin, the modules that
transformers makes of remote code go to an empty folder, and any of the versions of `versions.py` can take the place
of the installed transformers. Starting costs seconds, so a test module shares one process where it may.
"""

import inspect
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

BLOCKED = ("gated_qwen", "accelerate", "gguf", "peft")
TIMEOUT_S = 120

# Compiled under the name and at the line of the file it came from, so that a traceback shows the real source.
_SERVE = """
import json, sys, traceback
from multiprocessing.connection import Connection

connection = Connection(int(sys.argv[1]))
for name in sys.argv[2:]:
    sys.modules[name] = None  # to import it raises ModuleNotFoundError
import torch
torch.set_num_threads(1)
scope = {}
while True:
    try:
        functions, name, arguments = json.loads(connection.recv_bytes())
    except EOFError:
        break
    try:
        for file, line, source in functions:
            exec(compile("\\n" * (line - 1) + source, file, "exec"), scope)
        answer = {"value": scope[name](*arguments)}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    connection.send_bytes(json.dumps(answer).encode())
"""


class FreshProcess:
    """One process, which answers calls in order until it is closed.

    Args:
        folder: an empty or missing folder for what it writes: output, module cache, working directory.
        python_path: goes in front of the installed packages, from `versions.environment`.
        blocked: names of packages that cannot be imported.
        helpers: functions that the called functions use.

    Example:
        >>> with FreshProcess(tmp_path) as process:
        ...     assert process.call(logits, str(folder)) == expected
    """

    def __init__(
        self,
        folder: Path,
        python_path: Path | None = None,
        blocked: tuple[str, ...] = BLOCKED,
        helpers: tuple[Callable[..., Any], ...] = (),
    ):
        self._helpers = helpers
        self._log = folder / "output.txt"
        work = folder / "work"
        work.mkdir(parents=True)
        environment = {
            **os.environ,
            "PYTHONPATH": str(python_path or ""),
            "HF_HOME": str(folder / "home"),
            "HF_MODULES_CACHE": str(folder / "modules"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._connection, theirs = Pipe()
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, str(theirs.fileno()), *blocked],
                cwd=work,
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Begins a call of `function`, whose imports stand inside it; arguments and result are JSON."""
        functions = []
        for each in (*self._helpers, function):
            lines, first = inspect.getsourcelines(each)
            functions.append((inspect.getsourcefile(each), first, textwrap.dedent("".join(lines))))
        self._connection.send_bytes(json.dumps([functions, function.__name__, arguments]).encode())

    def result(self) -> Any:
        """What the call returned; an `AssertionError` with its traceback if it raised."""
        try:
            if not self._connection.poll(TIMEOUT_S):
                raise AssertionError(f"no answer within {TIMEOUT_S} seconds; it printed:\n{self.output}")
            answer = json.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise AssertionError(f"the process ended without an answer; it printed:\n{self.output}") from error
        if "error" in answer:
            raise AssertionError(f"the call raised in its process:\n{answer['error']}")
        return answer["value"]

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`start` and `result`."""
        self.start(function, *arguments)
        return self.result()

    @property
    def output(self) -> str:
        """All that the process has printed so far, on stdout and stderr."""
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        self._connection.close()
        self._process.kill()  # it holds nothing, and to unload torch in peace takes seconds
        self._process.wait()

    def __enter__(self) -> "FreshProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
