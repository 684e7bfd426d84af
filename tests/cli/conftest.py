"""Run the command line in this process, over small dumps and stand-ins."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime_instrument._cli.app import main


class Outcome(SimpleNamespace):
    code: int
    out: str
    err: str


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command line in this process."""

    def run(*arguments: str | Path) -> Outcome:
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code=caught.value.code or 0, out=captured.out, err=captured.err)

    return run


def sample(position: int) -> dict[str, Any]:
    return {
        "data_parallel_rank": 0,
        "rollout_position": position,
        "sample_index": position,
        "tokens": torch.arange(4),
        "total_lengths": 4,
        "response_lengths": 2,
        "loss_masks": torch.ones(2),
        "log_probs": torch.tensor([-1.0, torch.nan]),
    }


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """A valid v2 dump of two samples, with one NaN in each."""
    shard = {"rank": 0, "data_parallel_rank": 0, "sample_indices": [0, 1], "partition": [0, 1]}
    payload = {"format_version": 2, "rollout_id": 0, "rank": 0, "samples": [sample(0), sample(1)], "dp_shards": [shard]}
    torch.save({**payload, "raw_reward": [0.0, 1.0]}, tmp_path / "0.pt")
    return tmp_path / "0.pt"


@pytest.fixture
def invalid(dump: Path) -> Path:
    payload = torch.load(dump, weights_only=True)
    payload["samples"][1]["log_probs"] = torch.zeros(5)
    torch.save(payload, dump.with_name("invalid.pt"))
    return dump.with_name("invalid.pt")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a module with these names in the place of the real one."""

    def put(name: str, **names: Any) -> None:
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**names))  # type: ignore[arg-type]

    return put
