"""Colours and line styles of all plots, chosen so that colour-blind readers can tell them apart.

Source: Okabe and Ito, "Color Universal Design" (https://jfly.uni-koeln.de/color/), without black and yellow. Reddish
purple is a shade darker than theirs, so that it has a contrast of 3:1 on a white page.
"""

from __future__ import annotations

BLUE = "#0072B2"
VERMILION = "#D55E00"
GREEN = "#009E73"
PURPLE = "#C2679B"
ORANGE = "#E69F00"
SKY_BLUE = "#56B4E9"

CONTRASTING_COLOURS = (BLUE, VERMILION, GREEN, PURPLE)
"""Colours with a contrast of at least 3:1 on a light and on a dark page (WCAG 1.4.11), for HTML reports."""

COLOURS = (*CONTRASTING_COLOURS, ORANGE, SKY_BLUE)
"""Colours of plots on white."""

LINE_STYLES = ("-", "--", "-.", ":")
"""Matplotlib's line styles, in the order in which lines of the same colour take them."""


LineLook = dict[str, str]
"""Keyword arguments of matplotlib's ``plot``."""


def line_look(index: int) -> LineLook:
    """Return colour and style of line ``index``, from 0: all colours in the first style, then in the second, …."""
    style = LINE_STYLES[index // len(COLOURS) % len(LINE_STYLES)]
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": style}
