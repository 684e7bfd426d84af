"""Thresholds from the environment."""

from __future__ import annotations

import pytest

from slime_instrument._errors import SettingsError
from slime_instrument._settings import Settings
from slime_instrument._thresholds import METRICS, parse_alerts


def test_thresholds_are_read_and_shown_again() -> None:
    alerts = parse_alerts(" abs_diff.mean > 0.05, ess<0.5 ,k1>-1e-3")
    assert str(alerts) == "abs_diff.mean>0.05,ess<0.5,k1>-0.001"
    assert parse_alerts(str(alerts)) == alerts
    assert not parse_alerts("")


@pytest.mark.parametrize(
    ("text", "values", "passed"),
    [
        ("abs_diff.mean>0.05", {"abs_diff.mean": 0.06}, True),
        ("abs_diff.mean>0.05", {"abs_diff.mean": 0.05}, False),
        ("ess<0.5", {"ess": 0.4}, True),
        ("ess<0.5", {"ess": None}, False),
        ("ess<0.5", {}, False),
    ],
)
def test_only_a_value_beyond_the_threshold_passes_it(text: str, values: dict[str, float | None], passed: bool) -> None:
    (alert,) = parse_alerts(text).each
    assert alert.passed(values) is passed


@pytest.mark.parametrize(
    "text", ["abs_diff.mean", "abs_diff.mean=1", "nonsense>1", "k3>", "k3>nan", "k3>>1", "k3>1;ess<1"]
)
def test_a_bad_threshold_is_refused_at_start_by_the_name_of_its_variable(text: str) -> None:
    with pytest.raises(SettingsError, match=r"SLIME_INSTRUMENT_ALERT: expected thresholds such as") as caught:
        Settings.from_environment({"SLIME_INSTRUMENT_ALERT": text})
    assert repr(text) in str(caught.value)


def test_the_settings_are_shown_as_they_are_written() -> None:
    settings = Settings.from_environment({"SLIME_INSTRUMENT_METRICS": "1", "SLIME_INSTRUMENT_ALERT": "k3>0.1"})
    shown = settings.as_dict()
    assert (shown["SLIME_INSTRUMENT_METRICS"], shown["SLIME_INSTRUMENT_ALERT"]) == (True, "k3>0.1")
    assert not Settings.from_environment({}).metrics
    assert len(set(METRICS)) == len(METRICS)
