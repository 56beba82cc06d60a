"""Whatever stops a conversion, and wherever: the target is absent or complete, and the source is untouched."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny import tiny_model

from gated_qwen.conversion.convert import convert

# Opening to write, and whatever changes names or attributes: the steps at which a run can be cut off.
STEPS = ("os.rename", "os.truncate", "os.chmod", "os.mkdir", "shutil.copyfile", "shutil.rmtree")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("conversion") / "source"
    tiny_model(num_hidden_layers=1).save_pretrained(folder)  # the test takes a process for every step
    (folder / "tokenizer.json").write_text("{}")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file's bytes; the provenance without its date."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        found[path.name] = path.read_bytes()
        if path.name == "provenance.json":
            found[path.name] = json.dumps({**json.loads(path.read_text()), "created": None}).encode()
    return found


def run_until(step: int | None, ending: str, source: Path, target: Path, overwrite: bool) -> tuple[bool, int]:
    """Converts in a forked process that ends itself before write step `step`; returns success and steps taken."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        count = 0
        one_at_a_time = threading.Lock()  # weights are written by two threads

        def count_step() -> None:
            nonlocal count
            with one_at_a_time:
                count += 1
                os.write(writing, b".")
                if count == step:
                    if ending == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise OSError("interrupted")

        def audit(event: str, arguments: tuple) -> None:
            if event in STEPS or (event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_ACCMODE):
                count_step()

        pwrite, fsync = os.pwrite, os.fsync
        os.pwrite = lambda *a: (count_step(), pwrite(*a))[1]
        os.fsync = lambda *a: (count_step(), fsync(*a))[1]
        sys.addaudithook(audit)
        try:
            convert(source, target, to="official", max_shard_size="20KB", overwrite=overwrite)
            os._exit(0)
        except BaseException:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        steps = len(pipe.read())
    return os.waitpid(child, 0)[1] == 0, steps


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["exception", "kill"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["fresh target", "replacing"])
def test_cut_off_at_any_step_the_target_is_absent_or_complete(ending, overwrite, source, tmp_path):
    target = tmp_path / "target"
    before = contents(source)
    old = None
    if overwrite:
        convert(source, target)
        old = contents(target)
    finished, steps = run_until(None, ending, source, tmp_path / "reference", False)
    assert finished and steps > 30
    complete = contents(tmp_path / "reference")
    for step in range(1, steps + 10 * overwrite + 1):  # moving the old folder away takes steps of its own
        run_until(step, ending, source, target, overwrite)
        state = contents(target) if target.exists() else None
        assert state in ((None, complete) if not overwrite else (None, old, complete)), step
        assert contents(source) == before, step
        left = [path for path in tmp_path.iterdir() if path.name not in ("target", "reference")]
        assert all(path.name.startswith(".") for path in left), "nothing else that looks like a model"
        for path in left:
            shutil.rmtree(path)
        if state == complete or (overwrite and state is None):
            shutil.rmtree(target, ignore_errors=True)
            if overwrite:
                convert(source, target)
                old = contents(target)
    finished, _ = run_until(None, ending, source, target, overwrite)
    assert finished and contents(target) == complete, "a rerun is bit-identical"


MEASURE = """
import json, sys
from pathlib import Path
import gated_qwen
from gated_qwen.conversion.convert import convert

def status(field):
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith(field)).split()[1])

convert(sys.argv[1], sys.argv[3], to="official")  # everything that is loaded once is loaded
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
before = status("VmRSS")
convert(sys.argv[2], sys.argv[4], to="official", max_shard_size="256MiB")
print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures memory as Linux counts it")
def test_two_gibibytes_in_eight_shards_need_less_memory_than_one_and_a_half_shards(source, tmp_path):
    import torch

    import gated_qwen

    config = gated_qwen.GatedQwenConfig(
        vocab_size=16384,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=15,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        architectures=["GatedQwenForCausalLM"],
        dtype="bfloat16",
    )
    from gated_qwen.conversion.plan import filled
    from gated_qwen.conversion.writer import write_weights

    with torch.device("meta"):
        shapes = {n: tuple(t.shape) for n, t in gated_qwen.GatedQwenForCausalLM(config).state_dict().items()}
    big = tmp_path / "big"
    big.mkdir()
    config.save_pretrained(big)
    write_weights(big, [filled(name, "BF16", shape, 0.5) for name, shape in shapes.items()], 280 * 2**20)
    shards = [path.stat().st_size for path in big.glob("*.safetensors")]
    assert sum(shards) > 2**31 * 0.95 and len(shards) >= 8
    command = [sys.executable, "-c", MEASURE, str(source), str(big), str(tmp_path / "warm"), str(tmp_path / "out")]
    growth = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    largest = max(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert growth < 1.5 * largest, f"{growth / 2**20:.0f} MiB for shards of {largest / 2**20:.0f} MiB"
    some = load_file(next((tmp_path / "out").glob("model-00003-*")))
    assert all(bool((tensor == 0.5).all()) for tensor in some.values())
