"""Arming, disarming and looking, in a process of its own where it matters what was imported when."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

from slime_instrument import _runtime as runtime
from slime_instrument import _state as state
from slime_instrument import _waiting as waiting
from slime_instrument._capture import CaptureSession, enter, leave
from slime_instrument._errors import SettingsError

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
        import slime_instrument._dump.pipeline
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
    monkeypatch.setattr(sys, "meta_path", [waiting.SlimeWatch("a test", print), *sys.meta_path])
    assert runtime.status().route == "a test"
    runtime.uninstrument()
    assert not waiting.is_waiting()


def test_a_failure_concerns_the_rollout_in_which_it_happened(clean: None) -> None:
    runtime.instrument()
    current = runtime.current()
    current._failed("data-loader", ValueError("no"), False)
    current._failed("data-loader", ValueError("later"), False)
    assert current.take_failure() == "data-loader failed: ValueError: no"
    assert current.take_failure() is None
    session = CaptureSession(0, {"response_lengths": [], "partition": []})
    handle = enter(session)
    current._failed("log-probs", KeyError("x"), False)
    leave(handle)
    assert session.failure == "log-probs failed: KeyError: 'x'"
    assert current.take_failure() is None


def test_a_failure_of_something_optional_costs_no_dump(clean: None) -> None:
    runtime.instrument()
    runtime.current()._failed("optimizer-step", ValueError("no"), False)
    assert runtime.current().take_failure() is None


def test_a_rank_that_steps_out_says_so_to_the_others(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = dist.HashStore()
    monkeypatch.setattr(state, "default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    runtime.instrument()
    current = runtime.current()
    current.announce()
    assert store.check(["slime_instrument/armed/5"])
    current._failed("train-dump", ValueError("no"), False)
    assert store.check(["slime_instrument/armed/5"])
    current._failed("train-dump", ValueError("no"), True)
    assert not store.check(["slime_instrument/armed/5"])
    current.announce()
    assert not store.check(["slime_instrument/armed/5"])


def test_a_rollout_that_is_trained_again_has_another_dump_key_also_after_arming_again(clean: None) -> None:
    runtime.instrument()
    keys = []
    for rollout_id in (3, 3, 4, 3):
        runtime.current().training_begins(rollout_id)
        keys.append(runtime.current().dump_key(rollout_id))
    assert keys == ["3/0", "3/1", "4/0", "3/2"]
    runtime.uninstrument()
    runtime.instrument()
    runtime.current().training_begins(3)
    assert runtime.current().dump_key(3) == "3/3"


def test_the_first_dump_is_told_with_what_it_cost_and_the_others_are_not(
    clean: None, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    runtime.instrument()
    caplog.set_level(logging.INFO, "slime_instrument")
    runtime.current().training_begins(0)
    for rollout_id in range(3):
        runtime.current().wrote(rollout_id, tmp_path / f"{rollout_id}.pt", 2_500_000, 0.5)
    (line,) = [record.getMessage() for record in caplog.records if "wrote" in record.getMessage()]
    assert f"wrote {tmp_path / '0.pt'}, 2.5 MB in 0.50 s" in line


def test_status_asks_nothing_of_objects_that_warn_when_asked(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Touchy:
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

    module = ModuleType("touchy")
    vars(module)["stand_in"] = Touchy()
    monkeypatch.setitem(sys.modules, "touchy", module)
    monkeypatch.setitem(sys.modules, "torch._dynamo", ModuleType("torch._dynamo"))
    runtime.instrument()
    assert runtime.status().armed
