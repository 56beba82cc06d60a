"""Conversion: throughput against copying the same folder, and time and memory against loading and saving.

A synthetic bf16 checkpoint is converted to the official layout (every attention fused, the rest copied) and to our own
(all copied), in turn with `cp -r` of the same folder and the page cache warm. Ratios are medians over rounds. `sync`
runs before each timing and within it, since a conversion syncs its files to disk before it gives them their name. The
time of a conversion is that of the call, without starting Python.

    python benchmarks/conversion.py [--gigabytes 4] [--rounds 5] [--folder FOLDER] [--out FILE]
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

JOBS = ("cp -r", "convert to official", "convert to gated_qwen", "load and save_pretrained")
IN_PROCESS = """
import json, os, sys, time
from pathlib import Path
import torch, gated_qwen
from gated_qwen.conversion.convert import convert

def status(field):
    return 1024 * int(next(l for l in open("/proc/self/status") if l.startswith(field)).split()[1])

source, target, what = sys.argv[1:]
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
before, began = status("VmRSS"), time.perf_counter()
if what == "load and save_pretrained":
    model = gated_qwen.GatedQwenForCausalLM.from_pretrained(source, dtype="auto")
    model.save_pretrained(target, max_shard_size="500MB")
else:
    convert(source, target, to=what.removeprefix("convert to "), max_shard_size="500MB")
os.sync()
peak_private = status("VmHWM") - before
print(json.dumps({"seconds": time.perf_counter() - began, "peak growth": peak_private}))
"""


def make_checkpoint(folder: Path, gigabytes: float) -> None:
    """A gated bf16 model of about the size, in 500 MB shards, written shard by shard."""
    import torch

    import gated_qwen

    layers = max(1, round(gigabytes * 1e9 / 2 / 117e6))
    config = gated_qwen.GatedQwenConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=12288,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        dtype="bfloat16",
    )
    torch.set_default_dtype(torch.bfloat16)
    gated_qwen.GatedQwenForCausalLM(config).save_pretrained(folder, max_shard_size="500MB")


def timed_copy(source: Path, target: Path) -> dict[str, float]:
    began = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    copied = time.perf_counter() - began
    os.sync()
    return {"seconds": time.perf_counter() - began, "without sync": copied}


def timed(what: str, source: Path, target: Path) -> dict[str, float]:
    command = [sys.executable, "-c", IN_PROCESS, str(source), str(target), what]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the checkpoint is kept; default: a temporary one"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "conversion.json")
    options = parser.parse_args()
    work = options.folder or Path(tempfile.mkdtemp(prefix="gated-qwen-bench-"))
    source = work / "source"
    if not (source / "config.json").exists():
        subprocess.run(
            [sys.executable, __file__, "--gigabytes", str(options.gigabytes), "--folder", str(work), "--make"],
            check=True,
        )
    sizes = [path.stat().st_size for path in source.glob("*.safetensors")]
    rounds: dict[str, list[dict[str, float]]] = {job: [] for job in JOBS}
    for round_ in range(options.rounds + 1):
        for job in JOBS:
            for path in source.iterdir():
                path.read_bytes()  # the page cache is warm
            os.sync()
            target = work / "target"
            figures = timed_copy(source, target) if job == "cp -r" else timed(job, source, target)
            shutil.rmtree(target)
            if round_:
                rounds[job].append(figures)
                print(round_, job, {name: round(value, 2) for name, value in figures.items()}, flush=True)
    summary = {}
    for job in JOBS:
        ratios = [a["seconds"] / b["seconds"] for a, b in zip(rounds["cp -r"], rounds[job], strict=True)]
        summary[job] = {
            "median seconds": statistics.median(r["seconds"] for r in rounds[job]),
            "throughput relative to cp -r": statistics.median(ratios),
            "peak growth, bytes": max(r.get("peak growth", 0) for r in rounds[job]),
        }
    result = {
        "bytes": sum(sizes),
        "largest shard": max(sizes),
        "jobs": summary,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    if options.folder is None:
        shutil.rmtree(work)


if __name__ == "__main__":
    if "--make" in sys.argv:
        make_checkpoint(Path(sys.argv[sys.argv.index("--folder") + 1]) / "source", float(sys.argv[2]))
    else:
        main()
