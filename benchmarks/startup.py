"""Start-up, in fresh processes: what `import gated_qwen` adds to transformers' own import of Qwen3, and `--help`.

python benchmarks/startup.py [--rounds 7]
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

IMPORTS = """
import json, time
began = time.perf_counter()
from transformers import AutoModelForCausalLM
from transformers.models.qwen3 import modeling_qwen3
theirs = time.perf_counter()
import gated_qwen
print(json.dumps([theirs - began, time.perf_counter() - theirs]))
"""
HELP = [str(Path(sys.executable).with_name("gated-qwen")), "--help"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    seconds: dict[str, list[float]] = {
        "transformers' Qwen3 and Auto class": [],
        "gated_qwen after it": [],
        "--help": [],
    }
    for round_ in range(rounds + 1):
        imports = subprocess.run([sys.executable, "-c", IMPORTS], check=True, stdout=subprocess.PIPE).stdout
        began = time.perf_counter()
        subprocess.run(HELP, check=True, stdout=subprocess.DEVNULL)
        measured = [*json.loads(imports), time.perf_counter() - began]
        if round_:  # the first round warms the disk cache
            for times, value in zip(seconds.values(), measured, strict=True):
                times.append(value)
    for name, times in seconds.items():
        print(f"{name}: median {statistics.median(times):.3f} s (least {min(times):.3f}, most {max(times):.3f})")


if __name__ == "__main__":
    main()
