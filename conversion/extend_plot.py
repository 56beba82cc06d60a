"""A picture of the frequency ramp: what each rotary frequency was and is, and how far it was interpolated."""

import os
from typing import Any

from gated_qwen.configuration.frequencies import rope_frequencies
from gated_qwen.configuration.picture import check_plot
from gated_qwen.configuration.rope_schema import read_length, read_rope


def plot_frequencies(before: dict[str, Any], after: dict[str, Any], file: str | os.PathLike[str]) -> None:
    """Draws wavelengths before and after a change, and the share of interpolation, over the frequency's index.

    Args:
        before: the content of config.json as it was.
        after: the same as it is.
        file: where to write; the ending says how.

    Raises:
        ValueError, FileNotFoundError: as `check_plot`.
    """
    check_plot(file)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    was, now = rope_frequencies(before), rope_frequencies(after)
    index = range(len(now.inv_freq))
    if was.wavelengths != now.wavelengths:
        top.plot(range(len(was.inv_freq)), was.wavelengths, ".-", color="0.6", label=_title(before))
    top.plot(index, now.wavelengths, ".-", color="tab:blue", label=_title(after))
    longest = read_length(after)
    lengths = sorted({read_rope(after).get("original_max_position_embeddings") or longest, longest})
    names = ("length",) if len(lengths) == 1 else ("original length", "new length")
    for length, name, style in zip(lengths, names, ("--", ":"), strict=False):
        top.axhline(length, color="tab:red", linestyle=style, linewidth=1, label=f"{name}, {length:,} tokens")
    top.set_yscale("log")
    top.set_ylabel("wavelength (tokens)")
    top.legend(loc="upper left", fontsize="small")
    bottom.bar(index, now.interpolated_share, width=1.0, color="tab:blue", alpha=0.6)
    bottom.set_ylim(0, 1.05)
    bottom.set_ylabel("share interpolated")
    bottom.xaxis.get_major_locator().set_params(integer=True)
    bottom.set_xlabel(
        f"frequency, fast to slow: {now.kept} kept, {now.blended} blended, {now.interpolated} interpolated; "
        f"attention factor {now.attention_factor:.4f}"
    )
    figure.savefig(file, dpi=130)


def _title(config: dict[str, Any]) -> str:
    rope = read_rope(config)
    scaling = "unscaled" if rope["rope_type"] == "default" else f"{rope['rope_type']} x {rope.get('factor', 1.0):g}"
    return f"base {rope['rope_theta']:,.0f}, {scaling}"
