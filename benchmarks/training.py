"""What training costs with gates, and what packing and the loss in chunks save, through the command's own Trainer.

Speed: rounds in which each variant takes a few steps, in rotating order; a figure is the median over rounds of the
ratio to transformers' Qwen3 in the same round. Packing: one pass over the docstrings of Python's standard library.
Chunks: each in a process of its own, for its peak memory. Times are of the processor's clock, one thread.

    python benchmarks/training.py [--rounds 10] [--parts speed packing chunks] [--out FILE]

Parts that are not run keep what FILE says of them.
"""

import argparse
import ast
import json
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PrinterCallback, Qwen3Config, Qwen3ForCausalLM, TrainerCallback, TrainingArguments

from gated_qwen import GatedQwenConfig, GatedQwenForCausalLM
from gated_qwen.configuration.accounting import count_parameters
from gated_qwen.training.chunked_loss import loss_in_chunks
from gated_qwen.training.data import collate, tokenise
from gated_qwen.training.packing import one_document_a_row, pack
from gated_qwen.training.recipe import GateSection, LossSection, TokenizerTraining
from gated_qwen.training.tokenizer import learn_tokenizer
from gated_qwen.training.trainer import GatedTrainer

SHAPE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
VARIANTS = ("qwen3", "headwise", "elementwise")
ROWS, LENGTH, STEPS = 2, 128, 4  # of a step, and steps of a round; the first step of each warms up
SMALL = {**SHAPE, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1, "vocab_size": 2048}
DOCUMENTS, ROW_LENGTH, BATCH = 1500, 256, 8
WHOLE_VOCABULARY, CHUNK, CHUNKED_TOKENS = 151_936, 256, (1024, 2048)
RESULTS = Path(__file__).parent / "results" / "training.json"


def build(variant: str, shape: dict[str, Any] = SHAPE) -> Any:
    torch.manual_seed(0)
    if variant == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**shape))
    return GatedQwenForCausalLM(GatedQwenConfig(**shape, gate_granularity=variant))


class StepClock(TrainerCallback):
    """Processor seconds from the end of the first step to the end of the last one."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.began = time.process_time()
        self.seconds = time.process_time() - self.began


def trainer_of(variant: str, folder: str) -> tuple[GatedTrainer, StepClock]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, SHAPE["vocab_size"], (ROWS * STEPS, LENGTH), generator=generator).tolist()
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    clock = StepClock()
    trainer = GatedTrainer(
        gate=GateSection(),
        loss=LossSection(),
        model=build(variant),
        args=arguments,
        train_dataset=list(pack(ids, LENGTH)),
        data_collator=partial(collate, pad=0),
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer, clock


def measure_speed(rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        trainers = {variant: trainer_of(variant, folder) for variant in VARIANTS}
        for round_ in range(rounds + 1):
            for place in range(len(VARIANTS)):
                variant = VARIANTS[(round_ + place) % len(VARIANTS)]
                trainer, clock = trainers[variant]
                trainer.train()
                if round_:  # the first round warms up
                    seconds[variant].append(clock.seconds)
    tokens = ROWS * LENGTH * (STEPS - 1)
    base = trainers["qwen3"][0].model.num_parameters()
    found = {}
    for variant, times in seconds.items():
        ratios = [ours / theirs for ours, theirs in zip(times, seconds["qwen3"], strict=True)]
        found[variant] = {
            "tokens_per_processor_second": round(tokens / statistics.median(times), 1),
            "time_ratio_median": round(statistics.median(ratios), 4),
            "time_ratio_of_minima": round(min(times) / min(seconds["qwen3"]), 4),
            "time_ratios": [round(ratio, 4) for ratio in ratios],
            "parameters_ratio": round(trainers[variant][0].model.num_parameters() / base, 4),
        }
    gated = GatedQwenConfig(**SHAPE, gate_granularity="headwise")
    assert count_parameters(gated).total == trainers["headwise"][0].model.num_parameters()
    return {"shape": SHAPE, "tokens_per_step": ROWS * LENGTH, "steps": STEPS - 1, "rounds": rounds, **found}


def docstrings() -> Iterator[str]:
    """The docstrings of the standard library's modules, classes and functions: documents of uneven length."""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                yield text


def measure_packing() -> dict[str, Any]:
    texts = list(docstrings())[:DOCUMENTS]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = learn_tokenizer(texts, TokenizerTraining(2048), Path(folder) / "tokenizer")
    documents = list(tokenise(texts, tokenizer))
    special = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    rows = {
        "packed": list(pack(documents, ROW_LENGTH, **special, pad=0)),
        "one document a row": list(one_document_a_row(documents, ROW_LENGTH, **special)),
    }
    found: dict[str, Any] = {"documents": len(documents), "row_length": ROW_LENGTH, "rows_in_a_batch": BATCH}
    model = build("headwise", SMALL).train()
    for name, made in rows.items():
        order = torch.randperm(len(made), generator=torch.Generator().manual_seed(0)).tolist()
        batches = [
            collate([made[i] for i in order[first : first + BATCH]], pad=0) for first in range(0, len(order), BATCH)
        ]
        computed = sum(batch["input_ids"].numel() for batch in batches)
        targets = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        began = time.process_time()
        for batch in batches:
            model(**batch, use_cache=False).loss.backward()
            model.zero_grad()
        seconds = time.process_time() - began
        found[name] = {"rows": len(made), "tokens": computed, "targets": targets, "seconds": round(seconds, 2)}
        found[name]["tokens_without_target"] = round(1 - targets / computed, 4)
    return found


def run_loss(tokens: int, chunk: int) -> dict[str, float]:
    """One forward and backward pass in this process; `chunk` 0 is the loss on all logits at once."""
    shape = {**SMALL, "vocab_size": WHOLE_VOCABULARY, "num_hidden_layers": 1, "max_position_embeddings": 8192}
    model = build("headwise", shape).train()
    ids = torch.randint(WHOLE_VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0))
    model(ids[:, :8], labels=ids[:, :8], use_cache=False).loss.backward()  # gradients exist
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak counts anew
    before = memory("VmRSS")
    began = time.process_time()
    if chunk:
        with loss_in_chunks(model, chunk):
            loss = model(ids, labels=ids, use_cache=False).loss
    else:
        loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    seconds = time.process_time() - began
    grown = memory("VmHWM") - before
    return {"loss": loss.item(), "peak_growth_mib": round(grown / 1024), "seconds": round(seconds, 2)}


def memory(field: str) -> int:
    """Kilobytes of this process's memory: `VmRSS` now, `VmHWM` at its peak."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(f"{field}:")))


def measure_chunks() -> dict[str, Any]:
    found: dict[str, Any] = {"vocabulary": WHOLE_VOCABULARY, "width": SMALL["hidden_size"], "chunk": CHUNK}
    for tokens in CHUNKED_TOKENS:
        runs = {}
        for name, chunk in (("whole", 0), ("chunked", CHUNK)):
            command = [sys.executable, __file__, "--loss", str(tokens), str(chunk)]
            runs[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        assert abs(runs["whole"]["loss"] - runs["chunked"]["loss"]) < 1e-4
        found[f"{tokens} tokens"] = runs
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--parts", nargs="+", default=["speed", "packing", "chunks"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--loss", nargs=2, type=int, help=argparse.SUPPRESS)  # one run of `measure_chunks`
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.loss:
        print(json.dumps(run_loss(*options.loss)))
        return
    transformers.utils.logging.set_verbosity_error()
    result = json.loads(options.out.read_text()) if options.out.exists() else {}
    parts = {"speed": partial(measure_speed, options.rounds), "packing": measure_packing, "chunks": measure_chunks}
    for name in options.parts:
        result[name] = parts[name]()
    result["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    result["machine"] = f"{platform.machine()}, one thread, processor time, with other work on the machine"
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({name: result[name] for name in options.parts}, indent=2))


if __name__ == "__main__":
    main()
