"""Every variable is read, and every bad value refused by the variable's name."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from slime_instrument._errors import InstrumentError, SettingsError
from slime_instrument._settings import Pins, Settings


def read(**variables: str) -> Settings:
    return Settings.from_environment({f"SLIME_INSTRUMENT_{name}".rstrip("_"): text for name, text in variables.items()})


def test_without_variables_the_defaults_hold() -> None:
    settings = Settings.from_environment({"PATH": "/bin", "SLIME_INSTRUMENTED": "x"})
    assert settings == Settings()
    assert (settings.enabled, settings.strict, settings.every, settings.keep_last) == (None, False, 1, None)
    assert settings.bucket_bytes == 64 * 1024 * 1024


@pytest.mark.parametrize(
    ("variable", "text", "attribute", "value"),
    [
        ("", "1", "enabled", True),
        ("", "TRUE", "enabled", True),
        ("", "off", "enabled", False),
        ("", "", "enabled", False),
        ("STRICT", " yes ", "strict", True),
        ("STRICT", "0", "strict", False),
        ("EVERY", "10", "every", 10),
        ("EVERY", " 7\n", "every", 7),
        ("KEEP_LAST", "3", "keep_last", 3),
        ("KEEP_LAST", "", "keep_last", None),
        ("PIN", "0,10-12, 5 ,", "pin", Pins(((0, 0), (10, 12), (5, 5)))),
        ("PIN", "", "pin", Pins()),
        ("BUCKET_MB", "0.5", "bucket_mb", 0.5),
        ("TIMEOUT_S", "0.01", "timeout_s", 0.01),
        ("TIMEOUT_S", "3600", "timeout_s", 3600.0),
        ("CP_FIELDS", "my_kl, my_entropy,", "cp_fields", ("my_kl", "my_entropy")),
        ("CP_FIELDS", "", "cp_fields", ()),
        ("PACKAGE", "vime", "package", "vime"),
        ("PACKAGE", " ", "package", "slime"),
    ],
)
def test_a_good_value_is_read(variable: str, text: str, attribute: str, value: Any) -> None:
    assert getattr(read(**{variable: text}), attribute) == value


BAD: dict[str, list[str]] = {
    "": ["2", "ja", "1 0", "None"],
    "STRICT": ["2", "maybe", "-1"],
    "EVERY": ["", "0", "-1", "1.5", "often", "1e3", "٣", "²", "0x10", "9" * 5000],
    "KEEP_LAST": ["0", "-3", "all", "2.0", "9" * 5000],
    "PIN": ["a", "1-", "-1", "5-3", "1;2", "1-2-3", "²", "1 2", "0.5", "9" * 5000],
    "BUCKET_MB": ["", "0", "-1", "nan", "inf", "1e999", "64MB", "1e-999"],
    "TIMEOUT_S": ["", "0", "-1", "nan", "inf", "soon", "0.0001", "1e12"],
    "PACKAGE": ["a.b", "a-b", "1a", "a b"],
    "CP_FIELDS": ["a b", "1x", "a-b", "a,b!", "a.b"],
}


@pytest.mark.parametrize(("variable", "text"), [(name, text) for name, texts in BAD.items() for text in texts])
def test_a_bad_value_is_refused_naming_the_variable_and_the_value(variable: str, text: str) -> None:
    name = f"SLIME_INSTRUMENT_{variable}".rstrip("_")
    with pytest.raises(SettingsError) as raised:
        read(**{variable: text})
    message = str(raised.value)
    assert message.startswith(f"slime_instrument: {name}: expected ")
    assert f"found {text.strip()!r}. " in message
    assert "Correct the variable, or unset it" in message
    assert isinstance(raised.value, ValueError)
    assert isinstance(raised.value, InstrumentError)


def test_the_message_has_five_parts() -> None:
    with pytest.raises(SettingsError) as raised:
        read(EVERY="often")
    assert str(raised.value) == (
        "slime_instrument: SLIME_INSTRUMENT_EVERY: expected a whole number above 0, found 'often'. "
        "Nothing was instrumented. Correct the variable, or unset it for the default."
    )


def test_a_variable_that_means_nothing_is_reported_and_not_refused() -> None:
    settings = read(EVRY="10", EVERY="2", ROUTE="a .pth file")
    assert (settings.every, settings.unknown) == (2, ("SLIME_INSTRUMENT_EVRY",))


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_INSTRUMENT_EVERY", "4")
    assert Settings.from_environment().every == 4


def test_as_dict_shows_plain_values_under_the_variables_names() -> None:
    shown = read(PIN="0,10-20", CP_FIELDS="a", EVERY="2", **{"": "1"}).as_dict()
    assert shown["SLIME_INSTRUMENT"] is True
    assert shown["SLIME_INSTRUMENT_PIN"] == "0,10-20"
    assert shown["SLIME_INSTRUMENT_CP_FIELDS"] == ["a"]
    assert shown["SLIME_INSTRUMENT_EVERY"] == 2
    assert {name for name in shown if name != "SLIME_INSTRUMENT"} >= {
        f"SLIME_INSTRUMENT_{name}"
        for name in ("STRICT", "EVERY", "KEEP_LAST", "PIN", "BUCKET_MB", "TIMEOUT_S", "CP_FIELDS")
    }


def test_what_as_dict_shows_can_be_read_back() -> None:
    settings = read(PIN="3-5,9", KEEP_LAST="2")
    assert read(PIN=str(settings.as_dict()["SLIME_INSTRUMENT_PIN"])).pin == settings.pin


@pytest.mark.parametrize(("rollout_id", "pinned"), [(0, True), (1, False), (10, True), (20, True), (21, False)])
def test_pins_are_single_ids_and_inclusive_ranges(rollout_id: int, pinned: bool) -> None:
    assert (rollout_id in read(PIN="0,10-20").pin) is pinned


def test_a_tiny_bucket_is_at_least_one_byte() -> None:
    assert read(BUCKET_MB="1e-9").bucket_bytes == 1


def test_reading_settings_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'wrapt', 'typer', 'rich', 'polars'}"
    program = f"import sys, slime_instrument._settings; print({heavy} & set(sys.modules))"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"SLIME_INSTRUMENT": "0"}
    )
    assert ran.stdout == "set()\n"
