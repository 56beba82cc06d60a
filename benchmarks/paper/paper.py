"""The paper in small: what of its claims shows in models of half a million parameters, on a laptop.

    python benchmarks/paper/paper.py train   [--out FOLDER] [--only sweep] [--seeds 1] [--more-seeds 3]
    python benchmarks/paper/paper.py measure [--out FOLDER] [--results FILE]
    python benchmarks/paper/paper.py report  [--results FILE] [--page FILE] [--images FOLDER]

A finished run is not repeated, so `train` can be stopped and started again, and several may run at the same time;
`measure` takes the runs that are there. `report` reads nothing but the JSON.
"""

import argparse
import fcntl
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments import Run, runs

ROOT = Path(__file__).resolve().parent.parent.parent
RESULT, MEASUREMENT = "result.json", "measurement.json"
CHARACTERS = 8_000_000  # with a vocabulary of 1,024 more than twice the 1.2M tokens of a run


def prepare(out: Path, characters: int) -> None:
    """Writes the corpus and learns its tokenizer, once for all runs."""
    from corpus import write_corpus
    from experiments import RECIPE

    from gated_qwen.training.data import documents
    from gated_qwen.training.recipe import TextSource, load_recipe
    from gated_qwen.training.tokenizer import learn_tokenizer

    write_corpus(out / "corpus", characters)
    wanted = load_recipe(RECIPE).tokenizer.train
    assert wanted is not None
    learn_tokenizer(documents([TextSource(json=str(out / "corpus" / "train.jsonl"))]), wanted, out / "tokenizer")


def train(out: Path, wanted: list[Run], steps: int | None) -> None:
    """Trains what is not there yet; a run whose source is not there, or that another process has, is left out."""
    for run in wanted:
        folder = out / "runs" / run.name
        if run.source is not None and not (out / "runs" / run.source / "model").is_dir():
            print(f"{run.name}: left out, since {run.source} is not there yet", flush=True)
            continue
        folder.parent.mkdir(exist_ok=True)
        with folder.with_name(f"{run.name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            if not (folder / RESULT).exists():
                result = {**run.about, **train_one(run, out, steps)}
                write_json(folder / RESULT, result)
                print(f"{run.name}: {result.get('error', 'done')}", flush=True)


def train_one(run: Run, out: Path, steps: int | None) -> dict[str, Any]:
    """One run from its beginning; what an interrupted one left is deleted first."""
    if "backcopy" in run.experiment:
        from backcopy import Setting, train_backcopy

        shutil.rmtree(out / "runs" / run.name, ignore_errors=True)
        return train_backcopy(
            run, out, Setting() if steps is None else replace(Setting(), steps=steps, long_steps=steps)
        )
    from text_runs import train_on_text

    fewer = {} if steps is None else {"trainer.max_steps": steps, "trainer.warmup_steps": 1}
    return train_on_text(replace(run, changes={**run.changes, **fewer}), out)


def measure(out: Path, wanted: list[Run], results: Path) -> None:
    """Measures the finished models that were not measured yet, and writes everything into one file."""
    from measure import measure_text
    from results import collect

    for run in wanted:
        folder = out / "runs" / run.name
        if "backcopy" in run.experiment or not (folder / RESULT).exists() or (folder / MEASUREMENT).exists():
            continue
        result = json.loads((folder / RESULT).read_text())
        if "error" not in result:
            write_json(folder / MEASUREMENT, measure_text(run, result, out))
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(collect(out, wanted))


def write_json(path: Path, content: Any) -> None:
    from gated_qwen.conversion.folder import atomic_file

    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(content) + "\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["train", "measure", "report"])
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir(), "gated-qwen-paper"))
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "paper.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "paper-in-small.md")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--seeds", type=int, default=1, help="of every variant")
    parser.add_argument("--more-seeds", type=int, default=2, help="of baseline, headwise and elementwise")
    parser.add_argument("--only", nargs="+", default=[""], help="runs whose name begins so")
    parser.add_argument("--steps", type=int, help="instead of every run's own number, to try the command")
    parser.add_argument("--characters", type=int, default=CHARACTERS, help="of the corpus")
    options = parser.parse_args(arguments)
    if options.verb == "report":
        from report import write_report

        write_report(json.loads(options.results.read_text()), options.page, options.images)
        return
    import torch

    torch.set_num_threads(1)  # two processes of one thread are faster than one of two
    wanted = [run for run in runs(options.seeds, options.more_seeds) if run.name.startswith(tuple(options.only))]
    if options.verb == "measure":
        measure(options.out, wanted, options.results)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "prepare.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        prepare(options.out, options.characters)
    train(options.out, wanted, options.steps)


if __name__ == "__main__":
    main()
