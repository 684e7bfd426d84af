"""All hooks together on a made slime, in the forms that its releases had."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime_instrument import _runtime as runtime
from slime_instrument._errors import DumpError
from slime_instrument._hooks.capture import LOCAL_KEY, CaptureSession, current_session

from .fake_slime import FakeSlime, Form

EXPECTED = {0: [], 1: [14.0], 2: [24.0, 25.0]}
FORMS = {
    "v0.2.1": Form(log_probs="dict"),
    "v0.3": Form(),
    "#2266's loader, no capture": Form(loader="keeps", dump_home="slime.backends.megatron_utils.train_dump_utils"),
    "later main": Form(loader="keeps", dump_home="slime.observability.train_data_utils"),
}
Load = Callable[..., dict[str, Any]]


def log_probs(dump: dict[str, Any]) -> dict[int, list[float]]:
    return {sample["rollout_position"]: sample["log_probs"].tolist() for sample in dump["samples"]}


def states() -> dict[str, str]:
    return {patch.name: patch.state for patch in runtime.status()}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("order", ["arm first", "import first"])
@pytest.mark.parametrize("indexed", [False, True], ids=["static", "indexed"])
def test_one_v2_file_with_the_values_of_the_training_forward(
    slime: Any, trainer: Any, args: SimpleNamespace, batch: Any, load: Load, form: Form, order: str, indexed: bool
) -> None:
    args.indexed, args.steps, args.recompute = indexed, 2, True
    fake = slime(form)
    if order == "import first":
        importlib.import_module("slime.backends.megatron_utils.actor")
    runtime.instrument()
    assert trainer().train(0, [batch]) == "trained"
    dump = load()
    assert [sample["rollout_position"] for sample in dump["samples"]] == [0, 1, 2]
    assert log_probs(dump) == EXPECTED  # the first step's, not the second's; never the forward-only pass's
    assert fake.dump(form.dump_home).NATIVE == []
    provenance = dump["dp_shards"][0]["provenance"]
    assert provenance["fields"] == {"log_probs": "captured"}
    assert provenance["captured_optimizer_steps"] == [0, 0, 0]
    assert provenance["positions"] == "partition"
    assert dump["raw_reward"] == [0.0, 1.0, 2.0]


def test_slime_is_as_before_after_uninstrument(slime: Any, trainer: Any, batch: Any) -> None:
    fake: FakeSlime = slime()
    importlib.import_module("slime.backends.megatron_utils.actor")
    importlib.import_module("slime.utils.timer").Timer()  # a singleton that keeps itself on its class

    def everything() -> list[tuple[str, str, int]]:
        found = []
        for name in sorted(fake.modules()):
            for key, value in vars(importlib.import_module(name)).items():
                found.append((name, key, id(value)))
                if isinstance(value, type):
                    found += [(f"{name}.{key}", inner, id(held)) for inner, held in vars(value).items()]
        return found

    before = everything()
    runtime.instrument()
    assert states()["train-dump"] == "ACTIVE"
    trainer().train(0, [batch])
    assert everything() != before
    runtime.uninstrument()
    assert everything() == before


def test_log_probs_that_slime_computed_itself_are_dumped_and_nothing_is_captured(
    slime: Any, trainer: Any, args: SimpleNamespace, batch: Any, load: Load
) -> None:
    fake = slime()
    args.compute_log_probs = True
    runtime.instrument()
    trainer().train(0, [batch])
    assert log_probs(load()) == {0: [], 1: [-7.0], 2: [-7.0, -7.0]}
    assert load()["dp_shards"][0]["provenance"]["fields"] == {"log_probs": "recomputed"}
    assert all("partition" not in keys for keys in fake.loss.SEEN)


def test_captured_values_do_not_stay_in_the_trainers_rollout_data(slime: Any, trainer: Any, batch: Any) -> None:
    slime()
    runtime.instrument()
    actor = trainer()
    rollout_data = {**batch, "total_lengths": [5, 3, 4]}
    keys = set(rollout_data)
    actor.train_actor(0, rollout_data)
    assert set(rollout_data) == keys


def test_without_a_dump_asked_for_nothing_changes(slime: Any, trainer: Any, args: SimpleNamespace, batch: Any) -> None:
    fake = slime()
    args.save_debug_train_data = None
    runtime.instrument()
    trainer().train(0, [batch])
    assert [sorted(set(batch) - {"partition"})] == fake.data.LOGGED
    assert all("partition" not in keys for keys in fake.loss.SEEN)
    assert [rollout_id for rollout_id, _ in fake.dump().NATIVE] == [0]


def test_without_megatron_groups_slimes_own_dump_runs_untouched(
    slime: Any, trainer: Any, args: SimpleNamespace, batch: Any, megatron: SimpleNamespace, tmp_path: Path
) -> None:
    fake = slime()
    megatron.up = False
    runtime.instrument()
    trainer().train(0, [batch])
    ((rollout_id, dumped),) = fake.dump().NATIVE
    assert rollout_id == 0
    assert set(dumped) == (set(batch) - {"partition"}) | {"entropy_of_log"}
    assert not (tmp_path / "out").exists()


def test_only_every_nth_rollout_is_dumped_and_nothing_happens_in_the_others(
    slime: Any, trainer: Any, batch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = slime()
    monkeypatch.setenv("SLIME_INSTRUMENT_EVERY", "3")
    monkeypatch.setenv("SLIME_INSTRUMENT_PIN", "1")
    runtime.instrument()
    actor = trainer()
    for rollout_id in range(5):
        fake.loss.SEEN.clear()
        actor.train(rollout_id, [batch])
        assert any("partition" in keys for keys in fake.loss.SEEN) is (rollout_id in (0, 1, 3))
    assert dumps_in(tmp_path / "out") == ["0.pt", "1.pt", "3.pt"]
    assert fake.dump().NATIVE == []


@pytest.mark.parametrize("partition", [[0, 0, 1], [2, 0], [2, 0, 1, 1]], ids=["twice", "too few", "too many"])
def test_positions_that_do_not_fit_never_mix_up_the_captured_values(
    slime: Any, trainer: Any, args: SimpleNamespace, batch: Any, load: Load, partition: list[int]
) -> None:
    slime(Form(loader="keeps"))
    runtime.instrument()
    rollout_data = {**batch, "total_lengths": [5, 3, 4], "partition": partition}
    trainer().train_actor(0, rollout_data)
    dumped = {len(sample["log_probs"]): sample["log_probs"].tolist() for sample in load()["samples"]}
    assert dumped == EXPECTED
    assert LOCAL_KEY not in rollout_data


# ---------------------------------------------------------------- nothing outlives the call


@pytest.mark.parametrize("where", ["nowhere", "in the loss", "after the dump"])
def test_no_captured_tensor_outlives_train_actor(
    slime: Any, trainer: Any, args: SimpleNamespace, batch: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    slime()
    alive: list[weakref.ref[Any]] = []
    capture = CaptureSession.capture

    def watched(self: CaptureSession, positions: Any, values: Any) -> None:
        capture(self, positions, values)
        alive.append(weakref.ref(self))
        alive.extend(weakref.ref(value) for value in self._values.values())

    monkeypatch.setattr(CaptureSession, "capture", watched)
    args.fail_in_loss = 3 if where == "in the loss" else None
    args.fail_at_end = where == "after the dump"
    runtime.instrument()
    actor = trainer()
    error = {"in the loss": FloatingPointError, "after the dump": ConnectionError}.get(where)
    if error is None:
        actor.train(0, [batch])
    else:
        with pytest.raises(error):
            actor.train(0, [batch])
    assert len(alive) > 3
    gc.collect()
    assert [each() for each in alive if each() is not None] == []
    assert current_session() is None


@pytest.mark.parametrize("loader", ["pops", "v020"])
def test_a_failing_rollout_leaves_nothing_and_the_next_one_is_dumped_as_ever(
    slime: Any, trainer: Any, args: SimpleNamespace, batch: Any, load: Load, tmp_path: Path, loader: str
) -> None:
    fake = slime(Form(loader=loader))
    runtime.instrument()
    actor = trainer()
    if loader == "v020":
        reference: Any = {key: value for key, value in batch.items() if key not in ("partition", "raw_reward")}
        reference["total_lengths"] = [5, 3, 4]
    else:
        reference = [batch]
    args.fail_in_loss = 2
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        actor.train(0, reference)
    assert not (tmp_path / "out" / "0.pt").exists()
    args.fail_in_loss = None
    fake.loss.SEEN.clear()
    actor.train(1, reference)
    dumped = {len(sample["log_probs"]): sample["log_probs"].tolist() for sample in load(1)["samples"]}
    assert dumped == EXPECTED


# ---------------------------------------------------------------- failures of ours


FAULTS = {
    "data-loader": "slime_instrument._hooks.loading.megatron_is_up",
    "data-loader, after": "slime_instrument._hooks.loading.reconstruct",
    "micro-batches": "slime_instrument._patching.patch.Call.__setitem__",
    "policy-loss": "slime_instrument._hooks.training.PolicyLoss",
    "log-probs": "slime_instrument._hooks.training.per_sample",
    "train-actor": "slime_instrument._hooks.training.CaptureSession",
    "train-actor, cleanup": "slime_instrument._hooks.training.drain_native_capture",
    "train-dump": "slime_instrument._hooks.dump.megatron_is_up",
    "train-dump, inside": "slime_instrument._hooks.dump.Seen",
    "describe": "slime_instrument._dump.dumper.contribute",
    "restore": "slime_instrument._dump.dumper.put_together",
    "build": "slime_instrument._dump.dumper.build_payload",
    "write": "slime_instrument._dump.dumper.write_dump",
}
WITHOUT_LOSS = {"train-actor, cleanup"}  # the dump is written before it


def dumps_in(folder: Path) -> list[str]:
    """What stands there beside the journal."""
    return sorted(path.name for path in folder.iterdir() if path.name != "instrument.jsonl")


def inject(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(FAULTS[fault], fail)


def rollout(loader: str, batch: Any) -> Any:
    if loader != "v020":
        return [batch]
    whole = {key: value for key, value in batch.items() if key not in ("partition", "raw_reward")}
    return {**whole, "total_lengths": [5, 3, 4]}


@pytest.mark.parametrize("fault", FAULTS)
def test_lenient_whatever_fails_in_us_training_goes_on_and_no_part_of_a_dump_is_written(
    slime: Any, trainer: Any, batch: Any, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    loader = "v020" if fault == "data-loader, after" else "pops"
    fake = slime(Form(loader=loader))
    runtime.instrument()
    actor = trainer()
    with monkeypatch.context() as patched:
        inject(patched, fault)
        assert actor.train(0, rollout(loader, batch)) == "trained"
    written = dumps_in(tmp_path / "out")
    assert written == (["0.pt"] if fault in WITHOUT_LOSS else [])
    if fault not in ("train-dump",):  # before it could say whether the dump is ours, slime's own runs
        assert fake.dump().NATIVE == []
    assert sum(patch.failures for patch in runtime.status()) >= 1
    assert current_session() is None
    assert actor.train(1, rollout(loader, batch)) == "trained"
    dumped = {len(sample["log_probs"]): sample["log_probs"].tolist() for sample in load(1)["samples"]}
    assert dumped == EXPECTED


@pytest.mark.parametrize("fault", FAULTS)
def test_strict_whatever_fails_in_us_is_raised_as_our_own_type_and_leaves_nothing(
    slime: Any, trainer: Any, batch: Any, load: Load, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("SLIME_INSTRUMENT_STRICT", "1")
    loader = "v020" if fault == "data-loader, after" else "pops"
    slime(Form(loader=loader))
    runtime.instrument()
    actor = trainer()
    with monkeypatch.context() as patched:
        inject(patched, fault)
        with pytest.raises(DumpError) as raised:
            actor.train(0, rollout(loader, batch))
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert current_session() is None
    actor.train(1, rollout(loader, batch))
    dumped = {len(sample["log_probs"]): sample["log_probs"].tolist() for sample in load(1)["samples"]}
    assert dumped == EXPECTED


@pytest.mark.parametrize("strict", ["0", "1"])
def test_an_error_of_slimes_is_never_covered_by_one_of_ours(
    slime: Any, trainer: Any, args: SimpleNamespace, batch: Any, monkeypatch: pytest.MonkeyPatch, strict: str
) -> None:
    monkeypatch.setenv("SLIME_INSTRUMENT_STRICT", strict)
    slime()
    runtime.instrument()
    actor = trainer()
    args.fail_in_loss = 2
    inject(monkeypatch, "train-actor, cleanup")
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        actor.train(0, [batch])


def test_after_repeated_failures_the_layer_steps_out_and_slimes_own_dump_never_takes_its_place(
    slime: Any, trainer: Any, batch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = slime()
    runtime.instrument()
    actor = trainer()
    inject(monkeypatch, "write")
    for rollout_id in range(5):
        assert actor.train(rollout_id, [batch]) == "trained"
    assert states()["train-dump"] == "FAILED"
    assert "ZeroDivisionError: ours" in runtime.status()["train-dump"].reason
    assert states()["train-actor"] == states()["log-probs"] == "SKIPPED"
    assert (fake.dump().NATIVE, dumps_in(tmp_path / "out")) == ([], [])
    assert all("partition" not in keys for keys in fake.data.LOGGED)


@pytest.mark.parametrize("fault", ["micro-batches", "policy-loss", "log-probs"])
def test_one_bad_rollout_is_one_failure_however_many_micro_batches_it_has(
    slime: Any, trainer: Any, batch: Any, load: Load, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    slime()
    runtime.instrument()
    actor = trainer()
    with monkeypatch.context() as patched:
        inject(patched, fault)
        for rollout_id in range(2):
            actor.train(rollout_id, [batch])
            assert runtime.status()[fault].failures == rollout_id + 1
    assert states()[fault] == "ACTIVE"
    actor.train(2, [batch])
    assert log_probs(load(2)) == EXPECTED


@pytest.mark.parametrize("good_batches", [0, 1])
def test_a_capture_that_fails_in_every_rollout_takes_the_whole_layer_out(
    slime: Any, trainer: Any, batch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good_batches: int
) -> None:
    fake = slime()
    runtime.instrument()
    actor = trainer()
    taken: list[int] = []

    def fail(result: Any) -> Any:
        taken.append(1)
        if len(taken) > good_batches:
            raise ZeroDivisionError("ours")
        return result[1]["log_probs"]

    monkeypatch.setattr("slime_instrument._hooks.training.per_sample", fail)
    for rollout_id in range(4):
        taken.clear()
        actor.train(rollout_id, [batch])
    assert states()["train-dump"] == "FAILED"
    assert "log-probs failed: ZeroDivisionError: ours" in runtime.status()["train-dump"].reason
    assert (taken, dumps_in(tmp_path / "out"), fake.dump().NATIVE) == ([], [], [])


def test_a_failure_in_a_rollout_that_is_not_due_does_not_cost_the_next_dump(
    slime: Any, trainer: Any, batch: Any, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIME_INSTRUMENT_EVERY", "2")
    slime()
    runtime.instrument()
    actor = trainer()
    with monkeypatch.context() as patched:
        inject(patched, "data-loader")
        actor.train(1, [batch])
    actor.train(2, [batch])
    assert log_probs(load(2)) == EXPECTED


def test_two_actors_in_one_process_each_dump_their_own_values(
    slime: Any, args: SimpleNamespace, trainer: Any, batch: Any, load: Load, tmp_path: Path
) -> None:
    slime()
    runtime.instrument()
    first, second = trainer(), trainer()
    second.args = SimpleNamespace(**{**vars(args), "save_debug_train_data": str(tmp_path / "out" / "b{rollout_id}.pt")})
    second.weight = torch.tensor(2.0, requires_grad=True)
    first.train(0, [batch])
    second.train(0, [batch])
    assert log_probs(load()) == EXPECTED
    assert log_probs(load(name="b0.pt")) == {0: [], 1: [28.0], 2: [48.0, 50.0]}
