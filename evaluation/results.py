"""Result files: JSON lines as samples finish, then a JSON summary and a CSV table.

`NAME.jsonl` starts with a line of settings; each later line is one record. Records are written as they come, so that
an interrupted run can go on; a line that was cut off is dropped.
"""

import csv
import json
import math
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]
CELL = ("task", "length", "depth")


class RecordFile:
    """The JSON-lines file of a run, open for appending; use it in a `with` block.

    Args:
        path: where it is written, in place of what is there; None: records are kept in memory alone.
        settings: what the run measures, which becomes the first line.
        records: those that the file starts with.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any], records: Sequence[Record] = ()) -> None:
        self.records = list(records)
        self._file = None
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.partial")
        temporary.write_text(_lines([{"settings": settings}, *records]))
        os.replace(temporary, path)
        self._file = path.open("a")

    def add(self, records: Sequence[Record]) -> None:
        """Appends records and sees them to the disk."""
        self.records += records
        if self._file:
            self._file.write(_lines(records))
            self._file.flush()
            os.fsync(self._file.fileno())

    def __enter__(self) -> "RecordFile":
        return self

    def __exit__(self, *error: object) -> None:
        if self._file:
            self._file.close()


def read_records(path: Path, settings: dict[str, Any]) -> list[Record]:
    """Reads the records of a run that was interrupted.

    Raises:
        ValueError: the file belongs to a run with other settings (the message names the first), or is none of ours.
    """
    lines = path.read_text().split("\n")[:-1]  # what follows the last line feed was cut off
    try:
        first, *records = [json.loads(line) for line in lines]
        written = first["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a result file that a run can go on with; pass --overwrite") from error
    settings = json.loads(_lines([settings]))
    for name in sorted({*settings, *written}):
        if settings.get(name) != written.get(name):
            raise ValueError(
                f"{path}: {name} was {json.dumps(written.get(name))} and is now {json.dumps(settings.get(name))}; "
                "resume with the same settings, or pass --overwrite"
            )
    return records


def check_new(*paths: Path, resume: bool, overwrite: bool) -> None:
    """Refuses to touch results that are there.

    Raises:
        FileExistsError: one of `paths` exists, and neither `resume` nor `overwrite` says what to do with it.
    """
    for path in paths:
        if path.exists() and not (resume or overwrite):
            raise FileExistsError(f"{path} exists; pass --resume to go on with it, or --overwrite to replace it")


def summarize(records: Sequence[Record]) -> list[Record]:
    """The mean of each task, length and depth, in the order of the records.

    Returns:
        One dictionary for each cell: task, length, depth, samples, score (0 to 100, as RULER reports it) or, for
        perplexity, nll and perplexity (of the mean NLL) and the mean NLL of each bucket of positions.

    Example:
        >>> cell = {"task": "niah_single", "length": 1024, "depth": 0.5}
        >>> summarize([{**cell, "score": 1.0}, {**cell, "score": 0.0}])
        [{'task': 'niah_single', 'length': 1024, 'depth': 0.5, 'samples': 2, 'score': 50.0}]
    """
    cells: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        cells[tuple(record[name] for name in CELL)].append(record)
    summary = []
    for cell, members in cells.items():
        row: Record = dict(zip(CELL, cell, strict=True), samples=len(members))
        if "nll" in members[0]:
            row["nll"] = _mean([member["nll"] for member in members])
            row["perplexity"] = math.exp(row["nll"])
            runs = zip(*(member["buckets"] for member in members), strict=True)
            row["buckets"] = [[run[0][0], run[0][1], _mean([nll for _, _, nll in run])] for run in runs]
        else:
            row["score"] = 100.0 * _mean([member["score"] for member in members])
        summary.append(row)
    return summary


def write_summary(path: Path, content: dict[str, Any]) -> Path:
    """Writes the summary as JSON to `path` and its cells as CSV beside it, each at once; returns the CSV's path."""
    table = path.with_suffix(".csv")
    for target in (path, table):
        temporary = target.with_name(f".{target.name}.partial")
        with temporary.open("w", newline="") as file:
            if target is path:
                file.write(json.dumps(content, indent=2) + "\n")
            else:
                columns = [*CELL, "samples", "score", "nll", "perplexity"]
                writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
                writer.writeheader()
                writer.writerows(content["cells"])
        os.replace(temporary, target)
    return table


def _lines(contents: Sequence[Record]) -> str:
    return "".join(json.dumps(content) + "\n" for content in contents)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
