"""What happens after a dump: the tracker, the file, the warnings; and that nothing of it can hurt training."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_instrument._live.watch import LiveMetrics, append_line, metrics_file, report_command
from slime_instrument._settings import Settings
from slime_instrument._thresholds import parse_thresholds

from .dumps import payload


class Tracker:
    """slime's logging module, as far as we touch it."""

    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, Any], str]] = []
        self.error: Exception | None = None

    def log(self, _args: Any, metrics: dict[str, Any], step_key: str) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append((metrics, step_key))


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> Tracker:
    made = Tracker()
    monkeypatch.setitem(sys.modules, "slime.utils.logging_utils", made)  # type: ignore[arg-type]
    steps = SimpleNamespace(compute_rollout_step=lambda _args, rollout_id: 10 * rollout_id)
    monkeypatch.setitem(sys.modules, "slime.utils.metric_utils", steps)  # type: ignore[arg-type]
    return made


@pytest.fixture
def args(tmp_path: Path) -> SimpleNamespace:
    return SimpleNamespace(
        use_wandb=False,
        use_tensorboard=True,
        save_debug_train_data=str(tmp_path / "train_data" / "{rollout_id}.pt"),
        save_debug_rollout_data=str(tmp_path / "rollout_data" / "{rollout_id}.pt"),
    )


def lines(args: SimpleNamespace) -> list[dict[str, Any]]:
    return [json.loads(line) for line in metrics_file(args, Path("x")).read_text().splitlines()]


def run(live: LiveMetrics, args: SimpleNamespace, **dump: Any) -> None:
    content = payload(**dump)
    live.after_dump(args, content["rollout_id"], content, Path(args.save_debug_train_data.format(**content)))


def test_off_it_does_nothing(tracker: Tracker, args: SimpleNamespace) -> None:
    run(LiveMetrics(Settings()), args)
    assert tracker.calls == []
    assert not metrics_file(args, Path("x")).exists()


def test_each_dump_is_one_call_and_one_line(tracker: Tracker, args: SimpleNamespace) -> None:
    live = LiveMetrics(Settings(metrics=True))
    run(live, args, rollout_id=4)
    run(live, args, rollout_id=5, off=0.2)
    (first, key), (second, _) = tracker.calls
    assert key == "rollout/step"
    assert (first["rollout/step"], second["rollout/step"]) == (40, 50)
    assert all(name.startswith("instrument/") for name in first if name != "rollout/step")
    assert second["instrument/abs_diff.mean"] == pytest.approx(0.2, abs=0.01)
    written = lines(args)
    assert [(line["rollout_id"], line["step"]) for line in written] == [(4, 40), (5, 50)]
    assert written[1]["abs_diff"]["mean"] == second["instrument/abs_diff.mean"]
    assert all(isinstance(value, (int, float)) for value in first.values())
    assert written[0]["not_tracked"] is None


def test_what_has_no_value_is_null_in_the_line_and_absent_in_the_tracker(
    tracker: Tracker, args: SimpleNamespace
) -> None:
    run(LiveMetrics(Settings(metrics=True)), args, n=0)
    ((metrics, _),) = tracker.calls
    assert set(metrics) == {"instrument/n_tokens", "instrument/findings", "instrument/verdict", "rollout/step"}
    assert lines(args)[0]["abs_diff"]["mean"] is None


def test_a_finding_is_said_when_it_first_appears(
    tracker: Tracker, args: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    live = LiveMetrics(Settings(metrics=True))
    with caplog.at_level(logging.WARNING, "slime_instrument"):
        for rollout_id in (1, 2):
            content = payload(rollout_id=rollout_id)
            for sample in content["samples"]:
                sample["log_probs"] = sample["log_probs"].roll(1)
            live.after_dump(args, rollout_id, content, Path("x.pt"))
    said = [record.getMessage() for record in caplog.records if "token-shift" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("slime_instrument: rollout 1: token-shift: In 8 samples")
    assert [line["findings"][0]["code"] for line in lines(args)] == ["token-shift"] * 2
    assert tracker.calls[0][0]["instrument/findings"] == 1


@pytest.mark.parametrize("metrics", [True, False])
def test_an_alert_names_the_metric_and_the_command(
    tracker: Tracker, args: SimpleNamespace, caplog: pytest.LogCaptureFixture, metrics: bool
) -> None:
    live = LiveMetrics(Settings(metrics=metrics, alert=parse_thresholds("abs_diff.mean>0.05,ess<0.1")))
    with caplog.at_level(logging.WARNING, "slime_instrument"):
        run(live, args, rollout_id=1)
        run(live, args, rollout_id=2, off=0.25)
    folder = Path(args.save_debug_train_data).parents[1]
    warned = [record.getMessage() for record in caplog.records if "alert" in record.getMessage()]
    assert len(warned) == 1
    assert "rollout 2: alert abs_diff.mean>0.05: abs_diff.mean is 0.25" in warned[0]
    assert warned[0].endswith(
        f"slime-instrument report {folder}/rollout_data/2.pt {folder}/train_data/2.pt -o report-2.html"
    )
    assert len(tracker.calls) == (2 if metrics else 0)
    assert metrics_file(args, Path("x")).exists() is metrics


@pytest.mark.parametrize("where", ["tracker", "file", "payload"])
def test_a_failure_is_logged_once_and_never_raised(
    tracker: Tracker, args: SimpleNamespace, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    live = LiveMetrics(Settings(metrics=True, alert=parse_thresholds("abs_diff.max>0")))
    content = payload()
    if where == "tracker":
        tracker.error = RuntimeError("no run is active")
    elif where == "file":
        metrics_file(args, Path("x")).mkdir(parents=True)
    else:
        del content["samples"]
    with caplog.at_level(logging.WARNING, "slime_instrument"):
        for _ in range(2):
            live.after_dump(args, 4, content, Path("x.pt"))
    failures = [record for record in caplog.records if "no live metrics" in record.getMessage()]
    if where == "tracker":
        assert lines(args)[0]["not_tracked"] == "RuntimeError: no run is active"
        assert failures == []
    else:
        assert len(failures) == 1
        assert "The dump is not affected." in failures[0].getMessage()


def test_without_a_tracker_the_line_says_so(args: SimpleNamespace, tracker: Tracker) -> None:
    args.use_tensorboard = False
    run(LiveMetrics(Settings(metrics=True)), args)
    assert lines(args)[0]["not_tracked"] == "neither --use-wandb nor --use-tensorboard is on"
    assert tracker.calls == []


def test_the_newest_home_of_slimes_log_is_used_and_one_without_log_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, args: SimpleNamespace
) -> None:
    old, newest = Tracker(), Tracker()
    monkeypatch.setitem(sys.modules, "slime.utils.tracking_utils", old)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "slime.utils.logging_utils", SimpleNamespace())  # type: ignore[arg-type]
    run(LiveMetrics(Settings(metrics=True)), args)
    assert len(old.calls) == 1
    monkeypatch.setitem(sys.modules, "slime.observability.logging_utils", newest)  # type: ignore[arg-type]
    run(LiveMetrics(Settings(metrics=True)), args)
    assert (len(old.calls), len(newest.calls)) == (1, 1)


def test_a_line_that_a_crash_cut_short_does_not_swallow_the_next(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    append_line(file, {"a": 1})
    file.write_text(file.read_text() + '{"a": ')
    append_line(file, {"a": 2})
    assert file.read_text().splitlines() == ['{"a": 1}', '{"a": ', '{"a": 2}']


def test_the_file_stands_beside_the_dumps_whatever_the_template(args: SimpleNamespace) -> None:
    places = {
        "/d/train_data/{rollout_id}.pt": "/d/train_data/metrics.jsonl",
        "/d/run_{rollout_id}/train.pt": "/d/metrics.jsonl",
        "/d/all.pt": "/d/metrics.jsonl",
        "{rollout_id}.pt": "elsewhere/metrics.jsonl",
    }
    for template, expected in places.items():
        args.save_debug_train_data = template
        assert str(metrics_file(args, Path("elsewhere/3.pt"))) == expected
    args.save_debug_rollout_data = None
    assert report_command(args, 3, Path("/d/a b.pt")) == (
        "slime-instrument report ROLLOUT_DUMP '/d/a b.pt' -o report-3.html"
    )
