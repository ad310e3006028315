"""The SVG shapes of tools/make_figures.py, with a check that text fits.

There is no plotting library, so that the script gives the same bytes on every machine and a test
can compare them with the committed pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

INK = "#222222"
LINE = "#666666"
GREEN, YELLOW, GREY = "#8fd0c8", "#f2d58a", "#e8e8e8"
BLUE, RED, WHITE = "#bcd6ee", "#f0b6ae", "#ffffff"
STRONG = "#b3261e"
FONT = "DejaVu Sans, Verdana, Arial, sans-serif"
MONO = "DejaVu Sans Mono, Menlo, Consolas, monospace"


def text_width(text: str, size: float, mono: bool = False) -> float:
    """Returns the pixels that ``text`` takes at most, in DejaVu Sans, the widest font above."""
    if mono:
        return 0.605 * size * len(text)

    def em(letter: str) -> float:
        if letter in "mwMW%@=+<>~→×·^":
            return 0.99
        if letter in "ijlI.,:;'|!()[] /ftr-":
            return 0.42
        return 0.79 if letter.isupper() else 0.64

    return size * sum(map(em, text))


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


class Canvas:
    """A white drawing; y grows downwards, all lengths are pixels.

    Raises:
        ValueError: from any method, for text that does not fit where it is put.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def _tag(self, name: str, text: str | None = None, **attributes: object) -> None:
        pairs = " ".join(
            f'{key.replace("_", "-")}="{_number(v) if isinstance(v, int | float) else v}"'
            for key, v in attributes.items()
        )
        body = "/>" if text is None else f">{escape(text, quote=False)}</{name}>"
        self._parts.append(f"<{name} {pairs}{body}")

    def rect(
        self, x: float, y: float, w: float, h: float, fill: str, stroke: str = "none", r: float = 0
    ) -> None:
        """Draws a rectangle with its upper left corner at (x, y) and corners of radius r."""
        self._tag("rect", x=x, y=y, width=w, height=h, rx=r, fill=fill, stroke=stroke)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 13,
        *,
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
        fill: str = INK,
    ) -> None:
        """Draws one line on the baseline y, which starts, ends or has its middle at x."""
        wide = text_width(text, size, mono) * (1.1 if bold else 1)
        left = x - wide * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
        if left < 0 or left + wide > self.width or not size <= y <= self.height:
            raise ValueError(f"svg: expected text inside {self.title!r}, got {text!r}; make room")
        self._tag(
            "text",
            text,
            x=x,
            y=y,
            font_family=MONO if mono else FONT,
            font_size=size,
            font_weight="bold" if bold else "normal",
            text_anchor=anchor,
            fill=fill,
        )

    def line(self, points: Sequence[tuple[float, float]], stroke: str = LINE, **style: object):
        """Draws a line through the points; ``style`` holds further SVG attributes."""
        path = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self._tag("polyline", points=path, fill="none", stroke=stroke, **style)

    def arrow(self, points: Sequence[tuple[float, float]], stroke: str = LINE) -> None:
        """Draws a line whose last point, reached horizontally or vertically, has an arrowhead."""
        (x0, y0), (x, y) = points[-2:]
        dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
        if dx and dy:
            raise ValueError(f"svg: expected an arrow that ends along an axis, got {points}")
        self.line(points, stroke, stroke_width=1.5)
        base_x, base_y = x - 8 * dx, y - 8 * dy
        head = [(x, y), (base_x - 4 * dy, base_y + 4 * dx), (base_x + 4 * dy, base_y - 4 * dx)]
        path = " ".join(f"{_number(px)},{_number(py)}" for px, py in head)
        self._tag("polygon", points=path, fill=stroke)

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        lines: Sequence[str],
        *,
        file: str = "",
        fill: str = "#ffffff",
        size: float = 13,
    ) -> None:
        """Draws a rounded box: a bold first line, further lines, and a file name in the last."""
        rows = [*lines, file] if file else list(lines)
        for i, row in enumerate(rows):
            wide = text_width(row, size, mono=bool(file) and i == len(lines))
            if wide * (1.1 if i == 0 else 1) > w - 12:
                raise ValueError(f"svg: expected text of at most {w - 12} pixels, got {row!r}")
        if len(rows) * (size + 5) > h - 4:
            raise ValueError(f"svg: expected {len(rows)} lines to fit {h} pixels, in {lines!r}")
        self.rect(x, y, w, h, fill, LINE, 6)
        top = y + (h - len(rows) * (size + 5)) / 2 + size
        for i, row in enumerate(rows):
            is_file = bool(file) and i == len(lines)
            self.text(
                x + w / 2,
                top + i * (size + 5),
                row,
                size - 1 if is_file else size,
                anchor="middle",
                bold=i == 0,
                mono=is_file,
                fill="#1d5c8f" if is_file else INK,
            )

    def svg(self) -> str:
        """Returns the drawing as a file's text."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" role="img">'
        )
        title = f"<title>{escape(self.title, quote=False)}</title>"
        paper = f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>'
        return "\n".join([head, title, paper, *self._parts, "</svg>", ""])
