"""Versions come from metadata and files, and nothing is imported to learn them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slime_instrument import __version__
from slime_instrument._installation import checkout_version, installed, slime_version, versions


@pytest.mark.parametrize(
    ("name", "text", "version"),
    [
        ("setup.py", 'setup(\n    name="slime",\n    version="0.3.1",\n)', "0.3.1"),
        ("setup.py", "version = '0.2.0'\n", "0.2.0"),
        ("pyproject.toml", '[project]\nname = "slime"\nversion = "1.2"\n', "1.2"),
        ("pyproject.toml", '[tool.x]\npython_version = "3.10"\n', None),
        ("setup.py", "setup(version=read())", None),
        ("other.txt", 'version = "1"', None),
    ],
)
def test_a_checkout_declares_its_version(tmp_path: Path, name: str, text: str, version: str | None) -> None:
    (tmp_path / name).write_text(text)
    assert checkout_version(tmp_path) == version


def test_a_file_that_cannot_be_read_as_text_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_bytes(b"\xff\xfe version")
    (tmp_path / "pyproject.toml").write_text('version = "2"')
    assert checkout_version(tmp_path) == "2"
    assert checkout_version(tmp_path / "nowhere") is None


@pytest.mark.parametrize("stated", [None, "9.9"])
def test_the_imported_slime_is_asked_before_the_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stated: str | None
) -> None:
    module: Any = ModuleType("slime")
    module.__path__ = [str(tmp_path / "slime")]
    if stated is not None:
        module.__version__ = stated
    (tmp_path / "setup.py").write_text('version="0.3.0"')
    monkeypatch.setitem(sys.modules, "slime", module)
    assert slime_version() == (stated or "0.3.0")


def test_without_slime_there_is_no_version_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "slime", raising=False)
    assert installed("no-such-distribution-anywhere") is None
    found = versions()
    assert set(found) == {"slime_instrument", "slime", "torch", "megatron_core"}
    assert found["slime_instrument"] == __version__
    assert found["torch"] == installed("torch")


def test_under_another_name_slime_is_asked_by_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, version in (("slime", "1"), ("vime", "2")):
        module: Any = ModuleType(name)
        module.__version__ = version
        monkeypatch.setitem(sys.modules, name, module)
    assert slime_version() == "1"
    monkeypatch.setenv("SLIME_INSTRUMENT_PACKAGE", "vime")
    assert slime_version() == "2"
