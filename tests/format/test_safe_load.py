"""Nothing that is in a file runs, and whatever is no dump is refused in one line."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime_instrument._errors import DumpFormatError
from slime_instrument._format.safe_load import load_dump
from slime_instrument._format.unpickling import Opaque

from . import builders


class SpecInfo:
    """An object as rollout dumps of some releases hold them."""

    def __init__(self) -> None:
        self.accepted = 3


class Runs:
    """Leaves a mark if it is ever unpickled without care."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def refused(path: Path, **options: bool) -> str:
    with pytest.raises(DumpFormatError) as caught:
        load_dump(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def rewrite(path: Path, data_pkl: bytes, *, compress: int = zipfile.ZIP_STORED) -> Path:
    """A torch file with another pickle in it."""
    torch.save({"samples": [torch.arange(4)]}, path)
    with zipfile.ZipFile(path) as archive:
        members = {member.filename: archive.read(member) for member in archive.infolist()}
    with zipfile.ZipFile(path, "w", compress) as archive:
        for name, content in members.items():
            archive.writestr(name, data_pkl if name.endswith("/data.pkl") else content)
    return path


def pickle_of(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))


def test_a_train_dump_loads_with_its_tensors_mapped_from_the_file(tmp_path: Path) -> None:
    payload = builders.v2()
    loaded = load_dump(builders.save(payload, tmp_path / "7.pt"))
    assert loaded["samples"][1]["tokens"].equal(payload["samples"][1]["tokens"])
    assert loaded["samples"][1]["log_probs"].untyped_storage().nbytes() == 12
    mapped = Path("/proc/self/maps")
    if mapped.exists():
        assert str(tmp_path / "7.pt") in mapped.read_text()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int16, torch.bool, torch.uint8])
def test_every_type_of_tensor_comes_back_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    value = torch.tensor([0, 1, 3]).to(dtype)
    (loaded,) = load_dump(builders.save([value], tmp_path / "t.pt"))
    assert loaded.dtype is dtype
    assert loaded.equal(value)


def test_an_expanded_tensor_and_an_empty_one_are_accepted(tmp_path: Path) -> None:
    torch.save({"samples": [], "a": torch.zeros(1).expand(14), "b": torch.zeros(0)}, tmp_path / "e.pt")
    loaded = load_dump(tmp_path / "e.pt")
    assert (loaded["a"].shape, loaded["b"].shape) == ((14,), (0,))


# Objects


@pytest.mark.parametrize("plain", [False, True], ids=["torch", "plain-pickle"])
def test_an_object_is_refused_with_its_class_and_the_way_to_opt_in(plain: bool, tmp_path: Path) -> None:
    path = tmp_path / "3.pt"
    payload = {"rollout_id": 3, "samples": [{"index": 0, "metadata": {"o": SpecInfo()}}]}
    if plain:
        path.write_bytes(pickle.dumps(payload))
    else:
        torch.save(payload, path)
    message = refused(path)
    assert f"{SpecInfo.__module__}.SpecInfo" in message
    assert "--allow-pickle" in message
    assert "allow_pickle=True" in message
    loaded = load_dump(path, allow_pickle=True)
    assert loaded["samples"][0]["metadata"]["o"].accepted == 3


NUMPY_TYPES = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
)


@pytest.mark.parametrize("save", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value, 4))])
@pytest.mark.parametrize("name", NUMPY_TYPES)
def test_numpy_arrays_and_scalars_are_read_without_the_opt_in(save: Any, name: str, tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    values = numpy.arange(24).reshape(2, 3, 4).astype(name)
    several = [values, values.T, values[:, 1], values[:0], values[0, 0, 0], values[1, 2, 3]]
    save(
        {"rollout_id": 3, "samples": [{"several": several, "nested": (several[0], {"a": several[2]})}]},
        tmp_path / "3.pt",
    )
    (sample,) = load_dump(tmp_path / "3.pt")["samples"]
    for found, value in zip(sample["several"], several, strict=True):
        if value.shape:
            assert found.dtype is getattr(torch, name)
            assert found.tolist() == value.tolist()
            assert tuple(found.shape) == value.shape
        else:
            assert found == value.item()
            assert type(found) is type(value.item())
    assert sample["nested"][1]["a"].tolist() == several[2].tolist()


@pytest.mark.parametrize("dtype", ["O", "U3", ">f4", "datetime64[s]"])
def test_numpy_arrays_of_other_types_are_refused_by_name(dtype: str, tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    torch.save({"rollout_id": 3, "samples": [{"reward": numpy.zeros(2).astype(dtype)}]}, tmp_path / "3.pt")
    assert "numpy.ndarray of" in refused(tmp_path / "3.pt")


NEW_TYPES = [name for name in ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)]


@pytest.mark.parametrize("name", NEW_TYPES)
def test_tensors_of_newer_types_are_read(name: str, tmp_path: Path) -> None:
    value = torch.arange(6, dtype=torch.float32).to(getattr(torch, name)).reshape(3, 2)
    torch.save({"rollout_id": 0, "samples": [{"a": value, "b": value[1:]}]}, tmp_path / "0.pt")
    (sample,) = load_dump(tmp_path / "0.pt")["samples"]
    for found, expected in ((sample["a"], value), (sample["b"], value[1:])):
        assert found.dtype is value.dtype
        assert found.float().tolist() == expected.float().tolist()


def test_a_class_that_is_not_installed_becomes_a_stand_in(tmp_path: Path) -> None:
    program = (
        "import sys, types, torch\n"
        "module = types.ModuleType('absent_slime'); sys.modules['absent_slime'] = module\n"
        "class SpecInfo: pass\n"
        "SpecInfo.__module__ = 'absent_slime'; module.SpecInfo = SpecInfo\n"
        "info = SpecInfo(); info.accepted = 3\n"
        "torch.save({'rollout_id': 0, 'samples': [{'spec_info': info}]}, sys.argv[1])\n"
    )
    path = tmp_path / "0.pt"
    subprocess.run([sys.executable, "-c", program, str(path)], check=True)
    assert "absent_slime.SpecInfo" in refused(path)
    info = load_dump(path, allow_pickle=True)["samples"][0]["spec_info"]
    assert isinstance(info, Opaque)
    assert (repr(info), info.state) == ("<absent_slime.SpecInfo>", {"accepted": 3})


@pytest.mark.parametrize("form", ["torch", "plain-pickle"])
def test_nothing_in_a_hostile_file_runs(form: str, tmp_path: Path) -> None:
    mark, path = tmp_path / "mark", tmp_path / "3.pt"
    payload = {"rollout_id": 3, "samples": [Runs(mark)]}
    if form == "plain-pickle":
        path.write_bytes(pickle.dumps(payload))
    else:
        torch.save(payload, path)
    assert "system" in refused(path)
    assert not mark.exists()


@pytest.mark.parametrize("first", [{"format_version": 2}, {"rollout_id": 0, "rank": 0, "rollout_data": {}}])
def test_a_train_dump_is_never_unpickled_whatever_is_allowed(first: dict[str, Any], tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    torch.save({**first, "samples": [Runs(mark)]}, tmp_path / "0.pt")
    assert "A train dump holds tensors and plain values only" in refused(tmp_path / "0.pt", allow_pickle=True)
    assert not mark.exists()


# Files that are no dumps


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"step,loss\n0,1.5\n", "neither a torch file nor a pickle"),
        (b"\x80", "is damaged"),
        (b"\x80\x04\x95\xff\xff\xff\xff", "is damaged"),
        (b"PK\x03\x04 and nothing more", "cut or damaged"),
        (b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.", "format from before 1.6"),
    ],
    ids=["empty", "text", "one-byte", "cut-pickle", "cut-zip", "cut-old-torch"],
)
def test_a_foreign_file_is_refused_in_one_line(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "0.pt"
    path.write_bytes(content)
    assert reason in refused(path)
    refused(path, allow_pickle=True)


def test_a_directory_and_a_pipe_are_refused_without_waiting(tmp_path: Path) -> None:
    assert "is a directory" in refused(tmp_path)
    os.mkfifo(tmp_path / "pipe.pt")
    assert "not a regular file" in refused(tmp_path / "pipe.pt")


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_dump(tmp_path / "absent.pt")


def test_a_zip_that_torch_did_not_write_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert "without data.pkl" in refused(tmp_path / "a.pt")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = builders.save(builders.v2(), tmp_path / "7.pt").read_bytes()
    for size in range(0, len(whole), 97):
        (tmp_path / "cut.pt").write_bytes(whole[:size])
        refused(tmp_path / "cut.pt")


# Sizes


def test_a_compressed_member_is_refused_before_it_is_unfolded(tmp_path: Path) -> None:
    path = rewrite(tmp_path / "a.pt", b"\x80\x02]" + b"N" * 10_000_000 + b".", compress=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 100_000
    assert "compressed member" in refused(path)


@pytest.mark.parametrize("numel", [5, 1 << 20, 1 << 40, 1 << 62])
def test_a_storage_that_declares_more_than_the_file_has_is_refused(numel: int, tmp_path: Path) -> None:
    torch.save({"samples": [torch.arange(4)]}, tmp_path / "a.pt")
    content = pickle_of(tmp_path / "a.pt")
    # The storage is the tuple ("storage", LongStorage, "0", "cpu", 4); then offset 0, size (4,), stride (1,).
    small = b"K\x04"
    assert content.count(small) == 2
    large = b"\x8a\x08" + struct.pack("<q", numel)
    path = rewrite(tmp_path / "b.pt", content.replace(small, large))
    message = refused(path)
    assert "declares" in message or "damaged" in message or "holds a tensor" in message


def test_a_tensor_repeated_beyond_the_size_of_the_file_is_named_and_takes_no_memory(tmp_path: Path) -> None:
    torch.save({"samples": [torch.zeros(1).expand(1 << 40)]}, tmp_path / "a.pt")
    (found,) = load_dump(tmp_path / "a.pt")["samples"]
    assert repr(found) == f"<a view that repeats its elements of shape ({1 << 40},)>"


def test_classes_that_take_memory_by_a_stated_number_are_refused(tmp_path: Path) -> None:
    hostile = (
        b"\x80\x02}X\x07\x00\x00\x00samplescbuiltins\nbytearray\n\x8a\x08" + struct.pack("<q", 1 << 40) + b"\x85Rs."
    )
    assert "builtins.bytearray" in refused(rewrite(tmp_path / "a.pt", hostile))


def test_a_plain_pickle_with_a_huge_memo_or_buffer_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"\x80\x02]r\xff\xff\xff\xff.")
    assert load_dump(path) == []
    path.write_bytes(b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"abc.")
    refused(path)


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("behind", [0, 3])
def test_a_structure_that_contains_itself_is_refused(tmp_path: Path, as_dict: bool, behind: int) -> None:
    own: Any = {} if as_dict else []
    inner = own
    for _ in range(behind):
        inner = [inner, inner]
    own.update(a=inner) if as_dict else own.append(inner)
    torch.save({"samples": own}, tmp_path / "own.pt")
    assert "contains itself" in refused(tmp_path / "own.pt")


def test_a_structure_that_is_very_deep_is_refused_whatever_was_seen_first(tmp_path: Path) -> None:
    deep: list[Any] = []
    parts = [deep]
    for _ in range(200):
        deep = [deep]
        parts.append(deep)
    for samples in ([deep], parts, parts[::-1]):  # in the second, no step goes down more than one level
        torch.save({"samples": samples}, tmp_path / "deep.pt")
        assert "nested more than" in refused(tmp_path / "deep.pt")


def test_a_small_file_that_unfolds_into_very_many_values_is_refused(tmp_path: Path) -> None:
    bomb: list[Any] = [0]
    for _ in range(40):
        bomb = [bomb, bomb]
    torch.save({"samples": [{"metadata": bomb}]}, tmp_path / "bomb.pt")
    assert "unfolds into" in refused(tmp_path / "bomb.pt")


@pytest.mark.parametrize("compact", [False, True])
def test_a_long_list_that_all_samples_of_a_prompt_share_is_no_such_file(tmp_path: Path, compact: bool) -> None:
    prompt = list(range(20_000))
    torch.save({"samples": [{"prompt": prompt, "image": torch.zeros(5)} for _ in range(64)]}, tmp_path / "0.pt")
    assert len(load_dump(tmp_path / "0.pt", compact=compact)["samples"]) == 64


def test_a_dict_that_replaces_its_own_methods_is_refused(tmp_path: Path) -> None:
    hostile = OrderedDict(a=1)
    hostile.keys = 1  # type: ignore[assignment, method-assign]
    torch.save({"samples": [hostile]}, tmp_path / "0.pt")
    assert "methods are replaced" in refused(tmp_path / "0.pt")


def test_a_number_that_python_refuses_to_print_is_refused_before_anybody_prints_it(tmp_path: Path) -> None:
    sample = {"index": 10**5000, "tokens": [1], "response_length": 1}
    (tmp_path / "0.pkl").write_bytes(pickle.dumps([sample], protocol=2))
    torch.save({"samples": [sample]}, tmp_path / "0.pt")
    refused(tmp_path / "0.pkl")
    refused(tmp_path / "0.pt")


def test_a_tensor_without_data_is_refused(tmp_path: Path) -> None:
    torch.save({"samples": [torch.zeros(1 << 40, device="meta")]}, tmp_path / "a.pt")
    assert "holds a tensor of layout" in refused(tmp_path / "a.pt")


# Legacy forms


def test_a_plain_pickled_list_of_dicts_loads_safely_if_it_holds_data_only(tmp_path: Path) -> None:
    samples = [{"index": 0, "tokens": [1, 2], "reward": None, "metadata": {"a": (1, "b", 2.5, True)}}]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path = tmp_path / f"{protocol}.pt"
        path.write_bytes(pickle.dumps(samples, protocol=protocol))
        if protocol < 2:
            refused(path)  # text protocols of Python 2, which nothing here ever wrote
        else:
            assert load_dump(path) == samples


# Anything at all


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_bytes_give_a_dump_or_our_own_error(data: st.DataObject, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(builders.v2([[0], [1]]), buffer)
    content = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "fuzz.pt"
    path.write_bytes(content)
    with contextlib.suppress(DumpFormatError):
        load_dump(path)


def test_classes_that_a_library_added_to_torchs_own_are_refused_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "0.pt"
    payload = {"samples": [{"o": SimpleNamespace(a=1)}]}
    torch.save(payload, path)
    with torch.serialization.safe_globals([SimpleNamespace]):
        with pytest.raises(DumpFormatError, match="SimpleNamespace"):
            load_dump(path)
        assert SimpleNamespace in torch.serialization.get_safe_globals()
