"""The growth plot is well-formed, and a straight line stays straight."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def panels(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
    from benchmarks import plot

    yield plot
    for name in [name for name in sys.modules if name == "benchmarks" or name.startswith("benchmarks.")]:
        del sys.modules[name]


def test_linear_growth_is_a_straight_line(panels: object) -> None:
    lines = [panels.Series("ours", [1, 2, 4, 8], [0.1, 0.2, 0.4, 0.8])]  # type: ignore[attr-defined]
    text = panels.panels([("samples", lines)], "seconds")  # type: ignore[attr-defined]
    root = ElementTree.fromstring(text)
    (line,) = root.iter(f"{SVG}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(points)]
    assert max(slopes) - min(slopes) < 0.01
    assert slopes[0] < 0  # upwards: y counts from the top
    assert next(root.iter(f"{SVG}text")).text == "seconds"
