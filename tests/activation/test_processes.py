"""Child processes, threads and reloads: armed once, everywhere, and never half."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

CHILD = """
import json
def child(channel):
    import sys
    import slime.backends.megatron_utils.actor as actor
    import slime_instrument as si
    from types import SimpleNamespace
    trainer = actor.MegatronTrainRayActor()
    trainer.init(SimpleNamespace(save_debug_train_data=None), "actor")
    trainer.train_actor(0, {})
    status = si.status()
    channel.send([status.armed, status.route, status["train-actor"].calls, status["train-actor"].state])
"""
MAIN = """
import multiprocessing, sys
import child
if __name__ == "__main__":
    {first}
    context = multiprocessing.get_context({method!r})
    mine, other = context.Pipe()
    process = context.Process(target=child.child, args=(other,))
    process.start()
    answer = mine.recv()
    process.join()
    import json
    print(json.dumps(answer))
"""


@pytest.fixture
def program(tmp_path: Path) -> Any:
    (tmp_path / "child.py").write_text(CHILD)

    def write(method: str, first: str) -> Path:
        file = tmp_path / "program.py"
        file.write_text(MAIN.format(method=method, first=first))
        return file

    return write


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_child_of_an_armed_process_is_armed_and_counts_for_itself(
    installed: Any, fake_slime: Path, program: Any, method: str
) -> None:
    done = installed.run(program(method, "pass"), path=[fake_slime], SLIME_INSTRUMENT="1")
    route = "SLIME_INSTRUMENT in the environment (.pth)"
    assert done.stdout.strip() == f'[true, "{route}", 1, "ACTIVE"]'


def test_a_child_forked_after_slime_was_imported_starts_from_the_parents_patches(
    installed: Any, fake_slime: Path, program: Any
) -> None:
    file = program("fork", "import slime_instrument, slime.backends.megatron_utils.actor")
    assert installed.run(file, path=[fake_slime]).stdout.strip() == '[true, "import slime_instrument", 1, "ACTIVE"]'


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_of_a_process_that_is_off_is_off(installed: Any, fake_slime: Path, program: Any, method: str) -> None:
    done = installed.run(program(method, "pass"), path=[fake_slime], SLIME_INSTRUMENT="0")
    assert done.stdout.strip() == '[false, "", 0, "DISABLED"]'


def test_threads_that_arm_at_the_same_time_arm_once(installed: Any, fake_slime: Path) -> None:
    code = """
        import sys, threading
        import slime.backends.megatron_utils.actor as actor, slime.ray.actor_group
        from slime.backends.megatron_utils import loss
        held = [loss.policy_loss_function]  # in a list: a name would be repointed to the wrapper
        sys.setswitchinterval(1e-6)
        import os; os.environ["SLIME_INSTRUMENT"] = "0"
        import slime_instrument as si
        si.status()
        start = threading.Barrier(8)
        def arm():
            start.wait()
            si.instrument()
        threads = [threading.Thread(target=arm) for _ in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        depth, wrapper = 0, loss.policy_loss_function
        while wrapper is not held[0]:
            depth, wrapper = depth + 1, wrapper.__wrapped__
        loss.policy_loss_function({}, {}, 1, None)
        calls = si.status()["policy-loss"].calls
        si.uninstrument()
        answer = [depth, calls, loss.policy_loss_function is held[0]]
    """
    for _ in range(3):
        assert installed.answer(code, path=[fake_slime]) == [1, 1, True]


def test_threads_that_import_slime_at_the_same_time_find_it_patched(installed: Any, fake_slime: Path) -> None:
    code = """
        import sys, threading
        sys.setswitchinterval(1e-6)
        start, seen = threading.Barrier(6), []
        def look(number):
            start.wait()
            if number % 2:
                from slime.backends.megatron_utils import loss
                seen.append(hasattr(loss.policy_loss_function, "__wrapped__"))
            else:
                import slime.backends.megatron_utils.actor as actor
                seen.append(hasattr(actor.MegatronTrainRayActor.train_actor, "__wrapped__"))
        threads = [threading.Thread(target=look, args=(number,)) for number in range(6)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        answer = seen
    """
    for _ in range(3):
        assert installed.answer(code, path=[fake_slime], SLIME_INSTRUMENT="1") == [True] * 6


def test_arming_again_after_a_reload_patches_the_new_functions(installed: Any, fake_slime: Path) -> None:
    code = """
        import importlib
        import slime_instrument as si
        from slime.backends.megatron_utils import loss
        importlib.reload(loss)
        drifted = [si.status()["policy-loss"].state, hasattr(loss.policy_loss_function, "__wrapped__")]
        si.instrument()
        again = [si.status()["policy-loss"].state, hasattr(loss.policy_loss_function, "__wrapped__")]
        loss.policy_loss_function({}, {}, 1, None)
        calls = si.status()["policy-loss"].calls
        si.uninstrument()
        answer = [drifted, again, calls, hasattr(loss.policy_loss_function, "__wrapped__")]
    """
    assert installed.answer(code, path=[fake_slime]) == [["DRIFTED", False], ["ACTIVE", True], 1, False]


def test_reloading_the_package_itself_keeps_one_set_of_patches(installed: Any, fake_slime: Path) -> None:
    code = """
        import importlib
        import slime_instrument as si
        from slime.backends.megatron_utils import loss
        wrapper = loss.policy_loss_function
        importlib.reload(si)
        answer = [loss.policy_loss_function is wrapper, si.status()["policy-loss"].state]
    """
    assert installed.answer(code, path=[fake_slime]) == [True, "ACTIVE"]


def test_a_slime_that_cannot_be_imported_fails_as_it_would_and_works_on_the_second_try(
    installed: Any, fake_slime: Path, tmp_path: Path
) -> None:
    code = f"""
        import sys
        try:
            import slime
        except ModuleNotFoundError as error:
            failed = error.name
        sys.path.append({str(fake_slime)!r})
        import importlib; importlib.invalidate_caches()
        from slime.backends.megatron_utils import loss
        answer = [failed, hasattr(loss.policy_loss_function, "__wrapped__")]
    """
    assert installed.answer(code, SLIME_INSTRUMENT="1") == ["slime", True]


def test_asking_whether_slime_is_there_does_not_import_it(installed: Any, fake_slime: Path) -> None:
    code = """
        import importlib.util, sys
        found = importlib.util.find_spec("slime") is not None
        answer = [found, "slime" in sys.modules, "torch" in sys.modules]
    """
    assert installed.answer(code, path=[fake_slime], SLIME_INSTRUMENT="1") == [True, False, False]


@pytest.mark.parametrize("flags", [["-O"], ["-OO"], ["-X", "frozen_modules=off"], ["-W", "error"], ["-X", "dev"]])
def test_interpreter_flags_make_no_difference(installed: Any, fake_slime: Path, flags: list[str]) -> None:
    code = (
        "import slime.backends.megatron_utils.actor as a; "
        "print(hasattr(a.MegatronTrainRayActor.train_actor, '__wrapped__'))"
    )
    done = installed.run(*flags, "-c", code, path=[fake_slime], SLIME_INSTRUMENT="1")
    assert done.stdout == "True\n"
    assert done.stderr == ""


def test_under_a_debugger_that_traces_every_line_it_arms_and_counts(installed: Any, fake_slime: Path) -> None:
    code = """
        import sys
        lines = 0
        def trace(frame, event, arg):
            global lines
            lines += event == "line"
            return trace
        sys.settrace(trace)
        from slime.backends.megatron_utils.loss import policy_loss_function
        value = policy_loss_function({}, {}, 2, None)
        sys.settrace(None)
        import slime_instrument as si
        answer = [value, si.status()["policy-loss"].calls, lines > 0]
    """
    assert installed.answer(code, path=[fake_slime], SLIME_INSTRUMENT="1") == [4, 1, True]
