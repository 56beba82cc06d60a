"""What a diagnosis of one long document costs, end to end, beside the plain forward pass of the same tokens.

Every measurement is a process of its own: the time from the first token to the last, and the growth of its peak
resident memory over that of the loaded model. Results are added to the file as they come, under `way@length`.

    python benchmarks/diagnose_long.py MODEL --text FILE --lengths 8192,32768 [--ways diagnose,plain] [--threads 1]
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers

RESULTS = Path(__file__).parent / "results" / "diagnose_long.json"


def peak_memory() -> int:
    """This process's peak resident memory in bytes (Linux)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def measure(model_path: str, text: Path, way: str, length: int) -> dict[str, object]:
    from gated_qwen.diagnostics.diagnose import diagnose, read_in_chunks
    from gated_qwen.diagnostics.text_sequences import read_sequences
    from gated_qwen.evaluation.loading import load_model

    model, tokenizer = load_model(model_path)
    found = read_sequences(text, tokenizer, length=length)
    before, began, processor = peak_memory(), time.monotonic(), time.process_time()
    result: dict[str, object] = {"tokens": length, "model": Path(model_path).name}
    if way == "plain":
        with torch.inference_mode():
            read_in_chunks(model, torch.tensor(found.input_ids))
    else:
        diagnosis = diagnose(
            model, found.input_ids, progress=lambda tokens: print(tokens, file=sys.stderr, flush=True)
        )
        result["first_token_share"] = diagnosis["attention"]["mean"]["first_token_share"]
        result["uniform"] = diagnosis["attention"]["mean"]["uniform"]
        result["worst_layer"] = diagnosis["attention"]["worst_layer"]
        result["residual"] = diagnosis["activations"]["summary"]["residual"]
        result["chunk"] = diagnosis["input"]["chunk"]
    result |= {
        "seconds": round(time.monotonic() - began, 1),
        "processor_seconds": round(time.process_time() - processor, 1),
        "load_average": round(os.getloadavg()[0], 1),
        "peak_growth_bytes": peak_memory() - before,
        "peak_bytes": peak_memory(),
    }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--lengths", default="8192,32768")
    parser.add_argument("--ways", default="diagnose,plain")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--one", nargs=2, metavar=("WAY", "LENGTH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one:
        print(json.dumps(measure(options.model, options.text, options.one[0], int(options.one[1]))))
        return
    for length in options.lengths.split(","):
        for way in options.ways.split(","):
            command = [sys.executable, __file__, options.model, "--text", str(options.text)]
            command += ["--threads", str(options.threads), "--one", way, length]
            run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            record(options.out, f"{way}@{length}", json.loads(run.stdout.splitlines()[-1]), options)


def record(file: Path, name: str, result: dict[str, object], options: argparse.Namespace) -> None:
    content = json.loads(file.read_text()) if file.exists() else {"runs": {}}
    content |= {
        "text": options.text.name,
        "sha256": hashlib.sha256(options.text.read_bytes()).hexdigest(),
        "threads": options.threads,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "machine": platform.machine(),
    }
    content["runs"][name] = result
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2) + "\n")
    print(name, result, flush=True)


if __name__ == "__main__":
    main()
