"""Arming, disarming and looking, in a process of its own where it matters what was imported when."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from slime_instrument import _runtime as runtime
from slime_instrument import _switch as switch
from slime_instrument._errors import DumpError, SettingsError
from slime_instrument._hooks.capture import SESSIONS, CaptureSession, Loaded

ROOT = Path(__file__).parents[1]
LOADER = """
    ray = None
    def process_rollout_data(args, rollout_data_ref, dp_rank, dp_size): pass
"""


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No runtime before, and none after."""
    monkeypatch.setattr(runtime, "_current", None)
    yield
    runtime.uninstrument()


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., Any]:
    """Run a program beside a tiny slime; it prints one JSON document."""
    folder = tmp_path / "slime" / "utils"
    folder.mkdir(parents=True)
    (folder / "data.py").write_text(textwrap.dedent(LOADER))

    def run(program: str, **environment: str) -> Any:
        head = "import json, sys\ndef show(**k): print(json.dumps(k))\n"
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLIME_INSTRUMENT", "PYTEST"))
        }
        ran = subprocess.run(
            [sys.executable, "-c", head + textwrap.dedent(program)],
            cwd=tmp_path,
            env={**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]), **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)

    return run


LOOK = """
import slime.utils.data as d
show(wrapped=type(d.process_rollout_data).__name__ == "FunctionPatch", **found)
"""


def test_an_import_arms_and_status_says_so_before_slime_is_there(python: Any) -> None:
    program = """
import slime_instrument as si
light = not {"torch", "wrapt"} & set(sys.modules)
before = si.status()
found = dict(light=light, armed=before.armed, route=before.route, states=sorted({p.state for p in before}))
"""
    assert python(program + LOOK) == {
        "light": True, "armed": True, "route": "import slime_instrument", "states": ["PENDING"], "wrapped": True,
    }  # fmt: skip


def test_uninstrument_before_slime_is_imported_leaves_it_alone(python: Any) -> None:
    found = python("import slime_instrument as si\nsi.uninstrument()\nfound = dict(armed=si.status().armed)\n" + LOOK)
    assert found == {"wrapped": False, "armed": False}


def test_switched_off_an_import_arms_nothing(python: Any) -> None:
    program = "import slime_instrument as si\nfound = dict(armed=si.status().armed)\n" + LOOK
    assert python(program, SLIME_INSTRUMENT="0") == {"wrapped": False, "armed": False}


def test_switched_off_an_explicit_call_still_arms(python: Any) -> None:
    program = "import slime_instrument as si\nsi.instrument()\nfound = {}\n" + LOOK
    assert python(program, SLIME_INSTRUMENT="0") == {"wrapped": True}


def test_a_block_in_a_process_that_waits_for_slime_changes_nothing(python: Any) -> None:
    found = python("""
        import slime_instrument as si
        with si.instrumented():
            pass
        route = si.status().route
        import slime.utils.data as d
        show(route=route, wrapped=type(d.process_rollout_data).__name__)
    """)
    assert found == {"route": "import slime_instrument", "wrapped": "FunctionPatch"}


def test_a_block_in_a_process_that_is_not_armed_is_gone_afterwards_also_when_it_raises(python: Any) -> None:
    found = python(
        """
        import slime_instrument as si
        import slime.utils.data as d
        before = {k: id(v) for k, v in vars(d).items()}
        try:
            with si.instrumented():
                inside = type(d.process_rollout_data).__name__
                raise LookupError
        except LookupError:
            pass
        show(inside=inside, same={k: id(v) for k, v in vars(d).items()} == before, armed=si.status().armed)
        """,
        SLIME_INSTRUMENT="0",
    )
    assert found == {"inside": "FunctionPatch", "same": True, "armed": False}


def test_a_forked_process_is_armed_like_its_parent_and_disarms_alone(python: Any) -> None:
    found = python("""
        import os
        import slime_instrument as si
        import slime.utils.data as d
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            inside = type(d.process_rollout_data).__name__
            si.uninstrument()
            os.write(writer, f"{inside} {type(d.process_rollout_data).__name__}".encode())
            os._exit(0)
        os.waitpid(pid, 0)
        show(child=os.read(reader, 100).decode(), parent=type(d.process_rollout_data).__name__)
    """)
    assert found == {"child": "FunctionPatch function", "parent": "FunctionPatch"}


def test_the_training_side_imports_nothing_of_the_reading_side(python: Any) -> None:
    found = python("""
        import slime_instrument as si
        import slime.utils.data
        import slime_instrument._dump.dumper
        heavy = {"polars", "rich", "typer", "pydantic", "pyarrow", "click", "pandas"}
        show(heavy=sorted(heavy & set(sys.modules)))
    """)
    assert found == {"heavy": []}


# ---------------------------------------------------------------- in this process


def test_arming_and_disarming_are_idempotent(clean: None) -> None:
    first = runtime.instrument("one")
    second = runtime.instrument("two")
    assert (first.route, second.route, second.armed) == ("one", "one", True)
    runtime.uninstrument()
    runtime.uninstrument()
    assert not runtime.status().armed
    assert {patch.state for patch in runtime.status()} == {"REMOVED"}
    assert runtime.instrument("three").route == "three"


def test_without_arming_there_is_no_current_runtime_but_a_status(clean: None) -> None:
    with pytest.raises(RuntimeError, match="not armed in this process"):
        runtime.current()
    status = runtime.status()
    assert not status.armed
    assert {patch.state for patch in status} == {"DISABLED"}
    assert str(status).startswith("slime_instrument is not armed\nstate")


def test_a_bad_setting_arms_nothing_and_is_named(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_INSTRUMENT_TIMEOUT_S", "soon")
    with pytest.raises(SettingsError, match="SLIME_INSTRUMENT_TIMEOUT_S"):
        runtime.instrument()
    assert not runtime.status().armed
    with pytest.raises(SettingsError), runtime.instrumented():
        pytest.fail("the block must not be entered")


def test_a_bad_setting_where_nothing_may_raise_is_kept_for_later(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_INSTRUMENT_EVERY", "often")
    runtime.arm_quietly("a .pth file")
    status = runtime.status()
    assert status.armed
    assert "SLIME_INSTRUMENT_EVERY" in str(status.failure)
    assert "SLIME_INSTRUMENT_EVERY" in str(status).splitlines()[0]
    with pytest.raises(SettingsError):
        runtime.current().refuse_bad_settings()


def test_status_is_a_table_and_plain_data(clean: None) -> None:
    runtime.instrument("the test")
    status = runtime.status()
    document = json.loads(json.dumps(status.as_dict()))
    assert set(document) == {"armed", "route", "settings", "failure", "patches"}
    assert {"target", "state", "reason", "calls"} <= set(document["patches"][0])
    assert document["patches"][0]["state"] in ("PENDING", "ACTIVE")
    lines = str(status).splitlines()
    assert lines[0] == "slime_instrument is armed by the test"
    assert len(lines) == 2 + len(status.patches)
    assert status["train-dump"].name == "train-dump"


def test_a_block_inside_an_armed_process_leaves_it_armed(clean: None) -> None:
    runtime.instrument("outside")
    with runtime.instrumented():
        pass
    assert runtime.status().armed
    assert runtime.status().route == "outside"


def test_uninstrument_takes_the_watch_for_slime_away(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [switch.SlimeWatch("a test", print), *sys.meta_path])
    assert runtime.status().route == "a test"
    runtime.uninstrument()
    assert not switch.is_waiting()


class Told:
    """In the place of the dump side: what it was told."""

    def __init__(self) -> None:
        self.given_up: list[tuple[int, str]] = []
        self.stepped_out: list[str] = []

    def give_up(self, rollout_id: int, reason: str) -> None:
        self.given_up.append((rollout_id, reason))

    def step_out(self, reason: str) -> None:
        self.stepped_out.append(reason)


@pytest.fixture
def told(clean: None) -> Told:
    """The current runtime's dump side, told and not asked."""
    runtime.instrument()
    made: Any = Told()
    runtime.current().dumper = made
    return made  # type: ignore[no-any-return]


def session(rollout_id: int = 0) -> CaptureSession:
    return CaptureSession(rollout_id, {"response_lengths": [], "partition": []}, Loaded("partition", added=True))


@pytest.mark.parametrize("where", ["data-loader", "train-actor", "rollout-metrics", "train-dump"])
def test_what_fails_while_no_session_is_open_is_kept_for_the_next(told: Told, where: str) -> None:
    current = runtime.current()
    current._patch_failed(where, ValueError("no"), False)
    current._patch_failed(where, ValueError("later"), False)
    assert current.take_failures() == {where: f"{where} failed: ValueError: no"}
    assert current.take_failures() == {}


@pytest.mark.parametrize("where", ["train-actor", "rollout-metrics", "micro-batches", "log-probs", "train-dump"])
def test_what_fails_in_a_session_costs_its_rollout(told: Told, where: str) -> None:
    open_now = session(5)
    with SESSIONS.opened(open_now):
        runtime.current()._patch_failed(where, KeyError("x"), False)
    assert open_now.failure == f"{where} failed: KeyError: 'x'"
    assert "partition" not in open_now.rollout_data
    assert runtime.current().take_failures() == {}
    # Others wait for this rank in the dump only.
    assert told.given_up == ([(5, "train-dump failed: KeyError: 'x'")] if where == "train-dump" else [])


def test_data_that_fail_to_load_ahead_concern_the_rollout_that_trains_next(told: Told) -> None:
    open_now = session()
    with SESSIONS.opened(open_now):
        runtime.current()._patch_failed("data-loader", ValueError("no"), False)
    assert open_now.failure is None
    assert set(runtime.current().take_failures()) == {"data-loader"}


def test_a_failure_of_something_optional_costs_no_dump(told: Told) -> None:
    open_now = session()
    with SESSIONS.opened(open_now):
        runtime.current()._patch_failed("optimizer-step", ValueError("no"), True)
    assert (open_now.failure, runtime.current().take_failures(), told.stepped_out) == (None, {}, [])


def test_a_dump_that_was_given_up_is_no_failure_of_ours(told: Told) -> None:
    open_now = session(4)
    with SESSIONS.opened(open_now):
        for _ in range(10):
            runtime.current().patcher["train-dump"].failed(DumpError("the disk is full"))
    assert open_now.failure is None
    assert told.stepped_out == []
    assert {reason for _, reason in told.given_up} == {"train-dump failed: DumpError: the disk is full"}
    assert str(runtime.current().patcher["train-dump"].state) != "FAILED"


def test_three_lost_rollouts_in_a_row_take_this_rank_out_and_the_others_are_told_why(
    told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    current = runtime.current()
    bad, good = session(), session()
    bad.fail("log-probs failed: KeyError: 'x'")
    for each in (bad, bad, good, bad, bad):
        current.rollout_ended(each)
    assert told.stepped_out == []
    current.rollout_ended(bad)
    current.rollout_ended(bad)
    assert told.stepped_out == [current.stepped_out]
    assert "3 dumps in a row" in told.stepped_out[0]
    assert "log-probs failed: KeyError: 'x'" in told.stepped_out[0]
    lines = [record.getMessage() for record in caplog.records if "makes no more train dumps" in record.getMessage()]
    assert len(lines) == 1
    assert told.stepped_out[0] in lines[0]
    runtime.uninstrument()
    assert len(told.stepped_out) == 1


def test_a_rank_that_is_unarmed_in_mid_run_says_so(told: Told) -> None:
    runtime.uninstrument()
    runtime.uninstrument()
    assert told.stepped_out == ["slime_instrument was taken off on this rank"]


def test_waiting_for_slime_takes_no_other_finder_its_turn(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """importlib walks the list while the watch, which is in it, is asked."""

    class Knows:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            return ModuleSpec(name, None, is_package=True) if name == "slime" else None

    armed: list[str] = []
    monkeypatch.setattr(sys, "meta_path", [switch.SlimeWatch("a test", armed.append), Knows()])
    monkeypatch.delitem(sys.modules, "slime", raising=False)
    importlib.import_module("slime")
    monkeypatch.delitem(sys.modules, "slime")
    assert armed == ["a test"]
    assert not switch.is_waiting()
    importlib.import_module("slime")
    monkeypatch.delitem(sys.modules, "slime")
    assert armed == ["a test"], "once"
