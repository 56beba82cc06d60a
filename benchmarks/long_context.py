"""Long context on the real SmolLM2-135M (8,192 tokens): needles before and after YaRN x2, perplexity over 32k tokens.

The model is the gated one that `gated-qwen demo` makes, whose logits are SmolLM2's. Every part writes its result when
it is done, needles one by one, and a second run goes on where the first was stopped.

    python benchmarks/long_context.py needles [--model before|after] [--task niah_single] [--threads 1]
    python benchmarks/long_context.py perplexity --text FILE
    python benchmarks/long_context.py generator --text FILE
    python benchmarks/long_context.py table

The text of the published numbers: /usr/share/doc/jargon-text/jargon.txt.gz of Debian's package jargon-text, unpacked.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import gated_qwen  # noqa: F401  registers the model
from gated_qwen.configuration.context import apply_yarn
from gated_qwen.configuration.text_file import read_text
from gated_qwen.conversion.convert import convert
from gated_qwen.conversion.smollm2 import smollm2_folder
from gated_qwen.evaluation.evaluate import run_plan
from gated_qwen.evaluation.haystack import Haystack
from gated_qwen.evaluation.perplexity import measure_perplexity
from gated_qwen.evaluation.plan import Plan
from gated_qwen.evaluation.results import summarize
from gated_qwen.evaluation.tasks import TASKS, make_sample

RESULTS = Path(__file__).parent / "results"
LENGTHS = (2048, 4096, 8192, 16384)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
NEEDLE_TASKS = ("niah_single", "niah_multikey")
YARN_FACTOR = {"before": 1.0, "after": 2.0}


def load(yarn_factor: float) -> tuple[Any, Any]:
    """The gated SmolLM2 in fp32, with YaRN in its config where the factor is above 1; and its tokenizer."""
    source = smollm2_folder()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "gated")
        convert(source, folder, gate="headwise")
        config = AutoConfig.from_pretrained(folder)
        if yarn_factor > 1.0:
            config = type(config).from_dict(apply_yarn(config.to_dict(), factor=yarn_factor))
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype="float32").eval()
    return model, AutoTokenizer.from_pretrained(source)


def environment(threads: int) -> dict[str, Any]:
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"threads": threads, "machine": platform.machine(), "dtype": "float32", **versions}


def needles(which: str, task: str, threads: int) -> None:
    plan = Plan((task,), LENGTHS, DEPTHS, samples=1, max_new_tokens=32, beyond_limit=True)
    model, tokenizer = load(YARN_FACTOR[which])
    settings = {"model": "SmolLM2-135M-Instruct, headwise gate", "rope": dict(model.config.rope_parameters)}
    path = RESULTS / f"long_context_{task}_{which}.jsonl"
    began, steps = time.monotonic(), iter(range(10**6))

    def progress(done: int) -> None:
        print(f"{task} {which}: batch {next(steps)}, {time.monotonic() - began:.0f} s", flush=True)

    run_plan(
        model, tokenizer, plan, path=path, settings=settings | environment(threads), resume=True, progress=progress
    )


def table() -> None:
    """Prints the share of needles found, in percent, as Markdown."""
    print("| task | YaRN | " + " | ".join(f"{length:,}" for length in LENGTHS) + " |\n" + "| --- " * 6 + "|")
    for task in NEEDLE_TASKS:
        for which in YARN_FACTOR:
            path = RESULTS / f"long_context_{task}_{which}.jsonl"
            if not path.exists():
                continue
            records = [json.loads(line) for line in path.read_text().splitlines()[1:]]
            rows = summarize([{**record, "depth": None} for record in records])
            cells = {row["length"]: f"{row['score']:.0f} ({row['samples']})" for row in rows}
            print(f"| {task} | {which} | " + " | ".join(cells.get(length, "") for length in LENGTHS) + " |")


def peak_memory() -> int:
    """This process's peak resident memory in bytes (Linux)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def perplexity_in_this_process(way: str, length: int, text: Path) -> dict[str, Any]:
    """Time and growth of the peak memory over that of the loaded model after a short forward."""
    model, tokenizer = load(4.0)
    ids = torch.tensor(tokenizer(read_text(text)[0], add_special_tokens=False, verbose=False)["input_ids"][:length])
    with torch.inference_mode():
        model(ids[None, :512])
        before, began, busy = peak_memory(), time.perf_counter(), time.process_time()
        if way == "chunked":
            result = measure_perplexity(model, ids)
            nll, buckets = result.nll, [list(bucket) for bucket in result.buckets]
        else:
            logits = model(ids[None], use_cache=False).logits[0, :-1].float()
            nll, buckets = cross_entropy(logits, ids[1:]).item(), []
    figures = {
        "way": way,
        "tokens": length,
        "nll": nll,
        "seconds": time.perf_counter() - began,
        "processor seconds": time.process_time() - busy,
        "peak growth, bytes": peak_memory() - before,
    }
    return figures | ({"buckets": buckets} if buckets else {})


def perplexity(text: Path, threads: int) -> None:
    """Each measurement in a process of its own, so that a peak is its own."""
    path = RESULTS / "long_context_perplexity.json"
    content = json.loads(path.read_text()) if path.exists() else {"runs": []}
    content |= {"yarn factor": 4.0, "text sha256": read_text(text)[1], "environment": environment(threads)}
    done = {(run["way"], run["tokens"]) for run in content["runs"]}
    for way, length in (("naive", 8192), ("chunked", 8192), ("chunked", 32768)):
        if (way, length) in done:
            continue
        options = ["--way", way, "--length", str(length), "--threads", str(threads)]
        command = [sys.executable, __file__, "perplexity", "--text", str(text), *options]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        content["runs"].append(json.loads(run.stdout.strip().splitlines()[-1]))
        path.write_text(json.dumps(content, indent=2) + "\n")
        print(content["runs"][-1], flush=True)


def generator(text: Path, length: int = 131072) -> None:
    """Time to build one prompt of 128k tokens for each task."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    haystacks = {"noise": Haystack.noise(), "text": Haystack.from_file(text)}
    rows = []
    for name, haystack in haystacks.items():
        for task in TASKS:
            began, busy = time.perf_counter(), time.process_time()
            sample = make_sample(task, tokenizer, length, haystack=haystack)
            times = {"seconds": time.perf_counter() - began, "processor seconds": time.process_time() - busy}
            assert len(sample.input_ids) == length - sample.max_new_tokens
            rows.append({"task": task, "haystack": name, "tokens": len(sample.input_ids), **times})
            print(rows[-1], flush=True)
    content = {"length": length, "text sha256": read_text(text)[1], "environment": environment(1), "prompts": rows}
    (RESULTS / "long_context_generator.json").write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("needles", "perplexity", "generator", "table"))
    parser.add_argument("--model", choices=tuple(YARN_FACTOR), help="both, one after the other, when left out")
    parser.add_argument("--task", choices=NEEDLE_TASKS, help="all when left out")
    parser.add_argument("--text", type=Path, help="a UTF-8 file of at least 32,768 tokens")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--way", choices=("naive", "chunked"), help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part in ("perplexity", "generator") and options.text is None:
        parser.error("--text is needed")
    torch.set_num_threads(options.threads)
    RESULTS.mkdir(exist_ok=True)
    if options.part == "needles":
        for task in (options.task,) if options.task else NEEDLE_TASKS:
            for which in (options.model,) if options.model else tuple(YARN_FACTOR):
                needles(which, task, options.threads)
    elif options.part == "table":
        table()
    elif options.part == "generator":
        generator(options.text)
    elif options.way:
        print(json.dumps(perplexity_in_this_process(options.way, options.length, options.text)))
    else:
        perplexity(options.text, options.threads)


if __name__ == "__main__":
    main()
