"""The text of a recipe, read through `datasets`, tokenised, and packed into rows."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from glob import glob
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gated_qwen.conversion.folder import atomic_file
from gated_qwen.training.packing import IGNORED, Row, one_document_a_row, pack
from gated_qwen.training.recipe import DataSection, TextSource

if TYPE_CHECKING:
    from datasets import Dataset

TOKENISED_AT_ONCE = 64  # documents
ROWS_AT_ONCE = 256


def read_texts(source: TextSource, path: str = "data.train") -> Any:
    """Opens one source of a recipe.

    Args:
        source: where the text is.
        path: the recipe's field, for the errors.

    Returns:
        A `datasets.Dataset`, or an `IterableDataset` when it is streamed, with one document a row in `source.column`.

    Raises:
        ValueError: no such files, dataset or column.
    """
    from datasets import disable_progress_bars, load_dataset
    from datasets.utils.logging import CRITICAL, set_verbosity

    disable_progress_bars()
    set_verbosity(CRITICAL)  # it prints what it also raises
    kind = next(name for name in ("text", "parquet", "json", "hub") if getattr(source, name) is not None)
    where = getattr(source, kind)
    options: dict[str, Any] = {"split": source.split, "streaming": source.streaming}
    if kind == "hub":
        options |= {"name": source.config, "revision": source.revision}
    else:
        options["data_files"] = {source.split: where}
        options |= {"sample_by": source.sample_by} if kind == "text" else {}
    with _reading(f"{path}.{kind}: {where}", where if kind != "hub" else None):
        dataset = load_dataset(where if kind == "hub" else kind, **options)
    columns = dataset.column_names
    if columns is not None and source.column not in columns:
        raise ValueError(f"{path}.column: {where} has no column {source.column!r}, but {', '.join(columns)}")
    return dataset if source.limit is None else dataset.take(source.limit)


def documents(sources: list[TextSource], path: str = "data.train") -> Iterator[str]:
    """All texts of the sources, one after the other; empty ones are left out.

    Raises:
        ValueError: as `read_texts`, a document that is not text, or no text at all.
    """
    found = False
    for number, source in enumerate(sources):
        place = f"{path}[{number}]"
        for text in _column(source, place):
            if not isinstance(text, str):
                other = "nothing" if text is None else repr(text)[:40]
                raise ValueError(
                    f"{place}.column: {source.column!r} holds {other} in place of a text; take such documents out"
                )
            if text:
                found = True
                yield text
    if not found:
        raise ValueError(f"{path}: there is no text in it")


def _column(source: TextSource, path: str) -> Iterator[Any]:
    """The entries of a source's column, as they are."""
    dataset = read_texts(source, path)
    # In a worker of a DataLoader a stream would give its own part only, by file, and StreamedRows shares the rows.
    entries = dataset.iter(batch_size=1) if source.streaming else iter(dataset)
    where = source.text or source.parquet or source.json or source.hub
    while True:
        with _reading(f"{path}: {where}"):  # a streamed file is opened only now
            entry = next(entries, None)
        if entry is None:
            return
        if source.column not in entry:
            raise ValueError(f"{path}.column: {where} has no column {source.column!r}, but {', '.join(entry)}")
        yield entry[source.column][0] if source.streaming else entry[source.column]


@contextmanager
def _reading(what: str, files: str | None = None) -> Iterator[None]:
    """Says what could not be read, and why: `datasets` hides the reason behind errors of its own.

    Args:
        what: the recipe's field and its value.
        files: a path or pattern, while it is looked for.
    """
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (OSError, ValueError, RuntimeError, ImportError, DatasetsError) as error:
        if files is not None and "://" not in files:
            if Path(files).is_dir():
                raise ValueError(f"{what} is a folder; write which of its files, such as {Path(files)}/*") from error
            if not glob(files, recursive=True):
                raise ValueError(f"{what}: no such file") from error
        first: BaseException = error
        while isinstance(first, DatasetsError) and first.__cause__ is not None:
            first = first.__cause__
        reason = "it is not UTF-8 text" if isinstance(first, UnicodeDecodeError) else " ".join(str(first).split())
        raise ValueError(f"{what} cannot be read ({reason})") from error


def tokenise(texts: Iterable[str], tokenizer: Any) -> Iterator[list[int]]:
    """Token ids of each text, without special tokens; texts may be longer than the tokenizer's own limit."""
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == TOKENISED_AT_ONCE:
            yield from tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
            batch = []
    if batch:
        yield from tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]


def rows(sources: list[TextSource], tokenizer: Any, data: DataSection, path: str = "data.train") -> Iterator[Row]:
    """The rows of a recipe's sources, in order.

    Args:
        sources: `data.train` or `data.evaluation`.
        tokenizer: a Hugging Face tokenizer.
        data: how the rows are made.

    Raises:
        ValueError: as `documents`, or a special token that the tokenizer lacks.
    """
    if data.bos != "none" and tokenizer.bos_token_id is None:
        raise ValueError("data.bos: the tokenizer has no BOS token; write none, or give it one")
    if data.eos and tokenizer.eos_token_id is None:
        raise ValueError("data.eos: the tokenizer has no EOS token; write false, or give it one")
    special: dict[str, Any] = {
        "bos": None if data.bos == "none" else tokenizer.bos_token_id,
        "bos_every_piece": data.bos == "piece",
        "eos": tokenizer.eos_token_id if data.eos else None,
    }
    tokens = tokenise(documents(sources, path), tokenizer)
    if data.packing == "none":
        made = one_document_a_row(tokens, data.length, **special)
    else:
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        made = pack(tokens, data.length, boundaries=data.packing == "documents", pad=pad, **special)
    # A row of a lone token has no target, and the mean loss of a batch of such rows is 0 / 0.
    return (row for row in made if any(label != IGNORED for label in row["labels"]))


class StreamedRows(torch.utils.data.IterableDataset[Row]):
    """Rows that are made while training, over and over without an end, in the same order each time.

    Resuming skips the rows that were used by making them again. Without an end, since the Trainer does not know where
    a pass over a stream ends, and would skip all steps of a run within the first one.
    """

    def __init__(self, make: Callable[[], Iterator[Row]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Row]:
        worker = torch.utils.data.get_worker_info()
        share, shares = (0, 1) if worker is None else (worker.id, worker.num_workers)
        made = chain.from_iterable(self._passes())
        yield from islice(made, share, None, shares)

    def _passes(self) -> Iterator[Iterator[Row]]:
        while True:
            found = self._make()
            first = next(found, None)
            if first is None:
                raise ValueError("data.train: no text in it makes a row with a target")
            yield chain([first], found)


def training_rows(tokenizer: Any, data: DataSection, file: Path) -> "StreamedRows | Dataset":
    """The training rows: streamed, or kept in an Arrow file and read from there by memory mapping.

    Args:
        tokenizer, data: as `rows`.
        file: where they are kept; one that is there already is taken as it is.

    Raises:
        ValueError: as `rows`, or there is no text at all.
    """
    make = partial(rows, data.train, tokenizer, data)
    if data.train[0].streaming:
        return StreamedRows(make)
    return stored_rows(make, file, "data.train")


def evaluation_rows(tokenizer: Any, data: DataSection, file: Path) -> "Dataset | None":
    """The evaluation rows, or None when the recipe names no text for them; see `training_rows`."""
    if not data.evaluation:
        return None
    return stored_rows(partial(rows, data.evaluation, tokenizer, data, "data.evaluation"), file, "data.evaluation")


def stored_rows(make: Callable[[], Iterator[Row]], file: Path, path: str) -> "Dataset":
    """Writes rows to an Arrow file as they come, so that memory does not grow with the text.

    Raises:
        ValueError: there is no row.
    """
    import pyarrow
    from datasets import Dataset

    if not file.exists():
        found = make()
        first = next(found, None)
        if first is None:
            raise ValueError(f"{path}: no text in it makes a row with a target")
        schema = pyarrow.schema({name: pyarrow.list_(pyarrow.int32()) for name in first})
        with atomic_file(file) as temporary, pyarrow.OSFile(str(temporary), "wb") as sink:
            with pyarrow.ipc.new_stream(sink, schema) as writer:
                rest = chain([first], found)
                while batch := list(islice(rest, ROWS_AT_ONCE)):
                    writer.write_batch(pyarrow.RecordBatch.from_pylist(batch, schema=schema))
    return Dataset.from_file(str(file))


def collate(rows: list[Row], pad: int = 0) -> dict[str, torch.Tensor]:
    """Makes a batch of rows; rows of unequal length are padded on the right and get an attention mask.

    Packed rows never get a mask: with one, transformers would not look at `position_ids` and documents would see
    each other.

    Args:
        rows: of one kind, as `pack` or `one_document_a_row` makes them.
        pad: the token that fills shorter rows.

    Returns:
        dict: int64 tensors (B, T): `input_ids`, `labels`, and `position_ids` or `attention_mask`.

    Example:
        >>> rows = [{"input_ids": [5, 6], "labels": [-100, 6]}, {"input_ids": [7], "labels": [-100]}]
        >>> collate(rows)["attention_mask"]
        tensor([[1, 1],
                [1, 0]])
    """
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": pad, "labels": IGNORED, "position_ids": 0}
    batch = {
        name: torch.tensor([[*row[name], *[fill[name]] * (longest - len(row[name]))] for row in rows])
        for name in rows[0]
    }
    if "position_ids" not in batch and any(len(row["input_ids"]) < longest for row in rows):
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        batch["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
    return batch
