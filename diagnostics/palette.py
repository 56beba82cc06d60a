"""The report's colour scales as CSS: from the page's own colour to a strong one, on light and on dark pages."""

from gated_qwen.diagnostics.svg import LEVELS

Colour = tuple[int, int, int]

# Each scale begins near the page's background, so that nothing looks like nothing, and its lightness only falls (on
# light pages) or only rises. Shares are warm and gates are cool: the two are never mistaken for each other.
SCALES = {
    "light": {
        "heat": ("#f6f2ea", "#fbd9a5", "#f6a15c", "#e0603f", "#a92a52", "#641a5c", "#2a0f3f"),
        "gate": ("#eff3f4", "#c5e3e0", "#86c5c9", "#459fb5", "#24729f", "#1d477f", "#161f4d"),
    },
    "dark": {
        "heat": ("#211c2b", "#4a1c53", "#83235f", "#bd3a55", "#e8684a", "#fba35d", "#fdeab0"),
        "gate": ("#1a2230", "#1c3c63", "#1f6189", "#2d88a4", "#55b0b5", "#99d4c8", "#e4f7e3"),
    },
}


def scale_css(theme: str) -> str:
    """One rule for each level of each scale: `.heat0 { fill: ... }`."""
    return "\n".join(
        f".{name}{level}{{fill:{_hex(_between(stops, level / (LEVELS - 1)))}}}"
        for name, stops in SCALES[theme].items()
        for level in range(LEVELS)
    )


def _between(stops: tuple[str, ...], place: float) -> Colour:
    """The colour at `place` (0 to 1) between evenly spaced stops."""
    index = min(int(place * (len(stops) - 1)), len(stops) - 2)
    share = place * (len(stops) - 1) - index
    first, second = _rgb(stops[index]), _rgb(stops[index + 1])
    red, green, blue = (round(a + share * (b - a)) for a, b in zip(first, second, strict=True))
    return red, green, blue


def _rgb(text: str) -> Colour:
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)


def _hex(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)
