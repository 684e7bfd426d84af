"""What users do around slime: trainers, threads and wrappers of their own. Training goes on as it would without us, and
what can be dumped is dumped."""

from __future__ import annotations

import copy
import functools
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime_instrument import _runtime as runtime
from slime_instrument._hooks.capture import current_session, policy_loss

from .fake_slime import ACTOR, Form

EXPECTED = {0: [], 1: [14.0], 2: [24.0, 25.0]}
Load = Callable[..., dict[str, Any]]


def log_probs(dump: dict[str, Any]) -> dict[int, list[float]]:
    return {sample["rollout_position"]: sample["log_probs"].tolist() for sample in dump["samples"]}


def own_trainer(fake: Any, args: SimpleNamespace) -> Any:
    """An actor whose class brings a copy of ``train_actor`` that does not call slime's."""
    base = fake.actor.MegatronTrainRayActor
    copied = base.train_actor.__wrapped__

    class Mine(base):  # type: ignore[misc, valid-type]
        def train_actor(self, rollout_id: int, rollout_data: Any) -> Any:
            return copied(self, rollout_id, rollout_data)

    actor = Mine()
    actor.init(args, "actor")
    return actor


@pytest.mark.parametrize("loader", ["pops", "keeps", "v020"])
def test_a_trainer_of_its_own_leaves_dumps_with_positions_that_say_what_is_missing(
    slime: Any, args: SimpleNamespace, batch: Any, load: Load, loader: str
) -> None:
    fake = slime(Form(loader=loader))
    runtime.instrument()
    actor = own_trainer(fake, args)
    reference: Any = [batch]
    if loader == "v020":
        reference = {key: value for key, value in batch.items() if key not in ("partition", "raw_reward")}
        reference["total_lengths"] = [5, 3, 4]
    for rollout_id in range(4):
        assert actor.train(rollout_id, reference) == "trained"
        dump = load(rollout_id)
        assert [sample["rollout_position"] for sample in dump["samples"]] == [0, 1, 2]
        assert "log_probs" not in dump["samples"][0]
        (shard,) = dump["dp_shards"]
        assert "train_actor of its own" in shard["provenance"]["log_probs"]
        assert shard["provenance"]["positions"] == ("reconstructed" if loader == "v020" else "partition")
    assert fake.dump().NATIVE == []
    assert sum(patch.failures for patch in runtime.status()) == 0


def test_a_trainer_of_its_own_with_log_probs_of_slimes_keeps_them(
    slime: Any, args: SimpleNamespace, batch: Any, load: Load
) -> None:
    fake = slime()
    args.compute_log_probs = True
    runtime.instrument()
    own_trainer(fake, args).train(0, [batch])
    assert log_probs(load()) == {0: [], 1: [-7.0], 2: [-7.0, -7.0]}


def test_a_load_that_failed_costs_a_trainer_of_its_own_that_rollout_and_not_the_next(
    slime: Any, args: SimpleNamespace, batch: Any, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = slime()
    runtime.instrument()
    actor = own_trainer(fake, args)
    with monkeypatch.context() as patched:
        patched.setattr("slime_instrument._hooks.loading._with_positions", lambda *_: 1 / 0)
        assert actor.train(0, [batch]) == "trained"
    assert not (tmp_path / "out" / "0.pt").exists()
    assert actor.train(1, [batch]) == "trained"
    assert [sample["rollout_position"] for sample in load(1)["samples"]] == [0, 1, 2]


def test_a_load_that_failed_in_a_rollout_that_is_not_due_does_not_cost_a_later_one_its_dump(
    slime: Any, args: SimpleNamespace, batch: Any, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIME_INSTRUMENT_EVERY", "2")
    fake = slime()
    runtime.instrument()
    actor = own_trainer(fake, args)
    with monkeypatch.context() as patched:
        patched.setattr("slime_instrument._hooks.loading._with_positions", lambda *_: 1 / 0)
        actor.train(1, [batch])
    # Its data did not come through the loader at all.
    actor.train_actor(2, {**copy.deepcopy(batch), "total_lengths": [5, 3, 4]})
    assert [sample["rollout_position"] for sample in load(2)["samples"]] == [0, 1, 2]


def test_a_subclass_that_calls_slimes_own_is_captured(
    slime: Any, args: SimpleNamespace, batch: Any, load: Load
) -> None:
    fake = slime()
    runtime.instrument()

    class Mine(fake.actor.MegatronTrainRayActor):  # type: ignore[misc, name-defined]
        def train_actor(self, rollout_id: int, rollout_data: Any) -> Any:
            return "mine", super().train_actor(rollout_id, rollout_data)

    actor = Mine()
    actor.init(args, "actor")
    assert actor.train(0, [batch]) == ("mine", "trained")
    assert log_probs(load()) == EXPECTED


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copied_actor_trains_and_is_captured(
    slime: Any, trainer: Any, batch: Any, load: Load, copied: Callable[[Any], Any]
) -> None:
    slime()
    runtime.instrument()
    actor = trainer()
    actor.train(0, [batch])
    actor.weight = actor.weight.detach().requires_grad_()
    copied(actor).train(1, [batch])
    assert log_probs(load(1)) == EXPECTED


def test_a_dump_under_a_number_of_the_users_own_and_of_some_samples_keeps_their_log_probs(
    slime: Any, trainer: Any, batch: Any, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = slime()
    runtime.instrument()
    actor = trainer()
    real = fake.actor.save_debug_train_data

    def dump(args: Any, *, rollout_id: int, rollout_data: dict[str, Any]) -> None:
        count = len(rollout_data["tokens"])
        per_sample = [key for key, value in rollout_data.items() if isinstance(value, list) and len(value) == count]
        real(args, rollout_id=100 + rollout_id, rollout_data=rollout_data)
        some = {key: value[: 1 - rollout_id] if key in per_sample else value for key, value in rollout_data.items()}
        real(args, rollout_id=rollout_id, rollout_data=some)

    monkeypatch.setattr(fake.actor, "save_debug_train_data", dump)
    for rollout_id in (0, 1):
        actor.train(rollout_id, [copy.deepcopy(batch)])
        assert log_probs(load(100 + rollout_id)) == EXPECTED
    assert log_probs(load(0)) == {2: EXPECTED[2]}
    assert load(1)["samples"] == []
    assert sum(patch.failures for patch in runtime.status()) == 0


def test_partials_of_wrapped_targets_are_captured_through(
    slime: Any, trainer: Any, batch: Any, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = slime()
    runtime.instrument()
    actor = trainer()
    for owner, name in ((fake.model, "policy_loss_function"), (fake.loss, "get_log_probs_and_entropy")):
        monkeypatch.setattr(owner, name, functools.partial(getattr(owner, name)))
    monkeypatch.setattr(fake.actor, "save_debug_train_data", functools.partial(fake.actor.save_debug_train_data))
    actor.train(0, [batch])
    assert log_probs(load()) == EXPECTED


def test_another_rollout_trained_in_the_middle_of_one_keeps_both_apart(
    slime: Any, trainer: Any, args: SimpleNamespace, batch: Any, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = slime()
    runtime.instrument()
    outer, inner = trainer(), trainer()
    inner.weight = torch.tensor(2.0, requires_grad=True)
    real = fake.actor.train_one_step
    inside: list[int] = []

    def step(step_args: Any, rollout_id: int, *rest: Any) -> Any:
        if rollout_id == 0 and not inside:
            inside.append(1)
            inner.train(1, [copy.deepcopy(batch)])
        return real(step_args, rollout_id, *rest)

    monkeypatch.setattr(fake.actor, "train_one_step", step)
    outer.train(0, [batch])
    assert log_probs(load(0)) == EXPECTED
    assert log_probs(load(1)) == {key: [2 * value for value in values] for key, values in EXPECTED.items()}


def test_the_same_actor_called_again_from_inside_its_own_step(
    slime: Any, trainer: Any, batch: Any, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = slime()
    runtime.instrument()
    actor = trainer()
    real = fake.actor.train_one_step
    depth: list[int] = []

    def step(step_args: Any, rollout_id: int, *rest: Any) -> Any:
        if len(depth) < 2:
            depth.append(1)
            actor.train(rollout_id, [copy.deepcopy(batch)])
        return real(step_args, rollout_id, *rest)

    monkeypatch.setattr(fake.actor, "train_one_step", step)
    actor.train(0, [batch])
    assert log_probs(load(0)) == EXPECTED
    assert current_session() is None


class Stop(Exception):
    """The user's own class."""


@pytest.mark.parametrize("error", [Stop, SystemExit, KeyboardInterrupt, StopIteration, GeneratorExit, RuntimeError])
@pytest.mark.parametrize(
    "place", ["train_one_step", "policy_loss_function", "log_rollout_data", "save_debug_train_data"]
)
def test_whatever_slime_raises_in_the_middle_comes_out_as_it_is_and_leaves_nothing(
    slime: Any, trainer: Any, args: SimpleNamespace, batch: Any, load: Load, monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException], place: str,
) -> None:  # fmt: skip
    fake = slime()
    raised = error("theirs")

    def fail(*_: Any, **__: Any) -> Any:
        raise raised

    home = {"policy_loss_function": fake.model, "train_one_step": fake.actor}.get(place, fake.actor)
    actor_module = fake.actor
    runtime.instrument()
    actor = trainer()
    with monkeypatch.context() as patched:
        patched.setattr(home, place, fail)
        with pytest.raises(error) as caught:
            actor.train(0, [batch])
        assert caught.value is raised
        assert raised.__cause__ is raised.__context__ is None
    assert current_session() is policy_loss() is None
    assert sum(patch.failures for patch in runtime.status()) == 0
    assert actor_module.train_one_step is fake.model.train_one_step
    actor.train(1, [batch])
    assert log_probs(load(1)) == EXPECTED


def test_two_actors_that_train_at_once_in_threads_never_mix(
    slime: Any, trainer: Any, args: SimpleNamespace, batch: Any, load: Load
) -> None:
    slime()
    runtime.instrument()
    actors = [trainer() for _ in range(4)]
    for number, actor in enumerate(actors):
        template = args.save_debug_train_data.replace("{rollout_id}", f"{number}-{{rollout_id}}")
        actor.args = SimpleNamespace(**{**vars(args), "save_debug_train_data": template})
        actor.weight = torch.tensor(1.0 + number, requires_grad=True)
    threads = [threading.Thread(target=lambda a=a: [a.train(i, [batch]) for i in range(3)]) for a in actors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        for rollout_id in range(3):
            found = log_probs(load(name=f"{number}-{rollout_id}.pt"))
            assert found == {key: [v * (1 + number) for v in value] for key, value in EXPECTED.items()}


MODES: dict[str, Callable[[], Any]] = {
    "default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu"),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_around_the_training_change_nothing_in_what_is_captured(
    slime: Any, trainer: Any, batch: Any, load: Load, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    fake = slime()
    runtime.instrument()
    actor = trainer()
    real = fake.actor.train_one_step

    def step(*given: Any) -> Any:
        with MODES[mode]():
            return real(*given)

    monkeypatch.setattr(fake.actor, "train_one_step", step)
    actor.train(0, [batch])
    assert log_probs(load()) == EXPECTED


def test_another_default_dtype_around_the_whole_call_changes_nothing(
    slime: Any, trainer: Any, batch: Any, load: Load
) -> None:
    slime()
    runtime.instrument()
    actor = trainer()
    torch.set_default_dtype(torch.float64)
    try:
        actor.train(0, [batch])
    finally:
        torch.set_default_dtype(torch.float32)
    assert log_probs(load()) == EXPECTED
    assert {sample["log_probs"].dtype for sample in load()["samples"]} == {torch.float32}


class Refuses(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise PermissionError("no log today")


class NoText(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    "place", ["loading.megatron_is_up", "training.per_sample", "training.CaptureSession", "dump.Seen"]
)
def test_a_failure_whose_report_fails_too_never_reaches_training(
    slime: Any, trainer: Any, batch: Any, load: Load, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    slime()
    runtime.instrument()
    actor = trainer()

    def fail(*_: Any, **__: Any) -> Any:
        raise NoText

    logger, handler = logging.getLogger("slime_instrument"), Refuses()
    logger.addHandler(handler)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(f"slime_instrument._hooks.{place}", fail)
            for rollout_id in range(4):  # more than it takes to step out
                assert actor.train(rollout_id, [copy.deepcopy(batch)]) == "trained"
    finally:
        logger.removeHandler(handler)
    assert current_session() is None
    assert runtime.current().stepped_out is not None


@pytest.mark.parametrize("change", ["drops", "adds"])
@pytest.mark.parametrize("indexed", [False, True], ids=["static", "indexed"])
def test_a_hook_that_changes_the_samples_and_not_their_positions_costs_the_log_probs_alone(
    slime: Any, trainer: Any, args: SimpleNamespace, batch: Any, load: Load, change: str, indexed: bool
) -> None:
    args.indexed = indexed
    cut = "value[1:]" if change == "drops" else "[*value, value[0]]"
    hook = f"""
            for name, value in list(rollout_data.items()):
                if name in ("unconcat_tokens", "tokens", "loss_masks", "response_lengths", "total_lengths"):
                    rollout_data[name] = {cut}
"""
    loop = "            count = len("
    source = ACTOR.replace("{dump_home}", Form().dump_home)
    assert loop in source
    slime(slime__backends__megatron_utils__actor=source.replace(loop, hook.lstrip("\n") + loop))
    runtime.instrument()
    actor = trainer()
    for rollout_id in range(4):
        assert actor.train(rollout_id, [copy.deepcopy(batch)]) == "trained"
        dump = load(rollout_id)
        assert len(dump["samples"]) == (2 if change == "drops" else 4)
        assert not any("log_probs" in sample or "rollout_position" in sample for sample in dump["samples"])
        assert "did a hook drop or add samples?" in dump["dp_shards"][0]["provenance"]["log_probs"]
    assert sum(patch.failures for patch in runtime.status()) == 0
