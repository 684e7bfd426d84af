"""Runs are forked from a process that has imported torch and Megatron: nothing of it may show in a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_instrument.lab import LabOptions, LabResult, train
from tools.matrix.compare import differences

pytestmark = pytest.mark.lab

WRITES_WHAT_IT_SEES = """
    import json, os, sys
    def before_slime():
        names = ("slime", "wrapt", "torch", "megatron.core")
        seen = {name: name in sys.modules for name in names}
        seen |= {"MARK": os.environ.get("MARK"), "server": os.getppid()}
        open(os.environ["SEEN"], "w").write(repr(seen))
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plugin") / "plugin.py"
    file.write_text(textwrap.dedent(WRITES_WHAT_IT_SEES))
    return file


def seen_in(folder: Path, plugin: Path, **options: Any) -> tuple[LabResult, dict[str, Any]]:
    environment = {"SEEN": str(folder) + ".seen", **options.pop("environment", {})}
    result = train(LabOptions(out=folder, plugin=plugin, environment=environment, **options))
    seen: dict[str, Any] = eval(Path(environment["SEEN"]).read_text())
    return result, seen


def test_slime_and_arming_come_in_the_fork_and_nothing_is_left_of_the_run_before(tmp_path: Path, plugin: Path) -> None:
    first, seen_first = seen_in(tmp_path / "1", plugin, environment={"MARK": "first"})
    second, seen_second = seen_in(tmp_path / "2", plugin, instrumented=False)
    expected = {"slime": False, "wrapt": False, "torch": True, "megatron.core": True}
    for seen in (seen_first, seen_second):
        assert {name: seen[name] for name in expected} == expected
    assert seen_first["server"] == seen_second["server"] != os.getpid()
    assert (seen_first["MARK"], seen_second["MARK"]) == ("first", None)
    assert ([path.name for path in first.train_dumps], len(first.patches) > 0) == (["0.pt"], True)
    assert ([path.name for path in second.train_dumps], second.patches) == (["0_0.pt"], [])


def test_a_run_that_needs_another_interpreter_gets_it_and_dumps_the_same_bits(tmp_path: Path, plugin: Path) -> None:
    forked, seen_forked = seen_in(tmp_path / "forked", plugin, cp=2)
    fresh, seen_fresh = seen_in(tmp_path / "fresh", plugin, cp=2, environment={"PYTHONHASHSEED": "7"})
    assert seen_fresh["server"] == os.getpid()
    assert seen_forked["server"] != os.getpid()
    one, other = (torch.load(result.train_dumps[0], weights_only=True) for result in (forked, fresh))
    assert list(differences(one, other)) == []


def test_a_process_whose_variables_change_forks_from_a_server_that_has_them(
    tmp_path: Path, plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, before = seen_in(tmp_path / "1", plugin)
    monkeypatch.setenv("TORCH_LATER", "1")  # as an import of a library may set one
    _, after = seen_in(tmp_path / "2", plugin)
    assert len({before["server"], after["server"], os.getpid()}) == 3


def test_a_run_goes_on_when_its_server_is_killed_and_the_next_has_another(tmp_path: Path, plugin: Path) -> None:
    _, before = seen_in(tmp_path / "before", plugin)
    hook = tmp_path / "hook.py"
    hook.write_text(
        "import os, signal\n"
        "def kill_the_server(rank, actor_module, args):\n"
        "    worker = os.getppid()\n"
        f"    open({str(tmp_path / 'worker')!r}, 'w').write(str(worker))\n"
        "    os.kill(int(open(f'/proc/{worker}/stat').read().rpartition(')')[2].split()[1]), signal.SIGKILL)\n"
    )
    result = train(LabOptions(out=tmp_path / "out", rank_hook=f"{hook}:kill_the_server"))
    assert [path.name for path in result.train_dumps] == ["0.pt"]
    _, after = seen_in(tmp_path / "after", plugin)
    assert len({before["server"], after["server"], os.getpid()}) == 3
    deadline = time.monotonic() + 10
    while is_alive(int((tmp_path / "worker").read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_server_and_its_runs_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    hook = tmp_path / "hook.py"
    hook.write_text(
        "import os, signal, time\n"
        "def kill_the_client(rank, actor_module, args):\n"
        f"    worker = os.getppid()\n"
        "    server = int(open(f'/proc/{worker}/stat').read().rpartition(')')[2].split()[1])\n"
        "    client = int(open(f'/proc/{server}/stat').read().rpartition(')')[2].split()[1])\n"
        f"    print(os.getpid(), worker, server, file=open({str(tmp_path / 'pids')!r}, 'w', buffering=1))\n"
        "    os.kill(client, signal.SIGKILL)\n"
        "    time.sleep(60)\n"
    )
    code = (
        "from slime_instrument.lab import LabOptions, train\n"
        f"train(LabOptions(out={str(tmp_path / 'out')!r}, rank_hook={f'{hook}:kill_the_client'!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 10
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        while is_alive(pid):
            assert time.monotonic() < deadline, f"process {pid} outlived the one that it worked for"
            time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
