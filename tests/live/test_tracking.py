from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from slime_instrument._live.watch import slime_log


def test_slimes_logging_function_is_found_under_the_name_of_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, Any] = {
        name: ModuleType(name) for name in ("slime.utils.logging_utils", "vime.utils.logging_utils")
    }
    for name, module in modules.items():
        module.log = lambda name=name: name
        monkeypatch.setitem(sys.modules, name, module)
    for package in ("slime", "vime"):
        monkeypatch.setenv("SLIME_INSTRUMENT_PACKAGE", package)
        log = slime_log()
        assert log is not None
        assert log() == f"{package}.utils.logging_utils"
