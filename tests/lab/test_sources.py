"""Where slime is looked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_instrument.lab import default_source, find_sources, source_version
from slime_instrument.lab._sources import MINIATURE


def checkout_in(folder: Path) -> Path:
    (folder / "slime" / "backends" / "megatron_utils").mkdir(parents=True)
    (folder / "slime" / "__init__.py").touch()
    return folder


def test_sources_are_folders_with_slime_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = checkout_in(tmp_path / "one"), checkout_in(tmp_path / "other")
    (tmp_path / "empty").mkdir()
    cached = checkout_in(tmp_path / "home" / ".cache" / "slime-instrument" / "sources" / "v1")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SLIME_SOURCES", os.pathsep.join(map(str, [other, tmp_path / "empty", one])))
    assert find_sources() == [other, one, cached]


def test_the_version_is_the_checkouts_own_or_its_folder_name(tmp_path: Path) -> None:
    folder = checkout_in(tmp_path / "abc123")
    assert source_version(folder) == "abc123"
    (folder / "setup.py").write_text('python_version = "3"\nsetup(\n    name="slime",\n    version="9.8.7",\n)\n')
    assert source_version(folder) == "9.8.7"


def test_the_variable_wins_over_an_installed_slime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = checkout_in(tmp_path / "site")
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.delenv("SLIME_SOURCE", raising=False)
    assert default_source() == installed
    monkeypatch.setenv("SLIME_SOURCE", str(tmp_path / "named"))
    assert default_source() == tmp_path / "named"


def test_the_miniature_is_never_taken_for_slime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIME_SOURCE", raising=False)
    monkeypatch.syspath_prepend(str(MINIATURE))
    assert default_source() is None


def test_asking_for_the_lab_imports_no_torch() -> None:
    code = "import sys, slime_instrument.lab, slime_instrument.lab.demo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
