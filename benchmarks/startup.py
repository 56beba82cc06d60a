"""Start-up: `import gated_qwen` against transformers' own import of Qwen3, and `gated-qwen --help`; fresh processes.

python benchmarks/startup.py [--rounds 7]
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

QWEN3 = "from transformers import AutoModelForCausalLM\nfrom transformers.models.qwen3 import modeling_qwen3"
COMMANDS = {
    "transformers' Qwen3 and Auto class": [sys.executable, "-c", QWEN3],
    "the same, then gated_qwen": [sys.executable, "-c", f"{QWEN3}\nimport gated_qwen"],
    "gated-qwen --help": [str(Path(sys.executable).with_name("gated-qwen")), "--help"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for round_ in range(rounds + 1):
        for name, command in COMMANDS.items():
            began = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            if round_:  # the first round warms the disk cache
                seconds[name].append(time.perf_counter() - began)
    for name, times in seconds.items():
        print(f"{name}: median {statistics.median(times):.3f} s (min {min(times):.3f})")
    base, ours, _ = seconds.values()
    added = statistics.median(b - a for a, b in zip(base, ours, strict=True))
    print(f"added by gated_qwen: median {1000 * added:.0f} ms, minima {1000 * (min(ours) - min(base)):.0f} ms apart")


if __name__ == "__main__":
    main()
