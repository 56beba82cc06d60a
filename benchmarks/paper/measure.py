"""What the probes see in the finished models on text, and perplexity by position of the lengthened ones."""

import json
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from experiments import Run
from text_runs import LENGTHENED, YARN_FACTOR

from gated_qwen import register_auto_classes
from gated_qwen.conversion.extend import extend
from gated_qwen.diagnostics.diagnose import ProbeSettings, diagnose
from gated_qwen.evaluation.evaluate import run_plan
from gated_qwen.evaluation.perplexity import position_nll
from gated_qwen.evaluation.plan import Plan
from gated_qwen.training.loss_spikes import LossSpikes

SEQUENCES, LENGTH, SKIPPED = 48, 256, 64
WINDOWS = 6  # of the perplexity by position
NEEDLES = 2  # samples at each of five depths
SMOOTHED = 10  # steps
DIVERGED = 0.5  # nats that the smoothed loss ends above its lowest value


def measure_text(run: Run, result: dict[str, Any], out: Path) -> dict[str, Any]:
    """Everything that is not measured while training.

    Args:
        run: a run on text that ended.
        result: what training said of it.
        out: with `corpus`, `tokenizer` and `runs`.
    """
    found: dict[str, Any] = stability(result["losses"])
    model = _load(out / "runs" / run.name / "model")
    found["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    if run.experiment == "context":
        return {**found, "nll_by_position": _context_stages(run, out)}
    if any(not parameter.isfinite().all() for parameter in model.parameters()):
        return found
    return {**found, **_probed(model, evaluation_sequences(out, LENGTH, SEQUENCES))}


def stability(losses: list[float | None]) -> dict[str, Any]:
    """How calm training was.

    Args:
        losses: of every step, in nats; None where it was no number.

    Returns:
        `loss_spikes` (see `LossSpikes`), `final_loss`, the mean of the last steps, and `diverged`: a loss that was no
        number, or one that ends more than `DIVERGED` above its own lowest mean of so many steps.

    Example:
        >>> stability([3.0] * 20 + [4.0] * 10)["diverged"], stability([3.0] * 30)["diverged"]
        (True, False)
    """
    spikes = LossSpikes()
    for loss in losses:
        spikes.add(float("nan") if loss is None else loss)
    if not losses or None in losses:
        return {"loss_spikes": spikes.count, "final_loss": None, "diverged": True}
    width = min(SMOOTHED, len(losses))
    smoothed = [fmean(losses[i : i + width]) for i in range(len(losses) - width + 1)]
    return {
        "loss_spikes": spikes.count,
        "final_loss": smoothed[-1],
        "diverged": smoothed[-1] > min(smoothed) + DIVERGED,
    }


def evaluation_sequences(out: Path, length: int, count: int) -> list[list[int]]:
    """Up to `count` pieces of the evaluation text, which no run trains on, each of `length` tokens after a BOS."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "tokenizer")
    texts = [json.loads(line)["text"] for line in (out / "corpus" / "evaluation.jsonl").open(encoding="utf-8")]
    ids = [token for text in texts for token in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
    size = length - 1
    places = range(0, len(ids) - size + 1, size)
    if not places:
        raise ValueError(f"{out}/corpus: {len(ids)} tokens of evaluation text are less than one piece of {length}")
    return [[tokenizer.bos_token_id, *ids[place : place + size]] for place in places[:count]]


def _probed(model: Any, sequences: list[list[int]]) -> dict[str, Any]:
    found = diagnose(model, sequences, settings=ProbeSettings(skip_queries=SKIPPED, columns="off"), batch_size=8)
    attention, gates = found["attention"], found["gates"]
    residual = found["activations"]["residual"][1:]  # the states after each layer; the first are the embeddings
    return {
        "first_token_share": attention["mean"]["first_token_share"],
        "first_token_share_by_layer": [layer["first_token_share"] for layer in attention["layers"]],
        "first_token_share_skipped": fmean(layer["first_token_share_skipped"] for layer in attention["layers"]),
        "uniform": attention["mean"]["uniform"],
        "max_activation": found["activations"]["summary"]["residual"]["max_over_layers"],
        "max_over_median": max(state["ratio"] or 0.0 for state in residual),
        "mean_gate": None if gates is None else {place: value["mean"] for place, value in gates["summary"].items()},
    }


def _context_stages(run: Run, out: Path) -> dict[str, Any]:
    """Mean NLL over runs of positions at four times the stage's length: before it, after it, and then with YaRN."""
    assert run.source is not None
    length = round(LENGTHENED["train_length"] * YARN_FACTOR)
    edges = [1, LENGTH, LENGTHENED["train_length"], length // 2, length]
    sequences = evaluation_sequences(out, length, WINDOWS)
    stage = out / "runs" / run.name / "model"
    with tempfile.TemporaryDirectory() as folder:
        extend(stage, Path(folder) / "yarn", factor=YARN_FACTOR)
        stages = {"before": out / "runs" / run.source / "model", "trained": stage, "yarn": Path(folder) / "yarn"}
        nll = {
            name: torch.stack([position_nll(_load(path), ids) for ids in sequences]).mean(0)
            for name, path in stages.items()
        }
        needles = {name: _needles(path, [LENGTHENED["train_length"], length]) for name, path in stages.items()}
    return {
        "needles": needles,
        "edges": edges,
        "windows": len(sequences),
        **{
            name: [values[a - 1 : b - 1].mean().item() for a, b in zip(edges, edges[1:], strict=False)]
            for name, values in nll.items()
        },
    }


def _needles(folder: Path, lengths: list[int]) -> list[float]:
    """Scores of RULER's single needle at each length, 0 to 100, in the mean over five depths."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    plan = Plan(("niah_single",), tuple(lengths), samples=NEEDLES, beyond_limit=True)
    records = run_plan(_load(folder), tokenizer, plan).records
    return [100 * fmean(record["score"] for record in records if record["length"] == length) for length in lengths]


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    register_auto_classes()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
