"""One grammar of limits for settings and command line."""

from __future__ import annotations

import math

import pytest

from slime_instrument._errors import SettingsError
from slime_instrument._settings import Settings
from slime_instrument._thresholds import METRICS, Threshold, parse_threshold, parse_thresholds


def test_thresholds_are_read_and_shown_again() -> None:
    alerts = parse_thresholds(" abs_diff.mean > 0.05, ess<0.5 ,k1>-1e-3")
    assert str(alerts) == "abs_diff.mean>0.05,ess<0.5,k1>-0.001"
    assert parse_thresholds(str(alerts)) == alerts
    assert not parse_thresholds("")


@pytest.mark.parametrize(
    ("text", "value", "broken"),
    [
        ("abs_diff.mean>0.05", 0.06, True),
        ("abs_diff.mean>0.05", 0.05, False),
        ("abs_diff.mean=0.05", 0.06, True),
        ("abs_diff>0.05", 0.06, True),
        ("ess<0.5", 0.4, True),
        ("ess<0.5", 0.5, False),
        # More than a float holds is above every limit, and no value passes none.
        ("token_mult_prob_error>1e300", math.inf, True),
        ("token_mult_prob_error>1e300", math.nan, True),
        ("ess<0.5", math.inf, False),
        ("ess<0.5", None, True),
        ("abs_diff.mean>0.05", None, True),
    ],
)
def test_a_value_beyond_the_limit_breaks_it_and_so_does_none(text: str, value: float | None, broken: bool) -> None:
    limit = parse_threshold(text)
    assert isinstance(limit, Threshold)
    assert limit.broken_by(value) is broken
    assert bool(parse_thresholds(text).broken(lambda _name: value)) is broken


@pytest.mark.parametrize(
    "text", ["abs_diff.mean", "nonsense>1", "abs_diff.median>1", "k3>", "k3>nan", "k3>>1", "k3>1;ess<1"]
)
def test_a_bad_threshold_is_refused_at_start_by_the_name_of_its_variable(text: str) -> None:
    with pytest.raises(
        SettingsError, match=r"SLIME_INSTRUMENT_ALERT: expected (METRIC>VALUE|one of the metrics)"
    ) as caught:
        Settings.from_environment({"SLIME_INSTRUMENT_ALERT": text})
    assert repr(text) in str(caught.value)


def test_the_settings_are_shown_as_they_are_written() -> None:
    settings = Settings.from_environment({"SLIME_INSTRUMENT_METRICS": "1", "SLIME_INSTRUMENT_ALERT": "k3>0.1"})
    shown = settings.as_dict()
    assert (shown["SLIME_INSTRUMENT_METRICS"], shown["SLIME_INSTRUMENT_ALERT"]) == (True, "k3>0.1")
    assert not Settings.from_environment({}).metrics
    assert len(set(METRICS)) == len(METRICS)
