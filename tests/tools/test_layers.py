"""The layers that ``lint-imports`` checks: every module of the package is among them."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_every_module_of_the_package_has_a_place_in_the_layers() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads pyproject.toml by itself")
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    placed = {name for contract in linter["contracts"] for name in contract.get("source_modules", ())}
    placed |= {name for contract in linter["contracts"] for name in contract.get("forbidden_modules", ())}
    there = {
        f"slime_instrument.{path.stem}"
        for path in (ROOT / "slime_instrument").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    # What is below everything, and the package's own names.
    below = {"slime_instrument.__init__", "slime_instrument._errors"}
    assert there - placed - below == set()
