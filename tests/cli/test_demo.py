"""The options of demo and what it prints; nothing trains here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from .outcomes import PATCH, strict


@pytest.fixture
def trained(stand_in: Any) -> list[dict[str, Any]]:
    """The calls of the demonstration, which does not train here."""
    calls: list[dict[str, Any]] = []

    def train(out: Path, **options: Any) -> Any:
        options.pop("progress")("working")
        calls.append({"out": out, **options})
        return SimpleNamespace(
            target="miniature",
            slime_version=None,
            layout={name: options[name] for name in ("tp", "pp", "cp", "dp")},
            train_dumps=[out / "train_data" / "0.pt"],
            rollout_dumps=[out / "rollout_data" / "0.pt"],
            patches=[PATCH],
            seconds={"total": 1.5},
            agreement={
                "n_samples": 16,
                "n_tokens": 175,
                "layout_max_abs_diff": 7.15e-6,
                "rollout_mean_abs_diff": 0.01613,
                "rollout_log_probs": "no engine ran",
            },
            report=out / "report.html",
            report_note="No sign of a fault.",
        )

    stand_in("slime_instrument.lab", default_source=lambda: None)
    stand_in("slime_instrument.lab.demo", demo=train)
    return calls


def test_demo_prints_the_keys_that_checks_read(call: Any, trained: list[dict[str, Any]]) -> None:
    outcome = call("demo", "--out", "o", "--json")
    document = strict(outcome.out)
    assert outcome.code == 0
    assert document["target"] == "miniature"
    assert document["train_dumps"] == ["o/train_data/0.pt"]
    assert document["rollout_dumps"] == ["o/rollout_data/0.pt"]
    assert (document["report"], document["seconds"]) == ("o/report.html", 1.5)
    assert document["verdict"] == "No sign of a fault."
    assert document["patches"] == [PATCH]
    assert outcome.err == ""


def test_demo_says_in_words_what_agrees(call: Any, trained: list[dict[str, Any]]) -> None:
    out = call("demo", "--out", "o").out
    assert "16 samples, 175 trained tokens" in out
    assert "7.2e-06 at most between this layout and a single process" in out
    assert "0.016 on average between rollout and training" in out


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ([], (1, 1, 2, 2)),
        (["--tp", "2", "--pp", "2", "--cp", "2"], (2, 2, 2, 1)),
        (["--dp", "2"], (1, 1, 1, 2)),
        (["--cp", "1"], (1, 1, 1, 1)),
    ],
)
def test_sizes_that_are_not_given_are_1_unless_none_is(
    call: Any, trained: list[dict[str, Any]], options: list[str], layout: tuple[int, ...]
) -> None:
    outcome = call("demo", "--out", "o", "--rollouts", "3", *options)
    (seen,) = trained
    assert tuple(seen[name] for name in ("tp", "pp", "cp", "dp")) == layout
    assert seen["rollouts"] == 3
    assert "the bundled miniature" in outcome.out


def test_the_help_names_every_fault_that_can_be_injected(call: Any) -> None:
    from slime_instrument.lab._faults import FAULTS

    text = " ".join(call("demo", "--help").out.split())
    assert all(name in text for name in FAULTS)
