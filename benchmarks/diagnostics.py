"""What the attention probe costs: time and memory against plain SDPA and against eager attention with its full maps.

Every round times all variants in a rotating order, and a figure is the median over rounds of the ratio to SDPA in the
same round. Times are CPU times of this process, which neighbours on a shared machine disturb least. Memory is the
growth of the peak over one forward pass in a process of its own. A finished measurement is kept in the result file and
not repeated; delete the file, or an entry of it, to measure again.

    python benchmarks/diagnostics.py [--rounds 11] [--threads 1] [--out benchmarks/results/diagnostics.json]
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from gated_qwen.diagnostics.attention_probe import AttentionProbe

SHAPES: dict[str, Any] = {
    "2 layers, 4 heads": Qwen3Config(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=32768,
    ),
    "SmolLM2-135M": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    ),
}
VARIANTS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "sdpa": lambda model: nullcontext(),
    "probe": lambda model: AttentionProbe(model),
    "probe, no columns": lambda model: AttentionProbe(model, columns="off"),
    "eager maps": lambda model: nullcontext(),
}
# shape, tokens, variants, and how many rounds for each one asked for
TIMES = (
    ("2 layers, 4 heads", 2048, ("sdpa", "probe", "probe, no columns", "eager maps"), 1.0),
    ("2 layers, 4 heads", 8192, ("sdpa", "probe", "probe, no columns", "eager maps"), 0.5),
    ("SmolLM2-135M", 2048, ("sdpa", "probe"), 0.25),
)
MEMORY = (("2 layers, 4 heads", 2048), ("2 layers, 4 heads", 8192))


def build(shape: str) -> torch.nn.Module:
    """A random model of the shape, on SDPA."""
    torch.manual_seed(0)
    config = SHAPES[shape]
    kind = LlamaForCausalLM if isinstance(config, LlamaConfig) else Qwen3ForCausalLM
    return kind(config).eval()


@torch.no_grad()
def forward(model: torch.nn.Module, tokens: torch.Tensor, variant: str) -> None:
    """Logits of the last token, watched or not; the caller has set the attention implementation."""
    with VARIANTS[variant](model):
        model(tokens, use_cache=False, logits_to_keep=1, output_attentions=variant == "eager maps")


def set_attention(model: Any, variant: str) -> None:
    model.set_attn_implementation("eager" if variant == "eager maps" else "sdpa")


def measure_time(shape: str, length: int, variants: tuple[str, ...], rounds: int) -> dict[str, Any]:
    model = build(shape)
    tokens = torch.randint(0, model.config.vocab_size, (1, length))
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for round_ in range(-1, rounds):  # the first one warms up
        turn = round_ % len(variants)
        for variant in variants[turn:] + variants[:turn]:
            set_attention(model, variant)
            began = time.process_time()
            forward(model, tokens, variant)
            if round_ >= 0:
                seconds[variant].append(time.process_time() - began)
    result: dict[str, Any] = {"rounds": rounds, "sdpa median CPU seconds": statistics.median(seconds["sdpa"])}
    for variant in variants[1:]:
        ratios = [a / b for a, b in zip(seconds[variant], seconds["sdpa"], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        result[variant] = {"ratio": statistics.median(ratios), "quartiles": [low, high]}
    return result


def peak_memory() -> int:
    """This process's peak resident memory in bytes (Linux; getrusage would count that of the parent as well)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def peak_growth(shape: str, length: int, variant: str) -> int:
    """Growth in bytes of this process's peak memory over one forward pass, after one of 64 tokens."""
    model = build(shape)
    tokens = torch.randint(0, model.config.vocab_size, (1, length))
    set_attention(model, variant)
    forward(model, tokens[:, :64], variant)
    before = peak_memory()
    forward(model, tokens, variant)
    return peak_memory() - before


def measure_memory(shape: str, length: int, threads: int) -> dict[str, int]:
    growth = {}
    for variant in VARIANTS:
        command = [sys.executable, __file__, "--peak", shape, str(length), variant, "--threads", str(threads)]
        growth[variant] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return growth


def machine() -> dict[str, Any]:
    model_name = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {"cpu": model_name, "cores": os.cpu_count(), "architecture": platform.machine()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "diagnostics.json")
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        shape, length, variant = options.peak
        print(peak_growth(shape, int(length), variant))
        return
    settings = {
        "dtype": "float32",
        "threads": options.threads,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "machine": machine(),
        "shapes": {name: config.to_diff_dict() for name, config in SHAPES.items()},
    }
    results = {**settings, "time": {}, "peak memory growth, bytes": {}}
    if options.out.exists():
        earlier = json.loads(options.out.read_text())
        for name in ("dtype", "threads", "versions", "machine"):
            if earlier[name] != settings[name]:
                parser.error(f"{options.out} was measured with other {name}: delete it, or name another with --out")
        results |= {name: earlier[name] for name in ("time", "peak memory growth, bytes")}
    options.out.parent.mkdir(parents=True, exist_ok=True)

    def keep(section: str, name: str, value: dict[str, Any]) -> None:
        load = round(os.getloadavg()[0], 1)  # how busy the machine was at the end
        results[section][name] = {**value, "load average": load}
        options.out.write_text(json.dumps(results, indent=2) + "\n")

    for shape, length in MEMORY:
        name = f"{shape}, {length} tokens"
        if name not in results["peak memory growth, bytes"]:
            keep("peak memory growth, bytes", name, measure_memory(shape, length, options.threads))
        growth = results["peak memory growth, bytes"][name]
        print(f"{name}: " + ", ".join(f"{variant} {growth[variant] / 2**20:.0f} MiB" for variant in VARIANTS))
    for shape, length, variants, share in TIMES:
        name = f"{shape}, {length} tokens"
        if name not in results["time"]:
            keep("time", name, measure_time(shape, length, variants, max(3, round(share * options.rounds))))
        figures = results["time"][name]
        for variant in variants[1:]:
            low, high = figures[variant]["quartiles"]
            print(f"{name}: {variant} {figures[variant]['ratio']:.3f} ({low:.3f} to {high:.3f}) of SDPA", flush=True)


if __name__ == "__main__":
    main()
