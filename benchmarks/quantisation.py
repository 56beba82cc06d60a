"""What quantised weights cost in loss, with the gate quantised, spared, or quantised alone; on the CPU.

Two models: a small one with elementwise gates, trained from scratch for a few minutes, so that its gates do something,
and SmolLM2-135M with the zero gate of the retrofit, which is the constant 0.5. Nine tenths of the text are for
training, the rest is measured.

    python benchmarks/quantisation.py small --text FILE --folder DIR
    python benchmarks/quantisation.py smollm2 --text FILE --folder DIR
    python benchmarks/quantisation.py table

The text of the published numbers: /usr/share/doc/jargon-text/jargon.txt.gz of Debian's package jargon-text, unpacked.
A model that is in its folder is not made again, and what is in the results is not measured again. Tools that are
installed take part: optimum-quanto and torchao. bitsandbytes leaves the gate alone whatever it is told.
"""

import argparse
import hashlib
import importlib.metadata
import json
import platform
import statistics
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from gated_qwen import GatedQwenConfig, GatedQwenForCausalLM
from gated_qwen.conversion.convert import convert
from gated_qwen.conversion.smollm2 import smollm2_folder
from gated_qwen.training.adapters import ATTENTION, MLP
from gated_qwen.training.gates import gate_parameters
from gated_qwen.training.parameter_groups import parameter_groups
from gated_qwen.training.quantisation import HEADS, skip_modules

RESULTS = Path(__file__).parent / "results" / "quantisation.json"
PACKAGES = {"quanto": "optimum-quanto", "torchao": "torchao"}
VARIANTS = ("gate quantised", "gate spared", "gate alone")
VOCAB = 2048
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
STEPS, ROWS, LENGTH, PEAK = 1500, 4, 128, 4e-3  # of training the small model
EVALUATED = {"small": (32, 256), "smollm2": (6, 256)}  # windows, tokens a window


def read(text: Path) -> tuple[str, str]:
    """The part to train on and the part to measure."""
    content = text.read_text(encoding="utf-8", errors="replace")
    cut = len(content) * 9 // 10
    return content[:cut], content[cut:]


def small_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `VOCAB` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def train_small(text: str, folder: Path) -> None:
    torch.manual_seed(0)
    model, tokenizer = GatedQwenForCausalLM(GatedQwenConfig(**SMALL)), small_tokenizer(text)
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    optimizer = torch.optim.AdamW(parameter_groups(model, learning_rate=PEAK, weight_decay=0.1))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK, total_steps=STEPS, pct_start=0.05)
    for step in range(STEPS):
        places = torch.randint(len(ids) - LENGTH, (ROWS,))
        batch = torch.stack([ids[place : place + LENGTH] for place in places])
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def make(name: str, text: str, folder: Path) -> None:
    if name == "small":
        train_small(text, folder)
    else:
        convert(smollm2_folder(), folder, gate="headwise")


def quantisers(tool: str) -> dict[str, Any]:
    """For each kind of weights of a tool, a function from a list of modules to skip to a quantisation config."""
    if tool == "quanto":
        return {
            weights: lambda skip, weights=weights: transformers.QuantoConfig(weights, modules_to_not_convert=skip)
            for weights in ("int8", "int4", "int2")
        }
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    def torchao(config: Any) -> Any:
        return lambda skip: transformers.TorchAoConfig(config, modules_to_not_convert=skip)

    return {
        "int8": torchao(Int8WeightOnlyConfig()),
        "int4, groups of 32": torchao(IntxWeightOnlyConfig(torch.int4, PerGroup(32))),
    }


def skip_lists(config: Any, tool: str) -> dict[str, list[str]]:
    """Variant -> what it leaves alone."""
    spared = skip_modules(config, tool)
    pattern = r".*\.{}" if tool == "torchao" else "{}"
    return {
        "gate quantised": list(HEADS),
        "gate spared": spared,
        "gate alone": [*(pattern.format(name) for name in (*ATTENTION, *MLP)), *HEADS],
    }


@torch.no_grad()  # quanto's 4-bit weights do not work in torch.inference_mode
def windows_nll(model: Any, ids: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """(count,) mean loss of each window, in nats per token."""
    windows = [ids[start : start + length][None] for start in torch.linspace(0, len(ids) - length, count).long()]
    return torch.stack([model(input_ids=window, labels=window, use_cache=False).loss for window in windows])


def measure(name: str, text: Path, folder: Path) -> None:
    """Adds what is not there yet to the results, one variant after the other."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor(tokenizer(read(text)[1], verbose=False)["input_ids"])
    count, length = EVALUATED[name]
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = windows_nll(plain, ids, count, length)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    entry = results.setdefault(name, {})
    entry["model"] = {
        "gate": plain.config.gate_granularity,
        "parameters": plain.num_parameters(),
        "gate_parameters": sum(p.numel() for p in gate_parameters(plain).values()),
        "loss": round(expected.mean().item(), 5),
        "loss_with_mean_gate": round(loss_with_mean_gate(plain, ids, count, length), 5),
    }
    entry["evaluated"] = {"windows": count, "tokens_a_window": length, "text_sha256": sha256(text)}
    for tool in (tool for tool, package in PACKAGES.items() if installed(package)):
        for weights, make in quantisers(tool).items():
            for variant, skip in skip_lists(plain.config, tool).items():
                key = f"{tool} {weights}, {variant}"
                if key in entry.get("runs", {}):
                    continue
                model = AutoModelForCausalLM.from_pretrained(
                    folder, dtype=torch.float32, quantization_config=make(skip)
                ).eval()
                increases = [round(value, 6) for value in (windows_nll(model, ids, count, length) - expected).tolist()]
                entry.setdefault("runs", {})[key] = increases
                print(f"{name}: {key}: {cell(increases)} thousandths", flush=True)
                results["versions"] = versions()
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def loss_with_mean_gate(model: Any, ids: torch.Tensor, count: int, length: int) -> float:
    """The loss with every gate score replaced by its mean over a window: what the gate owes to its input.

    The mean is taken before the sigmoid.
    """
    hooks = [
        module.register_forward_hook(lambda module, inputs, scores: scores.mean(1, keepdim=True).expand_as(scores))
        for name, module in model.named_modules()
        if name.endswith("g_proj")
    ]
    try:
        return windows_nll(model, ids, count, length).mean().item()
    finally:
        for hook in hooks:
            hook.remove()


def installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def versions() -> dict[str, str]:
    packages = ("torch", "transformers", *PACKAGES.values())
    found = {package: importlib.metadata.version(package) for package in packages if installed(package)}
    return {"machine": platform.machine(), **found}


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def cell(increases: list[float]) -> str:
    """Mean and standard error over windows, in thousandths of a nat per token."""
    error = statistics.stdev(increases) / len(increases) ** 0.5
    return f"{1000 * statistics.mean(increases):+.2f} ± {1000 * error:.2f}"


def table() -> None:
    """The results as Markdown: what each variant adds to the loss, and the first two compared window by window."""
    results = json.loads(RESULTS.read_text())
    for name in (name for name in EVALUATED if name in results):
        print(f"\n{name}: {results[name]['model']}\n")
        print(f"| weights | {' | '.join(VARIANTS)} | quantised less spared |\n| --- |{' ---: |' * 4}")
        runs = results[name]["runs"]
        for weights in dict.fromkeys(key.rpartition(", ")[0] for key in runs):
            quantised, spared, alone = (runs[f"{weights}, {variant}"] for variant in VARIANTS)
            saved = [a - b for a, b in zip(quantised, spared, strict=True)]
            print(f"| {weights} | {' | '.join(map(cell, (quantised, spared, alone, saved)))} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=(*EVALUATED, "table"))
    parser.add_argument("--text", type=Path)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part == "table":
        table()
        return
    if not (options.text and options.folder):
        parser.error(f"{options.part} needs --text and --folder")
    if not (options.folder / "config.json").exists():
        make(options.part, read(options.text)[0], options.folder)
    measure(options.part, options.text, options.folder)


if __name__ == "__main__":
    main()
