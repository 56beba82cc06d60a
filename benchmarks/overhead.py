"""What a gate costs: prefill, decode and training step against transformers' Qwen3 of the same shape.

Every round times all variants in a rotating order, and each variant's figure is the median over rounds of its ratio
to Qwen3 in the same round, so that a machine whose speed drifts gives the same answer. Beside it stands what the gate
must cost: its share of FLOPs (prefill, training) or of the bytes that a step reads (decode).

    python benchmarks/overhead.py [--rounds 15] [--threads 1] [--out benchmarks/results/overhead.json]
"""

import argparse
import inspect
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from gated_qwen import GatedQwenConfig, GatedQwenForCausalLM
from gated_qwen.configuration.accounting import count_parameters, flops_per_token, kv_cache_bytes

# Qwen3-0.6B's layer (width, heads, FFN), fewer of them and a small vocabulary, so that a round takes seconds on a CPU.
SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
PREFILL_TOKENS, DECODE_CONTEXT, DECODE_STEPS, TRAIN_TOKENS = 512, 512, 16, 256
VARIANTS = ("qwen3", "headwise", "elementwise")
CACHE = "cache" if "cache" in inspect.signature(Qwen3ForCausalLM.forward).parameters else "past_key_values"


def build(variant: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if variant == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    return GatedQwenForCausalLM(GatedQwenConfig(**SHAPE, gate_granularity=variant))


def config_of(variant: str) -> GatedQwenConfig:
    gate = {"gate_positions": []} if variant == "qwen3" else {"gate_granularity": variant}
    return GatedQwenConfig(**SHAPE, **gate)


class Prefill:
    """Logits of the last of 512 tokens."""

    def __init__(self, variant: str) -> None:
        self.model = build(variant).eval()
        self.tokens = torch.randint(0, SHAPE["vocab_size"], (1, PREFILL_TOKENS))

    @torch.no_grad()
    def __call__(self) -> None:
        self.model(self.tokens, logits_to_keep=1)


class Decode:
    """16 steps of one token after a context of 512 tokens."""

    def __init__(self, variant: str) -> None:
        self.model = build(variant).eval()
        self.context = torch.randint(0, SHAPE["vocab_size"], (1, DECODE_CONTEXT))
        self.cache = DynamicCache(config=self.model.config)
        with torch.no_grad():
            self.model(self.context, use_cache=True, **{CACHE: self.cache})

    @torch.no_grad()
    def __call__(self) -> None:
        for _ in range(DECODE_STEPS):
            self.model(self.context[:, :1], use_cache=True, **{CACHE: self.cache})
        self.cache.crop(-DECODE_STEPS)


class TrainingStep:
    """Forward, backward and AdamW on 256 tokens."""

    def __init__(self, variant: str) -> None:
        self.model = build(variant).train()
        self.tokens = torch.randint(0, SHAPE["vocab_size"], (1, TRAIN_TOKENS))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)

    def __call__(self) -> None:
        self.model(self.tokens, labels=self.tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


TASKS = {"prefill": Prefill, "decode": Decode, "training step": TrainingStep}


def expected_ratio(task: str, variant: str) -> float:
    """The gated model's FLOPs (prefill, training) or bytes read (decode) over those of the ungated one."""
    costs = []
    for config in (config_of(variant), config_of("qwen3")):
        if task == "decode":
            weights = count_parameters(config)
            read = weights.total - weights.embedding  # one row of the embedding is read
            costs.append(4 * read + kv_cache_bytes(config, DECODE_CONTEXT, bytes_per_element=4))
        else:
            length = PREFILL_TOKENS if task == "prefill" else TRAIN_TOKENS
            flops = flops_per_token(config, length // 2)  # a causal mask attends to half of the keys on average
            costs.append(flops.total - (flops.lm_head if task == "prefill" else 0))
    return costs[0] / costs[1]


def measure(task: str, rounds: int) -> dict:
    runs = {variant: TASKS[task](variant) for variant in VARIANTS}
    for run in runs.values():
        run()
        run()
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for round_ in range(rounds):
        order = VARIANTS[round_ % len(VARIANTS) :] + VARIANTS[: round_ % len(VARIANTS)]
        for variant in order:
            began = time.perf_counter()
            runs[variant]()
            seconds[variant].append(time.perf_counter() - began)
    result = {"qwen3 median seconds": statistics.median(seconds["qwen3"])}
    for variant in VARIANTS[1:]:
        ratios = [a / b for a, b in zip(seconds[variant], seconds["qwen3"], strict=True)]
        quarters = statistics.quantiles(ratios, n=4)
        result[variant] = {
            "ratio": statistics.median(ratios),
            "quartiles": [quarters[0], quarters[2]],
            "expected ratio": expected_ratio(task, variant),
        }
    return result


def peak_memory() -> int:
    """This process's peak resident memory in bytes (Linux; getrusage would count that of the parent as well)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def peak_training_memory(variant: str) -> int:
    """Growth in bytes of the peak memory over three training steps, model and optimizer included."""
    before = peak_memory()
    step = TrainingStep(variant)
    for _ in range(3):
        step()
    return peak_memory() - before


def peak_in_a_process_of_its_own(variant: str, threads: int) -> int:
    command = [sys.executable, __file__, "--peak", variant, "--threads", str(threads)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "overhead.json")
    parser.add_argument("--peak", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        print(peak_training_memory(options.peak))
        return
    results = {
        "shape": SHAPE,
        "dtype": "float32",
        "threads": options.threads,
        "rounds": options.rounds,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "machine": platform.machine(),
        "tasks": {},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    print("| task | gate | ratio to Qwen3 (quartiles) | by FLOPs or bytes | above that |\n" + "| --- " * 5 + "|")
    for task in TASKS:
        figures = results["tasks"][task] = measure(task, options.rounds)
        options.out.write_text(json.dumps(results, indent=2) + "\n")
        for variant in VARIANTS[1:]:
            f = figures[variant]
            low, high = f["quartiles"]
            above = 100 * (f["ratio"] - f["expected ratio"])
            print(
                f"| {task} | {variant} | {f['ratio']:.3f} ({low:.3f} to {high:.3f}) | {f['expected ratio']:.3f} "
                f"| {above:+.1f} points |",
                flush=True,
            )
    results["peak training memory, bytes"] = {v: peak_in_a_process_of_its_own(v, options.threads) for v in VARIANTS}
    options.out.write_text(json.dumps(results, indent=2) + "\n")
    for variant, size in results["peak training memory, bytes"].items():
        print(f"peak memory of a training step, {variant}: {size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
