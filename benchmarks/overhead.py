"""What a gate costs: prefill, decode and training step against transformers' Qwen3 or Qwen3-MoE of the same shape.

Every round times all variants in a rotating order, and each variant's figure is the median over rounds of its ratio
to the ungated model in the same round, so that a machine whose speed drifts gives the same answer. Beside it stands
what the gate must cost: its share of FLOPs (prefill, training) or of the bytes that a step reads (decode).

    python benchmarks/overhead.py [--family dense|moe] [--rounds 15] [--threads 1] [--clock wall|processor] [--out F]

On a machine that others use too, take the processor's clock: it does not run while they do.
"""

import argparse
import inspect
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    DynamicCache,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from gated_qwen import GatedQwenConfig, GatedQwenForCausalLM, GatedQwenMoeConfig, GatedQwenMoeForCausalLM
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
# The same with the paper's ratio of query to key/value heads, and few and narrow experts for want of memory.
MOE_SHAPE = {
    **SHAPE,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,
}


@dataclass(frozen=True)
class Family:
    """An ungated family of transformers, ours, and the shape in which they are compared."""

    name: str
    ungated: tuple[type, type]
    gated: tuple[type, type]
    shape: dict[str, Any]

    def config(self, variant: str) -> PreTrainedConfig:
        """Our config of a variant, that of the ungated model too, for the accounting."""
        gate = {"gate_positions": []} if variant == "ungated" else {"gate_granularity": variant}
        return self.gated[0](**self.shape, **gate)

    def build(self, variant: str) -> torch.nn.Module:
        torch.manual_seed(0)
        if variant == "ungated":
            config_class, model_class = self.ungated
            return model_class(config_class(**self.shape))
        return self.gated[1](self.config(variant))


FAMILIES = {
    "dense": Family("Qwen3", (Qwen3Config, Qwen3ForCausalLM), (GatedQwenConfig, GatedQwenForCausalLM), SHAPE),
    "moe": Family(
        "Qwen3-MoE",
        (Qwen3MoeConfig, Qwen3MoeForCausalLM),
        (GatedQwenMoeConfig, GatedQwenMoeForCausalLM),
        MOE_SHAPE,
    ),
}
PREFILL_TOKENS, DECODE_CONTEXT, DECODE_STEPS, TRAIN_TOKENS = 512, 512, 16, 256
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
VARIANTS = ("ungated", "headwise", "elementwise")
CACHE = "cache" if "cache" in inspect.signature(Qwen3ForCausalLM.forward).parameters else "past_key_values"


class Prefill:
    """Logits of the last of 512 tokens."""

    def __init__(self, family: Family, variant: str) -> None:
        self.model = family.build(variant).eval()
        self.tokens = torch.randint(0, family.shape["vocab_size"], (1, PREFILL_TOKENS))

    @torch.no_grad()
    def __call__(self) -> None:
        self.model(self.tokens, logits_to_keep=1)


class Decode:
    """16 steps of one token after a context of 512 tokens."""

    def __init__(self, family: Family, variant: str) -> None:
        self.model = family.build(variant).eval()
        self.context = torch.randint(0, family.shape["vocab_size"], (1, DECODE_CONTEXT))
        self.cache = DynamicCache(config=self.model.config)
        with torch.no_grad():
            self.model(self.context, use_cache=True, **{CACHE: self.cache})

    @torch.no_grad()
    def __call__(self) -> None:
        for _ in range(DECODE_STEPS):
            self.model(self.context[:, :1], use_cache=True, **{CACHE: self.cache})
        self.cache.crop(-DECODE_STEPS)


class TrainingStep:
    """Forward, backward and AdamW on 256 tokens; of experts with the load-balancing loss."""

    def __init__(self, family: Family, variant: str) -> None:
        self.model = family.build(variant).train()
        self.model.config.output_router_logits = "num_experts" in family.shape
        self.tokens = torch.randint(0, family.shape["vocab_size"], (1, TRAIN_TOKENS))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)

    def __call__(self) -> None:
        self.model(self.tokens, labels=self.tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


TASKS = {"prefill": Prefill, "decode": Decode, "training step": TrainingStep}


def expected_ratio(task: str, family: Family, variant: str) -> float:
    """The gated model's FLOPs (prefill, training) or bytes read (decode) over those of the ungated one."""
    costs = []
    for config in (family.config(variant), family.config("ungated")):
        if task == "decode":
            weights = count_parameters(config)
            read = weights.active - weights.embedding  # one row of the embedding is read
            costs.append(4 * read + kv_cache_bytes(config, DECODE_CONTEXT, bytes_per_element=4))
        else:
            length = PREFILL_TOKENS if task == "prefill" else TRAIN_TOKENS
            flops = flops_per_token(config, length // 2)  # a causal mask attends to half of the keys on average
            costs.append(flops.total - (flops.lm_head if task == "prefill" else 0))
    return costs[0] / costs[1]


def measure(task: str, family: Family, rounds: int, clock: Callable[[], float]) -> dict:
    runs = {variant: TASKS[task](family, variant) for variant in VARIANTS}
    for run in runs.values():
        run()
        run()
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for round_ in range(rounds):
        order = VARIANTS[round_ % len(VARIANTS) :] + VARIANTS[: round_ % len(VARIANTS)]
        for variant in order:
            began = clock()
            runs[variant]()
            seconds[variant].append(clock() - began)
    result = {"ungated median seconds": statistics.median(seconds["ungated"])}
    for variant in VARIANTS[1:]:
        ratios = [a / b for a, b in zip(seconds[variant], seconds["ungated"], strict=True)]
        quarters = statistics.quantiles(ratios, n=4)
        result[variant] = {
            "ratio": statistics.median(ratios),
            "quartiles": [quarters[0], quarters[2]],
            "expected ratio": expected_ratio(task, family, variant),
        }
    return result


def peak_memory() -> int:
    """This process's peak resident memory in bytes (Linux; getrusage would count that of the parent as well)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def peak_training_memory(family: Family, variant: str) -> int:
    """Growth in bytes of the peak memory over three training steps, model and optimizer included."""
    before = peak_memory()
    step = TrainingStep(family, variant)
    for _ in range(3):
        step()
    return peak_memory() - before


def peak_in_a_process_of_its_own(family: str, variant: str, threads: int) -> int:
    command = [sys.executable, __file__, "--peak", variant, "--family", family, "--threads", str(threads)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=FAMILIES, default="dense")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/overhead.json, or overhead_moe.json")
    parser.add_argument("--peak", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    family = FAMILIES[options.family]
    name = "overhead.json" if options.family == "dense" else f"overhead_{options.family}.json"
    out = options.out or Path(__file__).parent / "results" / name
    if options.peak:
        print(peak_training_memory(family, options.peak))
        return
    results = {
        "shape": family.shape,
        "dtype": "float32",
        "threads": options.threads,
        "rounds": options.rounds,
        "clock": options.clock,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "machine": platform.machine(),
        "tasks": {},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    print(
        f"| task | gate | ratio to {family.name} (quartiles) | by FLOPs or bytes | above that |\n" + "| --- " * 5 + "|"
    )
    for task in TASKS:
        figures = results["tasks"][task] = measure(task, family, options.rounds, CLOCKS[options.clock])
        out.write_text(json.dumps(results, indent=2) + "\n")
        for variant in VARIANTS[1:]:
            f = figures[variant]
            low, high = f["quartiles"]
            above = 100 * (f["ratio"] - f["expected ratio"])
            print(
                f"| {task} | {variant} | {f['ratio']:.3f} ({low:.3f} to {high:.3f}) | {f['expected ratio']:.3f} "
                f"| {above:+.1f} points |",
                flush=True,
            )
    results["peak training memory, bytes"] = {
        variant: peak_in_a_process_of_its_own(options.family, variant, options.threads) for variant in VARIANTS
    }
    out.write_text(json.dumps(results, indent=2) + "\n")
    for variant, size in results["peak training memory, bytes"].items():
        print(f"peak memory of a training step, {variant}: {size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
