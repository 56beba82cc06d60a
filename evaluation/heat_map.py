"""The picture of a run: scores over length and needle depth, one panel for each task."""

import os
from collections.abc import Sequence

from gated_qwen.configuration.picture import check_plot
from gated_qwen.evaluation.results import Record


def draw_heat_map(cells: Sequence[Record], file: str | os.PathLike[str], title: str) -> None:
    """Draws lengths from left to right and depths from top (the text's start) to bottom, with the score in each cell.

    Args:
        cells: what `summarize` returns; tasks without a depth have one row, perplexity is left out.
        file: where to write; the ending says how.
        title: above the panels.

    Raises:
        ValueError: no cell has a score; or as `check_plot`.
        FileNotFoundError: as `check_plot`.
    """
    check_plot(file)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    scored = [cell for cell in cells if "score" in cell]
    if not scored:
        raise ValueError(f"{file}: there are no scores to draw")
    tasks = list(dict.fromkeys(cell["task"] for cell in scored))
    lengths = sorted({cell["length"] for cell in scored})
    depths = {t: sorted({c["depth"] for c in scored if c["task"] == t}, key=lambda d: d or 0.0) for t in tasks}
    heights = [max(len(depths[task]), 1) for task in tasks]
    size = (3.0 + 0.9 * len(lengths), 1.1 + 0.4 * sum(heights) + 0.75 * len(tasks))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize="medium")
    panels = figure.subplots(len(tasks), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    for task, panel in zip(tasks, panels, strict=True):
        scores = {(cell["depth"], cell["length"]): cell["score"] for cell in scored if cell["task"] == task}
        grid = [[scores.get((depth, length), float("nan")) for length in lengths] for depth in depths[task]]
        image = panel.imshow(grid, vmin=0, vmax=100, cmap="viridis", aspect="auto")
        for row, values in enumerate(grid):
            for column, value in enumerate(values):
                shade = "black" if value > 60 else "white"  # the colours are dark below
                number = "" if value != value else f"{value:.0f}"
                panel.text(column, row, number, color=shade, ha="center", va="center")
        panel.set_title(task, fontsize="small", loc="left")
        panel.set_yticks(range(len(grid)), ["-" if d is None else f"{d:.0%}" for d in depths[task]])
        panel.set_ylabel("needle depth" if depths[task] != [None] else "")
        panel.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    panels[-1].set_xlabel("length (tokens)")
    figure.colorbar(image, ax=list(panels), label="score")
    figure.savefig(file, dpi=130)
