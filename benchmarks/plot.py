"""Small line plots as SVG text: logarithmic both ways, so that linear growth is a line of slope one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Series", "panels"]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 340, 240, 52, 40, 34
_COLOURS = ("#b5482a", "#1f6f8b", "#4f7d3a")


@dataclass(frozen=True)
class Series:
    name: str
    x: Sequence[float]
    y: Sequence[float]


def panels(drawn: Sequence[tuple[str, Sequence[Series]]], y_title: str) -> str:
    """One panel per (title of the x axis, series); all values above 0."""
    width, height = _WIDTH * len(drawn), _HEIGHT + _TOP + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="8" y="16">{y_title}</text>',
    ]
    values = [value for _, lines in drawn for line in lines for value in line.y]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    for number, (title, lines) in enumerate(drawn):
        parts.append(f'<g transform="translate({number * _WIDTH},{_TOP})">')
        parts += _panel(title, lines, low, max(high, low + 1))
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _panel(title: str, lines: Sequence[Series], low: int, high: int) -> list[str]:
    along = sorted({x for line in lines for x in line.x})
    first, last = math.log2(along[0]), math.log2(along[-1])

    def across(x: float) -> float:
        return _LEFT + (math.log2(x) - first) / (last - first) * (_WIDTH - _LEFT - 90)

    def up(y: float) -> float:
        return _HEIGHT - (math.log10(y) - low) / (high - low) * _HEIGHT

    parts = []
    for power in range(low, high + 1):
        y = up(10.0**power)
        parts.append(f'<path d="M{_LEFT - 6} {y:.1f}H{_WIDTH - 84}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for x in along:
        parts.append(f'<text x="{across(x):.1f}" y="{_HEIGHT + 16}" text-anchor="middle">{x:g}</text>')
    parts.append(
        f'<text x="{(across(along[0]) + across(along[-1])) / 2:.1f}" y="{_HEIGHT + 33}" '
        f'text-anchor="middle">{title}</text>'
    )
    for line, colour in zip(lines, _COLOURS, strict=False):
        points = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in zip(line.x, line.y, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3" fill="{colour}"/>'
            for x, y in zip(line.x, line.y, strict=True)
        ]
        parts.append(
            f'<text x="{across(line.x[-1]) + 7:.1f}" y="{up(line.y[-1]) + 4:.1f}" fill="{colour}">{line.name}</text>'
        )
    return parts
