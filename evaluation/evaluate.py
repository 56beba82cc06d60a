"""A run: every task at every length and depth on one model, in this process."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gated_qwen.configuration.text_file import read_text
from gated_qwen.evaluation.exact_length import PromptEncoder
from gated_qwen.evaluation.generation import generate_answers
from gated_qwen.evaluation.haystack import Haystack
from gated_qwen.evaluation.perplexity import measure_perplexity
from gated_qwen.evaluation.plan import PERPLEXITY, Plan, longest_context
from gated_qwen.evaluation.results import Record, RecordFile, check_new, read_records
from gated_qwen.evaluation.scoring import match_all
from gated_qwen.evaluation.tasks import Sample, make_sample

Key = tuple[str, int, float | None, int]
LONGEST_QUICK_PROMPT = 8192  # tokens; made in a few hundredths of a second, and longer ones are never too short


@dataclass(frozen=True)
class Run:
    """Records, one for each sample, and the settings that they were measured with."""

    settings: dict[str, Any]
    records: list[Record]


def run_plan(
    model: Any,
    tokenizer: Any,
    plan: Plan,
    *,
    path: Path | None = None,
    settings: dict[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    start: Callable[[int], None] = lambda total: None,
    progress: Callable[[int], None] = lambda done: None,
) -> Run:
    """Measures a model.

    A run that goes on after an interruption does the batches that an uninterrupted one would have done, so its records
    are the same.

    Args:
        model: any Hugging Face causal LM; it is put in eval mode for the time of the run.
        tokenizer: its tokenizer.
        plan: what to measure.
        path: a JSON-lines file for records as they come; None: none.
        settings: of the model, to be compared on resuming.
        resume, overwrite: what to do with an existing file at `path`.
        start: called with the number of samples, before the first.
        progress: called with the number of samples done, after each batch, those found in the file included.

    Raises:
        ValueError: a length is over the model's longest context (nothing is ever cut), a prompt cannot be made, the
            text is too short, or the file at `path` belongs to other settings.
        OSError: the text cannot be read, or the file at `path` exists and neither `resume` nor `overwrite` is set.
    """
    _check_lengths(model.config, plan)
    material = _Material(tokenizer, plan)
    described = {**(settings or {}), **asdict(plan), "text": material.haystack.name}
    known = _records_to_go_on_with(path, described, resume=resume, overwrite=overwrite)
    batches = list(_batches(plan))
    done = [batch for batch in batches if all(key in known for key in batch)]
    training = model.training
    model.eval()
    try:
        with RecordFile(path, described, [known[key] for batch in done for key in batch]) as file:
            start(sum(map(len, batches)))
            progress(len(file.records))
            for batch in batches:
                if batch not in done:
                    file.add(_measure(model, material, batch))
                    progress(len(batch))
            return Run(described, file.records)
    finally:
        model.train(training)


class _Material:
    """What prompts are made of, checked before the model has worked for an hour."""

    def __init__(self, tokenizer: Any, plan: Plan) -> None:
        self.tokenizer, self.plan = tokenizer, plan
        self.encoder = PromptEncoder(tokenizer, plan.chat_template)
        self.haystack = Haystack.from_file(plan.text) if plan.text else Haystack.noise()
        if PERPLEXITY in plan.tasks and plan.text:
            self.tokens = tokenizer(read_text(plan.text)[0], add_special_tokens=False, verbose=False)["input_ids"]
            begins = tokenizer("a", verbose=False)["input_ids"][:1]
            self.first = begins if begins == [tokenizer.bos_token_id] else []
            needed = plan.samples * max(plan.lengths)
            if len(self.tokens) < needed:
                raise ValueError(f"{plan.text}: {len(self.tokens)} tokens, and the perplexity windows need {needed}")
        shortest = min(plan.lengths)
        if shortest <= LONGEST_QUICK_PROMPT:
            for task, length, depth in plan.cells():
                for index in range(plan.samples if task != PERPLEXITY and length == shortest else 0):
                    self.sample((task, length, depth, index))

    def sample(self, key: Key) -> Sample:
        task, length, depth, index = key
        return make_sample(
            task,
            self.encoder,
            length,
            depth=depth,
            index=index,
            seed=self.plan.seed,
            haystack=self.haystack,
            max_new_tokens=self.plan.max_new_tokens,
        )

    def window(self, length: int, index: int) -> list[int]:
        """The `index`-th run of the text that makes `length` tokens with the tokenizer's BOS, if it writes one."""
        size = length - len(self.first)
        window: list[int] = self.first + self.tokens[index * size : (index + 1) * size]
        return window


def _measure(model: Any, material: _Material, batch: list[Key]) -> list[Record]:
    task, length, depth, _ = batch[0]
    records: list[Record] = [dict(zip(("task", "length", "depth", "index"), key, strict=True)) for key in batch]
    if task == PERPLEXITY:
        for record in records:
            result = measure_perplexity(model, material.window(length, record["index"]))
            record.update(nll=result.nll, buckets=[list(bucket) for bucket in result.buckets])
        return records
    samples = [material.sample(key) for key in batch]
    answers = [sample.answers for sample in samples]
    prompts = [sample.input_ids for sample in samples]
    predictions = generate_answers(model, material.tokenizer, prompts, samples[0].max_new_tokens, stop_at=answers)
    for record, sample, prediction in zip(records, samples, predictions, strict=True):
        score = match_all(prediction, sample.answers)
        record.update(score=score, prediction=prediction, answers=list(sample.answers))
    return records


def _batches(plan: Plan) -> Iterator[list[Key]]:
    """The samples of each cell in runs of `batch_size`; all prompts of a batch have one length."""
    for task, length, depth in plan.cells():
        for first in range(0, plan.samples, plan.batch_size):
            yield [(task, length, depth, i) for i in range(first, min(first + plan.batch_size, plan.samples))]


def _check_lengths(config: Any, plan: Plan) -> None:
    limit = longest_context(config)
    longest = max(plan.lengths)
    if limit is not None and longest > limit and not plan.beyond_limit:
        raise ValueError(
            f"length {longest} is over the model's longest context of {limit} tokens, and prompts are never cut: "
            "leave it out, extend the model, or pass --beyond-limit to see what happens there"
        )


def _records_to_go_on_with(
    path: Path | None, settings: dict[str, Any], *, resume: bool, overwrite: bool
) -> dict[Key, Record]:
    if path is None:
        return {}
    check_new(path, resume=resume, overwrite=overwrite)
    records = read_records(path, settings) if resume and path.exists() else []
    return {(record["task"], record["length"], record["depth"], record["index"]): record for record in records}
