"""The mapped loader gives what torch's loader gives, to the type and the bit, or leaves the file to it."""

from __future__ import annotations

import math
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime_instrument._errors import DumpFormatError
from slime_instrument._format.containers import examine
from slime_instrument._format.safe_load import load_dump
from slime_instrument._format.unpickling import UnsupportedPickle, load_archive, was_list

NUMBERS = st.one_of(
    st.integers(0, 300),
    st.integers(60_000, 70_000),
    st.integers(-(2**31), 2**31 - 1),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=True),
    st.none(),
    st.booleans(),
)
# Long lists of one sort with a few strangers among them, around the pickler's batches of a thousand.
LENGTHS = st.sampled_from([0, 1, 2, 63, 64, 65, 999, 1000, 1001, 1002, 2000, 2001, 2100])


@st.composite
def long_lists(draw: st.DrawFn) -> list[Any]:
    usual = draw(st.sampled_from([7, 151_643, 65_535, -3, 0.5, -0.0, True, None]))
    values: list[Any] = [usual] * draw(LENGTHS)
    for stranger in draw(st.lists(NUMBERS, max_size=3)):
        if values:
            values[draw(st.integers(0, len(values) - 1))] = stranger
    return values


def saved(value: Any, folder: Path) -> Path:
    path = folder / "0.pt"
    torch.save(value, path)
    return path


def mapped(path: Path, *, compact: bool = False) -> Any:
    """By the mapped loader alone: torch's does not help out."""
    archive = examine(path).archive
    assert archive is not None
    return load_archive(path, archive, compact=compact)[0]


def alike(one: Any, other: Any) -> bool:
    """Same types, same bits; NaN is NaN."""
    if was_list(one):
        one = one.tolist()
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
        return same and one.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8))
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=long_lists(), second=long_lists(), compact=st.booleans())
def test_lists_come_back_as_they_were(tmp_path: Path, first: list[Any], second: list[Any], compact: bool) -> None:
    # The same list twice, lists in lists, and a list beside the numbers of another one.
    payload = {"samples": [{"a": first, "b": [second, first], "c": (second, [first])}, first], "z": [*first, [*second]]}
    path = saved(payload, tmp_path)
    assert alike(mapped(path, compact=compact), payload)


@pytest.mark.parametrize("compact", [False, True])
def test_one_list_in_two_places_stays_one(tmp_path: Path, compact: bool) -> None:
    for values in ([5] * 1500, [5] * 1500 + [None], [0.5] * 1001, [1] * 2):
        found = mapped(saved([values, {"again": values}], tmp_path), compact=compact)
        assert found[0] is found[1]["again"]


def test_long_lists_of_numbers_are_tensors_and_others_lists(tmp_path: Path) -> None:
    payload = {"ints": list(range(64)), "floats": [0.5] * 5000, "short": [1, 2, 3], "mixed": [0.5] * 5000 + [None]}
    found = mapped(saved(payload, tmp_path), compact=True)
    assert {key: type(value).__name__ for key, value in found.items()} == {
        "ints": "Tensor", "floats": "Tensor", "short": "list", "mixed": "list",
    }  # fmt: skip
    assert (found["ints"].dtype, found["floats"].dtype) == (torch.int32, torch.float64)
    assert was_list(found["ints"])
    assert not was_list(mapped(saved([torch.arange(64)], tmp_path), compact=True)[0])


TENSORS = {
    "of every type": lambda: [torch.zeros(3, dtype=dtype) for dtype in
                              (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
                               torch.int16, torch.int8, torch.uint8, torch.bool)],
    "empty": lambda: [torch.empty(0), torch.empty(0, 3), torch.empty(2, 0, dtype=torch.int64)],
    "of no dimension": lambda: [torch.tensor(3), torch.tensor(0.5)],
    "of several dimensions": lambda: [torch.arange(24).reshape(2, 3, 4), torch.randn(4, 6).T],
    "views": lambda: (lambda base: [base, base[2:5], base[::2], base.expand(3, 10)])(torch.arange(10.0)),
    "odd lengths one after another": lambda: [torch.arange(n, dtype=torch.int8) for n in range(1, 9)],
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    payload = {"samples": TENSORS[name]()}
    assert alike(mapped(saved(payload, tmp_path)), payload)


def test_views_share_their_storage(tmp_path: Path) -> None:
    base = torch.arange(10.0)
    whole, part = mapped(saved([base, base[3:]], tmp_path))
    whole[4] = -1.0
    assert float(part[1]) == -1.0


def test_changing_a_tensor_in_place_leaves_the_file_alone(tmp_path: Path) -> None:
    path = saved({"samples": torch.zeros(1000)}, tmp_path)
    before = path.read_bytes()
    load_dump(path)["samples"].fill_(7.0)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "value",
    [
        torch.nn.Parameter(torch.zeros(2)),
        torch.zeros(2, requires_grad=True),
    ],
    ids=repr,
)
def test_what_it_does_not_know_is_left_to_torch(tmp_path: Path, value: Any) -> None:
    path = saved({"samples": [value]}, tmp_path)
    with pytest.raises(UnsupportedPickle):
        mapped(path)


@pytest.mark.parametrize(
    "value", [torch.ones(2, dtype=torch.complex64), torch.Size([1, 2]), torch.float32, complex(1, 2), {1, 2}], ids=repr
)
def test_plain_values_of_other_kinds_are_read(tmp_path: Path, value: Any) -> None:
    found = load_dump(saved({"samples": [value]}, tmp_path))["samples"][0]
    assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value


UNREAD = {
    "a sparse_coo tensor of shape (3, 3)": lambda: torch.eye(3).to_sparse(),
    "a sparse_csr tensor of shape (3, 3)": lambda: torch.eye(3).to_sparse_csr(),
    "a quantized tensor of shape (3,)": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "a view that repeats its elements of shape (1000000,)": lambda: torch.zeros(1).expand(1_000_000),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNREAD)
def test_a_tensor_that_is_no_plain_array_is_named_and_everything_else_is_read(tmp_path: Path, name: str) -> None:
    found = load_dump(saved({"samples": [{"odd": UNREAD[name](), "plain": torch.ones(2)}]}, tmp_path))["samples"][0]
    assert repr(found["odd"]) == f"<{name}>"
    assert found["plain"].tolist() == [1.0, 1.0]


def rewritten(path: Path, pickled: bytes) -> Path:
    """The file with another pickle in it."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, pickled if name.endswith("/data.pkl") else content)
    return path


HEAD = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
TAIL = b"\x89ccollections\nOrderedDict\n)RtR."


@pytest.mark.parametrize(
    ("what", "pickled"),
    [
        ("more than the record holds", HEAD + b"X\x03\x00\x00\x00cpuM\xe8\x03tQK\x00M\xe8\x03\x85K\x01\x85" + TAIL),
        ("behind its end", HEAD + b"X\x03\x00\x00\x00cpuK\x02tQK\x02K\x01\x85K\x01\x85" + TAIL),
        ("a step behind its end", HEAD + b"X\x03\x00\x00\x00cpuK\x02tQK\x00K\x02\x85K\x02\x85" + TAIL),
        ("before its start", HEAD + b"X\x03\x00\x00\x00cpuK\x02tQJ\xff\xff\xff\xffK\x01\x85K\x01\x85" + TAIL),
        ("backwards", HEAD + b"X\x03\x00\x00\x00cpuK\x02tQK\x01K\x02\x85J\xff\xff\xff\xff\x85" + TAIL),
    ],
)
def test_a_tensor_outside_of_its_record_is_refused(tmp_path: Path, what: str, pickled: bytes) -> None:
    path = rewritten(saved(torch.zeros(2), tmp_path), pickled)
    with pytest.raises(UnsupportedPickle):
        mapped(path)
    with pytest.raises(DumpFormatError):
        load_dump(path)


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02](K\x01K\x02",  # ends in a batch
        b"\x80\x02](K\x01K\x02K\x03u.",  # a batch that fills a dict
        b"\x80\x02](K\x01K\x02t.",  # is a tuple
        b"\x80\x02](G" + bytes(8) + b"G" + bytes(3),
        b"\x80\x02]r\x00\x00",
        b"\x80\x02h\x00.",
        b"\x80\x02]q",
        b"\x80\x02e.",
        b"\x80\x02(e.",
        b"\x80\x02}(K\x01K\x02e.",
        b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.",
        b"\x80\x02ctorch\nFloatStorage\nK\x01\x85R.",
    ],
    ids=repr,
)
def test_damaged_and_hostile_pickles_end_in_one_line_or_as_torch_reads_them(tmp_path: Path, pickled: bytes) -> None:
    path = rewritten(saved([1], tmp_path), pickled)
    try:
        expected = torch.load(path, weights_only=True)
    except Exception:
        with pytest.raises(DumpFormatError) as caught:
            load_dump(path, compact=True)
        assert "\n" not in str(caught.value)
    else:
        assert alike(load_dump(path, compact=True), expected)


def test_numbers_that_are_not_appended_are_no_batch(tmp_path: Path) -> None:
    pickled = b"\x80\x02](" + b"K\x07" * 500 + b"l."  # an empty list, and another one of its own mark
    assert mapped(rewritten(saved([1], tmp_path), pickled), compact=True) == pickle.loads(pickled) == [7] * 500


def test_values_that_the_file_holds_negated_or_conjugated_have_their_sign(tmp_path: Path) -> None:
    value = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert value.is_neg()
    assert load_dump(saved({"samples": [value]}, tmp_path))["samples"][0].tolist() == [-2.0, 4.0]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_file_of_another_pickle_protocol_is_read_or_refused_as_torch_does(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "0.pt"
    value = [list(range(2500)), [0.5] * 1001, torch.arange(3)]
    torch.save(value, path, pickle_protocol=protocol)
    if protocol < 4:
        assert alike(mapped(path, compact=True), value)
    else:  # frames are read ahead: the mapped loader would look for numbers at the wrong place
        with pytest.raises(DumpFormatError, match="damaged"):
            load_dump(path, compact=True)


_SEVENTY = b"(" + b"K\x07" * 70 + b"e"


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02(]q\x00]q\x01]q\x00" + _SEVENTY + b"X\x01\x00\x00\x00xah\x00l.",  # a number that was given before
        b"\x80\x02(]q\x00" + _SEVENTY + b"(K\x01NeX\x01\x00\x00\x00xah\x00l.",
        b"\x80\x02(]r\x00\x01\x00\x00" + _SEVENTY + b"G" + bytes(8) + b"aj\x00\x01\x00\x00l.",
    ],
    ids=["overwritten", "batches", "long"],
)
def test_a_list_that_stops_being_numbers_is_the_same_list_wherever_it_is_used(tmp_path: Path, pickled: bytes) -> None:
    found = mapped(rewritten(saved([1], tmp_path), pickled), compact=True)
    assert found == pickle.loads(pickled)
    assert found[-1] is found[-2]


def test_a_list_that_changes_after_it_was_put_somewhere_is_left_to_torch(tmp_path: Path) -> None:
    # {"a": x}, and then a string is appended to x through the memo.
    pickled = b"\x80\x02]q\x00" + _SEVENTY + b"}X\x01\x00\x00\x00ah\x00sh\x00X\x01\x00\x00\x00xa\x87."
    path = rewritten(saved([1], tmp_path), pickled)
    with pytest.raises(UnsupportedPickle, match="grows"):
        mapped(path, compact=True)
    assert load_dump(path, compact=True)[1] == {"a": [7] * 70 + ["x"]}


def test_looking_at_many_records_does_not_keep_the_file_in_memory(tmp_path: Path) -> None:
    path = saved({"samples": [torch.zeros(1 << 14) for _ in range(1024)]}, tmp_path)  # 64 MB
    program = (
        "import sys\nfrom slime_instrument._format.safe_load import load_dump\n"
        "def peak():\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return int(next(line for line in lines if line.startswith('VmHWM')).split()[1])\n"
        "before = peak()\nkept = load_dump(sys.argv[1])\nprint(peak() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 40 << 10
