"""The start of training, the session, the micro-batches and the loss; and what steps back where slime is different."""

from __future__ import annotations

import contextvars
import copy
import importlib
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime_instrument import _runtime as runtime
from slime_instrument._errors import SettingsError, TrainingPathError
from slime_instrument._hooks import HOOKS
from slime_instrument._hooks.capture import LOCAL_KEY, SESSIONS, CaptureSession, current_session, policy_loss

from .fake_slime import ITERATOR, LOSS, Form

EXPECTED = {0: [], 1: [14.0], 2: [24.0, 25.0]}
Load = Callable[..., dict[str, Any]]


def states() -> dict[str, str]:
    return {patch.name: patch.state for patch in runtime.status()}


# ---------------------------------------------------------------- start


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{rollout_id}_{step}.pt", "{step}"),
        ("{}.pt", "{}"),
        ("{0}_{rollout_id}.pt", "{0}"),
        ("{rollout_id.real}.pt", "{rollout_id.real}"),
        ("t.pt", "a path without {rollout_id}, for several rollouts"),
        ("{rank}.pt", "a path without {rollout_id}, for several rollouts"),
    ],
)
def test_a_path_that_cannot_work_is_refused_when_training_starts(
    slime: Any, trainer: Any, args: SimpleNamespace, tmp_path: Path, template: str, found: str
) -> None:
    slime()
    runtime.instrument()
    args.save_debug_train_data = str(tmp_path / template)
    with pytest.raises(TrainingPathError) as raised:
        trainer()
    message = str(raised.value)
    assert message.startswith(f"slime_instrument: --save-debug-train-data {tmp_path / template}: expected ")
    assert f"found {found}. Training is not started, because its dumps would be lost. Use a path such as" in message


def test_the_same_path_as_the_rollout_dump_is_refused(slime: Any, trainer: Any, args: SimpleNamespace) -> None:
    slime()
    runtime.instrument()
    args.save_debug_rollout_data = args.save_debug_train_data
    with pytest.raises(TrainingPathError, match="found the same path for both"):
        trainer()


@pytest.mark.parametrize("kind", ["a file", "below a file"])
def test_a_folder_in_which_nothing_can_be_made_is_refused(
    slime: Any, trainer: Any, args: SimpleNamespace, tmp_path: Path, kind: str
) -> None:
    slime()
    runtime.instrument()
    (tmp_path / "out").write_text("x")
    folder = tmp_path / "out" if kind == "a file" else tmp_path / "out" / "deeper"
    args.save_debug_train_data = str(folder / "{rollout_id}.pt")
    with pytest.raises(TrainingPathError, match=r"found (File exists|Not a directory)") as raised:
        trainer()
    assert f"expected a folder {folder} in which files can be made" in str(raised.value)


@pytest.mark.parametrize("armed", ["quietly", "by instrument()"])
def test_a_bad_setting_is_refused_naming_the_variable(
    slime: Any, trainer: Any, monkeypatch: pytest.MonkeyPatch, armed: str
) -> None:
    slime()
    monkeypatch.setenv("SLIME_INSTRUMENT_EVERY", "often")
    if armed == "quietly":
        runtime.arm_quietly("a .pth file")
        with pytest.raises(SettingsError, match="SLIME_INSTRUMENT_EVERY"):
            trainer()
        assert "SLIME_INSTRUMENT_EVERY" in str(runtime.status().failure)
    with pytest.raises(SettingsError, match="SLIME_INSTRUMENT_EVERY"):
        runtime.instrument()


@pytest.mark.parametrize("reason", ["no dump", "critic", "critic by keyword"])
def test_a_run_that_is_not_dumped_is_not_checked(
    slime: Any, trainer: Any, args: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    slime()
    runtime.instrument()
    args.save_debug_train_data = None if reason == "no dump" else "t.pt"
    assert trainer("actor" if reason == "no dump" else "critic").args is args
    if reason == "critic by keyword":
        importlib.import_module("slime.backends.megatron_utils.actor").MegatronTrainRayActor().init(args, role="critic")


def test_one_line_says_that_we_are_in_and_what_is_not_in_place(
    slime: Any, trainer: Any, args: SimpleNamespace, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIME_INSTRUMENT_EVRY", "3")
    slime(
        slime__backends__megatron_utils__model="""
        from slime.backends.megatron_utils.loss import policy_loss_function
        def forward_only(*a): pass
        def train_one_step(renamed): pass
    """
    )
    runtime.instrument("the test")
    caplog.set_level("INFO", "slime_instrument")
    trainer()
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if line.startswith("slime_instrument: armed by the test")]) == 1
    assert any(f"goes to {args.save_debug_train_data}" in line for line in lines)
    assert any("optimizer-step is INCOMPATIBLE" in line and "expected also step_id" in line for line in lines)
    assert any("unknown settings ignored: SLIME_INSTRUMENT_EVRY" in line for line in lines)


# ---------------------------------------------------------------- micro-batches and loss


def test_keys_are_added_only_while_a_session_is_open(slime: Any, batch: Any) -> None:
    fake = slime()
    runtime.instrument()
    iterator = fake.data.DataIterator(batch, 1)
    keys = ["tokens"]
    assert set(iterator.get_next(keys)) == {"tokens"}
    with SESSIONS.opened(CaptureSession(0, batch)):
        assert iterator.get_next(keys)["partition"] == [0]
        assert iterator.get_next(keys=("tokens", "partition")).keys() == {"tokens", "partition"}
        other = fake.data.DataIterator({"tokens": [1]}, 1)  # of another rollout, which has no positions
        assert set(other.get_next(keys)) == {"tokens"}
    iterator.offset = 0
    assert set(iterator.get_next(keys)) == {"tokens"}
    assert keys == ["tokens"]  # the caller's own list


@pytest.mark.parametrize("loss_call", ["positional", "keywords only"])
def test_the_loss_may_be_called_either_way(slime: Any, args: SimpleNamespace, batch: Any, loss_call: str) -> None:
    fake = slime(Form(log_probs="dict"))
    runtime.instrument()
    session = CaptureSession(0, batch)
    call: dict[str, Any] = {
        "args": args, "batch": batch, "logits": torch.ones(()), "sum_of_sample_mean": lambda x: x.sum(),
    }  # fmt: skip
    with SESSIONS.opened(session):
        if loss_call == "positional":
            fake.loss.policy_loss_function(*call.values())
        else:
            fake.loss.policy_loss_function(**call)
        assert policy_loss() is None
    collected = session.collected()
    assert collected is not None
    assert [value.tolist() for value in collected[0] if value is not None] == [[24.0, 25.0], [], [14.0]]


def test_log_probs_outside_the_policy_loss_are_never_captured(slime: Any, batch: Any) -> None:
    fake = slime()
    runtime.instrument()
    session = CaptureSession(0, batch)
    with SESSIONS.opened(session):
        fake.loss.get_log_probs_and_entropy(
            torch.ones(()), unconcat_tokens=batch["tokens"], total_lengths=[5, 3, 4], response_lengths=[2, 0, 1]
        )
    assert session.collected() is None


def test_a_loss_that_raises_leaves_no_batch_behind(slime: Any, args: SimpleNamespace, batch: Any) -> None:
    fake = slime()
    runtime.instrument()
    args.fail_in_loss = 1
    with SESSIONS.opened(CaptureSession(0, batch)):
        with pytest.raises(FloatingPointError):
            fake.loss.policy_loss_function(args, batch, torch.ones(()), torch.sum)
        assert policy_loss() is None


ELSEWHERE: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "fresh context": lambda call: contextvars.Context().run(call),
    "thread": lambda call: ThreadPoolExecutor(1).submit(call).result(),
}


@pytest.mark.parametrize("how", ELSEWHERE)
@pytest.mark.parametrize("what", ["train_one_step", "the loss", "the log-probs"])
def test_what_trains_in_another_thread_or_context_is_captured(
    slime: Any, trainer: Any, batch: Any, load: Load, monkeypatch: pytest.MonkeyPatch, how: str, what: str
) -> None:
    fake = slime()
    runtime.instrument()
    actor = trainer()
    owners = {
        "train_one_step": (fake.actor, "train_one_step"),
        "the loss": (fake.model, "policy_loss_function"),
        "the log-probs": (fake.loss, "get_log_probs_and_entropy"),
    }
    real = getattr(*owners[what])
    monkeypatch.setattr(*owners[what], lambda *a, **k: ELSEWHERE[how](lambda: real(*a, **k)))
    actor.train(0, [batch])
    dump = load()
    assert {s["rollout_position"]: s["log_probs"].tolist() for s in dump["samples"]} == EXPECTED
    assert policy_loss() is current_session() is None


def test_two_rollouts_at_once_in_contexts_of_their_own_are_dumped_without_log_probs_and_say_so(
    slime: Any, trainer: Any, batch: Any, args: Any, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = slime()
    args.loss_type = "policy_loss"
    runtime.instrument()
    actor = trainer()
    real = fake.actor.train_one_step
    monkeypatch.setattr(fake.actor, "train_one_step", lambda *a: contextvars.Context().run(real, *a))
    with SESSIONS.opened(CaptureSession(7, copy.deepcopy(batch))):
        actor.train(0, [batch])
    dump = load()
    assert "log_probs" not in dump["samples"][0]
    assert "not called through its hook" in dump["dp_shards"][0]["provenance"]["log_probs"]


def test_each_thread_that_trains_captures_its_own(slime: Any, trainer: Any, batch: Any, args: Any, load: Load) -> None:
    slime()
    runtime.instrument()
    actors = [trainer() for _ in range(2)]
    for number, actor in enumerate(actors):
        actor.args = SimpleNamespace(**vars(args))
        actor.args.save_debug_train_data = args.save_debug_train_data.replace(
            "{rollout_id}", f"{number}-{{rollout_id}}"
        )
        actor.weight = torch.tensor(1.0 + number, requires_grad=True)
    data = [{**copy.deepcopy(batch), "total_lengths": [5, 3, 4]} for _ in actors]
    threads = [
        threading.Thread(target=lambda a=a, d=d: [a.train_actor(i, d) for i in range(3)])
        for a, d in zip(actors, data, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        for rollout_id in range(3):
            dump = load(name=f"{number}-{rollout_id}.pt")
            found = {s["rollout_position"]: s["log_probs"].tolist() for s in dump["samples"]}
            assert found == {key: [v * (1 + number) for v in value] for key, value in EXPECTED.items()}


# ---------------------------------------------------------------- a slime that captures by itself (#2266)


def native(slime: Any) -> Any:
    return slime(Form(loader="keeps", native_capture=True, dump_home="slime.backends.megatron_utils.train_dump_utils"))


def test_where_slime_captures_itself_ours_is_skipped(
    slime: Any, trainer: Any, args: Any, batch: Any, load: Load
) -> None:
    native(slime)
    runtime.instrument()
    args.compute_log_probs = True
    trainer().train(0, [batch])
    assert (states()["policy-loss"], states()["log-probs"]) == ("SKIPPED", "SKIPPED")
    assert "captures these log-probs itself since #2266" in runtime.status()["log-probs"].reason
    assert states()["train-dump"] == "ACTIVE"
    assert [len(sample["log_probs"]) for sample in load()["samples"]] == [0, 1, 2]


def test_what_slime_captured_before_training_raised_does_not_stay(
    slime: Any, trainer: Any, args: SimpleNamespace, batch: Any
) -> None:
    fake = native(slime)
    runtime.instrument()
    actor = trainer()
    args.fail_at_end = True
    fake.loss.CAPTURED.append(torch.ones(1))
    with pytest.raises(ConnectionError):
        actor.train(0, [batch])
    assert fake.loss.CAPTURED == []


# ---------------------------------------------------------------- a slime that is different


def test_without_the_dump_function_nothing_is_touched_and_slime_trains(
    slime: Any, trainer: Any, batch: Any, tmp_path: Path
) -> None:
    fake = slime(Form(dump_home="slime.somewhere.else_now"))
    runtime.instrument()
    rollout_data = {**batch, "total_lengths": [5, 3, 4]}
    del rollout_data["partition"]
    assert trainer().train_actor(0, rollout_data) == "trained"
    assert states()["train-dump"] == "INCOMPATIBLE"
    assert {states()[name] for name in ("train-actor", "micro-batches", "policy-loss", "log-probs")} == {"SKIPPED"}
    assert LOCAL_KEY not in rollout_data
    ((_, dumped),) = fake.dump("slime.somewhere.else_now").NATIVE
    assert LOCAL_KEY not in dumped


def test_without_positions_samples_are_told_apart_by_a_key_that_stays_invisible(
    slime: Any, trainer: Any, args: SimpleNamespace, batch: Any, load: Load
) -> None:
    fake = slime(
        slime__utils__data="""
        class process_rollout_data:
            "No function any more."
    """
    )
    runtime.instrument()
    rollout_data = {**batch, "total_lengths": [5, 3, 4], "sample_indices": [9, 7, 8]}
    del rollout_data["partition"]
    trainer().train_actor(0, rollout_data)
    assert states()["data-loader"] == "INCOMPATIBLE"
    assert states()["rollout-metrics"] == "ACTIVE"
    dump = load()
    assert [(s["sample_index"], s["log_probs"].tolist()) for s in dump["samples"]] == [
        (7, []), (8, [14.0]), (9, [24.0, 25.0]),
    ]  # fmt: skip
    assert LOCAL_KEY not in str(dump)
    assert LOCAL_KEY not in rollout_data
    assert any(LOCAL_KEY in keys for keys in fake.loss.SEEN)


def test_where_a_key_could_be_seen_in_the_metrics_none_is_added(
    slime: Any, trainer: Any, batch: Any, load: Load
) -> None:
    iterator = textwrap.dedent(ITERATOR).split("def log_rollout_data")[0]
    fake = slime(slime__backends__megatron_utils__data=iterator + "def log_rollout_data(renamed): pass\n")
    runtime.instrument()
    rollout_data = {**batch, "total_lengths": [5, 3, 4]}
    del rollout_data["partition"]
    assert trainer().train_actor(0, rollout_data) == "trained"
    assert (states()["rollout-metrics"], states()["data-loader"]) == ("INCOMPATIBLE", "SKIPPED")
    assert all(LOCAL_KEY not in keys for keys in fake.loss.SEEN)
    dump = load()
    assert "log_probs" not in dump["samples"][0]


def test_a_loss_of_another_signature_costs_only_the_log_probs(slime: Any, trainer: Any, batch: Any, load: Load) -> None:
    renamed = (
        textwrap.dedent(LOSS).replace("(args, batch, logits,", "(args, data, logits,").replace('batch["', 'data["')
    )
    slime(slime__backends__megatron_utils__loss="FORM = 'tuple'\n" + renamed.replace("sorted(batch)", "sorted(data)"))
    runtime.instrument()
    trainer().train(0, [batch])
    assert states()["policy-loss"] == "INCOMPATIBLE"
    assert (states()["log-probs"], states()["train-dump"]) == ("SKIPPED", "ACTIVE")
    reason = (
        "slime.backends.megatron_utils.loss.policy_loss_function takes (args, data, logits, sum_of_sample_mean); "
        "expected also batch"
    )
    assert runtime.status()["policy-loss"].reason == reason
    dump = load()
    assert [sample["rollout_position"] for sample in dump["samples"]] == [0, 1, 2]
    assert f"policy-loss is INCOMPATIBLE: {reason}" in dump["dp_shards"][0]["provenance"]["log_probs"]


def test_calls_outside_any_session_cost_nothing_and_change_nothing(slime: Any, args: Any, batch: Any) -> None:
    fake = slime()
    runtime.instrument()
    loss = fake.loss.policy_loss_function(args, batch, torch.ones(()), torch.sum)
    assert float(loss) == 63.0
    assert runtime.status()["policy-loss"].calls == 1
    assert current_session() is None


def test_every_declared_patch_has_a_name_of_its_own_and_says_what_a_failure_costs() -> None:
    names = [patch.name for patch in HOOKS]
    assert len(names) == len(set(names)) == 10
    assert all(patch.on_failure.endswith(".") for patch in HOOKS)
    groups = {patch.group for patch in HOOKS}
    assert all(need in groups for patch in HOOKS for need in patch.needs)
