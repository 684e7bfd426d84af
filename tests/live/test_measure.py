"""The figures are those of ``compare``, and a large dump is measured on a part of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slime_instrument._analysis.compare import compare
from slime_instrument._format.dumps import RolloutDump, TrainDump
from slime_instrument._live.measure import measure_payload

from .dumps import payload


def test_the_figures_are_those_that_compare_gives() -> None:
    content = payload(off=0.3)
    content["samples"][1]["loss_masks"][3] = 0
    content["samples"][2]["log_probs"][5] = float("nan")
    source = [
        {**{k: sample[k] for k in ("tokens", "rollout_log_probs")}, "index": sample["sample_index"],
         "response_length": sample["response_lengths"]}
        for sample in content["samples"]
    ]  # fmt: skip
    path = Path("4.pt")
    train = TrainDump((path,), "train-v2", 2, 4, 0, content["samples"], content["dp_shards"])
    expected = compare(RolloutDump(path, "rollout", 4, source), train)
    found = measure_payload(content, path)
    assert found.metrics.n_tokens == expected.n_tokens == 8 * 30 - 2
    assert found.metrics.excluded == expected.metrics.excluded
    assert [one.code for one in found.findings] == [one.code for one in expected.findings]
    assert "non-finite" in [one.code for one in found.findings]
    assert found.metrics.flat() == expected.metrics.flat()
    assert found.metrics.flat()["abs_diff.mean"] == pytest.approx(0.3, abs=0.01)


def test_every_metric_that_can_be_named_in_an_alert_has_a_value() -> None:
    values = measure_payload(payload(), Path("4.pt")).metrics.flat()
    assert [name for name, value in values.items() if value is None] == []


def test_a_large_dump_is_measured_on_evenly_spaced_samples() -> None:
    found = measure_payload(payload(n=10, length=20), Path("4.pt"), most_tokens=50)
    assert (found.n_samples, found.n_samples_measured, found.metrics.n_tokens) == (10, 3, 60)
    assert measure_payload(payload(n=10, length=20), Path("4.pt"), most_tokens=200).n_samples_measured == 10


@pytest.mark.parametrize("missing", ["rollout_log_probs", "log_probs", "everything"])
def test_without_both_log_probs_there_are_no_values_and_no_zeros(missing: str) -> None:
    content = payload()
    if missing == "everything":
        content["samples"] = []
    for sample in content["samples"]:
        del sample[missing]
    found = measure_payload(content, Path("4.pt"))
    assert (found.metrics.n_tokens, found.findings) == (0, ())
    assert set(found.metrics.flat().values()) == {None}


def test_it_brings_nothing_into_training_that_does_not_belong_there() -> None:
    script = (
        "import sys, torch\n"
        "before = set(sys.modules)  # torch itself may import some of them\n"
        "import slime_instrument._live.watch, slime_instrument._live.measure\n"
        "heavy = {'polars', 'pyarrow', 'rich', 'typer', 'pydantic', 'jinja2', 'textual', 'pandas', 'wandb'}\n"
        "print(sorted((heavy & set(sys.modules)) - before))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_measuring_changes_nothing_in_the_payload() -> None:
    content, before = payload(), payload()
    measure_payload(content, Path("4.pt"))
    for now, then in zip(content["samples"], before["samples"], strict=True):
        assert now.keys() == then.keys()
        assert all(torch.equal(now[key], then[key]) for key in now if isinstance(now[key], torch.Tensor))
