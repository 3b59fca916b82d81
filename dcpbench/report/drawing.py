"""How pictures are drawn: matplotlib's settings, and a drawing as PNG or as SVG to inline in a page.

matplotlib is loaded only when a picture is made. The same drawing gives the same bytes: no date, no
random ids. Lines and text of the SVG take the page's own colour, so that one picture serves light and dark pages.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#5a6b7c"
"""Stands for the page's own text colour in the SVG; a colour of its own in the PNG."""
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.facecolor": "none",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "path.simplify": True,
}


def png(draw: Callable[[Figure], None], name: str, size: tuple[float, float]) -> bytes:
    """A PNG file on white, `size` in inches of 160 pixels."""
    return _render(draw, name, size, "png", {"Software": None})


def svg(draw: Callable[[Figure], None], name: str, size: tuple[float, float]) -> str:
    """An `<svg>` element without background; the page gives its width. `name` must be its own on the page."""
    text = _render(draw, name, size, "svg", {"Date": None, "Creator": None}).decode()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    # The viewBox keeps the proportions.
    return re.sub(r'^<svg([^>]*?) width="[^"]*"', r"<svg\1", re.sub(r' height="[^"]*pt"', "", text, count=1), count=1)


def _render(
    draw: Callable[[Figure], None], name: str, size: tuple[float, float], kind: str, metadata: dict[str, None]
) -> bytes:
    import matplotlib  # noqa: PLC0415 - half a second, for reports only
    from matplotlib.figure import Figure  # noqa: PLC0415

    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": name}):
        figure = Figure(figsize=size)
        draw(figure)
        file = io.BytesIO()
        clear = "none" if kind == "svg" else "white"
        figure.savefig(file, format=kind, dpi=160, metadata=metadata, facecolor=clear)
    return file.getvalue()
