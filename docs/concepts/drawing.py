"""Simple SVG shapes, byte-identical on every machine. Lengths are in pixels; light background, dark text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

INK, FAINT, RULE = "#1f2933", "#616e7c", "#cbd2d9"
GREY, AMBER, BLUE, PALE = "#9aa5b1", "#e8973a", "#2f73b7", "#a9cbeb"
ORANGES = ("#e8973a", "#f0b062", "#c9752a", "#f6cf9c", "#8d5524")
_FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


def picture(width: int, height: int, title: str, shapes: Sequence[str]) -> str:
    """Return a complete SVG file; ``title`` is its label for screen readers."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="{_FONT}" role="img" aria-label="{escape(title)}">'
    )
    back = f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", back, *shapes, "</svg>"]) + "\n"


def box(x: float, y: float, width: float, height: float, fill: str, hint: str = "") -> str:
    """Return a filled rectangle; ``hint`` is its tooltip."""
    inside = f"<title>{escape(hint)}</title>" if hint else ""
    place = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
    return f'<rect {place} fill="{fill}">{inside}</rect>'


def text(
    x: float, y: float, words: str, size: int = 13, fill: str = INK, anchor: str = "start", bold: bool = False
) -> str:
    """Return a line of text whose baseline is at ``y``; ``anchor`` is start, middle or end."""
    weight = ' font-weight="600"' if bold else ""
    place = f'x="{_n(x)}" y="{_n(y)}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="{fill}"{weight}>{escape(words)}</text>'


def line(points: Sequence[tuple[float, float]], stroke: str = RULE, width: float = 1, dashes: str = "") -> str:
    """Return a line through ``points``."""
    path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{_n(width)}"{dashed}/>'


def area(points: Sequence[tuple[float, float]], fill: str) -> str:
    """Return a filled polygon."""
    return f'<polygon points="{" ".join(f"{_n(x)},{_n(y)}" for x, y in points)}" fill="{fill}"/>'


def dot(x: float, y: float, radius: float, fill: str) -> str:
    """Return a filled circle."""
    return f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" fill="{fill}" stroke="#ffffff" stroke-width="1.5"/>'


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
