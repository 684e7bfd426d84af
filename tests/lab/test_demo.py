"""The demonstration with a fault planted, on a fork that does not fit, and under the user's own settings."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_instrument.lab import FAULTS, LabError, find_sources
from slime_instrument.lab._faults import parse_fault
from slime_instrument.lab.demo import DemoResult, demo

pytestmark = pytest.mark.lab

ROLLOUTS = 4
#: One process: what is looked at here does not depend on the layout.
SMALL: dict[str, Any] = {"cp": 1, "dp": 1, "rollouts": ROLLOUTS}


def dumps(result: DemoResult) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Rollout and train samples of each rollout, side by side."""
    return [
        (torch.load(rollout, weights_only=False)["samples"], torch.load(train, weights_only=True)["samples"])
        for rollout, train in zip(result.rollout_dumps, result.train_dumps, strict=True)
    ]


def distances(result: DemoResult) -> list[float]:
    """Per rollout, the mean difference between train and rollout log-probs over all tokens."""
    means = []
    for rollout, train in dumps(result):
        pairs = zip(rollout, train, strict=True)
        apart = [(torch.tensor(r["rollout_log_probs"]) - t["log_probs"]).abs() for r, t in pairs]
        means.append(torch.cat(apart).mean().item())
    return means


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> DemoResult:
    return demo(tmp_path_factory.mktemp("healthy"), **SMALL)


def planted(folder: Path, fault: str) -> DemoResult:
    result = demo(folder, fault=fault, **SMALL)
    assert fault in result.agreement["rollout_log_probs"], "what is simulated is said"
    assert "layout_max_abs_diff" not in result.agreement
    return result


def test_a_healthy_run_says_that_its_rollout_log_probs_are_simulated(healthy: DemoResult) -> None:
    assert "no engine ran" in healthy.agreement["rollout_log_probs"]
    assert healthy.agreement["layout_max_abs_diff"] == 0.0, "both passes are one process"
    assert max(distances(healthy)) < 0.05


def test_stale_weights_show_from_the_rollout_on_that_was_named(healthy: DemoResult, tmp_path: Path) -> None:
    found, normal = distances(planted(tmp_path, "stale-weights:2")), distances(healthy)
    assert found[:2] == normal[:2]
    assert min(found[2:]) > 5 * max(normal)
    assert found[3] > found[2], "one more update behind"


def test_a_temperature_makes_the_engine_surer_of_everything(tmp_path: Path) -> None:
    for rollout, train in dumps(planted(tmp_path, "temperature:0.5")):
        theirs = torch.cat([torch.tensor(sample["rollout_log_probs"]) for sample in rollout])
        ours = torch.cat([sample["log_probs"] for sample in train])
        assert theirs.std() > 1.5 * ours.std()


def test_swapped_samples_have_each_others_values(healthy: DemoResult, tmp_path: Path) -> None:
    result = planted(tmp_path, "sample-swap:1")
    for number, (rollout, train) in enumerate(dumps(result)):
        apart = [
            (torch.tensor(r["rollout_log_probs"]) - t["log_probs"]).abs().mean()
            for r, t in zip(rollout, train, strict=True)
        ]
        far = [position for position, mean in enumerate(apart) if mean > 0.2]
        assert len(far) == (2 if number >= 1 else 0)
        if far:
            one, other = far
            swapped = torch.tensor(rollout[one]["rollout_log_probs"]) - train[other]["log_probs"]
            assert swapped.abs().mean() < 0.05


def test_a_shifted_mask_is_shifted_in_training_only(tmp_path: Path) -> None:
    for rollout, train in dumps(planted(tmp_path, "mask-shift")):
        for r, t in zip(rollout, train, strict=True):
            assert torch.tensor(r["loss_mask"]).roll(1).tolist() == t["loss_masks"].tolist()


@pytest.mark.parametrize("text", ["", "stale", "temperature:", "temperature:1", "temperature:hot", "stale-weights:0"])
def test_a_fault_that_means_nothing_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(LabError, match=r"lab fault: expected .*, found ") as caught:
        parse_fault(text)
    assert "\n" not in str(caught.value)


def test_every_fault_has_a_default() -> None:
    for name, kind in FAULTS.items():
        fault = parse_fault(name)
        assert fault is not None
        assert kind.in_range(fault.value)
        assert kind.in_engine or kind.in_training


def test_the_users_settings_are_for_the_second_pass_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_INSTRUMENT_EVERY", "2")
    monkeypatch.setenv("SLIME_INSTRUMENT_KEEP_LAST", "1")
    monkeypatch.setenv("SLIME_INSTRUMENT_PIN", "0")
    result = demo(tmp_path, **{**SMALL, "rollouts": 6})
    assert [path.name for path in result.train_dumps] == ["0.pt", "4.pt"]
    assert result.agreement["n_samples"] == 2 * 8
    assert result.report is not None


@pytest.mark.real_slime
def test_a_fork_without_the_loss_is_told_which_part_does_not_fit(tmp_path: Path) -> None:
    source = next(source for source in find_sources() if source.name == "681b3adca~1")
    shutil.copytree(source / "slime", tmp_path / "fork" / "slime")
    for name in ("loss.py", "model.py"):
        path = tmp_path / "fork" / "slime" / "backends" / "megatron_utils" / name
        path.write_text(path.read_text().replace("policy_loss_function", "our_policy_loss"))
    with pytest.raises(LabError, match="expected log-probs in every sample, found none") as caught:
        demo(tmp_path / "out", slime=tmp_path / "fork", cp=1, dp=1, rollouts=1)
    (line,) = str(caught.value).splitlines()
    assert "policy-loss is INCOMPATIBLE" in line
    assert "slime-instrument check --slime DIR" in line
    assert not list((tmp_path / "out").rglob("*.pt"))
