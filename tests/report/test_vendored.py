"""The libraries inside the page are the published ones, with their licences."""

from __future__ import annotations

import hashlib
import re
from importlib import resources

STATIC = resources.files("slime_instrument._report") / "static"


def test_each_vendored_file_is_the_one_that_the_table_names() -> None:
    vendor = STATIC / "vendor"
    table = (vendor / "README.md").read_text()
    stated = dict(re.findall(r"^\| `([\w.]+)` .*`([0-9a-f]{64})` \|$", table, re.MULTILINE))
    found = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in vendor.iterdir()
        if file.name.endswith((".js", ".css"))
    }
    assert stated == found
    for name in ("echarts.LICENSE", "echarts.NOTICE", "zrender.LICENSE", "tabulator.LICENSE"):
        assert (vendor / name).is_file()


def test_own_scripts_never_turn_text_into_markup() -> None:
    for file in (STATIC / "js").iterdir():
        found = re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", file.read_text())
        assert found is None, f"{file.name}: {found}"
