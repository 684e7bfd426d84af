"""Messages have five parts; exceptions are the builtins that callers already catch."""

from __future__ import annotations

import pytest

from slime_instrument import _errors as errors


def test_a_message_has_its_five_parts_in_order() -> None:
    text = errors.five_parts("x", expected="a", found="b", follows="C.", next_step="D.")
    assert text == "slime_instrument: x: expected a, found b. C. D."


@pytest.mark.parametrize(
    ("ours", "builtin"),
    [
        (errors.SettingsError, ValueError),
        (errors.TrainingPathError, ValueError),
        (errors.DumpError, RuntimeError),
        (errors.DumpFormatError, ValueError),
    ],
)
def test_each_error_is_ours_and_the_builtin(ours: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(ours, errors.InstrumentError)
    assert issubclass(ours, builtin)
