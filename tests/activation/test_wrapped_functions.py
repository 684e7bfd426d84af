"""What people do to functions, done to wrapped ones: pickle, inspect, wrap again, compile, checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SETUP = """
import copy, inspect, pickle
import slime_instrument as si
from slime.backends.megatron_utils import loss, data
from slime.backends.megatron_utils.actor import MegatronTrainRayActor
def calls(name):
    return si.status()[name].calls
"""


@pytest.fixture
def ask(uninstalled: Any, fake_slime: Path) -> Any:
    """Run code with everything armed and imported; other places on the path may be given."""
    return lambda code, **variables: uninstalled.answer(SETUP + code, path=[fake_slime], **variables)


@pytest.mark.parametrize("module", ["pickle", "cloudpickle", "ray.cloudpickle"])
@pytest.mark.parametrize("what", ["loss.policy_loss_function", "MegatronTrainRayActor.train_actor"])
def test_wrapped_functions_pickle_by_name_and_arrive_as_what_is_there(ask: Any, module: str, what: str) -> None:
    if module != "pickle":
        pytest.importorskip(module)
    code = f"""
import importlib
pickler = importlib.import_module({module!r})
data = pickler.dumps({what})
armed = pickle.loads(data) is {what}
si.uninstrument()
named = b"policy_loss_function" in data or b"train_actor" in data
answer = [armed, pickle.loads(data) is {what}, hasattr({what}, "__wrapped__"), named]
"""
    assert ask(code) == [True, True, False, True]


@pytest.mark.parametrize("how", ["copy.copy", "copy.deepcopy"])
@pytest.mark.parametrize("what", ["loss.policy_loss_function", "MegatronTrainRayActor.train_actor"])
def test_a_copy_of_a_wrapped_function_is_the_function(ask: Any, how: str, what: str) -> None:
    assert ask(f"answer = {how}({what}) is {what} and {how}([{what}])[0] is {what}") is True


@pytest.mark.parametrize(
    ("what", "signature"),
    [
        ("loss.policy_loss_function", "(args, batch, logits, sum_of_sample_mean)"),
        ("MegatronTrainRayActor.train_actor", "(self, rollout_id, rollout_data, external_data=None)"),
        ("MegatronTrainRayActor().train_actor", "(rollout_id, rollout_data, external_data=None)"),
    ],
)
def test_signature_name_and_documentation_are_the_originals(ask: Any, what: str, signature: str) -> None:
    code = f"""
f = {what}
armed = [str(inspect.signature(f)), f.__name__, f.__qualname__, f.__module__, f.__doc__, inspect.getsource(f)]
si.uninstrument()
f = {what}
answer = [armed[0], armed == [
    str(inspect.signature(f)), f.__name__, f.__qualname__, f.__module__, f.__doc__, inspect.getsource(f)]]
"""
    assert ask(code) == [signature, True]


def test_another_tool_below_keeps_working_and_is_there_after_removal(ask: Any) -> None:
    code = """
import wrapt
si.uninstrument()
seen = []
def other(wrapped, instance, args, kwargs):
    seen.append("other")
    return wrapped(*args, **kwargs)
wrapt.wrap_function_wrapper(loss, "policy_loss_function", other)
below = loss.policy_loss_function
si.instrument()
value = loss.policy_loss_function({}, {}, 1, None)
armed = [value, calls("policy-loss"), len(seen)]
si.uninstrument()
loss.policy_loss_function({}, {}, 1, None)
answer = [armed, loss.policy_loss_function is below, len(seen)]
"""
    assert ask(code) == [[2, 1, 1], True, 2]


@pytest.mark.parametrize("removal", ["ours first", "theirs first"])
def test_another_tool_on_top_keeps_working_and_ours_still_counts(ask: Any, removal: str) -> None:
    code = f"""
import wrapt
seen = []
def other(wrapped, instance, args, kwargs):
    seen.append("other")
    return wrapped(*args, **kwargs)
ours = loss.policy_loss_function
wrapt.wrap_function_wrapper(loss, "policy_loss_function", other)
value = loss.policy_loss_function({{}}, {{}}, 1, None)
status = si.status()["policy-loss"]
armed = [value, status.calls, len(seen), status.state, "wrapped again" in status.reason]
if {removal!r} == "ours first":
    si.uninstrument()
    loss.policy_loss_function({{}}, {{}}, 1, None)
    answer = [armed, len(seen), type(loss.policy_loss_function.__wrapped__).__name__]
else:
    loss.policy_loss_function = ours
    si.uninstrument()
    answer = [armed, len(seen) + 1, type(loss.policy_loss_function).__name__]
"""
    assert ask(code) == [[2, 1, 1, "DRIFTED", True], 2, "function"]


def test_another_tool_on_top_of_a_method_is_kept(ask: Any) -> None:
    code = """
import functools, types
original = MegatronTrainRayActor.train_actor.__wrapped__
ours, seen = MegatronTrainRayActor.train_actor, []
@functools.wraps(ours)
def traced(*args, **kwargs):
    seen.append("span")
    return ours(*args, **kwargs)
MegatronTrainRayActor.train_actor = traced
actor = MegatronTrainRayActor()
actor.args = types.SimpleNamespace(save_debug_train_data=None)
actor.train_actor(0, {})
counted = calls("train-actor")
si.uninstrument()
value = actor.train_actor(0, {})
answer = [counted, value, len(seen), MegatronTrainRayActor.train_actor is traced]
"""
    assert ask(code) == [1, 6, 2, True]


PAST_THE_WRAPPER = {
    "compiled": """
exec("from slime.backends.megatron_utils import loss\\ndef mine(x): return loss.policy_loss_function({}, {}, x, None)",
     vars(plug_in))
plug_in.mine = torch.compile(plug_in.mine, backend="eager")
""",
    "partial": """
si.uninstrument()
plug_in.mine = functools.partial(loss.policy_loss_function, {}, {}, sum_of_sample_mean=None)
si.instrument()
""",
}


@pytest.mark.parametrize("how", PAST_THE_WRAPPER)
def test_what_calls_past_the_wrapper_shows_as_a_patch_that_is_never_called(ask: Any, how: str) -> None:
    code = f"""
import functools, sys, torch, types
plug_in = sys.modules["plug_in"] = types.ModuleType("plug_in")
{PAST_THE_WRAPPER[how]}
value = plug_in.mine(torch.ones(2)).tolist()
before = si.status()["policy-loss"].reason
from slime.utils.train_dump_utils import save_debug_train_data
save_debug_train_data(types.SimpleNamespace(save_debug_train_data=None), rollout_id=0, rollout_data={{}})
status = si.status()["policy-loss"]
answer = [value, status.calls, status.state, before, status.reason, si.status()["train-dump"].reason]
"""
    value, counted, state, before, reason, called = ask(code)
    assert value == [2.0, 2.0]
    assert (counted, state) == (0, "ACTIVE"), "this is what is to be reported"
    assert "never called" not in before + called
    assert "never called although training ran" in reason
    assert "compiled" in reason
    assert "partial" in reason


def test_a_target_that_is_compiled_itself_is_wrapped_outside_the_compiled_code(ask: Any) -> None:
    code = """
import torch
si.uninstrument()
loss.policy_loss_function = torch.compile(loss.policy_loss_function, backend="eager", fullgraph=True)
si.instrument()
value = loss.policy_loss_function({}, {}, torch.ones(2), None).tolist()
status = si.status()["policy-loss"]
answer = [value, status.calls, status.state, "never" in status.reason]
"""
    assert ask(code) == [[2.0, 2.0], 1, "ACTIVE", False]


def test_a_checkpointed_loss_gives_the_same_gradient_and_is_counted_each_time_it_runs(ask: Any) -> None:
    code = """
import torch
from torch.utils.checkpoint import checkpoint
x = torch.ones(3, requires_grad=True)
y = checkpoint(lambda x: loss.policy_loss_function({}, {}, x, None) ** 2, x, use_reentrant=False).sum()
forward = calls("policy-loss")
y.backward()
answer = [x.grad.tolist(), forward, calls("policy-loss")]
"""
    assert ask(code) == [[8.0, 8.0, 8.0], 1, 2]


def test_subclasses_and_super_run_through_the_patch_once(ask: Any) -> None:
    code = """
import types
class Mine(MegatronTrainRayActor):
    def train_actor(self, rollout_id, rollout_data, external_data=None):
        return ("mine", super().train_actor(rollout_id, rollout_data, external_data=external_data))
actor = Mine()
actor.args = types.SimpleNamespace(save_debug_train_data=None)
answer = [actor.train_actor(0, {}), calls("train-actor")]
"""
    assert ask(code) == [["mine", 6], 1]


def test_an_exception_of_the_target_leaves_as_it_was_raised(ask: Any) -> None:
    code = """
import traceback
try:
    loss.policy_loss_function({}, {}, None, None)
except TypeError as error:
    ours = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    answer = [str(error), ours[-1], error.__cause__ is None, error.__context__ is None]
"""
    message, last, no_cause, no_context = ask(code)
    assert "NoneType" in message
    assert (last, no_cause, no_context) == ("policy_loss_function", True, True)
