"""Whatever rollout_data holds, the file loads with weights_only=True, with the right values in it."""

from __future__ import annotations

import collections
import datetime
import enum
import io
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import pytest
import torch

from slime_instrument._dump.plain import Converted, make_plain

np = pytest.importorskip("numpy")


class Status(str, enum.Enum):
    DONE = "completed"


class Level(enum.IntEnum):
    HIGH = 3


class Colour(enum.Enum):
    RED = enum.auto()


class Text(str):
    pass


class Point(NamedTuple):
    x: int
    y: Any


class Custom:
    def __repr__(self) -> str:
        return "<custom>"


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("no")


def written(value: Any, report: Converted | None = None) -> Any:
    """``value`` made plain, saved, and read the safe way."""
    file = io.BytesIO()
    torch.save(make_plain(value, lambda tensor: tensor, Converted() if report is None else report), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (-(2**70), -(2**70)),
        (1.5, 1.5),
        ("ü\ud800", "ü\ud800"),
        (b"\x00\xff", b"\x00\xff"),
        ([1, [2.0, "x", None]], [1, [2.0, "x", None]]),
        ((1, (2, [3])), (1, (2, [3]))),
        ({"a": {1: (2,)}, None: 0, 1.5: 1}, {"a": {1: (2,)}, None: 0, 1.5: 1}),
        (collections.OrderedDict(a=1), {"a": 1}),
        (collections.defaultdict(list, a=[1]), {"a": [1]}),
        (Point(1, 2), (1, 2)),
        (Point(1, [2]), (1, [2])),
        (torch.Size([2, 3]), (2, 3)),
        (Status.DONE, "completed"),
        (Level.HIGH, 3),
        (Colour.RED, 1),
        (Text("x"), "x"),
        (np.float32(1.0), 1.0),
        (np.float64(0.1), 0.1),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.str_("s"), "s"),
        (np.bytes_(b"s"), b"s"),
        (np.array(3), 3),
        (np.array(["a", "b"]), ["a", "b"]),
        (np.array([1, "a", None], dtype=object), [1, "a", None]),
        ({np.int64(3): 1, Status.DONE: 2, (np.int64(1), Text("k")): 3}, {3: 1, "completed": 2, (1, "k"): 3}),
    ],
)
def test_a_value_with_a_plain_counterpart_becomes_it_and_is_not_noted(value: Any, expected: Any) -> None:
    report = Converted()
    found = written({"field": [value]}, report)["field"][0]
    assert (type(found), found) == (type(expected), expected)
    assert not report


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.arange(6.0)[::-1],
        np.arange(6.0).reshape(2, 3).T,
        np.arange(3, dtype=">f4"),
        np.array([True, False]),
        np.zeros((0, 4), dtype=np.float16),
        np.arange(3, dtype=np.uint8),
        np.arange(3, dtype=np.longdouble),
    ],
    ids=["2d", "reversed", "transposed", "big-endian", "bool", "empty", "uint8", "longdouble"],
)
def test_an_array_becomes_a_tensor_or_a_list_of_the_same_values(array: Any) -> None:
    report = Converted()
    found = written([array], report)[0]
    values = found.tolist() if torch.is_tensor(found) else found
    if array.dtype == np.longdouble and not torch.is_tensor(found):
        values = [float(value) for value in values]
    assert values == array.astype(np.float64).tolist()
    if array.dtype.itemsize <= 8:
        assert torch.is_tensor(found)
        assert found.shape == array.shape
        assert not report


def test_a_read_only_array_gives_no_warning_and_a_copy() -> None:
    array = np.arange(3.0)
    array.flags.writeable = False
    assert written(array).tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Custom(), f"{__name__}.Custom"),
        (2j, "builtins.complex"),
        ({1}, "builtins.set"),
        (datetime.date(2026, 1, 2), "datetime.date"),
        (PurePosixPath("x"), "pathlib.PurePosixPath"),
        (torch.bfloat16, "torch.dtype"),
        (len, "builtins.builtin_function_or_method"),
        (np.dtype("f4"), "numpy"),
        (np.sin, "numpy.ufunc"),
        (np.datetime64("2026-01-02"), "datetime.date"),
    ],
)
def test_anything_else_becomes_its_text_and_is_noted_under_its_field(value: Any, kind: str) -> None:
    report = Converted()
    found = written([value, 1], report.at("metadata"))
    assert found == [repr(value.tolist() if isinstance(value, np.generic) else value), 1]
    assert list(report.as_dict()) == ["metadata"]
    assert report.as_dict()["metadata"][0].startswith(kind)


def test_an_object_that_cannot_even_be_printed_does_not_cost_the_dump() -> None:
    assert written([Unprintable()]) == [f"<{__name__}.Unprintable>"]


def test_keys_that_are_objects_become_text() -> None:
    assert written({Custom(): 1}) == {"<custom>": 1}


def test_tensors_are_handed_over_wherever_they_are() -> None:
    seen: list[torch.Tensor] = []
    given = {"a": [torch.zeros(1), (torch.zeros(2), {"b": torch.zeros(3)})], "p": torch.nn.Parameter(torch.zeros(4))}
    found = make_plain(given, lambda tensor: seen.append(tensor) or len(tensor), Converted())  # type: ignore[func-returns-value]
    assert found == {"a": [1, (2, {"b": 3})], "p": 4}


def test_images_may_be_mixed_with_samples_without_any() -> None:
    given = [None, {"pixel_values": torch.ones(4, 1176)}]
    found = written(given)
    assert found[0] is None
    assert found[1]["pixel_values"].shape == (4, 1176)
